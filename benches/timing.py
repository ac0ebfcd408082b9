"""Timing: warmed, garbage collection off, median over runs that alternate with the peer's."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], object]

LONG_S = 2.0
"""A peer that takes longer than this a call is called once, unwarmed: the noise is then ours."""


@dataclass
class Samples:
    """Seconds a call, over batches."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def noise(self) -> float:
        """Half the distance of the quartiles, as a part of the median."""
        if len(self.seconds) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def once(work: Work) -> float:
    start = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - start
    del result  # freeing what was made is no part of making it
    return elapsed


def batch(work: Work, number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        work()
    return (time.perf_counter() - start) / number


def calls_for(work: Work, seconds: float) -> int:
    """How many calls fill about so many seconds."""
    return max(1, int(seconds / max(once(work), 1e-7)))


def side_by_side(
    ours: Work, peer: Work | None, *, rounds: int = 9, batch_s: float = 0.05
) -> tuple[Samples, Samples | None]:
    """Times both in turns, so that a busy machine slows both."""
    gc.collect()
    gc.disable()
    try:
        ours()  # warm
        mine, theirs = Samples(), Samples() if peer else None
        number = calls_for(ours, batch_s)
        peer_number = 0
        if peer and theirs:
            first = once(peer)
            if first > LONG_S:
                theirs.seconds.append(first)
            else:
                peer_number = max(1, int(batch_s / first))
        for _ in range(rounds):
            mine.seconds.append(batch(ours, number))
            if peer and theirs and peer_number:
                theirs.seconds.append(batch(peer, peer_number))
        return mine, theirs
    finally:
        gc.enable()
