"""`pipeloom bench`: what planning one shape, and running it, takes on this machine."""

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
  pipeloom bench zb_v --pp 4 -m 16 --step
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
    parser.add_argument(
        "--step",
        action="store_true",
        help="also run a training step of next to no computation, all ranks in this process",
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
    if arguments.step:
        steps["run tiny stages"] = (_tiny_step(plan), plan.num_ops)
    best = {
        name: min(_timed(step) for _ in range(arguments.repeat))
        for name, (step, _) in steps.items()
    }
    rows = [(name, ops, best[name], best[name] / ops * 1e9) for name, (_, ops) in steps.items()]
    if arguments.json:
        keys = ("step", "ops", "seconds", "ns_per_op")
        dicts = [dict(zip(keys, row, strict=True)) for row in rows]
        options.print_json({"plan": repr(plan), "repeat": arguments.repeat, "steps": dicts})
        return 0
    print(f"{plan!r}, best of {arguments.repeat}")
    lines = [
        (name, str(ops), f"{seconds * 1e3:.3f}", f"{each:.1f}") for name, ops, seconds, each in rows
    ]
    print(options.table([("STEP", "OPS", "MS", "NS AN OP"), *lines], right=[1, 2, 3]))
    return 0


def _tiny_step(plan: pl.Plan) -> Callable[[], object]:
    """A step whose time is the runtime's own, but for the smallest of matrix products."""
    import torch

    from pipeloom.runtime import Pipeline, PipelineError

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).sum()

    stages = [torch.nn.Linear(16, 16) for _ in range(plan.num_stages)]
    data = [torch.zeros(1, 16) for _ in range(plan.num_microbatches)]
    pipeline = Pipeline(plan, stages, loss_of, boundary_shape=(1, 16))
    run = pipeline.evaluate if plan.forward_only else pipeline.step
    try:
        run(data, data)  # compiles the plan
    except PipelineError as error:
        raise pl.ConfigError(str(error)) from error
    return lambda: run(data, data)


def _timed(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
