"""Every argument out of range, of the wrong type, or contradicting another: one clear error.

A value out of range is a ConfigError; a value of the wrong type is a TypeError, as Python has it.
Both name the argument and end in a hint.
"""

import itertools
import re

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


@pytest.mark.parametrize("value", [2**32, 2**63, 10**40])
def test_a_number_too_large_is_told_what_the_most_is(value, refused):
    for name in COUNTS + NATURALS:
        words = (name, str(value)[:30], "must be at most 4294967295")
        refused(pl.ConfigError, plan_with(**{name: value}), *words)


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


class Hostile:
    """Fails whatever is asked of it."""

    def fail(self, *_):
        raise RuntimeError("hostile")

    __index__ = __len__ = __iter__ = __float__ = __repr__ = fail


ANYTHING = [
    *(0, -1, 2**31, 2**32, 2**70, float("nan"), float("inf"), 1.5, True, "", "x", "1", b"1", 1j),
    *([], [1], [[]], {}, (), object(), np.float32(1.5), np.array([]), np.array([1, 2]), "\ud800"),
    *("a\0b", [None], ["x"], [[1], [1, 2]], range(3), Ellipsis, Hostile()),
]
LOWERED = PLAN.lower()
LAYOUT = pl.Layout.even(8, pp=2, vp=2)
SEVEN = {"num_layers": 7, "pp": 2}


def costs_run(**costs):
    return PLAN.simulate(pl.Costs(**costs)).makespan


CALLS = [
    (plan_with, dict.fromkeys((*COUNTS, *NATURALS, "layout", "costs", "memory_limit"))),
    (
        lambda **changes: pl.legal_num_microbatches(
            **{"schedule": "interleaved_1f1b", "pp": 2, "vp": 2, "at_least": 3} | changes
        ),
        dict.fromkeys(("schedule", "pp", "vp", "microbatch_group_size", "placement")),
    ),
    *((getattr(PLAN, method), {"rank": 0}) for method in BY_RANK),
    *((getattr(PLAN, method), {"k": 0, "forward": True}) for method in ("chunk_id",)),
    (PLAN.op, {"rank": 0, "i": 0}),
    (PLAN.position, {"rank": 0, "op": "0F0"}),
    (PLAN.lower, {"p2p": "fifo", "prefetch": 1}),
    (PLAN.check, {"semantics": None}),
    (PLAN.simulate, {"costs": pl.Costs(), "semantics": "buffered", "link_contention": False}),
    (LOWERED.buffers, {"rank": 1, "channel": "forward"}),
    (LOWERED.to_csv, {"comms": True}),
    (pl.Layout.even, {"num_layers": 8, "pp": 2, "vp": 2, "placement": "loop"}),
    (
        pl.Layout.megatron,
        SEVEN | dict.fromkeys(("vp", "num_layers_in_first_pipeline_stage", "placement")),
    ),
    (pl.Layout.from_counts, {"counts": [[1], [2]], "placement": "loop"}),
    (pl.Layout.from_string, {"text": "Et|tL", "pp": 2, "num_layers": 2, "placement": "loop"}),
    (pl.Layout.from_names, {"names": [["embedding", "decoder", "loss"]], "pp": 1, "vp": 1}),
    (
        pl.Layout.balanced,
        {"layer_costs": [1, 2], "pp": 2, "embedding_cost": 0, "no_cut_after": []},
    ),
    (LAYOUT.layers, {"rank": 0, "vp_stage": 0}),
    (LAYOUT.embedding_ranks, {"tied": False}),
    (costs_run, {"forward": 1, "backward": 2, "latency": 0, "bandwidth": 1, "static_memory": 0}),
    (pl.p2p_order, {"rank": 0, "have": []}),
]
# Errors about what a value says, not about what it is, need not name the argument.
SAYS = {"text": "layout", "names": "layout", "counts": "layout", "op": "op"}


def given(call, arguments, name, value):
    found = call(**{key: own for key, own in arguments.items() if own is not None} | {name: value})
    return found() if call is plan_with else found


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [(call, arguments, name) for call, arguments in CALLS for name in arguments],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:30],
)
def test_anything_at_all_is_taken_or_refused_by_name(call, arguments, name):
    """No panic, no bare error of a library below: the argument, what was expected, a hint."""
    for value in ANYTHING:
        try:
            given(call, arguments, name, value)
        except (pl.PlanError, TypeError) as error:
            message = str(error)
            assert re.search(r"\nhint: \S", message), f"no hint: {message}"
            assert name in message or SAYS.get(name, name) in message, message


@pytest.mark.parametrize("name", ["pp_size", "vp_size"])
def test_sizes_of_the_dispatch(name, refused):
    for value in ("2", 2.0, True, [2], float("nan")):
        sizes = {"pp_size": 2, name: value}
        refused(TypeError, lambda sizes=sizes: pl.get_forward_backward_func(**sizes), name)
    for value in (0, -1, -(2**70)):
        sizes = {"pp_size": 2, name: value}
        refused(pl.ConfigError, lambda sizes=sizes: pl.get_forward_backward_func(**sizes), name)


@pytest.mark.parametrize("pp", [2**13 + 1, 2**24, 2**31, 2**32 - 1])
def test_searching_legal_numbers_ends(pp, refused):
    """It once tried all numbers up to twice the ranks, whatever the reason of the refusal."""
    refused(pl.ConfigError, lambda: pl.legal_num_microbatches("dualpipe", pp=pp, at_least=3), "pp")


@pytest.mark.parametrize("name", ["v_half", "v_min", "v_1f1b", "hanayo", "chimera"])
@pytest.mark.parametrize("change", [{"pp": 2**20}, {"num_microbatches": 2**28}])
def test_plans_that_hold_their_ops_have_a_limit(name, change, refused):
    arguments = {"pp": 2, "num_microbatches": 2} | change
    refused(pl.ConfigError, lambda: pl.plan(name, **arguments), name, *change)


@pytest.mark.parametrize("value", [{"send_next": False}, "send_next"])
def test_flags_are_no_list_of_transfers(value, refused):
    """A dict's keys would be taken, whatever their values."""
    refused(TypeError, lambda: pl.p2p_order(0, value), "have")


def test_files_that_can_not_be_written_or_read_are_named(tmp_path):
    path = tmp_path / "missing" / "plan"
    with pytest.raises(FileNotFoundError, match=r"missing.plan(.|\n)*hint: "):
        PLAN.save(path)
    with pytest.raises(FileNotFoundError, match=r"missing.plan(.|\n)*hint: "):
        pl.Plan.load(path)
    with pytest.raises(IsADirectoryError, match=r"hint: "):
        pl.Plan.from_csv(tmp_path)
