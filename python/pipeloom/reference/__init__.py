"""A slow, readable twin of the planner in plain Python: orders, transfers, progress, times.

Nothing here shares code with the Rust core, and every rule is written the way its paper states it:
short lists, no formula that skips a step. Tests and :mod:`pipeloom.testing` compare the planner
with it; read it for the exact meaning of a rule. It is far too slow for real shapes.

>>> twin = schedule("1f1b", pp=2, num_microbatches=3)
>>> twin.ops(0)
['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
>>> simulate(twin).makespan
12
>>> stuck(lower(twin), "streams"), faults(lower(twin))
([], [])
"""

from pipeloom.reference.checking import faults, stuck
from pipeloom.reference.orders import (
    FAMILIES,
    MANY_CHUNKS,
    default_group,
    interleaved_warmup,
    is_legal_group,
    recompute_mask,
    schedule,
    table,
    warmup,
)
from pipeloom.reference.timing import Timeline, simulate
from pipeloom.reference.transfers import lower
from pipeloom.reference.types import Op, Schedule, Step

__all__ = [
    "FAMILIES",
    "MANY_CHUNKS",
    "Op",
    "Schedule",
    "Step",
    "Timeline",
    "default_group",
    "faults",
    "interleaved_warmup",
    "is_legal_group",
    "lower",
    "recompute_mask",
    "schedule",
    "simulate",
    "stuck",
    "table",
    "warmup",
]
