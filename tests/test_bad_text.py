"""Texts that torch's parser or validator lets through by mistake: here each is an error with its
row, its column where it has one, and a hint."""

from importlib.metadata import version

import pytest

import pipeloom as pl

# What torch's `_Action.from_str` makes of a field that is no action.
FIELDS = {
    "0F0zzz": "0F0",
    "0F0garbage": "0F0",
    "0F0 ": "0F0",
    "0F0F1": "0F0",
    "0F0.5": "0F0",
    "0F-1": "0F",
    "0F": "0F",
    "0B": "0B",
    "0SEND_F": "0SEND_F",
    "0F1;2": "0F1",
    "0UNSHARD1": "0UNSHARD1",
    "0I0W0": "0I0",
    "00F0x": "0F0",
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("column", [0, 3])
@pytest.mark.parametrize("row", [0, 1])
def test_a_field_that_is_no_action(field, column, row, refused):
    if field.endswith(" "):
        field += "x"  # white space around a field means nothing
    line = [*["0F1", "", "0B1"][:column], field, "0B0"]
    text = "1F0,1B0\n" * row + ",".join(line) + "\n"
    refused(pl.ParseError, lambda: pl.Plan.from_csv(text), f"row {row}, column {column}", field)


@pytest.mark.skipif(not version("torch").startswith("2.13"), reason="what torch 2.13 takes")
def test_torch_takes_them():
    from torch.distributed.pipelining.schedules import _Action

    assert {field: str(_Action.from_str(field)) for field in FIELDS} == FIELDS


# Text, and what the message says: the place, then what is wrong there.
PLANS = {
    "microbatches from 1": ("0F1,0F2,0B1,0B2", "row 0: ", "never runs 0F0"),
    "other microbatches on each stage": (
        "0F0,0F1,0B0,0B1\n1F0,1F2,1B0,1B2",
        "row 0: ",
        "never runs 0F2",
    ),
    "a forward twice": ("0F0,,0F0,0B0", "row 0, column 2", "0F0 stands here a second time"),
    "B, I and W of one, none of the other": (
        "0F0,0F1,0B0,0I0,0W0",
        "row 0, column 3",
        "0I0 repeats what 0B0 does",
    ),
    "no weight half": ("0F0,,0I0", "row 0, column 2", "0I0 has no 0W0"),
    "a backward first": ("0B0,0F0", "row 0, column 0", "0B0 stands before 0F0"),
    "a missing backward": ("0F0,0F1,0B0", "row 0: ", "never runs 0B1"),
    "a cyclic order": (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0",
        "row 0, column 1",
        "deadlock",
    ),
    "a stage out of range": ("0F0,0B0,0F1,0B1,2F0,2B0", "stage 1", "without gaps"),
    "a number out of proportion": ("0F0,0B4000000000", "position 1", "out of proportion"),
    "a stage on two ranks": ("0F0,0B0\n0F1,0B1", "rank 1, position 0", "on rank 0 already"),
    "a missing receive": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
        "row 1: ",
        "rank 1 has no 1RECV_F0",
    ),
    "a missing send": (
        "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "row 0: ",
        "rank 0 has no 0SEND_F0",
    ),
    "swapped sends": (
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
        "row 1, column 0",
        "is 0SEND_F1 at position 2",
    ),
    "a receive behind its reader": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0",
        "row 1, column 0",
        "1F0 stands before 1RECV_F0",
    ),
    "a transfer that goes nowhere": (
        "0F0,0SEND_F0,0B0",
        "row 0, column 1",
        "does not change ranks",
    ),
    "sharding before the fault": (
        "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0B0",
        "row 0, column 4",
        "a second time",
    ),
    "a pair before the fault": (
        "0F0,(0F1;0B0)OVERLAP_F_B,0B1,,0B1",
        "row 0, column 4",
        "a second time",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_breaks_a_rule(name, refused):
    text, *words = PLANS[name]
    refused(pl.CheckError, lambda: pl.Plan.from_csv(text + "\n"), *words)
