"""Times and memory of a schedule whose sends never wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeloom.reference.flow import Value, makes, needs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeloom.reference.types import Op, Schedule, Step

Scalar = int | Sequence[int]
"""One cost for all stages, or one a stage."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The fields of :class:`pipeloom.Costs` that the twin knows, as integers."""

    forward: Scalar = 1
    backward_input: Scalar = 1
    backward_weight: Scalar = 1
    backward: Scalar | None = None
    overlapped: Scalar | None = None
    recompute: Scalar | None = None
    latency: int | Sequence[Sequence[int]] = 0
    memory_forward: int = 1
    memory_backward_input: int = 0
    memory_backward_weight: int = -1
    memory_recompute: int = 0

    def length(self, schedule: Schedule, step: Step) -> int:
        """Time of a step; a recomputed backward runs its forward first."""
        again = sum(self._again(op) for op in step if _is_recomputed_backward(schedule, op))
        if len(step) > 1 and self.overlapped is not None:
            return _of(self.overlapped, step[0].stage) + again
        return sum(map(self._plain, step)) + again

    def hop(self, source: int, target: int) -> int:
        """Time of a transfer."""
        if source == target:
            return 0
        return self.latency if isinstance(self.latency, int) else self.latency[source][target]

    def changes(self, schedule: Schedule, op: Op) -> Iterator[int]:
        """Changes of memory by an op, one after the other."""
        rest = self.memory_forward - self.memory_recompute
        if op.kind == "F":
            stored = (op.stage, op.unit) in schedule.recomputed
            yield self.memory_recompute if stored else self.memory_forward
            return
        if _is_recomputed_backward(schedule, op):
            yield rest
        i, w = self.memory_backward_input, self.memory_backward_weight
        yield {"B": i + w, "I": i, "W": w}[op.kind]

    def _plain(self, op: Op) -> int:
        i, w = _of(self.backward_input, op.stage), _of(self.backward_weight, op.stage)
        if op.kind == "B":
            return i + w if self.backward is None else _of(self.backward, op.stage)
        return {"F": _of(self.forward, op.stage), "I": i, "W": w}[op.kind]

    def _again(self, op: Op) -> int:
        return _of(self.forward if self.recompute is None else self.recompute, op.stage)


def _of(cost: Scalar, stage: int) -> int:
    return cost if isinstance(cost, int) else cost[stage]


def _is_recomputed_backward(schedule: Schedule, op: Op) -> bool:
    return op.kind in "BI" and (op.stage, op.unit) in schedule.recomputed


@dataclass(frozen=True)
class Timeline:
    """When each step of each rank starts and ends.

    Attributes:
        start: Start of each step, by rank; ``end`` likewise.
        makespan: Last end minus first start.
        span: The longest time from a rank's own first start to its own last end.
        peak_memory: The largest running sum of each rank.
    """

    start: list[list[int]]
    end: list[list[int]]
    makespan: int
    span: int
    peak_memory: list[int]


def simulate(schedule: Schedule, **costs: Any) -> Timeline:
    """Runs an unlowered schedule: a step starts when its rank is free and all it needs is there.

    Args:
        schedule: The orders.
        **costs: Fields of :class:`Costs`, in any one unit.

    Raises:
        ValueError: If the schedule deadlocks.
    """
    cost = Costs(**costs)
    ranks = range(len(schedule.steps))
    ready: dict[Value, int] = {}
    start: list[list[int]] = [[] for _ in ranks]
    end: list[list[int]] = [[] for _ in ranks]

    def run(rank: int) -> bool:
        at = len(end[rank])
        if at == len(schedule.steps[rank]):
            return False
        step = schedule.steps[rank][at]
        wanted = [value for op in step for value in needs(schedule, op)]
        if any(value not in ready for value in wanted):
            return False
        arrivals = [ready[v] + cost.hop(schedule.rank_of[v[1]], rank) for v in wanted]
        begin = max([*arrivals, end[rank][-1] if at else 0])
        start[rank].append(begin)
        end[rank].append(begin + cost.length(schedule, step))
        ready.update({value: end[rank][-1] for op in step for value in makes(op)})
        return True

    while sum(run(rank) for rank in ranks):
        pass
    if any(len(end[rank]) < len(schedule.steps[rank]) for rank in ranks):
        raise ValueError("the schedule deadlocks\nhint: see reference.stuck")
    busy = [rank for rank in ranks if start[rank]]
    return Timeline(
        start,
        end,
        max(end[r][-1] for r in busy) - min(start[r][0] for r in busy),
        max(end[r][-1] - start[r][0] for r in busy),
        [_peak(schedule, cost, steps) for steps in schedule.steps],
    )


def _peak(schedule: Schedule, cost: Costs, steps: list[Step]) -> int:
    """The largest running sum, taken after each change."""
    live = peak = 0
    for op in (op for step in steps for op in step):
        for change in cost.changes(schedule, op):
            live += change
            peak = max(peak, live)
    return peak
