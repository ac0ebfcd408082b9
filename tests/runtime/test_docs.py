"""The guide's code runs."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "runtime.md"


def test_code_of_the_guide_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    assert blocks
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), {"__name__": "guide"})
