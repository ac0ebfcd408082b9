"""Transfers, from compute order and placement."""

from __future__ import annotations

from itertools import accumulate

from pipeloom.reference.flow import channel, makes, match_of
from pipeloom.reference.types import Op, Schedule, Step


def lower(schedule: Schedule, *, prefetch: int = 1) -> Schedule:
    """Adds transfers: each send right behind its producer, each receive ahead of its consumer.

    A receive stands before the ``prefetch``-th step counted back from its consumer, or earlier,
    so that a channel receives in the order in which it sends. This is the planner's style
    ``streams``.
    """
    sends = [[_sends(schedule, step) for step in steps] for steps in schedule.steps]
    receives: list[list[list[Op]]] = [[[] for _ in steps] for steps in schedule.steps]
    channels: dict[tuple[int, int, str], list[Op]] = {}
    for op in (op for steps in sends for step in steps for op in step):
        channels.setdefault(channel(schedule, op), []).append(match_of(op))
    for (_, target, _), ops in sorted(channels.items()):
        wanted = [max(0, _reader(schedule, target, op) - prefetch + 1) for op in ops]
        slots = list(accumulate(reversed(wanted), min))[::-1]
        for op, slot in zip(ops, slots, strict=True):
            receives[target][slot].append(op)
    lowered: list[list[Step]] = [
        [
            step
            for at, computed in enumerate(steps)
            for step in (
                *((op,) for op in receives[rank][at]),
                computed,
                *((op,) for op in sends[rank][at]),
            )
        ]
        for rank, steps in enumerate(schedule.steps)
    ]
    return schedule.with_steps(lowered)


def _sends(schedule: Schedule, step: Step) -> list[Op]:
    """The sends of what a step makes, where the other stage is on another rank."""
    found = []
    for op in step:
        for name, stage, unit in makes(op):
            to = schedule.next(stage) if name == "output" else schedule.previous(stage)
            if to is not None and schedule.rank_of[to] != schedule.rank_of[stage]:
                found.append(Op(stage, "SEND_F" if name == "output" else "SEND_B", unit))
    return found


def _reader(schedule: Schedule, rank: int, receive: Op) -> int:
    """The step that reads a received tensor first."""
    kinds = "F" if receive.kind == "RECV_F" else "BI"
    for at, step in enumerate(schedule.steps[rank]):
        if any(
            (op.stage, op.unit) == (receive.stage, receive.unit) and op.kind in kinds for op in step
        ):
            return at
    raise ValueError(f"nothing reads {receive}\nhint: see reference.faults")
