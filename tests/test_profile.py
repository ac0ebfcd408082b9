"""Profiles: what was recorded comes back, as times, costs and differences."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.profile import Profile, Step
from pipeloom.testing import costs, plans
from pipeloom.training.measure import Timed


def as_if_run(plan, timeline, *, at=0.0):
    """Events of a run that went as simulated, in seconds."""
    events = []
    for rank in range(plan.pp):
        columns = plan.columns(rank)
        units = columns["microbatch"] * plan.num_seq_pieces + columns["piece"]
        rows = zip(columns["stage"], columns["kind"], units, strict=True)
        texts = [f"{stage}{pl.OpKind(kind).name}{unit}" for stage, kind, unit in rows]
        times = zip(texts, timeline.start(rank), timeline.end(rank), strict=True)
        events += [Timed(rank, op, at + a / 1000, at + b / 1000) for op, a, b in times]
    return events


def profiled(plan, timeline):
    profile = Profile(plan)
    profile.add(1, as_if_run(plan, timeline, at=100.0))
    return profile


NAMES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "gpipe", "looped_bfs")


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=15)
def test_costs_of_a_run_without_waiting_costs_predict_it(name, data):
    vp = 2 if name in ("interleaved_1f1b", "looped_bfs", "zb_v") else None
    plan = pl.plan(name, pp=data.draw(st.integers(1, 4)), vp=vp, num_microbatches=6)
    numbers = st.lists(st.integers(1, 9), min_size=plan.num_stages, max_size=plan.num_stages)
    given_costs = pl.Costs(
        forward=data.draw(numbers),
        backward_input=data.draw(numbers),
        backward_weight=data.draw(numbers),
        latency=data.draw(st.integers(0, 3)) if plan.pp > 1 else 0,
    )
    timeline = plan.simulate(given_costs)
    found = pl.Costs.from_profile(profiled(plan, timeline))
    assert found.forward == pytest.approx(given_costs.forward)
    assert plan.simulate(found).makespan == pytest.approx(timeline.makespan, rel=1e-4)


def test_recomputation_is_measured_where_both_kinds_ran():
    plan = pl.plan(
        "1f1b", pp=2, num_microbatches=8, num_microbatches_with_partial_activation_checkpoints=1
    )
    timeline = plan.simulate(pl.Costs(forward=2, backward=4, recompute=3))
    found = pl.Costs.from_profile(profiled(plan, timeline))
    assert found.backward[0] == pytest.approx(4)
    assert found.recompute[0] == pytest.approx(3)
    assert plan.simulate(found).makespan == pytest.approx(timeline.makespan)


@given(plan=plans(), data=st.data())
@settings(max_examples=30)
def test_saved_profiles_come_back(plan, data, tmp_path_factory):
    profile = profiled(plan, plan.simulate(data.draw(costs(plan))))
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_ranks_that_took_turns_are_shown_side_by_side():
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    timeline = plan.simulate(pl.Costs())
    turns, now = [], 0.0
    for event in sorted(as_if_run(plan, timeline), key=lambda event: event.start):
        took = event.end - event.start
        turns.append(event._replace(start=now, end=now + took))
        now += took
    profile = Profile(plan, side_by_side=False)
    profile.add(1, turns)
    assert profile.drawing().extent == pytest.approx((0, timeline.makespan))
    # The picture itself says that its times are no clock's.
    assert "replayed: ranks of one process took turns" in profile.drawing().headline
    assert all(abs(op.late) < 1e-6 for op in profile.compare(timeline))


def test_differences_are_of_each_op():
    plan = pl.plan("1f1b", pp=1, num_microbatches=1)
    profile = Profile(plan, [Step(1, [[0.0, 2.5]], [[2.0, 5.0]])])
    first, second = profile.compare(plan.simulate(pl.Costs(forward=1, backward=3)))
    assert (first.op, first.late, first.longer) == ("0F0", 0, 1)
    assert (second.op, second.late, second.longer) == ("0B0", 1.5, -0.5)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": 2}, "format"),
        ({"plan": "x"}, "no profile"),
        ({"steps": [{"step": 1, "start": [[0.0]], "end": [[1.0]]}]}, "does not cover"),
        ({"steps": 3}, "no profile"),
    ],
)
def test_damaged_profiles_are_refused(change, word, tmp_path, refused):
    plan = pl.plan("1f1b", pp=1, num_microbatches=1)
    path = tmp_path / "profile.json"
    Profile(plan, [Step(1, [[0.0, 2.0]], [[2.0, 5.0]])]).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused(pl.ParseError, lambda: Profile.load(path), word)


def test_profiles_without_steps_and_of_another_plan_are_refused(tmp_path, refused):
    plan = pl.plan("1f1b", pp=1, num_microbatches=1)
    refused(pl.ParseError, lambda: pl.Costs.from_profile(Profile(plan)), "no step")
    refused(pl.ParseError, lambda: Profile.load(tmp_path), "profile.json")
    other = pl.plan("gpipe", pp=1, num_microbatches=2)
    events = as_if_run(other, other.simulate(pl.Costs()))
    refused(pl.ParseError, lambda: Profile(plan).add(1, events), "rank 0", "not the 2")
