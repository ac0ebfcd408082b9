"""The public names, called as their documentation writes them."""

import inspect
import pickle

import numpy as np
import pytest

import pipeloom as pl

PLAN = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8)
LOWERED = PLAN.lower()
TIMELINE = PLAN.simulate(pl.Costs())
LAYOUT = pl.Layout.even(8, pp=2, vp=2)

BY_NAME = [
    (PLAN.num_ops_of, {"rank": 1}),
    (PLAN.num_warmup, {"rank": 1}),
    (PLAN.chunk_id, {"k": 5, "forward": False}),
    (PLAN.microbatch_id, {"k": 5, "forward": False}),
    (PLAN.recompute_mask, {"rank": 1}),
    (PLAN.ops, {"rank": 1}),
    (PLAN.op, {"rank": 1, "i": 3}),
    (PLAN.position, {"rank": 1, "op": "5B0"}),
    (PLAN.lower, {"p2p": "streams", "backend": None, "prefetch": 2}),
    (LOWERED.buffers, {"rank": 1, "channel": (0, 1, "forward")}),
    (PLAN.to_csv, {"path": None, "comms": False}),
    (pl.Plan.from_csv, {"text_or_path": "0F0,0B0"}),
    (TIMELINE.bubble, {"rank": 1}),
    (TIMELINE.work, {"rank": 1}),
    (TIMELINE.peak_memory, {"rank": 1}),
    (LAYOUT.layers, {"rank": 1, "vp_stage": 0}),
    (LAYOUT.offset, {"rank": 1, "vp_stage": 0}),
    (pl.p2p_order, {"rank": 1, "have": ["send_next"]}),
    (pl.get_forward_backward_func, {"pp_size": 2, "vp_size": 2}),
]


@pytest.mark.parametrize(("call", "arguments"), BY_NAME, ids=lambda value: str(value)[:40])
def test_arguments_go_by_name_or_place(call, arguments):
    assert call(**arguments) == call(*arguments.values())


def test_columns_and_times_go_by_name_too():
    again = PLAN.simulate(costs=pl.Costs(), semantics="buffered", link_contention=False)
    assert (again.start(0) == TIMELINE.start(0)).all()
    for key, column in PLAN.columns(rank=1).items():
        assert (column == PLAN.columns(1)[key]).all()
    for method in (TIMELINE.start, TIMELINE.end, TIMELINE.memory):
        assert (method(rank=1) == method(1)).all()


def test_save_and_load_go_by_name(tmp_path):
    LOWERED.save(path=tmp_path / "plan")
    assert pl.Plan.load(path=tmp_path / "plan") == LOWERED


def test_defaults_are_shown():
    """Help and editors show what is left out, not None."""
    shown = {
        pl.Plan.simulate: {"semantics": "buffered", "link_contention": False},
        pl.Plan.lower: {"p2p": "auto", "backend": None, "prefetch": 1},
        pl.Plan.chunk_id: {"forward": True},
        pl.Plan.to_csv: {"path": None, "comms": False},
        pl.Layout.even: {"vp": None, "placement": "loop"},
        pl.Layout.megatron: {"account_for_loss_in_pipeline_split": False, "placement": "loop"},
    }
    for method, defaults in shown.items():
        parameters = inspect.signature(method).parameters
        assert {name: parameters[name].default for name in defaults} == defaults


def test_every_default_of_plan_can_be_written_out():
    """An argument that a schedule does not use may be given as what it is when left out."""
    for row in pl.schedules():
        shape = {"pp": 1 if row.name == "no_pipelining" else 4, "num_microbatches": 8}
        written = pl.plan(
            row.name,
            **shape,
            vp=None,
            microbatch_group_size=None,
            placement=None,
            layout=None,
            costs=None,
            memory_limit=None,
            num_seq_pieces=1,
            reverse_backward=None,
            forward_only=False,
            extra_warmup=0,
            num_microbatches_with_partial_activation_checkpoints=None,
        )
        assert written == pl.plan(row.name, **shape)


def test_columns_have_their_types():
    wanted = dict.fromkeys(("stage", "chunk", "microbatch", "piece"), np.uint32)
    wanted |= {"kind": np.uint8, "recompute": np.bool_}
    assert {key: column.dtype for key, column in PLAN.columns(0).items()} == wanted
    wanted |= {"peer": np.uint32, "group": np.uint32}
    assert {key: column.dtype for key, column in LOWERED.columns(0).items()} == wanted
    pairs = pl.plan("dualpipe_v", pp=2, num_microbatches=6).columns(0)
    assert pairs["pair"].dtype == np.uint32
    mask = pl.plan(
        "1f1b", pp=2, num_microbatches=4, num_microbatches_with_partial_activation_checkpoints=1
    ).recompute_mask(0)
    assert mask.dtype == np.bool_
    assert PLAN.recompute_mask(0) is None


def test_values_have_one_line_and_plans_print_their_grid():
    for value in (PLAN, LOWERED, TIMELINE, LAYOUT, pl.Costs(forward=2), PLAN.check()):
        assert "\n" not in repr(value)
    assert str(PLAN).count("\nrank ") == PLAN.pp


def test_a_check_error_leaves_its_process():
    """Pools of processes pickle what a worker raises."""
    with pytest.raises(pl.CheckError) as caught:
        pl.Plan.from_csv("0F0,0B0\n1B0,1F0\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.violations == caught.value.violations != ()


def test_a_channel_is_any_sequence():
    for channel in ((0, 1, "forward"), [0, 1, "forward"], (0, "forward"), "forward"):
        assert LOWERED.buffers(1, channel) == LOWERED.buffers(1, (0, 1, "forward"))
