"""`train --profile`: each op's times on every rank, on one clock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pipeloom.profile import Profile
from pipeloom.training.measure import Timed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeloom import Plan
    from pipeloom.training.measure import OpEvent
    from pipeloom.training.processes import Processes
    from pipeloom.training.session import Session

MAX_STEPS = 100
"""Steps that a profile keeps: the last ones."""
_ROUNDS = 8


class StepProfiler:
    """Collects the steps' events on the first process."""

    def __init__(self, plan: Plan, session: Session) -> None:
        """Measures by how much this process's clock is ahead of the first one's."""
        self.processes, self.pipeline = session.processes, session.pipelines[0]
        # Of a plan with transfers too, what is recorded is the ops that compute.
        self.profile = Profile(plan.without_transfers(), side_by_side=session.processes.count > 1)
        self.ahead_s = clock_offset(session.processes)

    def take(self, number: int, events: Iterable[OpEvent]) -> None:
        """Adds a step of the first pipeline; all processes call it."""
        own = [
            Timed(event.rank, event.op, event.start - self.ahead_s, event.end - self.ahead_s)
            for event in events
            if self.pipeline == 0
        ]
        parts = self.processes.gather(own)
        if self.processes.index == 0:
            self.profile.add(number, (event for part in parts for event in part))
            del self.profile.steps[:-MAX_STEPS]


def clock_offset(processes: Processes) -> float:
    """Seconds by which this process's clock is ahead of the first process's.

    Nobody leaves a gather before everybody has entered it, which bounds the difference from both
    sides. Processes of one machine share a clock: where no difference is within the bounds, it is
    none.
    """
    lowest, highest = float("-inf"), float("inf")
    for _ in range(_ROUNDS if processes.count > 1 else 0):
        entered = time.perf_counter()
        processes.gather(None)
        left = time.perf_counter()
        first_entered, first_left = processes.gather((entered, left))[0]
        lowest = max(lowest, entered - first_left)
        highest = min(highest, left - first_entered)
    return 0.0 if lowest <= 0.0 <= highest else (lowest + highest) / 2
