"""Orders made by repeating one microbatch's block of cells, then closing the gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pipeloom.reference.flow import makes, needs
from pipeloom.reference.types import Op, Schedule, zigzag

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD = 6
"""Cells from one microbatch's block to the next: two F, two I and two W, or two F and two B."""

Block = dict[Op, int]
"""The cell in which each op of microbatch 0 begins; microbatch u is u periods later."""


class Placed(NamedTuple):
    """An op and when it starts and ends, by a clock that may run backwards."""

    start: int
    end: int
    op: Op


def v_half(pp: int, m: int) -> Schedule:
    """V-Half: half of 1F1B's activations live."""

    def cells(rank: int) -> tuple[int, int, int, int]:
        gap = 3 if pp % 2 == 0 else 0
        backward = 3 * pp + gap
        return 2 * rank, 3 * pp - 2 - rank, backward - 1 + 2 * rank, backward + 3 * pp - 2 - rank

    return _compacted(_split(pp, cells), pp, m)


def v_min(pp: int, m: int) -> Schedule:
    """V-Min: each microbatch goes straight there and back; a third of 1F1B's activations live."""

    def cells(rank: int) -> tuple[int, int, int, int]:
        gap = 2 if pp % 3 == 0 else 0
        backward = 2 * pp + gap
        return rank, 2 * pp - 1 - rank, backward + rank, backward + 2 * pp - 1 - rank

    return _compacted(_split(pp, cells), pp, m)


def v_1f1b(pp: int, m: int) -> Schedule:
    """V-1F1B: forwards go straight there and back, full backwards as soon as the rank has room."""
    block: Block = {Op(stage, "F", 0): stage for stage in range(2 * pp)}
    places = [_rooms_for_two(rank, 2 * pp - 1 - rank) for rank in range(pp)]
    now = 2 * pp
    for stage, rank in reversed(list(enumerate(zigzag(pp)))):
        while now % PERIOD not in places[rank]:
            now += 1
        places[rank].remove(now % PERIOD)
        block[Op(stage, "B", 0)] = now
        now += 2
    return _compacted(block, pp, m)


def _rooms_for_two(one: int, other: int) -> list[int]:
    """Where in the period two ops of two cells fit between two forwards of one."""
    rooms: list[int] = []
    cell = one + 1
    while len(rooms) < 2:
        if cell % PERIOD == other % PERIOD:
            cell += 1
            continue
        rooms.append(cell % PERIOD)
        cell += 2
    return rooms


def _split(pp: int, cells: Callable[[int], tuple[int, int, int, int]]) -> Block:
    """A block from the cells of F and F there and back, and I and I likewise.

    Each W takes the next cell that is free in every period.
    """
    block: Block = {}
    for rank in range(pp):
        first, last = rank, 2 * pp - 1 - rank
        own = dict(
            zip(
                (Op(first, "F", 0), Op(last, "F", 0), Op(last, "I", 0), Op(first, "I", 0)),
                cells(rank),
                strict=True,
            )
        )
        for stage in (last, first):
            cell = own[Op(stage, "I", 0)] + 1
            while cell % PERIOD in {taken % PERIOD for taken in own.values()}:
                cell += 1
            own[Op(stage, "W", 0)] = cell
        block |= own
    return block


def _repeated(block: Block, rank_of: list[int], m: int) -> list[Op]:
    """All ops by cell, then rank."""
    ops = {op._replace(unit=u): cell + u * PERIOD for op, cell in block.items() for u in range(m)}
    return sorted(ops, key=lambda op: (ops[op], rank_of[op.stage]))


def _added(op: Op) -> int:
    """What an op adds to the activations of its rank."""
    return {"F": 1, "I": 0, "W": -1, "B": -1}[op.kind]


def _peak(block: Block, rank_of: list[int]) -> int:
    """Most activations of a rank once blocks follow each other."""
    enough = max(block.values()) // PERIOD + 2
    live, peak = [0] * len(rank_of), 0
    for op in _repeated(block, rank_of, enough):
        live[rank_of[op.stage]] += _added(op)
        peak = max(peak, live[rank_of[op.stage]])
    return peak


def _compacted(block: Block, pp: int, m: int) -> Schedule:
    """Pulls ops forward in time, then those of the result back; the shorter one is the schedule."""
    rank_of = zigzag(pp)
    empty = Schedule([[] for _ in range(pp)], rank_of, m)
    limit = _peak(block, rank_of)
    forward = _insert(empty, _repeated(block, rank_of, m), limit)
    starts = {placed.op: placed.start for timeline in forward for placed in timeline}
    latest_first = sorted(starts, key=lambda op: (-starts[op], -rank_of[op.stage]))
    backward = _insert(empty, latest_first, limit, reverse=True)
    if _last_end(backward) < _last_end(forward):
        orders = [[placed.op for placed in reversed(timeline)] for timeline in backward]
    else:
        orders = [[placed.op for placed in timeline] for timeline in forward]
    return empty.with_steps([[(op,) for op in order] for order in orders])


def _last_end(timelines: list[list[Placed]]) -> int:
    return max(timeline[-1].end for timeline in timelines)


def _insert(
    schedule: Schedule, ops: list[Op], limit: int, *, reverse: bool = False
) -> list[list[Placed]]:
    """Puts op after op into the first hole of its rank that it fits into; none placed moves.

    Behind an op that adds an activation, no more than `limit` may ever live. With `reverse` the
    clock runs backwards: an op waits for those that need it, and a W adds what it freed.
    """
    waits = _waits(schedule, ops, reverse)
    timelines: list[list[Placed]] = [[] for _ in schedule.steps]
    ends: dict[Op, int] = {}
    for op in ops:
        timeline = timelines[schedule.rank_of[op.stage]]
        ready = max((ends[other] for other in waits[op]), default=0)
        way = -1 if reverse else 1
        if way * _added(op) > 0:
            live = 0
            for placed in timeline:
                if live == limit:
                    ready = max(ready, placed.end)
                live += way * _added(placed.op)
        placed = _first_hole(timeline, op, ready)
        timeline.append(placed)
        timeline.sort()
        ends[op] = placed.end
    return timelines


def _first_hole(timeline: list[Placed], op: Op, ready: int) -> Placed:
    length = 2 if op.kind == "B" else 1
    start = ready
    for placed in timeline:
        if start + length <= placed.start:
            break
        start = max(start, placed.end)
    return Placed(start, start + length, op)


def _waits(schedule: Schedule, ops: list[Op], reverse: bool) -> dict[Op, list[Op]]:
    """The ops that each op stands behind."""
    maker = {value: op for op in ops for value in makes(op)}
    waits: dict[Op, list[Op]] = {op: [] for op in ops}
    for op in ops:
        for value in needs(schedule, op):
            if reverse:
                waits[maker[value]].append(op)
            else:
                waits[op].append(maker[value])
    return waits
