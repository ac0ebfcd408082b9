"""Runs plans that cut sequences: a cache for each microbatch of a chunk, around the same ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeloom.runtime.executor import RankExecutor
from pipeloom.runtime.pieces import SequenceCache
from pipeloom.runtime.program import RUN_INPUT_HALF
from pipeloom.runtime.ready import ReadyExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.autograd.graph import GradientEdge

    from pipeloom.runtime.program import Instruction

__all__ = ["PieceExecutor", "ReadyPieceExecutor"]


class PieceExecutor(RankExecutor):
    """Runs one rank's program; forwards of a microbatch's pieces share a cache, so do backwards."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._caches: dict[tuple[int, int], SequenceCache] = {}

    def _cache_of(self, op: Instruction) -> SequenceCache:
        place = (op.chunk, op.microbatch)
        if place not in self._caches:
            self._caches[place] = SequenceCache(self.program.num_seq_pieces)
        return self._caches[place]

    def _finish(self, op: Instruction) -> None:
        if self._cache_of(op).finish(op.piece):
            del self._caches[op.chunk, op.microbatch]

    def _forward(self, op: Instruction, stage_input: Any) -> None:
        lean = not self._training or bool(op.recompute)
        with self._cache_of(op).forward(op.piece, lean=lean):
            super()._forward(op, stage_input)
        if not self._training and op.piece == self.program.num_seq_pieces - 1:
            del self._caches[op.chunk, op.microbatch]

    def _differentiate(
        self,
        op: Instruction,
        edges: Sequence[GradientEdge | Tensor],
        gradients: Sequence[Tensor],
        leaves: Sequence[Tensor],
    ) -> None:
        cache = self._cache_of(op)
        own, gathered = cache.take_gradients(op.piece)
        gradients = [*(gradients if edges else ()), *gathered]
        leaves = [*leaves, *cache.leaves_before(op.piece)]
        with cache.again(op.piece):
            super()._differentiate(op, [*edges, *own], gradients, leaves)
        if op.action != RUN_INPUT_HALF:
            self._finish(op)

    def _weight_half(self, op: Instruction, *given: Any) -> None:
        with self._cache_of(op).again(op.piece):
            super()._weight_half(op, *given)
        self._finish(op)


class ReadyPieceExecutor(PieceExecutor, ReadyExecutor):
    """The same, ops whose input has arrived first: each chunk's pieces keep their order."""
