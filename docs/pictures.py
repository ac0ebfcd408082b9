"""Redraws the pictures of schedules.md from its marker comments: `python docs/pictures.py`.

A marker is an HTML comment, "picture: NAME name=value ...", on the line before a text block; the
values are arguments of `pipeloom.plan`.
"""

import re
from pathlib import Path
from typing import Any

import pipeloom as pl
from pipeloom import reference

PAGE = Path(__file__).with_name("schedules.md")
MARKED = re.compile(r"<!-- picture: (\S+)((?: \w+=\w+)+) -->\n```text\n.*?```\n", re.DOTALL)


def draw(name: str, **arguments: Any) -> str:
    """A grid of ranks by time at F = I = W = 1: kind and microbatch, letters of odd chunks small.

    A backward takes two cells, an overlapped pair (with +) three.
    """
    plan = pl.plan(name, **arguments)
    schedule = reference.Schedule.of(plan)
    timeline = reference.simulate(schedule)
    chunk_of = [chunk for _, chunk in plan.stages]
    lines = []
    for rank, steps in enumerate(schedule.steps):
        cells = [" ."] * timeline.makespan
        for step, start, end in zip(steps, timeline.start[rank], timeline.end[rank], strict=True):
            names = [
                (op.kind.lower() if chunk_of[op.stage] % 2 else op.kind) + str(op.unit)
                for op in step
            ]
            cells[start:end] = ["=="] * (end - start)
            cells[start] = names[0]
            if len(names) == 2:
                cells[start + 1] = "+" + names[1]
        lines.append(f"rank {rank} " + " ".join(cell.ljust(2) for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def redraw(page: str) -> str:
    """The page with every marked picture drawn again."""

    def picture(marked: re.Match[str]) -> str:
        arguments = dict(pair.split("=") for pair in marked[2].split())
        values = {
            key: value == "True" if value in ("True", "False") else int(value)
            for key, value in arguments.items()
        }
        head = f"<!-- picture: {marked[1]}{marked[2]} -->"
        return f"{head}\n```text\n{draw(marked[1], **values)}\n```\n"

    return MARKED.sub(picture, page)


if __name__ == "__main__":
    PAGE.write_text(redraw(PAGE.read_text()))
