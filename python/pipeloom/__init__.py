"""Plan pipeline-parallel training in Rust, run it in PyTorch.

Examples:
    >>> import pipeloom as pl
    >>> p = pl.plan("1f1b", pp=2, num_microbatches=3)
    >>> p
    Plan("1f1b", pp=2, vp=1, num_microbatches=3)
    >>> p.ops(0)
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
"""

from pipeloom._core import (
    CheckError,
    ConfigError,
    Layout,
    LayoutError,
    ParseError,
    Plan,
    PlanError,
    SearchError,
    Violation,
    __version__,
)
from pipeloom.planning import OpKind, Schedule, plan, schedules

__all__ = [
    "CheckError",
    "ConfigError",
    "Layout",
    "LayoutError",
    "OpKind",
    "ParseError",
    "Plan",
    "PlanError",
    "Schedule",
    "SearchError",
    "Violation",
    "__version__",
    "plan",
    "schedules",
]
