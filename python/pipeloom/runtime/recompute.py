"""Run a forward again in the backward: once, whatever the number of runs of the engine."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import get_device_states, set_device_states

from pipeloom.runtime.errors import PipelineError, with_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["recomputed"]


def recomputed(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a function whose graph keeps nothing but its arguments until the backward.

    `torch.utils.checkpoint` runs the function again for each run of the engine through its graph: a
    backward in halves is several. Here the first run brings back all that the graph had saved, and
    each node lets go of its own when it is done. Random numbers and autocast are those of the call.

    Args:
        function: Does the same when it is called again.
        args: Tensors, or structures of them.
        named: Likewise.

    Examples:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> recomputed(lambda value: value.exp().sin(), x).sum().backward()
        >>> torch.allclose(x.grad, torch.ones(2).exp() * torch.ones(2).exp().cos())
        True
    """
    if not torch.is_grad_enabled():
        return function(*args, **named)
    frame = _Frame(function, args, named)
    with saved_tensors_hooks(frame.pack, _unpack):
        result = function(*args, **named)
    frame.has_run = True
    return result


class _Saved:
    """The place of one tensor that the graph saved; its node holds it, and nobody else."""

    __slots__ = ("__weakref__", "frame", "tensor")

    def __init__(self, frame: _Frame) -> None:
        self.frame: _Frame | None = frame
        self.tensor: Tensor | None = None


class _Complete(Exception):  # noqa: N818 - ends a run, nothing is wrong
    """All that was saved is back: the rest of the function need not run."""


class _Frame:
    """One call: what it needs to run again, and the places to fill."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._call: Any = (function, args, named)
        self._places: list[weakref.ref[_Saved]] = []
        self.has_run = False
        self._random = torch.get_rng_state()
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        self._devices = get_device_states(*tensors)
        kinds = {"cpu", *(tensor.device.type for tensor in tensors)}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted(kinds)
        ]

    def pack(self, _: Tensor) -> _Saved:
        """Note that the graph saves a tensor, and let it go."""
        place = _Saved(self)
        self._places.append(weakref.ref(place))
        return place

    def fill(self) -> None:
        """Run the function again and keep what the graph saves this time."""
        if not self.has_run:
            raise PipelineError(
                with_hint(
                    "a recomputed forward runs a backward of its own (torch.autograd.grad), which "
                    "needs what recomputation has dropped",
                    "leave its forwards out of the mask, or checkpoint parts of the chunk yourself",
                )
            )
        function, args, named = self._call
        self._call = None
        found = 0

        def take(tensor: Tensor) -> None:
            nonlocal found
            place = self._places[found]() if found < len(self._places) else None
            found += 1
            if place is not None:
                place.tensor = tensor.detach()
                place.frame = None
            if found == len(self._places):
                raise _Complete

        args = tuple(map(_fresh, args))
        named = {name: _fresh(value) for name, value in named.items()}
        with self._as_it_was(), saved_tensors_hooks(take, _never), contextlib.suppress(_Complete):
            function(*args, **named)
        if found != len(self._places):
            raise PipelineError(
                with_hint(
                    f"a recomputed forward saved {found} tensors, but {len(self._places)} the "
                    "first time",
                    "a chunk must do the same when it runs again; else leave it out of the mask",
                )
            )

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Gradients on, random numbers and autocast as at the call."""
        with contextlib.ExitStack() as stack:
            devices, states = self._devices
            stack.enter_context(torch.random.fork_rng(devices=devices))
            torch.set_rng_state(self._random)
            if devices:
                set_device_states(devices, states)
            stack.enter_context(torch.enable_grad())
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


def _unpack(place: _Saved) -> Tensor:
    if place.tensor is None:
        assert place.frame is not None
        place.frame.fill()
    assert place.tensor is not None
    return place.tensor


def _never(_: None) -> Tensor:
    raise AssertionError("the graph of a recomputed forward is never run backward")


def _fresh(value: Any) -> Any:
    """An argument with a graph of its own."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        return tuple(map(_fresh, value))
    if isinstance(value, list):
        return list(map(_fresh, value))
    if isinstance(value, dict):
        return {key: _fresh(part) for key, part in value.items()}
    return value
