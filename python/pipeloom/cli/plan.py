"""`pipeloom plan`: print, save, lower or export a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pipeloom as pl
from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom plan 1f1b --pp 4 -m 8
  pipeloom plan interleaved_1f1b --pp 4 --vp 2 -m 8 --rank 0 --json
  pipeloom plan zb_h1 --pp 4 -m 8 --lower streams --save step.plan
  pipeloom plan --plan step.plan --csv > actions.csv
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    options.add_plan_arguments(parser)
    options.add_lower_arguments(parser)
    options.add_cost_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--rank", type=int, metavar="R", help="only this rank's order")
    output.add_argument("--save", type=Path, metavar="FILE", help="save the plan instead")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="PyTorch's CSV of actions")
    form.add_argument("--json", action="store_true", help="shape and orders as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan as text, CSV or JSON, or save it."""
    plan = options.plan_of(arguments)
    if options.cost_values(arguments) and not options.plans_for_costs(arguments):
        raise pl.ConfigError(
            "costs have no use here: this plan does not depend on them"
            "\nhint: leave them out, or see `pipeloom simulate`"
        )
    if arguments.save is not None:
        with options.naming(arguments.save):
            plan.save(arguments.save)
        print(f"saved {plan!r} to {arguments.save}")
        return 0
    if arguments.csv:
        if arguments.rank is not None:
            raise pl.ConfigError("--rank has no use with --csv\nhint: a CSV has all ranks")
        print(plan.to_csv(None, comms=plan.style is not None), end="")
        return 0
    ranks = range(plan.pp) if arguments.rank is None else [arguments.rank]
    if arguments.json:
        options.print_json(
            {
                "schedule": plan.schedule,
                "pp": plan.pp,
                "vp": plan.vp,
                "num_microbatches": plan.num_microbatches,
                "num_seq_pieces": plan.num_seq_pieces,
                "num_stages": plan.num_stages,
                "num_replicas": plan.num_replicas,
                "microbatch_group_size": plan.microbatch_group_size,
                "placement": plan.placement,
                "style": plan.style,
                "semantics": list(plan.semantics),
                "orders": {str(rank): plan.ops(rank) for rank in ranks},
            }
        )
        return 0
    width = len(str(plan.pp - 1))
    for rank in ranks:
        print(f"rank {rank:>{width}} ", *plan.ops(rank))
    return 0
