"""`pipeloom schedules`: what there is to plan."""

from __future__ import annotations

import shutil
import textwrap
from typing import TYPE_CHECKING

import pipeloom as pl
from pipeloom.cli import options

if TYPE_CHECKING:
    import argparse

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  pipeloom schedules
  pipeloom schedules zb_v
  pipeloom schedules --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("name", nargs="*", help="only these, with all that is known of them")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the table of schedules, or all about some of them."""
    schedules = pl.schedules()
    known = {schedule.name: schedule for schedule in schedules}
    for name in arguments.name:
        options.refuse_unknown(name)
    chosen = [known[name] for name in arguments.name] or schedules
    if arguments.json:
        options.print_json([schedule._asdict() for schedule in chosen])
    elif arguments.name:
        print("\n\n".join(map(_card, chosen)))
    else:
        width = max(len(schedule.name) for schedule in schedules)
        room = max(40, min(120, shutil.get_terminal_size().columns) - width - 2)
        for schedule in chosen:
            text = textwrap.wrap(schedule.summary, room) + [
                f"needs {line}" if not at else line
                for at, line in enumerate(textwrap.wrap(schedule.constraints, room - 6))
            ]
            for at, line in enumerate(text):
                print(f"{'' if at else schedule.name:<{width}}  {line}")
    return 0


def _card(schedule: pl.Schedule) -> str:
    facts = {
        "what": schedule.summary,
        "needs": schedule.constraints,
        "vp": "any" if schedule.vp is None else str(schedule.vp),
        "placement": schedule.placement,
        "options": ", ".join(schedule.arguments) or "none",
        "source": schedule.source,
    }
    lines = [textwrap.fill(text, 90, subsequent_indent=" " * 13) for text in facts.values()]
    return schedule.name + "".join(
        f"\n  {fact:<10} {text}" for fact, text in zip(facts, lines, strict=True)
    )
