"""`pipeloom check`: prove that a plan is right, or say where it is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pipeloom as pl
from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom check 1f1b --pp 4 -m 8 --lower fifo --semantics all
  pipeloom check interleaved_1f1b --pp 4 --vp 2 -m 8 --lower streams --max-buffers 9
  pipeloom check --plan actions.csv
  pipeloom check --plan step.plan --semantics rendezvous --json

`--semantics all` reports deadlocks under semantics that the plan does not promise; a semantics
asked for by name must hold.

exit status: 0 the plan is right, 1 it is wrong, 2 bad input
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_plan_arguments(parser)
    options.add_lower_arguments(parser)
    parser.add_argument(
        "--semantics",
        choices=(*options.SEMANTICS, "all"),
        metavar="NAME",
        help=f"{', '.join(options.SEMANTICS)} or all (default: those that the plan promises)",
    )
    parser.add_argument(
        "--max-buffers",
        type=int,
        metavar="N",
        help="most receive buffers that any channel of a lowered plan may need (default: any)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check the plan: status 0 if it is right, 1 if it is wrong."""
    try:
        plan = options.plan_of(arguments)
        report = plan.check(arguments.semantics, arguments.max_buffers)
    except pl.CheckError as error:
        if not arguments.json:
            raise
        options.print_json({"ok": False, "violations": list(map(_fields, error.violations))})
        return 1
    if arguments.json:
        options.print_json(
            {
                "ok": True,
                "plan": repr(plan),
                "progress": report.progress,
                "unpromised": list(map(_fields, report.unpromised)),
            }
        )
    else:
        print(report)
    return 0


def _fields(violation: pl.Violation) -> dict[str, object]:
    names = ("rule", "rank", "position", "op", "message", "hint")
    return {name: getattr(violation, name) for name in names}
