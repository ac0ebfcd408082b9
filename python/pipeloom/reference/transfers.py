"""Transfers, from compute order and placement."""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from pipeloom.reference.flow import channel, makes, match_of
from pipeloom.reference.timing import simulate
from pipeloom.reference.types import Op, Schedule, Step

if TYPE_CHECKING:
    from collections.abc import Callable


def lower(schedule: Schedule, style: str = "streams", *, prefetch: int = 1) -> Schedule:
    """Adds transfers in one of the planner's styles; `prefetch` is that of ``streams``.

    ``even_odd`` is what a plan gets that Megatron-core does not have: ``1f1b`` and
    ``interleaved_1f1b`` get the calls that it makes.
    """
    if style == "streams":
        return _streams(schedule, prefetch)
    one_by_one = _fifo(schedule)
    if style == "fifo":
        return one_by_one
    groups = [
        [
            step
            for is_compute, run in _runs(steps)
            for step in (run if is_compute else [sum(run, ())])
        ]
        for steps in one_by_one.steps
    ]
    if style == "even_odd":
        groups = [
            [step if step[0].computes else tuple(sorted(step, key=_turn(rank))) for step in steps]
            for rank, steps in enumerate(groups)
        ]
    return schedule.with_steps(groups)


def _fifo(schedule: Schedule) -> Schedule:
    """All steps in one global order, by end and rank; behind each its transfers, on both ranks.

    Ends are those of a run in which F, I and W take one tick, B two, transfers and recomputation
    nothing.
    """
    ends = simulate(schedule, recompute=0).end
    order = sorted((end, rank, at) for rank, own in enumerate(ends) for at, end in enumerate(own))
    lowered: list[list[Step]] = [[] for _ in schedule.steps]
    for _, rank, at in order:
        step = schedule.steps[rank][at]
        lowered[rank].append(step)
        # Of a pair, the activation goes first.
        for send in sorted(_sends(schedule, step), key=lambda op: op.kind != "SEND_F"):
            lowered[rank].append((send,))
            _, target, _ = channel(schedule, send)
            lowered[target].append((match_of(send),))
    return schedule.with_steps(lowered)


def _runs(steps: list[Step]) -> list[tuple[bool, list[Step]]]:
    """Neighbouring steps that all compute, or are all transfers."""
    return [(kind, list(run)) for kind, run in groupby(steps, key=lambda step: step[0].computes)]


def _turn(rank: int) -> Callable[[Op], int]:
    """Even ranks send where odd ranks receive: to the next rank, then to the previous."""
    even = ["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
    odd = ["RECV_F", "SEND_F", "RECV_B", "SEND_B"]
    turns = odd if rank % 2 else even
    return lambda op: turns.index(op.kind)


def _streams(schedule: Schedule, prefetch: int) -> Schedule:
    """Each send right behind its producer, each receive ahead of its consumer.

    A receive stands before the ``prefetch``-th step counted back from its consumer, or earlier,
    so that a channel receives in the order in which it sends.
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
