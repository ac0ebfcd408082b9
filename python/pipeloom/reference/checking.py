"""What is wrong with a schedule, and where it stops."""

from __future__ import annotations

from collections import Counter

from pipeloom.reference.flow import (
    Channel,
    Value,
    carried,
    channel,
    crosses,
    makes,
    match_of,
    needs,
)
from pipeloom.reference.types import Op, Schedule, Step


def faults(schedule: Schedule, *, forward_only: bool = False) -> list[str]:
    """Everything wrong with the orders themselves; see :func:`stuck` for progress.

    Every stage runs F of each of its units once, and B, or I and W, once; on its own rank; what
    an op needs from its own rank stands before it; the n-th send and the n-th receive of a
    channel name the same tensor.
    """
    found = []
    count = Counter(op for _, _, op in schedule.walk() if op.computes)
    for stage in range(len(schedule.rank_of)):
        for unit in schedule.units_of(stage):
            f, b, i, w = (count.pop(Op(stage, kind, unit), 0) for kind in "FBIW")
            backward = (
                (b, i, w) == (0, 0, 0) if forward_only else (b, i, w) in ((1, 0, 0), (0, 1, 1))
            )
            if f != 1 or not backward:
                found.append(f"stage {stage} unit {unit} runs F {f}, B {b}, I {i}, W {w} times")
    found += [f"{op} is of no stage or unit" for op in count]
    lowered = any(not op.computes for _, _, op in schedule.walk())
    for rank, steps in enumerate(schedule.steps):
        found += _rank_faults(schedule, rank, steps, lowered)
    return found + _pairing_faults(schedule)


def _rank_faults(schedule: Schedule, rank: int, steps: list[Step], lowered: bool) -> list[str]:
    here: set[Value] = set()
    found = []
    for at, step in enumerate(steps):
        made: list[Value] = []
        for op in step:
            if op.stage >= len(schedule.rank_of) or schedule.rank_of[op.stage] != rank:
                found.append(f"rank {rank} step {at}: {op} belongs to another rank")
                continue
            if op.computes:
                wanted, gives = needs(schedule, op), makes(op)
            elif not crosses(schedule, op):
                found.append(f"rank {rank} step {at}: {op} moves nothing between ranks")
                continue
            else:
                wanted, gives = [], []
                (gives if op.kind.startswith("RECV") else wanted).append(carried(op))
            for value in wanted:
                local = schedule.rank_of[value[1]] == rank
                if (local or lowered) and value not in here:
                    found.append(f"rank {rank} step {at}: {op} stands before its {value}")
            made += gives
        here.update(made)
    return found


def _pairing_faults(schedule: Schedule) -> list[str]:
    sent: dict[Channel, list[Value]] = {}
    received: dict[Channel, list[Value]] = {}
    for _, _, op in schedule.walk():
        if not op.computes and crosses(schedule, op):
            side = sent if op.kind.startswith("SEND") else received
            side.setdefault(channel(schedule, op), []).append(carried(op))
    keys = sorted(sent.keys() | received.keys())
    return [
        f"channel {key}: sends {sent.get(key, [])} but receives {received.get(key, [])}"
        for key in keys
        if sent.get(key) != received.get(key)
    ]


QUEUES = {
    # semantics: (one queue for the whole rank, the program waits for what it posts)
    "rendezvous": (True, True),
    "batched": (False, True),
    "single_stream": (True, False),
    "streams": (False, False),
    "buffered": (False, False),
}


def stuck(schedule: Schedule, semantics: str = "buffered") -> list[tuple[int, int]]:
    """Where the ranks stand when nothing moves any more: (rank, step); empty if all end.

    A transfer is posted on a queue, and completes when it and its match head their queues. Without
    transfers, what one rank makes is there for all.
    """
    one_queue, waits = QUEUES[semantics]
    if semantics == "rendezvous":
        steps: list[list[tuple[Op, ...]]] = [
            [(op,) for step in rank for op in step] for rank in schedule.steps
        ]
        schedule = schedule.with_steps(steps)
    run = _Run(schedule, one_queue=one_queue, waits=waits)
    while run.moves():
        pass
    return run.unfinished()


class _Run:
    """The state of all ranks."""

    def __init__(self, schedule: Schedule, *, one_queue: bool, waits: bool) -> None:
        self.schedule = schedule
        self.one_queue, self.waits = one_queue, waits
        self.lowered = any(not op.computes for _, _, op in schedule.walk())
        self.ranks = range(len(schedule.steps))
        self.at = [0 for _ in self.ranks]
        self.waiting = [False for _ in self.ranks]  # for the transfers of the step before `at`
        self.here: list[set[Value]] = [set() for _ in self.ranks]
        self.queues: dict[tuple[int, Channel | None], list[Op]] = {}

    def moves(self) -> bool:
        """Lets every rank go on as far as one step, then completes matches."""
        went_on = [self.goes_on(rank) for rank in self.ranks]
        return any([*went_on, self.completes()])

    def goes_on(self, rank: int) -> bool:
        if self.waiting[rank]:
            self.waiting[rank] = any(q for (owner, _), q in self.queues.items() if owner == rank)
            return not self.waiting[rank]
        if self.at[rank] == len(self.schedule.steps[rank]):
            return False
        step = self.schedule.steps[rank][self.at[rank]]
        if step[0].computes:
            known = self.here[rank] if self.lowered else set[Value]().union(*self.here)
            if any(value not in known for op in step for value in needs(self.schedule, op)):
                return False
            self.here[rank].update(value for op in step for value in makes(op))
        else:
            for op in step:
                self.queues.setdefault(self.queue_of(rank, op), []).append(op)
            self.waiting[rank] = self.waits
        self.at[rank] += 1
        return True

    def queue_of(self, rank: int, op: Op) -> tuple[int, Channel | None]:
        return rank, None if self.one_queue else channel(self.schedule, op)

    def completes(self) -> bool:
        for queue in self.queues.values():
            if queue and queue[0].kind.startswith("SEND"):
                receive = match_of(queue[0])
                target = channel(self.schedule, receive)[1]
                other = self.queues.get(self.queue_of(target, receive), [])
                if other[:1] == [receive]:
                    self.here[target].add(carried(queue.pop(0)))
                    other.pop(0)
                    return True
        return False

    def unfinished(self) -> list[tuple[int, int]]:
        left = {rank for rank in self.ranks if self.at[rank] < len(self.schedule.steps[rank])}
        left |= {rank for (rank, _), queue in self.queues.items() if queue}
        return [(rank, self.at[rank]) for rank in sorted(left)]
