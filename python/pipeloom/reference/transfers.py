"""Transfers, from compute order and placement."""

from __future__ import annotations

from pipeloom.reference.flow import makes, needs
from pipeloom.reference.types import Op, Schedule, Step


def lower(schedule: Schedule, *, prefetch: int = 1) -> Schedule:
    """Adds transfers: a send right behind its producer, a receive ``prefetch`` ops early.

    This is the planner's style ``streams``.
    """
    lowered: list[list[Step]] = []
    for rank, steps in enumerate(schedule.steps):
        before: list[list[Step]] = [[] for _ in steps]
        behind: list[list[Step]] = [[] for _ in steps]
        for at, step in enumerate(steps):
            for op in step:
                for name, stage, unit in needs(schedule, op):
                    if schedule.rank_of[stage] != rank:
                        kind = "RECV_F" if name == "output" else "RECV_B"
                        before[max(0, at - prefetch + 1)].append((Op(op.stage, kind, unit),))
                for name, stage, unit in makes(op):
                    to = schedule.next(stage) if name == "output" else schedule.previous(stage)
                    if to is not None and schedule.rank_of[to] != rank:
                        kind = "SEND_F" if name == "output" else "SEND_B"
                        behind[at].append((Op(stage, kind, unit),))
        lowered.append(
            [s for at, step in enumerate(steps) for s in (*before[at], step, *behind[at])]
        )
    return schedule.with_steps(lowered)
