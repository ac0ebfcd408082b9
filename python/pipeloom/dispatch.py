"""The classic entry points of a training loop. torch is imported when one of them is called."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Protocol, TypedDict

from pipeloom._core import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Required, Unpack

    from pipeloom._core import Plan
    from pipeloom.runtime.step import StepResult
    from pipeloom.runtime.transport import Transport

__all__ = [
    "StepArguments",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
]


class StepArguments(TypedDict, total=False):
    """Keyword arguments of the three functions; `pipeloom.runtime.forward_backward` says more."""

    forward_step_func: Required[Callable[..., Any]]
    """(data_iterator, model_chunk[, checkpoint_activations_microbatch]) -> (output, loss_func)."""
    data_iterator: Required[Any]
    """An iterator, a list of one a chunk, or a mapping from rank to either."""
    model: Required[Any]
    """A chunk, a list of chunks, or a mapping from rank to either (all ranks in this process)."""
    num_microbatches: Required[int]
    seq_length: Required[int | None]
    micro_batch_size: Required[int | None]
    forward_only: bool
    plan: Plan | None
    transport: Transport | None
    loss_scale: float | None
    total_num_tokens: int | None
    hidden_size: int | None
    dtype: Any
    variable_shapes: bool
    microbatch_group_size: int | None
    num_microbatches_with_partial_activation_checkpoints: int | None
    data_parallel_group: Any
    on_gradients_ready: Callable[[int, int], None] | None
    record: bool
    fingerprint: Mapping[str, str] | None


class ForwardBackwardFunc(Protocol):
    """What `get_forward_backward_func` gives."""

    def __call__(self, **arguments: Unpack[StepArguments]) -> StepResult:
        """Run one step."""
        ...


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None
) -> ForwardBackwardFunc:
    """Choose the function that runs a step.

    Args:
        pp_size: Number of pipeline ranks. None: the world size of `torch.distributed`, or 1
            without it.
        vp_size: Chunks a rank. 1 gives the same plan as None.

    Returns:
        One of the three functions below.

    Raises:
        ConfigError: A size is below 1.
        TypeError: A size is no integer.

    Examples:
        >>> get_forward_backward_func(4, 2).__name__
        'forward_backward_pipelining_with_interleaving'
        >>> get_forward_backward_func(4).__name__
        'forward_backward_pipelining_without_interleaving'
        >>> get_forward_backward_func(1).__name__
        'forward_backward_no_pipelining'
    """
    if pp_size is None:
        from torch import distributed

        pp_size = distributed.get_world_size() if distributed.is_initialized() else 1
    for name, size in (("pp_size", pp_size), ("vp_size", vp_size)):
        if size is not None:
            _check_size(name, size)
    if pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is not None:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving


def _check_size(name: str, size: int) -> None:
    try:
        whole = None if isinstance(size, bool) else operator.index(size)
    except TypeError:
        whole = None
    if whole is None:
        kind = type(size).__name__
        raise TypeError(
            f"{name} must be an integer, but got {size!r} of type {kind}\nhint: give {name} as int"
        )
    if whole < 1:
        raise ConfigError(
            f"{name}={size} is out of range: it must be at least 1\n"
            f"hint: leave {name} out if there is no such split"
        )


def forward_backward_no_pipelining(**arguments: Unpack[StepArguments]) -> StepResult:
    """Run forward and backward of each microbatch in turn, on one rank."""
    from pipeloom.runtime.forward_backward import forward_backward

    return forward_backward("no_pipelining", **arguments)


def forward_backward_pipelining_without_interleaving(
    **arguments: Unpack[StepArguments],
) -> StepResult:
    """Run one step of 1F1B, one chunk a rank."""
    from pipeloom.runtime.forward_backward import forward_backward

    return forward_backward("1f1b", **arguments)


def forward_backward_pipelining_with_interleaving(**arguments: Unpack[StepArguments]) -> StepResult:
    """Run one step of interleaved 1F1B, several chunks a rank."""
    from pipeloom.runtime.forward_backward import forward_backward

    return forward_backward("interleaved_1f1b", **arguments)
