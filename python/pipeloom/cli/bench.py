"""`pipeloom bench`: what planning one shape takes on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pipeloom as pl
from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom bench interleaved_1f1b --pp 128 --vp 4 -m 1024
  pipeloom bench zb_h1 --pp 16 -m 256 --repeat 10 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_plan_arguments(parser)
    parser.add_argument(
        "--lower",
        choices=options.STYLES,
        default="streams",
        metavar="STYLE",
        help=f"{', '.join(options.STYLES)} (default: streams)",
    )
    parser.set_defaults(backend=None, prefetch=None)
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="runs of each; the best counts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Time each step and print seconds and nanoseconds an op."""
    if arguments.repeat < 1:
        raise pl.ConfigError(
            f"--repeat {arguments.repeat} is out of range: it must be at least 1"
            "\nhint: give --repeat 5"
        )
    style, arguments.lower = arguments.lower, None
    plan = options.plan_of(arguments)
    if plan.style is not None:
        raise pl.ConfigError(
            "the plan has transfers already, so there is nothing to lower"
            "\nhint: give a plan without, or a schedule and a shape"
        )
    lowered = plan.lower(style)
    costs = pl.Costs()
    ranks = range(plan.pp)

    def columns() -> None:
        for rank in ranks:
            plan.columns(rank)

    steps: dict[str, tuple[Callable[[], object], int]] = {
        "plan": (lambda: options.plan_of(arguments), plan.num_ops),
        "columns of all ranks": (columns, plan.num_ops),
        f"lower ({style})": (lambda: plan.lower(style), lowered.num_ops),
        "check all that is promised": (lowered.check, lowered.num_ops),
        "simulate": (lambda: plan.simulate(costs), plan.num_ops),
    }
    rows = []
    for name, (step, ops) in steps.items():
        seconds = min(_timed(step) for _ in range(arguments.repeat))
        rows.append(
            {"step": name, "ops": ops, "seconds": seconds, "ns_per_op": seconds / ops * 1e9}
        )
    if arguments.json:
        options.print_json({"plan": repr(plan), "repeat": arguments.repeat, "steps": rows})
        return 0
    print(f"{plan!r}, best of {arguments.repeat}")
    lines = [
        (row["step"], f"{row['ops']}", f"{row['seconds'] * 1e3:.3f}", f"{row['ns_per_op']:.1f}")
        for row in rows
    ]
    print(options.table([("STEP", "OPS", "MS", "NS AN OP"), *lines], right=[1, 2, 3]))
    return 0


def _timed(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
