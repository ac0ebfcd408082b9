"""Orders made of units of `pp` microbatches: Hanayo's waves, Chimera's two directions."""

from __future__ import annotations

from pipeloom.reference.flow import needs
from pipeloom.reference.types import Op, Schedule, zigzag


def hanayo(pp: int, m: int, vp: int = 2) -> Schedule:
    """Hanayo: waves over an even number of chunks."""
    return _in_units(Schedule([[] for _ in range(pp)], zigzag(pp, vp), m), pp)


def chimera(pp: int, m: int) -> Schedule:
    """Chimera: two replicas in opposite directions, half of a unit's microbatches each."""
    rank_of = [*range(pp), *reversed(range(pp))]
    return _in_units(Schedule([[] for _ in range(pp)], rank_of, m, num_replicas=2), pp)


def _in_units(empty: Schedule, pp: int) -> Schedule:
    """Units one behind the other; the last one has what is left."""
    orders: list[list[Op]] = [[] for _ in range(pp)]
    replicas = empty.num_replicas
    for first in range(0, empty.num_units, pp):
        count = min(pp, empty.num_units - first)
        units = {
            stage: list(empty.units_of(stage))[first // replicas : (first + count) // replicas]
            for stage in range(len(empty.rank_of))
        }
        for order, ops in zip(orders, _backward_first(empty, units), strict=True):
            order += ops
    return empty.with_steps([[(op,) for op in order] for order in orders])


def _backward_first(schedule: Schedule, units: dict[int, list[int]]) -> list[list[Op]]:
    """Step by step, each free rank runs a backward if it can, else the forward nearest the loss.

    Of several backwards it takes the one nearest the input; of one stage the earliest unit. A
    forward takes one step, a backward two.
    """
    ranks = range(len(schedule.steps))
    left = {Op(s, kind, u) for s, own in units.items() for u in own for kind in "FB"}
    orders: list[list[Op]] = [[] for _ in ranks]
    end: dict[tuple[str, int, int], int] = {}
    free = [0 for _ in ranks]
    now = 0

    def preference(op: Op) -> tuple[int, int, int]:
        depth = op.stage % schedule.stages_per_replica
        return (0, depth, op.unit) if op.kind == "B" else (1, -depth, op.unit)

    while left:
        for rank in ranks:
            if free[rank] > now:
                continue
            ready = [
                op
                for op in left
                if schedule.rank_of[op.stage] == rank
                and all(end.get(value, now + 1) <= now for value in needs(schedule, op))
            ]
            if not ready:
                continue
            op = min(ready, key=preference)
            left.remove(op)
            orders[rank].append(op)
            free[rank] = now + (1 if op.kind == "F" else 2)
            end["output" if op.kind == "F" else "gradient", op.stage, op.unit] = free[rank]
        now += 1
    return orders
