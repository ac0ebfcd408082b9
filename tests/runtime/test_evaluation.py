"""Evaluation with its own number of microbatches, on every placement, between processes too."""

import pytest
import torch

import pipeloom as pl
from pipeloom.runtime import Pipeline
from pipeloom.runtime.evaluation import evaluation_plan

PLANS = [
    ("interleaved_1f1b", 2, 2),
    ("zb_v", 2, 2),
    ("zb_v", 4, 2),
    ("dualpipe_v", 2, 2),
    ("dualpipe_v", 3, 2),
    ("hanayo", 2, 4),
    ("dualpipe", 2, 1),
    ("chimera", 4, 1),
]


def odd_v(pp, m):
    """Three stages a rank, zig-zag: a placement that only a CSV can give."""
    rows = []
    for rank in range(pp):
        own = [rank, 2 * pp - 1 - rank, 2 * pp + rank]
        forwards = [f"{stage}F{unit}" for unit in range(m) for stage in own]
        backwards = [f"{stage}B{unit}" for unit in range(m) for stage in reversed(own)]
        rows.append(",".join(forwards + backwards))
    return pl.Plan.from_csv("\n".join(rows))


@pytest.mark.parametrize("m", [1, 2, 3, 7, 16])
@pytest.mark.parametrize(("schedule", "pp", "vp"), PLANS)
def test_its_plan_is_right_under_every_semantics_that_it_promises(schedule, pp, vp, m):
    plan = evaluation_plan(pl.plan(schedule, pp=pp, vp=vp, num_microbatches=12), m)
    assert plan.num_microbatches == m
    assert plan.num_stages == pp * vp
    plan.lower("streams").check()
    plan.lower("fifo").check()


@pytest.mark.parametrize(("schedule", "pp", "vp"), PLANS)
@pytest.mark.parametrize("m", [1, 3, 12, 40])
def test_it_idles_only_while_the_pipeline_fills_and_drains(schedule, pp, vp, m):
    """No rank waits in between: all work, and the way of one microbatch through other ranks."""
    plan = evaluation_plan(pl.plan(schedule, pp=pp, vp=vp, num_microbatches=12), m)
    makespan = plan.simulate(pl.Costs()).makespan
    assert makespan <= m * vp + vp * (pp - 1)


def test_it_is_planned_once():
    plan = pl.plan("zb_v", pp=2, num_microbatches=4)
    assert evaluation_plan(plan, 3) is evaluation_plan(plan, 3)


@pytest.mark.dist
@pytest.mark.parametrize(("schedule", "pp", "vp"), PLANS)
def test_between_processes(tools, launch, schedule, pp, vp):
    """A54: every rank evaluates with 1, 3, and 7 microbatches, trains, and evaluates again."""
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=8)
    per_replica = plan.num_stages // plan.num_replicas
    reference = tools.make_stages(per_replica)
    data = {m: tools.make_data([3, 1, 4, 1, 5, 2, 6][:m], seed=m) for m in (1, 3, 7)}
    inputs, targets = tools.make_data([2] * 8)

    def body(transport):
        stages = tools.make_stages(per_replica) * plan.num_replicas
        pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)

        def evaluate():
            return [pipeline.evaluate(*data[m], num_microbatches=m).loss for m in data]

        first = evaluate()
        untouched = all(p.grad is None for p in pipeline.parameters())
        loss = pipeline.step(inputs, targets).loss
        return first, untouched, loss, evaluate()

    outcomes = launch.values(launch(pp, body))
    assert all(untouched for _, untouched, _, _ in outcomes)
    first, _, loss, again = outcomes[list(plan.stages)[per_replica - 1][0]]
    for n, m in enumerate(data):
        expected = tools.run_reference(reference, *data[m])
        assert torch.equal(first[n], expected)
        assert torch.equal(again[n], expected)
    assert torch.equal(loss, tools.run_reference(reference, inputs, targets))


@pytest.mark.parametrize("m", [1, 3, 7])
def test_a_placement_of_a_csv_evaluates_too(tools, m):
    plan = odd_v(2, 4)
    stages, reference = tools.pair(6)
    pipeline = Pipeline(plan, stages, tools.square_sum)
    data = tools.make_data([2] * m)
    loss = pipeline.evaluate(*data, num_microbatches=m).loss
    assert torch.equal(loss, tools.run_reference(reference, *data))
