"""Checking plans: rules, promises, deadlocks."""

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
