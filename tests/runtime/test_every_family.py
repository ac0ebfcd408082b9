"""Every family that the planner names, run: equal to one process, whatever the transport."""

import pytest
import torch

import pipeloom as pl
from pipeloom.runtime import LocalTransport, Pipeline, PipelineError

NAMES = [schedule.name for schedule in pl.schedules()]
TRAINED = [name for name in NAMES if name not in ("seq1f1b", "forward_only")]
MASK = "num_microbatches_with_partial_activation_checkpoints"


def plans_of(name):
    """Small plans of a family: one for every (pp, vp, m) of a grid that it accepts."""
    found = []
    for pp in (1, 2, 3, 4):
        for vp in (1, 2, 3, 4) if pp == 2 else (1, 2):
            for m in (1, 4, 7, 8):
                try:
                    found.append(pl.plan(name, pp=pp, vp=vp, num_microbatches=m))
                except pl.PlanError:
                    continue
    return found


def run(tools, plan, *, transport=None, shared):
    """One step and one evaluation, compared with one process."""
    per_replica = plan.num_stages // plan.num_replicas
    stages, reference = tools.pair(per_replica)
    own = stages * plan.num_replicas if shared else [*stages, *tools.make_stages(per_replica)]
    own = own[: plan.num_stages]
    inputs, targets = tools.make_data([2] * plan.num_microbatches)
    expected = tools.run_reference(reference, inputs, targets)
    pipeline = Pipeline(plan, own, tools.square_sum, transport=transport)
    assert torch.equal(pipeline.evaluate(inputs, targets).loss, expected)
    assert torch.equal(pipeline.step(inputs, targets).loss, expected)
    for replica in range(plan.num_replicas):
        mine = own[replica * per_replica :][:per_replica]
        tools.assert_same_gradients(mine, reference)


@pytest.mark.parametrize("name", TRAINED)
def test_equal_to_one_process(tools, name):
    plans = plans_of(name)
    assert plans
    for plan in plans:
        run(tools, plan, shared=False)
    largest = plans[-1]
    run(tools, largest, shared=True)
    run(tools, largest, transport=LocalTransport(largest.pp, seed=3), shared=False)


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "no_pipelining"])
def test_recomputed(tools, name):
    """With every forward recomputed, each runs twice and no more."""
    plan = next(plan for plan in plans_of(name) if plan.pp > 1 and plan.num_microbatches > 1)
    plan = pl.plan(
        name, pp=plan.pp, vp=plan.vp, num_microbatches=plan.num_microbatches, **{MASK: 0}
    )
    run(tools, plan, shared=False)
    stages = tools.make_stages(plan.num_stages)
    inputs, targets = tools.make_data([2] * plan.num_microbatches)
    Pipeline(plan, stages, tools.square_sum).step(inputs, targets)
    forwards = plan.num_microbatches * plan.num_stages // plan.num_replicas
    assert sum(stage.calls for stage in stages) == 2 * forwards


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "no_pipelining"])
def test_a_plan_read_from_csv_runs_as_its_family_does(tools, name):
    plan = next(plan for plan in plans_of(name) if plan.pp > 1)
    read = pl.Plan.from_csv(plan.to_csv(None))
    run(tools, read, shared=False)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("m", [1, 3, 6])
def test_a54_evaluation_with_its_own_number_of_microbatches(tools, name, m):
    """A54, and torch fails here on V placements: evaluate, train, evaluate."""
    plan = plans_of(name)[-1]
    per_replica = plan.num_stages // plan.num_replicas
    stages, reference = tools.pair(per_replica)
    own = stages * plan.num_replicas
    more = tools.make_data([2] * m, seed=7)
    pipeline = Pipeline(plan, own, tools.square_sum)
    evaluated = pipeline.evaluate(*more, num_microbatches=m).loss
    assert all(p.grad is None for stage in stages for p in stage.parameters())
    inputs, targets = tools.make_data([2] * plan.num_microbatches)
    loss = pipeline.step(inputs, targets).loss
    again = pipeline.evaluate(*more, num_microbatches=m).loss
    assert torch.equal(loss, tools.run_reference(reference, inputs, targets))
    tools.assert_same_gradients(stages, reference)
    for stage in reference:
        stage.zero_grad()
    expected = tools.run_reference(reference, *more)
    assert torch.equal(evaluated, expected)
    assert torch.equal(again, expected)


@pytest.mark.parametrize(("pp", "vp"), [(1, 1), (2, 1), (2, 3), (4, 2)])
def test_forward_only(tools, pp, vp):
    plan = pl.plan("forward_only", pp=pp, vp=vp, num_microbatches=5)
    stages, reference = tools.pair(pp * vp)
    inputs, targets = tools.make_data([2] * 5)
    result = Pipeline(plan, stages, tools.square_sum).evaluate(inputs, targets)
    assert torch.equal(result.loss, tools.run_reference(reference, inputs, targets))


def test_number_of_microbatches_may_change_from_step_to_step(tools):
    plans = [pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=m) for m in (4, 2, 6)]
    stages, reference = tools.pair(4)
    pipeline = Pipeline(plans[0], stages, tools.square_sum)
    for plan in [*plans, pl.plan("interleaved_zb", pp=2, vp=2, num_microbatches=3)]:
        inputs, targets = tools.make_data([2] * plan.num_microbatches)
        loss = pipeline.step(inputs, targets, plan=plan).loss
        assert torch.equal(loss, tools.run_reference(reference, inputs, targets))
    tools.assert_same_gradients(stages, reference)
    with pytest.raises(PipelineError, match=r"zb_v places stages at .*\n*hint:"):
        pipeline.step(plan=pl.plan("zb_v", pp=2, num_microbatches=4))


def gradients_by_chunk(pipeline):
    return {
        rank: [[p.grad for p in chunk.parameters()] for chunk in chunks]
        for rank, chunks in pipeline.chunks.items()
    }


SAMPLE = [
    (2, "1f1b", 1, 5),
    (2, "looped_bfs", 2, 3),
    (2, "dualpipe", 1, 4),
    (2, "chimera", 1, 6),
    (2, "hanayo", 4, 4),
    (3, "zb_h1", 1, 5),
    (3, "interleaved_1f1b", 2, 7),
    (3, "dualpipe_v", 2, 6),
    (3, "v_min", 2, 4),
    (4, "dualpipe", 1, 8),
    (4, "chimera", 1, 4),
    (4, "zb_v", 2, 7),
    (4, "group_interleaved", 2, 4),
]


@pytest.mark.dist
@pytest.mark.parametrize(("pp", "name", "vp", "m"), SAMPLE)
def test_one_process_a_rank(tools, launch, pp, name, vp, m):
    """Twice, without zeroing: replicas are summed in each step, and steps add up (A59)."""
    plan = pl.plan(name, pp=pp, vp=vp, num_microbatches=m)
    per_replica = plan.num_stages // plan.num_replicas
    reference = tools.make_stages(per_replica)
    inputs, targets = tools.make_data([3] * m)
    expected = tools.run_reference(reference, inputs, targets)
    tools.run_reference(reference, inputs, targets)
    norm = torch.stack([p.grad.norm() for stage in reference for p in stage.parameters()]).norm()

    def body(transport):
        stages = tools.make_stages(per_replica) * plan.num_replicas
        pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport)
        losses = [pipeline.step(inputs, targets).loss for _ in range(2)]
        gradients = gradients_by_chunk(pipeline)[transport.rank]
        return losses, gradients, float(pipeline.clip_grad_norm(1e9))

    outcomes = launch.values(launch(pp, body, sockets=pp != 2))
    places = list(plan.stages)
    by_rank = {rank: losses for rank, (losses, _, _) in enumerate(outcomes)}
    holders = {places[last][0] for last in range(per_replica - 1, plan.num_stages, per_replica)}
    assert {rank for rank, losses in by_rank.items() if losses[0] is not None} == holders
    for holder in holders:
        assert torch.equal(by_rank[holder][0], expected)
    for rank, (_, gradients, mine) in enumerate(outcomes):
        assert mine == pytest.approx(float(norm), rel=1e-5)
        for chunk, values in enumerate(gradients):
            stage = reference[places.index((rank, chunk)) % per_replica]
            for value, p in zip(values, stage.parameters(), strict=True):
                bound = 1e-6 * float(p.grad.abs().max())
                torch.testing.assert_close(value, p.grad, rtol=0, atol=bound)
