"""Times, memory, bounds and costs."""

import pickle
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
    for (_, end, rank), (start, _, other) in zip(times, times[1:], strict=False):
        assert start == end + (costs.latency if rank != other else 0)


def test_bounds_name_what_binds():
    timeline = pl.plan("1f1b", pp=4, num_microbatches=8).simulate(pl.Costs())
    assert timeline.bounds["work"] == 24 + 3
    assert timeline.bounds["drain"] == 3 + 24 + 6
    assert timeline.binding_bound == "drain"
    assert timeline.gap == 0
    split = pl.plan("zb_h1", pp=4, num_microbatches=8).simulate(pl.Costs())
    assert split.lower_bound == split.bounds["memory"] == split.makespan


def test_link_contention_only_adds_time():
    plan = pl.plan("zb_v", pp=4, num_microbatches=8)
    costs = pl.Costs(latency=2)
    free, shared = plan.simulate(costs), plan.simulate(costs, link_contention=True)
    assert shared.makespan > free.makespan
    assert shared.critical_path


def test_semantics_of_transfers_need_transfers(refused):
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    refused(pl.ConfigError, lambda: plan.simulate(pl.Costs(), "rendezvous"), "rendezvous", "lower")
    refused(pl.ConfigError, lambda: plan.simulate(pl.Costs(), "telepathy"), "telepathy")


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
    with pytest.raises(AttributeError):
        costs.forward = 1
    with pytest.raises(AttributeError):
        _ = costs.speed


def test_recorded_schedules_are_in_the_golden_file():
    lines = (Path(__file__).parent / "golden" / "zero_bubble.tsv").read_text().splitlines()
    algorithms = {line.split("\t")[0] for line in lines if not line.startswith("#")}
    assert {"cpsat_v1", "ref2_dualpipe_FBsum", "ref2_seq1f1b_k2", "sail_zbv"} <= algorithms
