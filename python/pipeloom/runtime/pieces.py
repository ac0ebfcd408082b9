"""Sequences cut into pieces: what a piece reads of those before it, and gives back to them.

With causal attention, piece j of a microbatch needs the keys and values of pieces 0..j on the same
stage. A module hands its own to `with_earlier_pieces` and gets all of them. The earlier ones come
in as leaves of piece j's graph. Backwards run last piece first: each leaves gradients on these
leaves, and the backward of piece i goes in at its outputs and at its own keys and values, with what
the later pieces have left there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.multiprocessing.reductions import StorageWeakRef

from pipeloom.runtime.backward import gradient_edge
from pipeloom.runtime.errors import PipelineError, with_hint

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from torch.autograd.graph import GradientEdge

__all__ = ["SequenceCache", "with_earlier_pieces"]

# In torch's own thread-local table, which the engine's threads take over from the thread that
# starts a backward: there a checkpoint runs a forward again.
_CURRENT = "pipeloom.runtime.pieces"

# Whether a plan with pieces has run in this process. A plain global, so that a compiled module is
# traced without a break as long as there is none.
_in_use = False


def with_earlier_pieces(tensor: Tensor, key: Hashable, *, dim: int) -> Tensor:
    """Put what the earlier pieces of this microbatch gave under the same key before a tensor.

    Call it in a module's forward on what later positions read: keys and values of causal attention,
    the last inputs of a causal convolution. Without cut sequences it gives `tensor` itself.

    Args:
        tensor: This piece's, not to be written to any more.
        key: Names it within the stage, once in a forward: `(self, "key")`.
        dim: Dimension of the sequence.

    Returns:
        The pieces 0..j in order, one tensor. The number of earlier positions is its size minus that
        of `tensor`.

    Raises:
        PipelineError: The key is used twice in one forward, or an earlier piece did not use it.

    Examples:
        >>> cache = SequenceCache(2)
        >>> for piece in range(2):
        ...     with cache.forward(piece):
        ...         positions = torch.arange(3 * piece, 3 * piece + 3)
        ...         print(with_earlier_pieces(positions, "positions", dim=0))
        tensor([0, 1, 2])
        tensor([0, 1, 2, 3, 4, 5])
    """
    return _extend(tensor, key, dim) if _in_use else tensor


@_disable_dynamo  # lazily, as `torch.utils.checkpoint` is
def _extend(tensor: Tensor, key: Hashable, dim: int) -> Tensor:
    known = torch._C._is_key_in_tls(_CURRENT)
    current: _Pass | None = torch._C._get_obj_in_tls(_CURRENT) if known else None
    return tensor if current is None else current.extend(tensor, key, dim)


class _Part(NamedTuple):
    """What one piece gave under a key."""

    leaf: Tensor
    """The tensor, cut from its graph; later pieces leave gradients on it."""
    edge: GradientEdge | None
    """Where those go into the piece's own graph."""


class SequenceCache:
    """What the pieces of one microbatch on one stage have given so far, by key and piece.

    Args:
        num_pieces: Pieces of the sequence.

    Examples:
        >>> cache, weight = SequenceCache(2), torch.tensor(2.0, requires_grad=True)
        >>> sums = []
        >>> for piece in range(2):
        ...     with cache.forward(piece):
        ...         own = weight * torch.ones(1)
        ...         sums.append(with_earlier_pieces(own, "own", dim=0).sum())
        >>> for piece in (1, 0):
        ...     edges, gradients = cache.take_gradients(piece)
        ...     with cache.again(piece):
        ...         torch.autograd.backward([sums[piece], *edges], [torch.ones(()), *gradients])
        >>> weight.grad
        tensor(3.)
    """

    def __init__(self, num_pieces: int) -> None:
        global _in_use
        _in_use = True
        self._unfinished = list(range(num_pieces))
        self._parts: dict[Hashable, dict[int, _Part]] = {}

    @contextmanager
    def forward(self, piece: int, *, lean: bool = False) -> Iterator[None]:
        """The forward of a piece: `with_earlier_pieces` adds to this cache.

        What autograd saves of the joined tensors is joined again in the backward, or every piece
        would hold a copy of all before it.

        Args:
            piece: Its number.
            lean: The graph keeps nothing, so a part of a tensor is copied rather than all kept.
        """
        made = _Pass(self._parts, piece, is_first=True, lean=lean)
        if piece == 0 or not torch.is_grad_enabled():
            with made.current():
                yield
            return
        with made.current(), torch.autograd.graph.saved_tensors_hooks(made.pack, _unpack):
            yield

    @contextmanager
    def again(self, piece: int) -> Iterator[None]:
        """The backward of a piece: forwards that it runs again read the same tensors."""
        with _Pass(self._parts, piece, is_first=False).current():
            yield

    def take_gradients(self, piece: int) -> tuple[list[GradientEdge], list[Tensor]]:
        """What later pieces have left for a piece: edges of its graph and their gradients."""
        edges, gradients = [], []
        for parts in self._parts.values():
            part = parts.get(piece)
            if part is not None and part.edge is not None and part.leaf.grad is not None:
                edges.append(part.edge)
                gradients.append(part.leaf.grad)
                part.leaf.grad = None
        return edges, gradients

    def leaves_before(self, piece: int) -> list[Tensor]:
        """The earlier pieces' tensors that want a gradient from a piece."""
        return [
            part.leaf
            for parts in self._parts.values()
            for number, part in parts.items()
            if number < piece and part.leaf.requires_grad
        ]

    def finish(self, piece: int) -> bool:
        """Say that a piece's backward is over; tell whether all are.

        What a piece gave is forgotten when no later one may still run its forward again.
        """
        self._unfinished.remove(piece)
        last = max(self._unfinished, default=-1)
        for parts in self._parts.values():
            for number in [number for number in parts if number > last]:
                del parts[number]
        return not self._unfinished


class _Pass:
    """One run through a stage's forward on one piece."""

    def __init__(
        self,
        parts: dict[Hashable, dict[int, _Part]],
        piece: int,
        *,
        is_first: bool,
        lean: bool = False,
    ) -> None:
        self._parts, self._piece, self._is_first, self._lean = parts, piece, is_first, lean
        self._joined: dict[int, tuple[Any, tuple[Tensor, ...], int, torch.dtype]] = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        known = torch._C._is_key_in_tls(_CURRENT)
        before = torch._C._get_obj_in_tls(_CURRENT) if known else None
        torch._C._stash_obj_in_tls(_CURRENT, self)
        try:
            yield
        finally:
            torch._C._stash_obj_in_tls(_CURRENT, before)

    def extend(self, tensor: Tensor, key: Hashable, dim: int) -> Tensor:
        parts = self._parts.setdefault(key, {})
        self._check(tensor, key, parts)
        if self._is_first:
            leaf = tensor.detach()
            if self._lean and leaf.untyped_storage().nbytes() > leaf.nbytes:
                leaf = leaf.clone()
            parts[self._piece] = _Part(
                leaf.requires_grad_(tensor.requires_grad), gradient_edge(tensor)
            )
        if self._piece == 0:
            return tensor
        earlier = [parts[number].leaf for number in range(self._piece)]
        joined = torch.cat([*earlier, tensor], dim)
        if self._is_first:
            storage = joined.untyped_storage()
            leaves = (*earlier, parts[self._piece].leaf)
            self._joined[storage._cdata] = (_reference(storage), leaves, dim, joined.dtype)
        return joined

    def pack(self, saved: Tensor) -> Any:
        """Keep the pieces in place of the tensor that was joined from them, or of a view of it."""
        known = self._joined.get(saved.untyped_storage()._cdata)
        if known is None or known[-1] is not saved.dtype:
            return saved.detach()  # a node must not own its own output
        _, leaves, dim, _ = known
        return leaves, dim, saved.size(), saved.stride(), saved.storage_offset()

    def _check(self, tensor: Tensor, key: Hashable, parts: dict[int, _Part]) -> None:
        number = self._piece
        missing = next((n for n in range(number) if n not in parts), None)
        if missing is not None:
            problem = f"piece {number} of a sequence uses it, but piece {missing} did not"
            hint = "call with_earlier_pieces with the same keys in every forward"
        elif self._is_first and number in parts:
            problem = f"it is used twice in the forward of piece {number}"
            hint = 'give each tensor a key of its own, such as (self, "key") and (self, "value")'
        elif not self._is_first and number not in parts:
            problem = f"piece {number} uses it only where its forward is run again"
            hint = "call with_earlier_pieces with the same keys in every forward"
        elif not self._is_first and tensor.requires_grad and parts[number].edge is None:
            problem = (
                f"the forward of piece {number} used it without gradients, its second run does"
            )
            hint = "checkpoint(..., use_reentrant=False): a reentrant one hides the first forward"
        else:
            return
        raise PipelineError(with_hint(f"with_earlier_pieces, key {key!r:.200}: {problem}", hint))


def _reference(storage: torch.UntypedStorage) -> Any:
    """Keeps the address of a storage from being used again, not its memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    leaves, dim, size, stride, offset = kept
    return torch.cat([leaf.detach() for leaf in leaves], dim).as_strided(size, stride, offset)
