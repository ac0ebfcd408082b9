"""Chunks wrapped in DistributedDataParallel or fully_shard: one reduction a chunk and step.

Both wrappers reduce when a backward ends. In a pipeline that is wrong: a chunk has a backward for
each microbatch, in parts where it is split. So their own reductions are off during a step, and a
chunk's gradients are reduced once, right after its last scheduled backward.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from pipeloom.runtime.errors import (
    PeerLost,
    PipelineTimeout,
    TransferBroken,
    TransferTimeout,
    with_hint,
)
from pipeloom.runtime.lanes import complete

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.nn import Parameter

__all__ = ["ChunkReduction", "sum_tokens"]


class ChunkReduction:
    """Reduces gradients of wrapped chunks over their data-parallel ranks, by sums.

    The loss scale counts the tokens of all data-parallel ranks already, so nothing is averaged.

    Args:
        models: Each rank's chunks, wrapped or not.
        limit_s: Of the wait for DDP's reductions, in seconds. 0: the group's own.

    Examples:
        >>> import torch
        >>> with ChunkReduction({0: [torch.nn.Linear(2, 2)]}) as reduction:
        ...     reduction.chunk_ready(0, 0)  # nothing is wrapped: nothing to do
        >>> reduction.parameters
        []
    """

    def __init__(self, models: Mapping[int, Sequence[nn.Module]], *, limit_s: float = 0.0) -> None:
        self._limit_s = limit_s
        self._replicated: dict[tuple[int, int], list[Any]] = {}
        self._sharded: dict[tuple[int, int], list[Any]] = {}
        self._works: list[Any] = []
        self._stack = contextlib.ExitStack()
        if not dist.is_available() or not dist.is_initialized():
            return
        for rank, chunks in models.items():
            for number, chunk in enumerate(chunks):
                self._find(chunk, (rank, number))

    def _find(self, chunk: nn.Module, place: tuple[int, int]) -> None:
        from torch.distributed.fsdp import FSDPModule
        from torch.nn.parallel import DistributedDataParallel

        for module in chunk.modules():
            if isinstance(module, DistributedDataParallel):
                self._replicated.setdefault(place, []).append(module)
            elif isinstance(module, FSDPModule):
                self._sharded.setdefault(place, []).append(module)

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters whose gradients are summed in place: earlier steps' must be set aside."""
        return [p for modules in self._replicated.values() for m in modules for p in m.parameters()]

    def __enter__(self) -> Self:
        for modules in self._replicated.values():
            for module in modules:
                self._stack.enter_context(module.no_sync())
        for modules in self._sharded.values():
            for module in modules:
                _set_last(module, False)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average
                module.set_gradient_divide_factor(1.0)
        return self

    def chunk_ready(self, rank: int, chunk: int) -> None:
        """Start the chunk's reduction: its last scheduled backward has run."""
        for module in self._replicated.get((rank, chunk), ()):
            for p in module.parameters():
                if p.requires_grad:
                    if p.grad is None:
                        p.grad = p.new_zeros(p.shape)
                    work = dist.all_reduce(p.grad, group=module.process_group, async_op=True)
                    self._works.append(work)
        for module in self._sharded.get((rank, chunk), ()):
            _set_last(module, True)
        for state in self._states((rank, chunk)):
            for group in state._fsdp_param_groups:
                group.post_backward()
            if state._is_root:
                state._root_post_backward_final_callback()

    def _states(self, place: tuple[int, int]) -> Iterator[Any]:
        """The sharded modules' states, those inside others first."""
        from torch.distributed.fsdp import fully_shard

        for module in reversed(self._sharded.get(place, [])):
            yield fully_shard.state(module)  # type: ignore[attr-defined]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            for work in self._works:
                _wait(work, self._limit_s, "the gradients")
        self._works.clear()
        self._stack.close()


def sum_tokens(tokens: Tensor, group: ProcessGroup, limit_s: float) -> None:
    """Sum counts of tokens over data-parallel ranks, in place.

    Args:
        tokens: One number.
        group: The ranks.
        limit_s: In seconds. 0: the group's own.

    Raises:
        PipelineTimeout: Not all ranks came within the limit.
        PeerLost: One of them is gone.
    """
    work = dist.all_reduce(tokens, group=group, async_op=True)
    _wait(work, limit_s, "the tokens")


def _wait(work: Any, limit_s: float, what: str) -> None:
    """Wait for a reduction over data-parallel ranks, but not longer than for pipeline ranks."""
    try:
        if limit_s:
            complete(work, limit_s, polls=False)
        else:
            work.wait()
    except (TransferTimeout, TransferBroken) as error:
        kind = PipelineTimeout if isinstance(error, TransferTimeout) else PeerLost
        raise kind(
            with_hint(
                f"summing {what} of the step over the data-parallel ranks failed: {error}",
                "every pipeline of data_parallel_group must run the step: look for the first "
                "error of the others",
            )
        ) from error


def _set_last(module: Any, last: bool) -> None:
    """Whether the next end of a backward is the step's last one."""
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last)
    module.set_requires_gradient_sync(last)
