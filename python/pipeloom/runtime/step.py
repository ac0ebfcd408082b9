"""One step over all ranks of this process: what every face of the runtime comes down to."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipeloom.runtime.agreement import versions
from pipeloom.runtime.data_parallel import ChunkReduction, sum_tokens
from pipeloom.runtime.errors import AgreementError, PipelineError, with_hint
from pipeloom.runtime.executor import Event, ForwardFn, RankExecutor, StepOptions
from pipeloom.runtime.gradients import GradientStash, reduce_tied_gradients
from pipeloom.runtime.piecewise import PieceExecutor, ReadyPieceExecutor
from pipeloom.runtime.ready import ReadyExecutor
from pipeloom.runtime.replicas import replica_weights, share_losses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from pipeloom.runtime.program import CompiledPlan
    from pipeloom.runtime.transport import Transport

__all__ = ["StepResult", "entering", "run_step"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a step. Only a process that hosts the last stage has losses."""

    loss: Tensor | None
    """Sum over the microbatches, in their order, of loss sum times loss scale; 0-dim."""
    losses: list[Tensor] = field(default_factory=list)
    """Each microbatch's loss sum, by microbatch."""
    num_tokens: list[int] = field(default_factory=list)
    """Each microbatch's number of tokens."""
    reports: list[Any] = field(default_factory=list)
    """What loss functions gave beside, by microbatch; of cut sequences by piece."""
    outputs: list[Tensor] = field(default_factory=list)
    """The last stage's outputs by microbatch, if they were asked for; of cut sequences by piece."""
    events: list[Event] = field(default_factory=list)
    """Executed ops of this process's ranks, if recorded."""

    def bubble_ratio(self) -> float:
        """1 - the busiest recorded rank's work / the time from the first event to the last.

        Meaningful with one rank a process; ranks of one process take turns.
        """
        return bubble_ratio(self.events)


def bubble_ratio(events: list[Event]) -> float:
    """1 - the busiest rank's work / makespan, of events on one clock.

    Examples:
        >>> bubble_ratio([Event(0, 0, "0F0", 0.0, 1.0), Event(1, 0, "1F0", 1.0, 4.0)])
        0.25
    """
    if not events:
        raise ValueError(with_hint("no events were recorded", "run the step with record=True"))
    work: dict[int, float] = {}
    for event in events:
        work[event.rank] = work.get(event.rank, 0.0) + event.end - event.start
    span = max(event.end for event in events) - min(event.start for event in events)
    return 1.0 - max(work.values()) / span if span > 0 else 0.0


@contextlib.contextmanager
def entering(transport: Transport) -> Iterator[None]:
    """What a rank does before a step: if it fails, the other ranks are told and do not wait."""
    try:
        yield
    except AgreementError:  # which every rank has already
        raise
    except BaseException as error:
        transport.withdraw(error)
        raise


def run_step(
    compiled: CompiledPlan,
    transport: Transport,
    forwards: Mapping[int, ForwardFn],
    options: StepOptions,
    *,
    loss_scale: float | None,
    fingerprint: Mapping[str, str] | None = None,
    models: Mapping[int, Sequence[torch.nn.Module]] | None = None,
    data_parallel_group: ProcessGroup | None = None,
) -> StepResult:
    """Run one step of a compiled plan.

    Args:
        compiled: The programs of this process's ranks.
        transport: What moves the tensors.
        forwards: How each rank runs its chunks.
        options: What all ranks share; its `loss_scale` is replaced by the argument.
        loss_scale: Seed of every backward, 1 / tokens of the step over all data-parallel ranks.
            None: tokens are counted while the step runs; the backwards are seeded with 1, and the
            gradients that this step adds are scaled at its end.
        fingerprint: What ranks must agree on beside plan, shapes and versions.
        models: Each rank's chunks, for scaling at the end and for summing over replicas.
        data_parallel_group: Ranks over which tokens are counted.

    Returns:
        Losses and what else was asked for.
    """
    training = not compiled.forward_only
    with entering(transport):
        if training and not torch.is_grad_enabled():
            raise PipelineError(
                with_hint(
                    "a training step needs gradients, but they are disabled here",
                    "leave torch.no_grad(), or evaluate (forward_only=True)",
                )
            )
        options.boundary.check_count(compiled.num_units)
    if transport.backend is not None:  # one process agrees with itself
        transport.agree(
            {
                "plan": compiled.digest,
                "boundary": options.boundary.describe(compiled.plan.num_stages, compiled.num_units),
                **versions(),
                **(fingerprint or {}),
            }
        )
    transport.open(compiled.channels)
    count = training and loss_scale is None
    plain, ready = RankExecutor, ReadyExecutor
    if compiled.num_seq_pieces > 1:
        plain, ready = PieceExecutor, ReadyPieceExecutor
    executor = ready if options.order == "ready" else plain
    models = models or {}
    copies = replica_weights(compiled.plan, models) if training and models else []
    reduction = ChunkReduction(models if training else {}, limit_s=transport.timeout_s)
    options = dataclasses.replace(
        options, on_gradients_ready=_chain(reduction.chunk_ready, options.on_gradients_ready)
    )
    executors = [
        executor(program, transport, forwards[rank], options, training=training)
        for rank, program in compiled.programs.items()
    ]
    everything = [p for chunks in models.values() for chunk in chunks for p in chunk.parameters()]
    stash = GradientStash(everything if count or copies else reduction.parameters)
    with stash, torch.set_grad_enabled(training):
        with reduction:
            transport.drive(executors)
        reduce_tied_gradients(copies, transport)
        if loss_scale is None:
            loss_scale = _counted_scale(transport, executors, data_parallel_group)
        if count:
            stash.scale(loss_scale)
    share_losses(compiled.plan, transport, executors)
    return _collect(executors, loss_scale, compiled.num_seq_pieces)


def _chain(
    first: Callable[[int, int], None], second: Callable[[int, int], None] | None
) -> Callable[[int, int], None]:
    def both(rank: int, chunk: int) -> None:
        first(rank, chunk)
        if second is not None:
            second(rank, chunk)

    return both


def _counted_scale(
    transport: Transport,
    executors: list[RankExecutor],
    group: ProcessGroup | None,
) -> float:
    """1 / tokens of the step, counted on the ranks that host a last stage, known to all."""
    counts = {
        executor.rank: torch.tensor(
            [float(sum(map(int, executor.num_tokens.values())))], dtype=torch.float64
        )
        for executor in executors
    }
    device = getattr(transport, "device", None)
    counts = {rank: count.to(device) for rank, count in counts.items()}
    transport.all_reduce(counts)
    total = next(iter(counts.values()))
    if group is not None:
        sum_tokens(total, group, transport.timeout_s)
    return 1.0 / max(float(total), 1.0)


def _collect(executors: list[RankExecutor], loss_scale: float, num_pieces: int) -> StepResult:
    losses: dict[int, Tensor] = {}
    num_tokens: dict[int, Any] = {}
    reports: dict[int, Any] = {}
    outputs: dict[int, Tensor] = {}
    events: list[Event] = []
    for executor in executors:
        losses |= executor.losses
        num_tokens |= executor.num_tokens
        reports |= executor.reports
        outputs |= executor.outputs
        events += executor.events
    losses, num_tokens = _whole(losses, num_pieces), _whole(num_tokens, num_pieces)
    order = sorted(losses)
    return StepResult(
        loss=_sum_in_order([losses[microbatch] for microbatch in order], loss_scale),
        losses=[losses[microbatch] for microbatch in order],
        num_tokens=[int(num_tokens[microbatch]) for microbatch in order],
        reports=[reports[microbatch] for microbatch in sorted(reports)],
        outputs=[outputs[microbatch] for microbatch in sorted(outputs)],
        events=events,
    )


def _whole(by_unit: dict[int, Any], num_pieces: int) -> dict[int, Any]:
    """What each microbatch's pieces have, added up in their order."""
    if num_pieces == 1:
        return by_unit
    sums: dict[int, Any] = {}
    for unit in sorted(by_unit):
        value, microbatch = by_unit[unit], unit // num_pieces
        sums[microbatch] = sums[microbatch] + value if microbatch in sums else value
    return sums


def _sum_in_order(losses: list[Tensor], loss_scale: float) -> Tensor | None:
    """Scale losses and add them one by one: `Tensor.sum` adds in an order of its own."""
    if not losses:
        return None
    scaled = torch.stack([x.reshape(()) if x.dim() else x for x in losses]) * loss_scale
    first, *others = scaled.unbind()
    return sum(others, start=first)
