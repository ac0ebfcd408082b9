"""Times and memory of a schedule whose sends never wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from pipeloom.reference.flow import Value, makes, needs

if TYPE_CHECKING:
    from pipeloom.reference.types import Op, Schedule, Step

Scalar = int | Sequence[int]


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


def simulate(
    schedule: Schedule,
    *,
    forward: Scalar = 1,
    backward_input: Scalar = 1,
    backward_weight: Scalar = 1,
    backward: Scalar | None = None,
    overlapped: int | None = None,
    latency: int | Sequence[Sequence[int]] = 0,
    memory_forward: int = 1,
    memory_backward_input: int = 0,
    memory_backward_weight: int = -1,
) -> Timeline:
    """Runs an unlowered schedule: a step starts when its rank is free and all it needs is there.

    Times are those of :class:`pipeloom.Costs`, in any one unit.

    Raises:
        ValueError: If the schedule deadlocks.
    """

    def of(cost: Scalar, stage: int) -> int:
        return cost if isinstance(cost, int) else cost[stage]

    def duration(op: Op) -> int:
        i, w = of(backward_input, op.stage), of(backward_weight, op.stage)
        if op.kind == "B":
            return i + w if backward is None else of(backward, op.stage)
        return {"F": of(forward, op.stage), "I": i, "W": w}[op.kind]

    def hop(source: int, target: int) -> int:
        if source == target:
            return 0
        return latency if isinstance(latency, int) else latency[source][target]

    change = {"F": memory_forward, "I": memory_backward_input, "W": memory_backward_weight}
    change["B"] = change["I"] + change["W"]
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
        arrivals = [ready[v] + hop(schedule.rank_of[v[1]], rank) for v in wanted]
        begin = max([*arrivals, end[rank][-1] if at else 0])
        length = sum(map(duration, step))
        if len(step) > 1 and overlapped is not None:
            length = overlapped
        start[rank].append(begin)
        end[rank].append(begin + length)
        ready.update({value: begin + length for op in step for value in makes(op)})
        return True

    while sum(run(rank) for rank in ranks):
        pass
    if any(len(end[rank]) < len(schedule.steps[rank]) for rank in ranks):
        raise ValueError("the schedule deadlocks\nhint: see reference.stuck")
    peaks = [_peak(steps, change) for steps in schedule.steps]
    busy = [rank for rank in ranks if start[rank]]
    return Timeline(
        start,
        end,
        max(end[r][-1] for r in busy) - min(start[r][0] for r in busy),
        max(end[r][-1] - start[r][0] for r in busy),
        peaks,
    )


def _peak(steps: list[Step], change: dict[str, int]) -> int:
    """The largest running sum, taken after each op."""
    return max(accumulate((change[op.kind] for step in steps for op in step), initial=0))
