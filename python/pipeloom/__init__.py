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
    Costs,
    Layout,
    LayoutError,
    Load,
    ParseError,
    Plan,
    PlanError,
    Report,
    SearchError,
    Timeline,
    Violation,
    __version__,
    p2p_order,
)
from pipeloom.dispatch import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from pipeloom.memory import MemoryReport, ModelMemory
from pipeloom.planning import OpKind, Schedule, legal_num_microbatches, plan, schedules

__all__ = [
    "CheckError",
    "ConfigError",
    "Costs",
    "Layout",
    "LayoutError",
    "Load",
    "MemoryReport",
    "ModelMemory",
    "OpKind",
    "ParseError",
    "Plan",
    "PlanError",
    "Report",
    "Schedule",
    "SearchError",
    "Timeline",
    "Violation",
    "__version__",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "legal_num_microbatches",
    "p2p_order",
    "plan",
    "schedules",
]
