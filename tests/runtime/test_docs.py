"""The guide's code runs."""

import re
from pathlib import Path

import pytest
import torch

GUIDE = Path(__file__).parents[2] / "docs" / "runtime.md"


def test_code_of_the_guide_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)
    assert blocks
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), {"__name__": "guide"})


@pytest.mark.dist
def test_its_first_script_runs_with_one_process_a_rank(launch):
    """With nothing changed but the transport, as the guide says."""
    block = re.search(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M).group(1)
    made = "Pipeline(plan, [front, back], sum_of_squares)"
    assert made in block

    def body(transport):
        script = block.replace(made, f"{made[:-1]}, transport=transport)")
        names = {"__name__": "guide", "transport": transport}
        exec(compile(script, str(GUIDE), "exec"), names)
        return names["result"].loss, len(list(names["pipeline"].parameters()))

    (nothing, own), (loss, others) = launch.values(launch(2, body))
    assert nothing is None
    assert (own, others) == (2, 2)
    names = {"__name__": "guide"}
    exec(compile(block, str(GUIDE), "exec"), names)
    assert torch.equal(loss, names["result"].loss)
