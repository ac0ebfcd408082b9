"""What the recorded ops of a step say: which needs which, and how long a rank sits idle."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class OpEvent(Protocol):
    """One executed op, as the runtime records it."""

    @property
    def rank(self) -> int:
        """The rank that ran it."""
        ...

    @property
    def op(self) -> str:
        """The op in the plan's words, such as `2F0`."""
        ...

    @property
    def start(self) -> float:
        """Seconds on the host's clock."""
        ...

    @property
    def end(self) -> float:
        """Seconds on the host's clock."""
        ...


def split_op(text: str) -> tuple[int, str, int]:
    """Stage, kind and microbatch of an op's text.

    Examples:
        >>> split_op("12W3")
        (12, 'W', 3)
    """
    kind = next(letter for letter in text if letter.isalpha())
    stage, microbatch = text.split(kind, 1)
    return int(stage), kind, int(microbatch)


def predecessor(stage: int, kind: str, microbatch: int, num_stages: int) -> str | None:
    """The op on the neighbouring stage whose result this op reads.

    Examples:
        >>> predecessor(2, "F", 5, 4), predecessor(2, "B", 5, 4), predecessor(0, "F", 5, 4)
        ('1F5', '3B5', None)
    """
    place = stage % num_stages  # a second replica's stages follow the first's
    if kind == "F" and place > 0:
        return f"{stage - 1}F{microbatch}"
    if kind in "BI" and place < num_stages - 1:
        return f"{stage + 1}{kind}{microbatch}"
    return None


class Timed(NamedTuple):
    """An op with times of our own."""

    rank: int
    op: str
    start: float
    end: float


def replay(events: Iterable[OpEvent], num_stages: int) -> list[Timed]:
    """The ops as if ranks ran side by side and messages took no time, from 0 s on.

    In one process ranks take turns, so their times say nothing of the pipeline. Each op keeps its
    measured duration and its place in its rank's order, and starts when its rank is free and its
    input is there.
    """
    queues: dict[int, list[OpEvent]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        queues[event.rank].append(event)
    ends: dict[str, float] = {}
    free = dict.fromkeys(queues, 0.0)
    position = dict.fromkeys(queues, 0)
    replayed: list[Timed] = []
    moved = True
    while moved:
        moved = False
        for rank, queue in queues.items():
            while position[rank] < len(queue):
                event = queue[position[rank]]
                needed = predecessor(*split_op(event.op), num_stages)
                if needed is not None and needed not in ends:
                    break
                begin = max(free[rank], 0.0 if needed is None else ends[needed])
                free[rank] = ends[event.op] = begin + event.end - event.start
                replayed.append(Timed(rank, event.op, begin, free[rank]))
                position[rank] += 1
                moved = True
    return replayed


def side_by_side(events: Iterable[OpEvent], num_stages: int) -> float:
    """Seconds that a step would take if its ranks ran side by side and messages took no time."""
    return max((timed.end for timed in replay(events, num_stages)), default=0.0)


def work_and_waiting(events: Iterable[OpEvent]) -> dict[int, tuple[float, float]]:
    """Of each rank, seconds of its ops, and seconds between its first and last that were idle.

    Examples:
        >>> work_and_waiting([Timed(0, "0F0", 1.0, 2.0), Timed(0, "0B0", 5.0, 7.0)])
        {0: (3.0, 3.0)}
    """
    own: dict[int, list[OpEvent]] = defaultdict(list)
    for event in events:
        own[event.rank].append(event)
    found = {}
    for rank, some in sorted(own.items()):
        work = sum(event.end - event.start for event in some)
        span = max(event.end for event in some) - min(event.start for event in some)
        found[rank] = (work, max(0.0, span - work))
    return found


def busiest(events: Iterable[OpEvent]) -> float:
    """Seconds of work of the rank that worked most."""
    return max((work for work, _ in work_and_waiting(events).values()), default=0.0)
