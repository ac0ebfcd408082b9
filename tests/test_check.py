"""Checking plans: rules, promises, deadlocks."""

import pickle

import pytest

import pipeloom as pl


def test_a_right_plan_is_reported_as_such():
    report = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8).check()
    assert report.ok
    assert report.violations == []
    assert report.progress == {"buffered": True}
    assert "no rule is broken" in str(report)
    assert repr(report) == "Report(ok=True, violations=0, unpromised=0)"


def test_all_semantics_of_a_plan_without_transfers():
    report = pl.plan("1f1b", pp=2, num_microbatches=2).check("all")
    assert report.progress == {
        "buffered": True,
        "streams": None,
        "single_stream": None,
        "batched": None,
        "rendezvous": None,
    }


def test_named_semantics_need_transfers(refused):
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    assert plan.check("buffered").ok
    assert plan.check(["buffered"]).ok
    refused(pl.ConfigError, lambda: plan.check("rendezvous"), "rendezvous", "lower")
    refused(pl.ConfigError, lambda: plan.check("magic"), "magic", "rendezvous")
    with pytest.raises(TypeError, match="hint: "):
        plan.check(3)


lowers = pytest.mark.skipif(not hasattr(pl.Plan, "lower"), reason="not bound: lower")


@lowers
@pytest.mark.parametrize("style", ["streams", "fifo", "batched", "even_odd"])
def test_lowered_plans_keep_what_they_promise(style):
    for schedule in ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v"):
        vp = 2 if schedule == "interleaved_1f1b" else None
        plan = pl.plan(schedule, pp=4, vp=vp, num_microbatches=8).lower(style)
        report = plan.check("all")
        assert report.ok
        assert all(report.progress[semantics] for semantics in plan.semantics)


@lowers
def test_an_unpromised_deadlock_is_reported_and_raised_only_if_named():
    plan = pl.plan("1f1b", pp=4, num_microbatches=8).lower("streams")
    report = plan.check("all")
    assert report.ok
    assert report.progress["rendezvous"] is False
    told = [v for v in report.unpromised if "rendezvous" in v.message]
    assert told[0].rule == "progress"
    assert "wait for each other" in told[0].message
    assert "waits for" in str(report)
    with pytest.raises(pl.CheckError, match="deadlock under rendezvous") as caught:
        plan.check("rendezvous")
    assert [v.message for v in caught.value.violations] == [v.message for v in told]


@lowers
def test_buffered_times_do_not_depend_on_lowering():
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8)
    costs = pl.Costs(latency=2)
    for style in ("streams", "fifo", "batched", "even_odd"):
        assert plan.lower(style).simulate(costs).makespan == plan.simulate(costs).makespan


@lowers
def test_fifo_delays_nothing_at_zero_latency():
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=16)
    lowered = plan.lower("fifo").simulate(pl.Costs(), "single_stream")
    assert lowered.makespan == plan.simulate(pl.Costs()).makespan


@lowers
def test_receive_buffers_can_be_bounded(refused):
    plan = pl.plan("1f1b", pp=4, num_microbatches=8).lower()
    needed = max(plan.buffers(rank, way) for rank in range(4) for way in ("forward", "backward"))
    assert needed == 3
    assert plan.check(max_buffers=needed).ok
    with pytest.raises(pl.CheckError, match="needs buffer 3 of channel 0 -> 1 forward") as caught:
        plan.check("all", max_buffers=2)
    (told,) = caught.value.violations
    assert (told.rule, told.rank, told.op) == ("buffers", 1, "1RECV_F2")
    assert plan.ops(1)[told.position] == told.op
    unlowered = pl.plan("1f1b", pp=4, num_microbatches=8)
    refused(pl.ConfigError, lambda: unlowered.check(max_buffers=3), "no transfers", "lower")
    refused(pl.ConfigError, lambda: plan.check(max_buffers=-1), "max_buffers=-1")


# Orders in PyTorch's CSV, and the rules that they break (none: the text itself is refused). Those
# marked `torch` pass torch 2.13's validator or loader and run wrong, hang or raise KeyError later.
WRONG = {
    "torch: microbatches numbered from 1": ("0F1,0F2,0B1,0B2\n1F1,1B1,1F2,1B2\n", {"exactly_once"}),
    "torch: its own last rank of 1F1B": ("0F0,0F1,0B0,0B1\n1F1,1B1,1F2,1B2\n", {"exactly_once"}),
    "torch: other microbatches on each stage": (
        "0F0,0F1,0B0,0B1\n1F5,1B5,1F7,1B7\n",
        {"exactly_once"},
    ),
    "torch: a forward twice": ("0F0,0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", {"exactly_once"}),
    "torch: B, I and W of one, none of the other": (
        "0F0,0F1,0B0,0I0,0W0\n",
        {"split_backward", "exactly_once"},
    ),
    "torch: a cycle across ranks": ("0F0,2F0,0B0,2B0\n1F0,3F0,3B0,1B0\n", {"progress"}),
    "torch: a cycle of microbatches": ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", {"progress"}),
    "torch: a stage of nobody": ("0F0,7F0,0B0,7B0\n1F0,1B0\n", {"placement"}),
    "torch: a microbatch with a tail": ("0F0zzz,0B0\n", None),
    "torch: a negative microbatch": ("0F-1,0B-1\n", None),
    "torch: a microbatch with a comma": ("0F1,2,0B1\n", None),
    "torch: no send": ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", {"missing_transfer"}),
    "torch: no receive": ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", {"missing_transfer"}),
    "torch: sends swapped": (
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
        {"channel_pairing"},
    ),
    "torch: sent twice": (
        "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1RECV_F0,1F0,1B0,1SEND_B0\n",
        {"exactly_once"},
    ),
    "an unknown kind": ("0Q1,0B0\n", None),
    "a backward missing": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", {"exactly_once"}),
    "a backward before its forward": ("0F0,0B0\n1B0,1F0\n", {"data_flow"}),
    "W before I": ("0F0,0W0,0I0\n", {"data_flow"}),
    "received too late": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n",
        {"data_flow"},
    ),
    "sent before it is made": (
        "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        {"data_flow", "progress"},
    ),
    "sent to itself": ("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n", {"unneeded_transfer"}),
    "all receive first": ("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1SEND_B0,1F0,1B0\n", {"data_flow"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_orders_are_refused_in_csv(name, refused):
    text, rules = WRONG[name]
    refused(pl.CheckError if rules else pl.ParseError, lambda: pl.Plan.from_csv(text))
    if rules:
        with pytest.raises(pl.CheckError) as caught:
            pl.Plan.from_csv(text)
        assert {v.rule for v in caught.value.violations} == rules
        assert all(v.op and v.hint for v in caught.value.violations)


def test_the_deferred_receives_of_torch_are_seen_to_deadlock():
    # What defer_pp_recv=True makes of 1F1B at its smallest: it runs where sends are buffered.
    plan = pl.Plan.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    assert plan.check("all").progress == {
        "buffered": True,
        "streams": True,
        "single_stream": False,
        "batched": False,
        "rendezvous": False,
    }
    with pytest.raises(pl.CheckError, match="0SEND_F1 waits for 1RECV_F1") as caught:
        plan.check("single_stream")
    assert {v.rule for v in caught.value.violations} == {"progress"}


def test_sound_neighbours_of_wrong_orders_are_read():
    for text in (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "0F0,0F1,0B0,0I1,0W1\n",
        "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "0F0,1F0,1B0,0B0\n",
    ):
        assert pl.Plan.from_csv(text).check().ok


def test_a_deadlock_of_a_thousand_ranks_is_told_in_a_few_lines():
    # Rank 0 starts with its second chunk, which waits for all others, which wait for its first.
    rows = [f"{r}F0,{r + 1000}F0,{r + 1000}B0,{r}B0" for r in range(1000)]
    rows[0] = "1000F0,0F0,1000B0,0B0"
    text = "\n".join(rows) + "\n"
    with pytest.raises(pl.CheckError) as caught:
        pl.Plan.from_csv(text)
    (told,) = (v for v in caught.value.violations if v.rule == "progress")
    lines = told.message.splitlines()
    assert lines[0] == "deadlock under buffered: 1000 ranks wait for each other"
    assert "rank 0, position 0: 1000F0 waits for 1999F0" not in lines[0]
    assert 3 < len(lines) < 10
    assert all(len(line) < 100 for line in lines)
    assert any("more" in line for line in lines)


@pytest.mark.parametrize("semantics", [None, "all", "streams", ["buffered", "streams"]])
@pytest.mark.parametrize("style", [None, "streams", "even_odd"])
def test_reports_pickle(semantics, style):
    plan = pl.plan("interleaved_1f1b", pp=3, vp=2, num_microbatches=6)
    if style is not None:
        plan = plan.lower(style)
    elif semantics not in (None, "all"):
        return  # about transfers
    report = plan.check(semantics)
    again = pickle.loads(pickle.dumps(report))
    assert again.plan == plan
    assert (again.ok, again.progress) == (report.ok, report.progress)
    assert (again.violations, again.unpromised) == (report.violations, report.unpromised)
    assert str(again) == str(report)


def test_a_text_without_a_shape_lists_all_that_leaves_it_without():
    """Every CheckError says what is broken, one that is raised before the rules are checked too."""
    with pytest.raises(pl.CheckError, match=r"row 0: rank 0, position 2, `1F0`") as caught:
        pl.Plan.from_csv("0F0,0B0\n\n3F0,3B0\n")
    rules = [(told.rule, told.rank, told.op) for told in caught.value.violations]
    assert rules == [
        ("exactly_once", 0, "1F0"),
        ("exactly_once", 0, "2F0"),
        ("placement", 1, ""),
    ]
    with pytest.raises(pl.CheckError) as caught:
        pl.Plan.from_csv("0F0,1F0,0B0,0F1,0B1\n1B0,1F1,1B1\n")
    first = caught.value.violations[0]
    assert (first.rule, first.rank, first.position, first.op) == ("placement", 0, 1, "1F0")


def test_a_deadlock_shows_the_ranks_of_its_cycle_side_by_side():
    text = (
        "0F0,0F1,3F0,3F1,3B0,0B0,3B1,0B1\n"
        "1F0,1F1,4F0,4B0,1B0,4F1,4B1,1B1\n"
        "2F0,5F0,5B0,2B0,2F1,5F1,5B1,2B1\n"
    )
    with pytest.raises(pl.CheckError, match="2 ranks wait for each other") as caught:
        pl.Plan.from_csv(text)
    assert "  rank 0     rank 2\n" in str(caught.value)
    assert "  3 3F1 <--  3 2B0 <--\n" in str(caught.value)
