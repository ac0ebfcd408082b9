"""The interactive page: template, script, and the drawings' data put together."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeloom._core import Drawing

__all__ = ["assemble"]

HERE = Path(__file__).parent
_SCRIPTS = ("plan.js", "page.js")


def assemble(
    plans: Sequence[tuple[str, Drawing, Mapping[str, str]]],
    *,
    view: tuple[float | None, float | None],
    ranks: tuple[int, int] | None,
    memory: bool,
    critical_path: bool,
    paired: bool,
) -> str:
    """Put the page together; it needs nothing else, and loads nothing.

    Args:
        plans: Name, drawing, and facts to show beside those that the page works out.
        view: The stretch of time that it shows first.
        ranks: First rank that it draws and the first after them; None: all.
        memory: Whether it shows memory at first.
        critical_path: Whether it outlines the critical path at first.
        paired: Whether an op tells how the same op of the other plans differs.

    Returns:
        The page's text.
    """
    entries = ",".join(
        f'{{"name":{_json(name)},"facts":{_json(dict(facts))},"data":{drawing.page_data()}}}'
        for name, drawing, facts in plans
    )
    settings = (
        f'"view":{_json(view)},"ranks":{_json(ranks)},"memory":{_json(memory)},'
        f'"critical":{_json(critical_path)}'
    )
    parts = {
        "TITLE": escape(", ".join(name for name, _, _ in plans)),
        "SCRIPT": "".join((HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS),
        "DATA": f'{{{settings},"paired":{_json(paired)},"plans":[{entries}]}}',
    }
    text = (HERE / "page.html").read_text(encoding="utf-8")
    # In one pass, so that no part is searched for marks.
    return re.sub("@(TITLE|SCRIPT|DATA)@", lambda mark: parts[mark[1]], text)


def _json(value: object) -> str:
    # "</script>" inside a string must not end the element.
    return json.dumps(value).replace("<", "\\u003c")
