"""Every argument out of range, of the wrong type, or contradicting another: one clear error.

A value out of range is a ConfigError; a value of the wrong type is a TypeError, as Python has it.
Both name the argument and end in a hint.
"""

import itertools

import numpy as np
import pytest

import pipeloom as pl

GOOD = {"schedule": "interleaved_1f1b", "pp": 2, "vp": 2, "num_microbatches": 4}
HUGE = (2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64, 10**40)
COUNTS = ("pp", "vp", "num_microbatches", "microbatch_group_size", "num_seq_pieces")
NATURALS = ("extra_warmup", "num_microbatches_with_partial_activation_checkpoints")
WRONG = {
    **dict.fromkeys(
        COUNTS + NATURALS, ("3", 2.0, 2.5, [2], {}, b"2", True, float("nan"), object())
    ),
    "schedule": (3, None, b"1f1b", ["1f1b"]),
    "placement": (3, b"loop", ["loop"], True),
    "reverse_backward": ("yes", 2, [True]),
    "forward_only": ("yes", 2, [True]),
}


def plan_with(**changes):
    return lambda: pl.plan(**GOOD | changes)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, -(2**63), -(10**40)])
def test_counts_below_one(name, value, refused):
    refused(pl.ConfigError, plan_with(**{name: value}), name, str(value)[:30])


@pytest.mark.parametrize("name", NATURALS)
@pytest.mark.parametrize("value", [-1, -(10**40)])
def test_naturals_below_zero(name, value, refused):
    refused(pl.ConfigError, plan_with(**{name: value}), name, str(value)[:30])


@pytest.mark.parametrize(
    "name", ["pp", "vp", "num_microbatches", "microbatch_group_size", "extra_warmup"]
)
@pytest.mark.parametrize("value", HUGE)
def test_huge_numbers(name, value, refused):
    refused(pl.ConfigError, plan_with(**{name: value}), name)


@pytest.mark.parametrize("value", HUGE)
def test_huge_window_keeps_all(value):
    """Any number of kept activations beyond the window keeps all of them, if it is a u32."""
    name = "num_microbatches_with_partial_activation_checkpoints"
    if value < 2**32:
        assert not pl.plan(**GOOD, **{name: value}).recompute_mask(0).any()
    else:
        with pytest.raises(pl.ConfigError, match=name):
            pl.plan(**GOOD, **{name: value})


@pytest.mark.parametrize(
    ("pp", "vp", "m"),
    [(2**24, 2, 1), (2**12, 2**13, 1), (2**24 + 1, 1, 1), (1, 2, 2**31), (2, 2, 2**30 + 1)],
)
def test_products_beyond_the_limits(pp, vp, m, refused):
    message = refused(pl.ConfigError, plan_with(pp=pp, vp=vp, num_microbatches=m))
    assert "pp=" in message or "num_microbatches=" in message


def test_largest_shapes_are_lazy():
    """The limits themselves are taken, in no time and no memory."""
    wide = pl.plan("1f1b", pp=2**24, num_microbatches=1)
    assert (wide.num_stages, wide.op(2**24 - 1, 1)) == (2**24, f"{2**24 - 1}B0")
    m = 2**30
    long = pl.plan("interleaved_1f1b", pp=2, vp=2, num_microbatches=m)
    assert long.op(1, 2 * m * 2 - 1) == f"1B{m - 1}"
    assert long.position(1, f"1B{m - 1}") == 2 * m * 2 - 1


CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{n}={v!r:.20}" for n, v in CASES])
def test_wrong_types(name, value, refused):
    refused(TypeError, plan_with(**{name: value}), name, repr(value)[:60])


@pytest.mark.parametrize("name", ["pp", "num_microbatches"])
def test_needed_arguments(name, refused):
    arguments = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(TypeError, match=name):
        pl.plan(**arguments)
    refused(TypeError, lambda: pl.plan(**arguments, **{name: None}), name)


def test_unknown_argument():
    with pytest.raises(TypeError, match="num_microbatch"):
        pl.plan("1f1b", pp=2, num_microbatch=3)
    with pytest.raises(TypeError):
        pl.plan("1f1b", 2, 3)


def test_numpy_integers_are_integers():
    for kind in (np.int8, np.uint32, np.int64):
        arguments = {"pp": kind(2), "vp": kind(2), "num_microbatches": kind(4)}
        assert pl.plan("interleaved_1f1b", **arguments) == pl.plan(**GOOD)


@pytest.mark.parametrize("name", ["", "1F1B", "gpipe ", "zero", "1f1b\0", "é" * 300])
def test_unknown_schedule_lists_the_names(name, refused):
    words = [row.name for row in pl.schedules()]
    refused(pl.ConfigError, lambda: pl.plan(name, pp=2, num_microbatches=2), "unknown", *words)


@pytest.mark.parametrize("name", ["", "ring", "Loop", "table"])
def test_unknown_placement_lists_the_names(name, refused):
    refused(pl.ConfigError, plan_with(placement=name), "placement", '"loop"', '"v"')


@pytest.mark.parametrize("row", pl.schedules(), ids=lambda row: row.name)
def test_arguments_that_a_family_does_not_use(row, refused):
    pp = 1 if row.name == "no_pipelining" else 2
    given = {
        "microbatch_group_size": 2,
        "extra_warmup": 1,
        "reverse_backward": True,
        "forward_only": True,
        "num_microbatches_with_partial_activation_checkpoints": 1,
        "num_seq_pieces": 2,
    }
    for name, value in given.items():
        if name not in row.arguments:
            arguments = {"pp": pp, "num_microbatches": 8, name: value}
            refused(pl.ConfigError, lambda a=arguments: pl.plan(row.name, **a), row.name, name)
    if row.vp is not None:
        wrong = {"pp": pp, "num_microbatches": 8, "vp": row.vp + 1}
        refused(pl.ConfigError, lambda: pl.plan(row.name, **wrong), f"vp={row.vp + 1}")


@pytest.mark.parametrize(
    ("schedule", "arguments", "words"),
    [
        ("no_pipelining", {"pp": 2}, ["pp=2", "pp=1"]),
        ("interleaved_1f1b", {"pp": 2, "vp": 2, "extra_warmup": 2}, ["extra_warmup=2"]),
        (
            "interleaved_1f1b",
            {"pp": 2, "vp": 2, "microbatch_group_size": 9},
            ["microbatch_group_size=9", "num_microbatches=4"],
        ),
        (
            "interleaved_1f1b",
            {"pp": 4, "vp": 2, "microbatch_group_size": 1},
            ["microbatch_group_size=1", "deadlock"],
        ),
        ("interleaved_1f1b", {"pp": 2, "vp": 2, "placement": "v"}, ["placement", "loop"]),
        ("zb_v", {"pp": 2, "placement": "loop"}, ["placement", "v"]),
        ("dualpipe_v", {"pp": 4}, ["num_microbatches", "8"]),
    ],
)
def test_contradictions(schedule, arguments, words, refused):
    refused(pl.ConfigError, lambda: pl.plan(schedule, num_microbatches=4, **arguments), *words)


PLAN = pl.plan(**GOOD)
BY_RANK = ("ops", "columns", "num_warmup", "recompute_mask")


@pytest.mark.parametrize("method", BY_RANK)
@pytest.mark.parametrize("rank", [2, -1, 2**32, -(10**40)])
def test_ranks_out_of_range(method, rank, refused):
    refused(pl.PlanError, lambda: getattr(PLAN, method)(rank), "rank")


@pytest.mark.parametrize("method", BY_RANK)
@pytest.mark.parametrize("rank", ["0", None, 0.0, True])
def test_ranks_of_the_wrong_type(method, rank, refused):
    refused(TypeError, lambda: getattr(PLAN, method)(rank), "rank")


def test_positions_out_of_range(refused):
    for rank, i in itertools.product((0, 1), (16, -1, 2**32, 10**40)):
        refused(pl.ConfigError, lambda rank=rank, i=i: PLAN.op(rank, i), "i=")
    for k in (8, -1, 10**40):
        for method in (PLAN.chunk_id, PLAN.microbatch_id):
            refused(pl.ConfigError, lambda k=k, method=method: method(k), "k=")


def test_no_table_no_chunk_id(refused):
    plan = pl.plan("zb_v", pp=2, num_microbatches=4)
    for method in (plan.chunk_id, plan.microbatch_id):
        refused(pl.ConfigError, lambda method=method: method(0), "zb_v")


@pytest.mark.parametrize(
    "op",
    [
        "",
        "F",
        "0",
        "0F",
        "F0",
        "0X0",
        "0f0",
        " 0F0",
        "0F0 ",
        "-1F0",
        "0F-1",
        "0F1.0",
        "0٣F0",
        "9" * 40 + "F0",
        "0F" + "9" * 40,
    ],
)
def test_texts_that_are_no_op(op, refused):
    refused(pl.PlanError, lambda: PLAN.position(0, op))


@pytest.mark.parametrize("op", ["1F0", "0F4", "0I0", "0SEND_F0", "4F0"])
def test_ops_that_the_rank_does_not_run(op, refused):
    refused(pl.ConfigError, lambda: PLAN.position(0, op), op)


def test_errors_have_one_base():
    kinds = (pl.ConfigError, pl.LayoutError, pl.ParseError, pl.CheckError, pl.SearchError)
    assert all(issubclass(kind, pl.PlanError) for kind in kinds)
    assert issubclass(pl.PlanError, ValueError)


def test_plans_are_frozen():
    with pytest.raises(AttributeError):
        PLAN.pp = 3
    with pytest.raises(TypeError):
        pl.Plan()
    assert PLAN != 3
    assert pl.plan("1f1b", pp=2, num_microbatches=4) != PLAN
