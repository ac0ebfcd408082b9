"""Plans as CSV, saved files and pickles."""

import copy
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pipeloom as pl

GOLDEN = Path(__file__).parent / "golden"

TORCH = [json.loads(line) for line in (GOLDEN / "torch_csv.jsonl").read_text().splitlines()]
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def name(record):
    return f"{record['schedule']}-{record['pp']}x{record['v']}x{record['m']}"


def kept(row):
    return [action for action in row.split(",") if action and not action.endswith(SHARDING)]


@pytest.mark.parametrize("record", TORCH, ids=name)
def test_torchs_orders_are_read(record, refused):
    text = "\n".join(record["order"])
    if record["schedule"] == "1F1B":
        # The last rank of torch 2.13's own listing runs F1..Fm instead of F0..F(m-1).
        refused(pl.CheckError, lambda: pl.Plan.from_csv(text), "never runs")
        return
    plan = pl.Plan.from_csv(text)
    assert (plan.pp, plan.vp, plan.num_microbatches) == (record["pp"], record["v"], record["m"])
    assert [rank for rank, _ in plan.stages] == record["s2r"]
    assert plan.placement in (("v", "loop") if plan.pp == 1 else ("v",)) or record["s2r"] == [
        s % plan.pp for s in range(plan.num_stages)
    ]
    for rank, row in enumerate(record["order"]):
        assert plan.ops(rank) == kept(row)


@pytest.mark.parametrize("record", TORCH, ids=name)
def test_torchs_transfers_are_read_in_their_order(record):
    text = "\n".join(record["comms"])
    plan = pl.Plan.from_csv(text)
    assert plan.style == "text"
    for rank, row in enumerate(record["comms"]):
        assert plan.ops(rank) == kept(row)
        groups = plan.columns(rank)["group"]
        numbers = groups[groups != 2**32 - 1].tolist()
        assert numbers == list(range(len(numbers)))
    fields = [row.split(",") for row in record["comms"]]
    assert plan.dropped_actions == [
        (rank, column, action)
        for rank, row in enumerate(fields)
        for column, action in enumerate(row)
        if action.endswith(SHARDING)
    ]
    again = plan.to_csv(comms=True)
    assert again == "".join(",".join(kept(row)) + "\n" for row in record["comms"])
    assert pl.Plan.from_csv(again) == plan


def test_csv_of_a_plan_and_back(tmp_path):
    plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4)
    text = plan.to_csv()
    assert text.splitlines()[0].startswith("0F0,0F1,2F0,2F1,")
    path = tmp_path / "plan.csv"
    assert plan.to_csv(path) is None
    assert path.read_text() == text
    for source in (text, path, str(path)):
        assert pl.Plan.from_csv(source) == plan
    lowered = plan.lower("fifo")
    assert pl.Plan.from_csv(lowered.to_csv(comms=True)).to_csv(comms=True) == lowered.to_csv(
        comms=True
    )
    assert lowered.to_csv() == text
    assert list(tmp_path.iterdir()) == [path]


def test_csv_errors_say_where(refused, tmp_path):
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    refused(pl.ConfigError, lambda: plan.to_csv(comms=True), "comms")
    read = pl.Plan.from_csv
    refused(pl.ParseError, lambda: read("0F0,0B0\n1F0,1X0"), "row 1, column 1", "1X0")
    refused(pl.ParseError, lambda: read("0F0,2F0garbage"), "2F0garbage")
    refused(pl.ParseError, lambda: read(""), "empty")
    refused(FileNotFoundError, lambda: read("no_such_file.csv"), "no_such_file.csv")
    refused(FileNotFoundError, lambda: read(tmp_path / "none.csv"), "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0F0")
    refused(pl.ParseError, lambda: read(tmp_path / "bytes.csv"), "UTF-8")
    with pytest.raises(pl.CheckError) as caught:
        read("0F0,0F1,0B0,0B1\n1F1,1B0")
    assert {violation.op for violation in caught.value.violations} == {"1F0", "1B1"}
    message = refused(pl.CheckError, lambda: read("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"), "deadlock")
    assert "1F1 waits for 0F1" in message


def test_swapped_sends_are_refused(refused):
    """torch reads this and computes wrong gradients."""
    rank0 = "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1"
    rank1 = "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    refused(pl.CheckError, lambda: pl.Plan.from_csv(f"{rank0}\n{rank1}"), "0SEND_F1 at position 2")


SAVED = [
    pl.plan("1f1b", pp=4, num_microbatches=9),
    pl.plan(
        "interleaved_1f1b",
        pp=2,
        vp=2,
        num_microbatches=6,
        microbatch_group_size=3,
        num_microbatches_with_partial_activation_checkpoints=1,
    ),
    pl.plan("1f1b", pp=2, num_microbatches=3, forward_only=True),
    pl.plan("looped_bfs", pp=2, vp=2, num_microbatches=3, reverse_backward=False),
    pl.plan("zb_v", pp=3, num_microbatches=7),
    pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4).lower("even_odd"),
    pl.Plan.from_csv("1F0,2F0,2B0,1B0\n0F0,0B0"),
    pl.Plan.from_csv("\n".join(TORCH[-1]["comms"])),
]


@pytest.mark.parametrize("plan", SAVED, ids=repr)
def test_saved_plans_come_back_exactly(plan, tmp_path):
    path = tmp_path / "plan.pipeloom"
    plan.save(path)
    for back in (pl.Plan.load(path), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert back == plan
        assert hash(back) == hash(plan)
        assert repr(back) == repr(plan)
        assert (back.style, back.semantics) == (plan.style, plan.semantics)
        for rank in range(plan.pp):
            assert back.ops(rank) == plan.ops(rank)
            assert back.num_warmup(rank) == plan.num_warmup(rank)
            mine, theirs = plan.columns(rank), back.columns(rank)
            assert mine.keys() == theirs.keys()
            assert all((mine[key] == theirs[key]).all() for key in mine)
    assert list(tmp_path.iterdir()) == [path]


def test_a_huge_plan_pickles_small():
    plan = pl.plan("interleaved_1f1b", pp=64, vp=8, num_microbatches=4096)
    assert len(pickle.dumps(plan)) < 1000


def test_saving_never_leaves_half_a_file(tmp_path):
    plan = pl.plan("1f1b", pp=2, num_microbatches=3)
    with pytest.raises(FileNotFoundError):
        plan.save(tmp_path / "no_folder" / "plan")
    target = tmp_path / "folder"
    target.mkdir()
    (target / "inside").touch()
    with pytest.raises(IsADirectoryError):
        plan.save(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder"]


def test_damage_and_newer_versions_are_told(tmp_path, refused):
    path = tmp_path / "plan"
    pl.plan("1f1b", pp=2, num_microbatches=3).lower().save(path)
    text = path.read_text()

    def load(changed):
        path.write_text(changed)
        return lambda: pl.Plan.load(path)

    refused(pl.ParseError, load(text.replace("plan 1", "plan 99", 1)), "format 99", "update")
    refused(pl.ParseError, load(text.replace("0F2", "0F1", 1)), "damaged")
    refused(pl.ParseError, load(text[:-30]), "damaged")
    refused(pl.ParseError, load("0F0,0B0"), "no saved plan", "from_csv")
    refused(FileNotFoundError, lambda: pl.Plan.load(tmp_path / "none"), "none")


# Any text, and pieces of CSVs in any order, which get further into the reader.
PIECES = st.builds(
    lambda stage, kind, unit, end: f"{stage}{kind}{unit}{end}",
    st.sampled_from(["", "0", "1", "2", "9", "4294967295", "("]),
    st.sampled_from(
        ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "REDUCE_GRAD"]
    ),
    st.sampled_from(["", "0", "1", "4294967296", "-1"]),
    st.sampled_from([",", "\n", ",,", " ", ";", ")OVERLAP_F_B,", "\r\n", "\ufeff"]),
)


@given(st.text(max_size=80) | st.lists(PIECES, max_size=24).map("".join))
@example("0F0\n\n")
@example("\x00")
def test_any_text_is_read_or_refused(text):
    refusal = None
    try:
        plan = pl.Plan.from_csv(text + "\n")
    except pl.PlanError as error:
        refusal = str(error)
    assert "\nhint: " in refusal if refusal else plan.to_csv()
