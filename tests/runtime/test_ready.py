"""Ready-first execution: any order of arrival, the same numbers, within the plan's memory."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.runtime import DelayedTransport, LocalTransport, Pipeline, PipelineError
from pipeloom.runtime.delay import jitter
from pipeloom.runtime.program import compile_plan
from pipeloom.runtime.ready import _hint
from pipeloom.runtime.threads import ThreadedTransport
from pipeloom.testing.strategies import plans

MASK = "num_microbatches_with_partial_activation_checkpoints"
SHAPES = [
    ("1f1b", 3, 1, 6, {}),
    ("gpipe", 3, 1, 5, {}),
    ("eager_1f1b", 3, 1, 6, {}),
    ("interleaved_1f1b", 2, 2, 6, {}),
    ("interleaved_1f1b", 3, 2, 7, {MASK: 1}),
    ("looped_bfs", 2, 3, 4, {}),
    ("zb_h1", 3, 1, 6, {}),
    ("zb_h2", 4, 1, 9, {}),
    ("interleaved_zb", 2, 2, 6, {}),
    ("zb_v", 3, 2, 7, {}),
    ("v_min", 3, 2, 6, {}),
    ("dualpipe_v", 2, 2, 7, {}),
    ("no_pipelining", 1, 1, 3, {}),
]
by_shape = pytest.mark.parametrize(("schedule", "pp", "vp", "m", "optional"), SHAPES)


def run(tools, plan, transport, order):
    stages = tools.make_stages(plan.num_stages)
    inputs, targets = tools.make_data([2] * plan.num_microbatches)
    pipeline = Pipeline(plan, stages, tools.square_sum, transport=transport, order=order)
    return pipeline.step(inputs, targets, record=True), stages


def assert_bitwise_equal(one, other):
    for mine, theirs in zip(one[1], other[1], strict=True):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    assert [float(x) for x in one[0].losses] == [float(x) for x in other[0].losses]
    assert torch.equal(one[0].loss, other[0].loss)


def live_forwards(rank, events):
    """Peak number of forwards whose backward (or weight half) has not run."""
    live = peak = 0
    for event in events:
        if event.rank == rank:
            kind = event.op.lstrip("0123456789")[0]
            live += (kind == "F") - (kind in "BW")
            peak = max(peak, live)
    return peak


@by_shape
@pytest.mark.parametrize("seed", range(4))
def test_any_delivery_gives_the_same_numbers_within_the_plans_memory(
    tools, schedule, pp, vp, m, optional, seed
):
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=m, **optional)
    assert_ready_keeps_the_plan(tools, plan, seed)


@given(
    plan=plans(max_pp=3, max_vp=2, max_microbatches=6).filter(
        lambda plan: plan.num_seq_pieces == 1 and not plan.forward_only
    ),
    seed=st.integers(0, 2**32 - 1),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_plan_keeps_its_numbers_and_memory(tools, plan, seed):
    assert_ready_keeps_the_plan(tools, plan, seed)


def assert_ready_keeps_the_plan(tools, plan, seed):
    fixed = run(tools, plan, LocalTransport(plan.pp), "plan")
    ready = run(tools, plan, LocalTransport(plan.pp, seed=seed), "ready")
    assert_bitwise_equal(fixed, ready)
    assert sorted(e.op for e in fixed[0].events) == sorted(e.op for e in ready[0].events)
    for rank in range(plan.pp):
        planned = live_forwards(rank, fixed[0].events)
        assert live_forwards(rank, ready[0].events) <= planned


@by_shape
def test_jitter_on_threads_gives_the_same_numbers(tools, schedule, pp, vp, m, optional):
    plan = pl.plan(schedule, pp=pp, vp=vp, num_microbatches=m, **optional)
    fixed = run(tools, plan, LocalTransport(pp), "plan")
    late = DelayedTransport(ThreadedTransport(pp, timeout_s=20), delay_s=jitter(0.0005, seed=m))
    assert_bitwise_equal(fixed, run(tools, plan, late, "ready"))


def test_late_messages_move_ops_ahead(tools):
    """Else the tests above would compare the fixed order with itself."""
    plan = pl.plan("interleaved_1f1b", pp=3, vp=2, num_microbatches=7)
    for seed in range(4):
        result, _ = run(tools, plan, LocalTransport(3, seed=seed), "ready")
        orders = [[e.op for e in result.events if e.rank == rank] for rank in range(3)]
        assert orders != [plan.ops(rank) for rank in range(3)], f"seed {seed} moved nothing"


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "eager_1f1b"])
def test_without_jitter_a_plan_runs_as_planned(tools, schedule):
    """In one thread with one rank nothing is ever late, so nothing is moved."""
    plan = pl.plan(schedule, pp=1, num_microbatches=4)
    result, _ = run(tools, plan, LocalTransport(1), "ready")
    assert [e.op for e in result.events] == plan.ops(0)


def test_live_forwards_of_the_hint_are_those_of_the_order():
    plan = pl.plan("1f1b", pp=4, num_microbatches=8)
    programs = compile_plan(plan, (0, 3)).programs
    assert max(_hint(programs[0]).live) == 4
    assert max(_hint(programs[3]).live) == 1


def test_evaluation_runs_ready_first_too(tools):
    plan = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=6)
    inputs, targets = tools.make_data([2] * 6)
    stages = tools.make_stages(4)
    losses = [
        Pipeline(
            plan, stages, tools.square_sum, transport=LocalTransport(2, seed=seed), order=order
        )
        .evaluate(inputs, targets)
        .loss
        for seed, order in ((None, "plan"), (1, "ready"), (2, "ready"))
    ]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def test_an_unknown_order_is_refused(tools):
    plan = pl.plan("1f1b", pp=1, num_microbatches=1)
    with pytest.raises(PipelineError, match=r"order='fast'(.|\n)*hint:"):
        Pipeline(plan, tools.make_stages(1), tools.square_sum, order="fast")


@pytest.mark.dist
@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_ready_first_between_processes(tools, launch, schedule, sockets):
    plan = pl.plan(schedule, pp=2, num_microbatches=6)
    inputs, targets = tools.make_data([2] * 6)
    reference = tools.make_stages(plan.num_stages)
    expected = tools.run_reference(reference, inputs, targets)
    owner = [rank for rank, _ in plan.stages]

    def body(transport):
        stages = tools.make_stages(plan.num_stages)
        late = DelayedTransport(transport, delay_s=jitter(0.001))
        pipeline = Pipeline(plan, stages, tools.square_sum, transport=late, order="ready")
        loss, _ = [pipeline.step(inputs, targets).loss for _ in range(2)]
        mine = [stage for stage, rank in zip(stages, owner, strict=True) if rank == transport.rank]
        return loss, [[p.grad / 2 for p in stage.parameters()] for stage in mine]

    values = launch.values(launch(2, body, sockets=sockets))
    assert torch.equal(values[owner[-1]][0], expected)
    for rank, (_, gradients) in enumerate(values):
        true = [stage for stage, other in zip(reference, owner, strict=True) if other == rank]
        for mine, stage in zip(gradients, true, strict=True):
            for p, q in zip(mine, stage.parameters(), strict=True):
                torch.testing.assert_close(p, q.grad, rtol=0, atol=1e-6 * float(q.grad.abs().max()))
