"""Properties of every plan, on hypothesis' shapes; PIPELOOM_HYPOTHESIS_PROFILE sets how many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.testing import invariants, plans, shapes, strategies


@given(strategies.arguments())
def test_refused_exactly_if_it_deadlocks(arguments):
    invariants.refuses_what_deadlocks(arguments)


@given(shapes())
def test_every_op_once_in_dependency_order(arguments):
    invariants.is_sound(arguments)


@given(shapes())
def test_equals_the_reference(arguments):
    invariants.equals_twin(arguments)


@given(plans())
def test_random_access(plan):
    invariants.random_access_agrees(plan)


@given(plans())
def test_recomputed_backwards_follow_their_forwards(plan):
    invariants.marks_agree(plan)


@given(shapes())
def test_same_arguments_same_plan(arguments):
    first, second = pl.plan(**arguments), pl.plan(**arguments)
    assert first == second
    assert hash(first) == hash(second)
    assert [first.ops(r) for r in range(first.pp)] == [second.ops(r) for r in range(first.pp)]


@given(shapes(schedules=["interleaved_1f1b"]))
def test_one_chunk_is_plain_1f1b(arguments):
    arguments = arguments | {"vp": 1}
    arguments.pop("microbatch_group_size", None)
    arguments.pop("extra_warmup", None)
    plain = {name: value for name, value in arguments.items() if name != "vp"}
    assert pl.plan(**arguments) == pl.plan(**plain | {"schedule": "1f1b"})


@given(plans())
def test_the_shape_is_told_as_it_was_given(plan):
    assert len(plan.stages) == plan.num_stages
    assert plan.num_ops == sum(len(plan.columns(rank)["kind"]) for rank in range(plan.pp))
    assert plan.num_stages == plan.pp * plan.vp * plan.num_replicas


@given(plans())
def test_pickles(plan):
    invariants.round_trips(plan)


@given(plans())
def test_csv(plan):
    invariants.csv_round_trips(plan)


@given(plans(lowered=True))
def test_csv_of_lowered_plans(plan):
    invariants.csv_round_trips(plan)


@given(plans(), st.sampled_from(strategies.STYLES), st.integers(1, 3))
def test_lowering(plan, style, prefetch):
    invariants.lowers(plan, style, prefetch)


@given(st.data())
def test_broken_plans_are_refused(data):
    whole = plans(max_pp=3, max_microbatches=5)
    plan = data.draw(whole.filter(lambda p: p.num_replicas == 1))
    mutation = data.draw(strategies.mutations(plan))
    invariants.verdict_agrees(mutation)


@given(st.data())
def test_broken_transfers_are_refused(data):
    whole = plans(lowered=True, max_pp=3, max_microbatches=5)
    plan = data.draw(whole.filter(lambda p: p.num_replicas == 1))
    invariants.verdict_agrees(data.draw(strategies.mutations(plan)))


def test_a_late_send_is_refused():
    """Each rank's send stands behind what its peer needs it for: a deadlock under buffered too."""
    late = "0RECV_B0,0F0,0B0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    with pytest.raises(pl.CheckError, match="0B0"):
        pl.Plan.from_csv(late)


@given(plans(lowered=True))
def test_progress(plan):
    invariants.progress_agrees(plan)


@given(st.data())
def test_times(data):
    plan = data.draw(plans())
    invariants.times_agree(plan, data.draw(strategies.cost_arguments(plan)))


@given(st.data())
def test_dearer_is_later(data):
    plan = data.draw(plans())
    costs = data.draw(strategies.cost_arguments(plan))
    name = data.draw(st.sampled_from(["forward", "backward_input", "backward_weight", "latency"]))
    invariants.dearer_is_later(plan, costs, name)


@given(strategies.layouts())
def test_layouts_cover_every_layer_once(layout):
    stages = [(rank, chunk) for rank in range(layout.pp) for chunk in range(layout.vp)]
    found = sorted(layer for stage in stages for layer in layout.layers(*stage))
    assert found == list(range(1, layout.num_layers_total + 1))
    assert sum(layout.pre_process(*stage) for stage in stages) == 1
    assert sum(layout.post_process(*stage) for stage in stages) == 1
    for stage in stages:
        layers = layout.layers(*stage)
        assert layout.num_layers(*stage) == len(layers)
        if layers:
            assert layers == list(range(layers[0], layers[-1] + 1))
            assert layout.offset(*stage) == layers[0] - 1
