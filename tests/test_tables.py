"""The tables in README.md and docs/format.md are those that docs/tables.py computes."""

import importlib.util
import re
from pathlib import Path

import pytest

import pipeloom as pl

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_tables_are_true(path):
    page = path.read_text()
    assert tables.MARKED.search(page)
    assert tables.recomputed(page) == page, "run `python docs/tables.py`"


def test_the_readme_lists_every_schedule():
    table = (ROOT / "README.md").read_text().split("<!-- table: schedules -->")[1]
    listed = re.findall(r"^\| `(\w+)` \|", table.split("<!-- end -->")[0], re.MULTILINE)
    assert listed == [row.name for row in pl.schedules()]
