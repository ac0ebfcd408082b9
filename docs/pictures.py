"""Redraws the pictures of schedules.md from its marker comments: `python docs/pictures.py`.

A marker is an HTML comment, "picture: NAME name=value ...", on the line before a text block; the
values are arguments of `pipeloom.plan`.
"""

import re
from pathlib import Path
from typing import Any

import pipeloom as pl
from pipeloom import plot

PAGE = Path(__file__).with_name("schedules.md")
MARKED = re.compile(r"<!-- picture: (\S+)((?: \w+=\w+)+) -->\n```text\n.*?```\n", re.DOTALL)


def draw(name: str, **arguments: Any) -> str:
    """What `pipeloom show` prints, at F = I = W = 1, without its legend."""
    timeline = pl.plan(name, **arguments).simulate(pl.Costs())
    lines = plot.grid(timeline).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.startswith(("  time", "rank")))


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
