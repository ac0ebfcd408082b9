"""Times, memory, bounds and costs."""

import copy
import doctest
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import pipeloom as pl


@pytest.mark.parametrize("m", [1, 3, 8, 16])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_1f1b_has_its_closed_form_bubble(pp, m):
    timeline = pl.plan("1f1b", pp=pp, num_microbatches=m).simulate(pl.Costs())
    assert timeline.makespan == 3 * (m + pp - 1)
    assert timeline.bubble_ratio == pytest.approx((pp - 1) / (m + pp - 1))
    assert [timeline.peak_memory(r) for r in range(pp)] == [min(m, pp - r) for r in range(pp)]


def test_zero_bubble_has_none_in_span():
    timeline = pl.plan("zb_h2", pp=4, num_microbatches=8).simulate(pl.Costs())
    assert timeline.bubble_span == 0
    assert timeline.makespan == 24 + 3


def test_whole_costs_give_ints_and_fractions_floats():
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    whole = plan.simulate(pl.Costs(forward=1, latency=1))
    assert isinstance(whole.makespan, int)
    assert whole.start(0).dtype == np.int64
    fraction = plan.simulate(pl.Costs(forward=1.5, memory_forward=0.25))
    assert isinstance(fraction.makespan, float)
    assert fraction.end(1).dtype == np.float64
    assert fraction.makespan == 3 * 3.5
    assert fraction.peak_memory(0) == 0.5
    assert plan.simulate(pl.Costs(forward=1 / 3)).makespan == pytest.approx(7.0, abs=1e-5)


def test_transfers_take_latency_and_bytes_rounded_up():
    plan = pl.plan("1f1b", pp=2, num_microbatches=1)
    costs = pl.Costs(latency=3, boundary_bytes=7, bandwidth=2)
    assert plan.simulate(costs).makespan == 6 + 2 * (3 + 4)
    halves = pl.Costs(forward=0.5, boundary_bytes=7, bandwidth=2)
    assert plan.simulate(halves).makespan == 5 + 2 * 3.5
    one_way = pl.Costs(latency=[[0, 5], [1, 0]])
    assert plan.simulate(one_way).makespan == 6 + 5 + 1
    wrap = pl.plan("interleaved_1f1b", pp=1, vp=2, num_microbatches=1)
    assert wrap.simulate(pl.Costs(latency=100)).makespan == 6


def test_costs_differ_by_stage():
    plan = pl.plan("gpipe", pp=2, num_microbatches=1)
    timeline = plan.simulate(pl.Costs(forward=[1, 10], backward=np.array([100, 1000])))
    assert timeline.makespan == 1111
    assert timeline.start(1).tolist() == [1, 11]
    assert timeline.end(0).tolist() == [1, 1111]
    assert (timeline.work(0), timeline.bubble(0)) == (101, pytest.approx(1010 / 1111))


def test_recompute_costs_time_and_saves_memory():
    name = "num_microbatches_with_partial_activation_checkpoints"
    plan = pl.plan("1f1b", pp=2, num_microbatches=4, **{name: 0})
    plain = pl.plan("1f1b", pp=2, num_microbatches=4)
    costs = pl.Costs(memory_forward=10, memory_backward_weight=-10, memory_recompute=1)
    again, kept = plan.simulate(costs), plain.simulate(costs)
    assert again.work(0) == kept.work(0) + 4
    assert (again.peak_memory(0), kept.peak_memory(0)) == (11, 20)
    assert again.memory(0).tolist() == [1, 2, 1, 2, 1, 2, 1, 0]


def test_an_overlapped_pair_starts_and_ends_together():
    plan = pl.plan("dualpipe_v", pp=2, num_microbatches=4)
    timeline = plan.simulate(pl.Costs(overlapped=2))
    pair = plan.columns(0)["pair"]
    numbers = {number for number in pair.tolist() if (pair == number).sum() == 2}
    assert numbers
    for number in numbers:
        starts, ends = timeline.start(0)[pair == number], timeline.end(0)[pair == number]
        assert starts[0] == starts[1]
        assert (ends - starts).tolist() == [2, 2]
    assert timeline.makespan < plan.simulate(pl.Costs()).makespan


@pytest.mark.parametrize("costs", [pl.Costs(), pl.Costs(forward=2, latency=3)])
@pytest.mark.parametrize(
    ("schedule", "vp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", None), ("gpipe", 1)]
)
def test_the_critical_path_has_no_gap(schedule, vp, costs):
    plan = pl.plan(schedule, pp=4, vp=vp, num_microbatches=8)
    timeline = plan.simulate(costs)
    path = timeline.critical_path
    times = [(timeline.start(r)[at], timeline.end(r)[at], r) for r, at in path]
    assert times[0][0] == 0
    assert times[-1][1] == timeline.makespan
    for (_, end, rank), (start, _, other) in pairwise(times):
        assert start == end + (costs.latency if rank != other else 0)


def test_bounds_name_what_binds():
    timeline = pl.plan("1f1b", pp=4, num_microbatches=8).simulate(pl.Costs())
    assert timeline.bounds["work"] == 24 + 3
    assert timeline.bounds["drain"] == 3 + 24 + 6
    assert timeline.binding_bound == "drain"
    assert timeline.gap == 0
    split = pl.plan("zb_h1", pp=4, num_microbatches=8).simulate(pl.Costs())
    assert split.lower_bound == split.bounds["memory"] == split.makespan


def test_little_memory_binds_by_what_it_holds_for_how_long():
    costs = pl.Costs(forward=10, backward_input=10, backward_weight=2, latency=1)
    timeline = pl.plan("v_min", pp=8, num_microbatches=64).simulate(costs)
    assert timeline.binding_bound == "occupancy"
    others = {name: time for name, time in timeline.bounds.items() if name != "occupancy"}
    assert max(others.values()) < timeline.lower_bound <= timeline.makespan
    assert timeline.span_bound == 64 * 2 * (10 + 10 + 2) <= timeline.span


def test_link_contention_only_adds_time():
    # The turn of a V makes forwards and gradients go the same way.
    plan = pl.plan("zb_v", pp=2, num_microbatches=8)
    costs = pl.Costs(latency=3)
    free, shared = plan.simulate(costs), plan.simulate(costs, link_contention=True)
    assert shared.makespan > free.makespan
    assert shared.critical_path


def test_semantics_of_transfers_need_transfers(refused):
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    refused(pl.ConfigError, lambda: plan.simulate(pl.Costs(), "rendezvous"), "rendezvous", "lower")
    refused(pl.ConfigError, lambda: plan.simulate(pl.Costs(), "telepathy"), "telepathy")


def test_a_plan_that_gets_stuck_says_where_and_what_would_not(refused):
    plan = pl.plan("1f1b", pp=4, num_microbatches=8).lower("streams")
    message = refused(
        pl.CheckError,
        lambda: plan.simulate(pl.Costs(), "rendezvous"),
        "gets stuck under rendezvous",
        "2 ranks wait for each other",
        "waits for",
    )
    assert message.splitlines()[-1].startswith(
        "hint: this plan promises to progress under buffered"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("latency", [0, 2])
def test_the_critical_path_of_early_receives_and_free_forwards(schedule, latency):
    # Receives are posted two ops ahead, and forwards take no time: many ops start at once.
    vp = 2 if schedule == "interleaved_1f1b" else None
    plan = pl.plan(schedule, pp=4, vp=vp, num_microbatches=8).lower("streams", prefetch=2)
    for semantics in plan.semantics:
        timeline = plan.simulate(pl.Costs(forward=0, latency=latency), semantics)
        path = [(timeline.start(r)[at], timeline.end(r)[at], r) for r, at in timeline.critical_path]
        assert (path[0][0], path[-1][1]) == (0, timeline.makespan)
        assert len(set(timeline.critical_path)) == len(path), "no op twice"
        for (_, end, rank), (start, _, other) in pairwise(path):
            wait = latency if semantics == "buffered" and rank != other else 0
            assert start == end + wait


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"forward": -1}, ("forward=-1", "negative")),
        ({"latency": float("nan")}, ("latency=NaN",)),
        ({"forward": [1, float("inf")]}, ("forward=inf",)),
        ({"bandwidth": 0}, ("bandwidth=0",)),
        ({"forward": 2**80}, ("forward=", "too large")),
        ({"forward": []}, ("forward",)),
    ],
)
def test_bad_costs_are_refused(arguments, words, refused):
    refused(pl.ConfigError, lambda: pl.Costs(**arguments), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"forward": [1, 2, 3]}, ("forward", "3", "2 stages")),
        ({"static_memory": [1]}, ("static_memory", "1", "pp=2")),
        ({"latency": [[0, 1]]}, ("latency", "1 rows", "pp=2")),
        ({"latency": [[0, 1], [1]]}, ("latency[1]", "1 numbers")),
        ({"forward": 2**61}, ("time", "62 bits")),
        ({"memory_forward": -(2**61)}, ("memory", "62 bits")),
    ],
)
def test_costs_that_do_not_fit_a_plan_are_refused(arguments, words, refused):
    plan = pl.plan("1f1b", pp=2, num_microbatches=4)
    refused(pl.ConfigError, lambda: plan.simulate(pl.Costs(**arguments)), *words)


@pytest.mark.parametrize("value", ["1", True, {1: 2}, None.__class__, [[1]]])
def test_what_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"forward.*\nhint: "):
        pl.Costs(forward=value)


def test_costs_are_values():
    costs = pl.Costs(forward=[1, 2.5], latency=[[0, 1], [1, 0]], bandwidth=4)
    assert pickle.loads(pickle.dumps(costs)) == costs
    assert repr(costs) == "Costs(forward=(1, 2.5), latency=((0, 1), (1, 0)), bandwidth=4)"
    assert costs.forward == (1, 2.5)
    assert costs != pl.Costs()
    same = pl.Costs(forward=[1.0, 2.5], latency=[[0, 1.0], [1, 0]], bandwidth=4.0)
    assert (same == costs, len({same, costs, pl.Costs()})) == (True, 2)
    assert pl.Costs(forward=-0.0) == pl.Costs(forward=0) != pl.Costs(forward=2.0**-30)
    assert pl.Costs(forward=2.0**62) == pl.Costs(forward=2**62)
    assert pl.Costs(forward=2.0**63) != pl.Costs(forward=2**63 - 1)
    with pytest.raises(AttributeError):
        costs.forward = 1
    with pytest.raises(AttributeError):
        _ = costs.speed


def test_recorded_schedules_are_in_the_golden_file():
    lines = (Path(__file__).parent / "golden" / "zero_bubble.tsv").read_text().splitlines()
    algorithms = {line.split("\t")[0] for line in lines if not line.startswith("#")}
    assert {"cpsat_v1", "ref2_dualpipe_FBsum", "ref2_seq1f1b_k2", "sail_zbv"} <= algorithms


FORMULAS = {
    # name, vp: bubble in chunk-steps and most chunks of activations on a rank, for m = pp
    ("no_pipelining", 1, 1): (0, 1),
    ("hanayo", 2, 4): (4 * 3, 2 * 4),
    ("hanayo", 2, 8): (4 * 7, 2 * 8),
    ("hanayo", 4, 4): (13, 4 * 4),
    ("hanayo", 4, 8): (30, 4 * 8),
    ("chimera", 1, 4): (2 * 2, 4),
    ("chimera", 1, 8): (6 * 2, 8),
}


@pytest.mark.parametrize(("name", "vp", "pp"), FORMULAS)
def test_documented_formulas_are_simulated(name, vp, pp):
    bubble, peak = FORMULAS[name, vp, pp]
    timeline = pl.plan(name, pp=pp, vp=vp, num_microbatches=pp).simulate(pl.Costs())
    assert timeline.makespan - 3 * vp * pp == bubble
    peaks = [timeline.peak_memory(rank) for rank in range(pp)]
    assert max(peaks) <= peak
    if name == "chimera":
        assert (peaks[0], peaks[-1], max(peaks)) == (pp // 2 + 1, pp // 2 + 1, peak)


def test_parts_of_the_bubble_add_up_under_every_semantics():
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8).lower("fifo")
    costs = pl.Costs(forward=0.5, backward=1, latency=0.25)
    for semantics in plan.semantics:
        timeline = plan.simulate(costs, semantics)
        for rank in range(4):
            parts = timeline.bubble_parts(rank)
            assert list(parts) == ["warmup", "steady", "cooldown", "transfer"]
            assert sum(parts.values()) == timeline.makespan - timeline.work(rank)
            assert min(parts.values()) >= 0
            assert parts["transfer"] > 0
    free = plan.simulate(pl.Costs())
    assert all(free.bubble_parts(rank)["transfer"] == 0 for rank in range(4))
    # The slow link is what costs: with it the steady phase is no longer idle-free.
    with pytest.raises(pl.ConfigError):
        free.bubble_parts(4)


def test_the_path_through_a_busy_link_accounts_for_all_time():
    plan = pl.plan("gpipe", pp=2, num_microbatches=4)
    timeline = plan.simulate(pl.Costs(latency=5), link_contention=True)
    path = [(timeline.start(r)[at], timeline.end(r)[at], r) for r, at in timeline.critical_path]
    work = sum(end - start for start, end, _ in path)
    waits = [later[0] - earlier[1] for earlier, later in pairwise(path)]
    assert work + sum(waits) == timeline.makespan
    assert all(wait % 5 == 0 for wait in waits)
    assert max(waits) > 5  # a queue of messages, in one piece


def test_the_slowest_stage_bounds_the_step():
    """ai-dynamo/aiconfigurator PR#1459: an ideal speed-up of 8 was claimed."""
    times = [3.153, *[3.150] * 6, 3.901]
    plan = pl.plan("forward_only", pp=8, num_microbatches=1000)
    timeline = plan.simulate(pl.Costs(forward=times))
    assert sum(times) / len(times) / max(times) == pytest.approx(0.832, abs=1e-3)
    assert timeline.makespan / 1000 == pytest.approx(3.901, rel=0.01)
    assert 1000 * sum(times) / timeline.makespan == pytest.approx(6.65, rel=0.01)
    assert timeline.lower_bound >= 1000 * 3.901
    layout = pl.Layout.even(64, pp=6)
    assert layout.load([1] * 64).bottleneck / (64 / 6) == pytest.approx(1.031, abs=1e-3)


def test_the_documentation_runs():
    page = Path(__file__).parent.parent / "docs" / "checking.md"
    result = doctest.testfile(
        str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.attempted > 8
    assert result.failed == 0


@pytest.mark.parametrize("link_contention", [False, True])
def test_timelines_pickle(link_contention):
    """Pools of processes return what they simulated."""
    plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=4).lower("streams")
    costs = pl.Costs(forward=[1, 2, 3, 4], latency=0.5, boundary_bytes=7, bandwidth=2)
    timeline = plan.simulate(costs, semantics="streams", link_contention=link_contention)
    again = pickle.loads(pickle.dumps(timeline))
    for one in (timeline, again):
        assert (one.plan, one.costs, one.semantics) == (plan, costs, "streams")
        assert one.link_contention is link_contention
        assert one.makespan == timeline.makespan
        assert one.start(1).tolist() == timeline.start(1).tolist()
    assert repr(copy.copy(timeline)) == repr(timeline)
