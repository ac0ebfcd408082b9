"""Layouts: each layer exactly once, Megatron-core's splits, the layout language."""

from __future__ import annotations

import ast
import copy
import doctest
import gzip
import itertools
import json
import pickle
import re
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import pipeloom as pl

HERE = Path(__file__).parent
with gzip.open(HERE / "golden" / "layouts.jsonl.gz", "rt") as file:
    GOLDEN = [json.loads(line) for line in file]


def split(record: dict) -> pl.Layout:
    """The layout of a record of kind `layers`."""
    return pl.Layout.megatron(
        record["num_layers"],
        pp=record["pp"],
        vp=record["vp"],
        num_layers_in_first_pipeline_stage=record.get("first"),
        num_layers_in_last_pipeline_stage=record.get("last"),
        account_for_embedding_in_pipeline_split=record.get("emb", False),
        account_for_loss_in_pipeline_split=record.get("loss", False),
    )


def places(layout: pl.Layout) -> list[tuple[int, int]]:
    """All (rank, chunk), in stage order."""
    chunks = layout.vp * (2 if layout.placement == "bidirectional" else 1)
    pairs = itertools.product(range(layout.pp), range(chunks))
    return sorted(pairs, key=lambda place: layout.stage(*place))


# ------------------------------------------------------------------------------ Megatron-core


def test_every_split_that_megatron_makes_is_ours_too():
    made = [r for r in GOLDEN if r["kind"] == "layers" and "stages" in r]
    assert len(made) > 300
    for record in made:
        layout = split(record)
        got = [
            [[layout.num_layers(r, c), layout.offset(r, c)] for c in range(layout.vp)]
            for r in range(layout.pp)
        ]
        assert got == record["stages"], record


def test_every_split_that_megatron_refuses_is_refused_and_its_crash_is_not():
    refused = [r for r in GOLDEN if r["kind"] == "layers" and "stages" not in r]
    crashes = [r for r in refused if r.get("error", [""])[0] == "ZeroDivisionError"]
    assert len(refused) > 300
    assert len(crashes) == 4
    for record in refused:
        if record in crashes:
            layout = split(record)
            assert layout.num_layers_total == record["num_layers"]
            for rank, size in enumerate([record["first"], record["last"]]):
                for c in range(layout.vp):
                    assert layout.num_layers(rank, c) == size // layout.vp
        else:
            with pytest.raises(pl.LayoutError, match=r"(?s)\d.*\nhint: "):
                split(record)


# --------------------------------------------------------------------------------- properties


@st.composite
def layouts(draw):
    pp, vp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    chunk = st.integers(0, draw(st.sampled_from([1, 3, 30])))
    rank = st.lists(chunk, min_size=vp, max_size=vp)
    counts = draw(st.lists(rank, min_size=pp, max_size=pp))
    counts[0][0] += not any(map(sum, counts))
    placement = draw(st.sampled_from(["loop", "v", "bidirectional"]))
    return counts, pl.Layout.from_counts(counts, placement=placement)


@given(layouts())
def test_each_layer_is_built_once_in_stage_order(case):
    counts, layout = case
    order = places(layout)[: layout.pp * layout.vp]
    numbers = [n for place in order for n in layout.layers(*place)]
    assert numbers == list(range(1, layout.num_layers_total + 1))
    for r, c in order:
        assert layout.num_layers(r, c) == counts[r][c]
        assert layout.offset(r, c) == sum(counts[q][d] for q, d in order[: layout.stage(r, c)])
    assert [layout.pre_process(*p) for p in order] == [True] + [False] * (len(order) - 1)
    assert [layout.post_process(*p) for p in order] == [False] * (len(order) - 1) + [True]


@given(layouts())
def test_a_layout_is_a_value(case):
    _, layout = case
    twins = [
        pl.Layout.from_string(layout.to_string(), pp=layout.pp, placement=layout.placement),
        pickle.loads(pickle.dumps(layout)),
        copy.deepcopy(layout),
        eval(repr(layout), {"Layout": pl.Layout}),
    ]
    for twin in twins:
        assert twin == layout
        assert hash(twin) == hash(layout)
        assert str(twin) == layout.to_string()
    assert layout != layout.to_string()


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 5))
def test_even_gives_the_remainder_to_the_first_stages(num_layers, pp, vp):
    layout = pl.Layout.even(num_layers, pp=pp, vp=vp)
    base, rest = divmod(num_layers, pp * vp)
    got = [layout.num_layers(*place) for place in places(layout)]
    assert got == [base + 1] * rest + [base] * (pp * vp - rest)


@pytest.mark.parametrize(
    ("num_layers", "pp", "vp"), [(n, p, v) for p in (1, 2, 4) for v in (1, 2, 3) for n in (24, 48)]
)
def test_uniform_loop_layouts_have_the_closed_form(num_layers, pp, vp):
    layout = pl.Layout.even(num_layers, pp=pp, vp=vp)
    for r, c in places(layout):
        assert layout.num_layers(r, c) == num_layers // pp // vp
        assert layout.offset(r, c) == c * (num_layers // vp) + r * (num_layers // pp // vp)
    assert layout == pl.Layout.megatron(num_layers, pp=pp, vp=vp)


# ----------------------------------------------------------------------------- what users met


def test_eight_layers_on_two_ranks_with_two_chunks():
    layout = pl.Layout.even(8, pp=2, vp=2)
    assert [layout.layers(0, 0), layout.layers(0, 1)] == [[1, 2], [5, 6]]
    assert [layout.layers(1, 0), layout.layers(1, 1)] == [[3, 4], [7, 8]]
    assert layout.pre_process(0, 0)
    assert layout.post_process(1, 1)


@pytest.mark.parametrize(
    ("num_layers", "pp", "counts"),
    [
        (30, 4, [8, 8, 7, 7]),
        (40, 16, [3] * 8 + [2] * 8),
        (38, 8, [5] * 6 + [4] * 2),
        (70, 12, [6] * 10 + [5] * 2),
        (58, 8, [8] * 2 + [7] * 6),
        (5, 4, [2, 1, 1, 1]),
        (2, 4, [1, 1, 0, 0]),
    ],
)
def test_reported_depths_split_without_loss(num_layers, pp, counts):
    layout = pl.Layout.even(num_layers, pp=pp)
    assert [layout.num_layers(r) for r in range(pp)] == counts


def test_last_size_alone_with_chunks_shifts_no_offset():
    layout = pl.Layout.megatron(14, pp=4, vp=2, num_layers_in_last_pipeline_stage=2)
    assert [layout.offset(r, 0) for r in range(4)] == [0, 2, 4, 6]
    assert [layout.offset(r, 1) for r in range(4)] == [7, 9, 11, 13]


@pytest.mark.parametrize(
    ("num_layers", "arguments", "parts"),
    [
        (30, {"pp": 4}, ["num_layers=30", "pp=4"]),
        (40, {"pp": 8, "vp": 2}, ["5 layers of each rank", "vp=2", "pp=8"]),
        (
            46,
            {
                "pp": 2,
                "num_layers_in_first_pipeline_stage": 11,
                "num_layers_in_last_pipeline_stage": 11,
            },
            ["24 of num_layers=46 layers unassigned"],
        ),
        (20, {"pp": 1, "num_layers_in_last_pipeline_stage": 1}, ["19 of num_layers=20", "pp=1"]),
        (
            8,
            {
                "pp": 4,
                "num_layers_in_first_pipeline_stage": 2,
                "account_for_loss_in_pipeline_split": True,
            },
            ["account_for_loss_in_pipeline_split", "num_layers_in_first_pipeline_stage"],
        ),
    ],
)
def test_a_split_that_would_lose_layers_is_refused_with_its_numbers(num_layers, arguments, parts):
    with pytest.raises(pl.LayoutError, match="\nhint: ") as caught:
        pl.Layout.megatron(num_layers, **arguments)
    for part in parts:
        assert part in str(caught.value)


def test_one_rank_with_chunks_shares_the_layers_instead_of_repeating_them():
    layout = pl.Layout.megatron(8, pp=1, vp=2)
    assert [layout.layers(0, 0), layout.layers(0, 1)] == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("costs", "pp", "arguments", "counts"),
    [
        ([1] * 5, 4, {}, [2, 1, 1, 1]),
        ([1] * 38, 8, {}, [5] * 6 + [4] * 2),
        ([1] * 3, 2, {"embedding_cost": 2, "loss_cost": 2}, [2, 1]),
        ([0, 1, 1, 1, 1, 0], 4, {"embedding_cost": 2, "loss_cost": 2}, [1, 2, 2, 1]),
        ([10, 1, 1, 1, 1, 1], 3, {}, [1, 3, 2]),
        ([0.5] * 8, 2, {"loss_cost": 1.0}, [5, 3]),
        # bigscience-workshop/Megatron-DeepSpeed#186: 2 on every stage.
        ([0, 2, 0, 1, 1, 1, 1, 0, 0, 2, 0], 4, {}, [3, 2, 3, 3]),
        ([1] * 4, 4, {"embedding_cost": 2, "loss_cost": 2, "allow_empty": True}, [0, 2, 2, 0]),
        # Oneflow-Inc/libai PR#225; ISEEKYAN/Megatron-LM PR#47; AI-Hypercomputer/maxtext PR#1616.
        ([1] * 12, 5, {}, [3, 3, 2, 2, 2]),
        ([1] * 6, 4, {"embedding_cost": 1, "loss_cost": 1}, [1, 2, 2, 1]),
        ([1] * 58, 8, {}, [8, 8, 7, 7, 7, 7, 7, 7]),
        # radixark/miles PR#1376: layers 1 to 3 and 4 to 6 share weights.
        ([1] * 6, 4, {"no_cut_after": [1, 2, 4, 5], "allow_empty": True}, None),
        ([1] * 7, 3, {"no_cut_after": [1, 2, 4, 5]}, [3, 3, 1]),
        # MTP layers weigh on the last stage.
        ([1] * 8, 4, {"mtp_costs": [1], "loss_cost": 1}, [3, 2, 2, 1]),
    ],
)
def test_reported_costs_are_balanced(costs, pp, arguments, counts):
    layout = pl.Layout.balanced(costs, pp=pp, **arguments)
    if counts is not None:
        assert [layout.num_layers(r) for r in range(pp)] == counts
    assert not {layout.offset(rank) for rank in range(pp)} & set(arguments.get("no_cut_after", ()))
    given = {name: value for name, value in arguments.items() if name != "placement"}
    load = layout.load(costs, **given)
    assert load.proved
    assert load.bottleneck == load.best == max(load.ranks)
    assert load.why.startswith(f"rank {load.rank} is the busiest with {load.bottleneck:g}")


def test_layers_kept_together_leave_no_stage_empty_unasked(refused):
    words = (
        "shared_layers leaves 3 blocks of the 6 layers",
        "4 stages of pp=4, vp=1",
        "allow_empty",
    )
    arguments = {"pp": 4, "shared_layers": {4: 1}}
    refused(pl.LayoutError, lambda: pl.Layout.balanced([1] * 6, **arguments), *words)
    layout = pl.Layout.balanced([1] * 6, allow_empty=True, **arguments)
    assert layout.num_layers_total == 6
    refused(
        pl.LayoutError,
        lambda: pl.Layout.balanced([1] * 6, pp=2, vp=2, no_cut_after=[1, 2, 4]),
        "no_cut_after leaves 3 blocks",
        "4 stages of pp=2, vp=2",
    )


def test_memory_of_each_rank_is_filled_so_that_the_next_has_a_layer_that_fits():
    memory = {"memory_limit": [2, 0, 2], "layer_memory": [1, 0, 1, 1]}
    assert pl.Layout.balanced([1] * 4, pp=3, **memory).to_string() == "Et|t|ttL"


def test_an_embedding_above_an_equal_share_is_no_error_and_named():
    # pytorch/torchtitan PR#1041, PR#1103, PR#1416: 7 units, then a weight above any stage's share.
    weights = {"embedding_cost": 2, "loss_cost": 2}
    layout = pl.Layout.balanced([1] * 3, pp=2, **weights)
    assert layout.to_string() == "Ett|tL"
    assert layout.load([1] * 3, **weights).ranks == [4.0, 3.0]
    heavy = {"embedding_cost": 10, "loss_cost": 2}
    layout = pl.Layout.balanced([1] * 3, pp=2, **heavy)
    assert layout.to_string() == "Et|ttL"
    why = layout.load([1] * 3, **heavy).why
    assert "rank 0 is the busiest with 11: embedding (10), layer 1 (1)" in why
    assert "an equal share of all is 7.5; embedding alone is 10; no split does better" in why
    empty = pl.Layout.balanced([1] * 3, pp=2, allow_empty=True, **heavy)
    assert empty.to_string() == "E|tttL"
    assert empty.load([1] * 3, allow_empty=True, **heavy).bottleneck == 10.0


def test_balance_weighs_ranks_not_stages():
    by_stages = pl.Layout.from_string("Et|tt|tt|tL", pp=2)
    costs = {"embedding_cost": 1, "loss_cost": 3}
    assert by_stages.load([1] * 6, **costs).ranks == [4.0, 6.0]
    balanced = pl.Layout.balanced([1] * 6, pp=2, vp=2, **costs)
    load = balanced.load([1] * 6, **costs)
    assert load.ranks == [5.0, 5.0]
    assert load.why.endswith("; an equal share of all is 5; no split does better")
    v = pl.Layout.balanced([1] * 6, pp=2, vp=2, placement="v", **costs)
    assert max(v.load([1] * 6, **costs).ranks) == 6.0  # a layer at least beside both ends
    assert repr(load) == "Load(bottleneck=5, rank=0)"


def test_a_memory_limit_is_kept(refused):
    memory = {"layer_memory": [1] * 8, "embedding_memory": 2, "loss_memory": 3}
    layout = pl.Layout.balanced([1] * 8, pp=4, memory_limit=[4, 3, 2, 4], **memory)
    assert [layout.num_layers(r) for r in range(4)] == [2, 3, 2, 1]
    refused(
        pl.LayoutError,
        lambda: pl.Layout.balanced([1] * 8, pp=4, memory_limit=3, **memory),
        "there is no split that fits memory_limit",
        "at most 3",
        "13 on 4 ranks",
    )
    refused(
        pl.LayoutError,
        lambda: pl.Layout.balanced([1] * 8, pp=4, memory_limit=5, **memory | {"loss_memory": 9}),
        "loss_memory alone 9",
    )
    refused(
        pl.ConfigError,
        lambda: pl.Layout.balanced([1] * 8, pp=4, memory_limit=3),
        "memory_limit",
        "layer_memory",
    )
    for name, value in memory.items():
        refused(
            pl.ConfigError,
            lambda given={name: value}: pl.Layout.balanced([1] * 8, pp=4, **given),
            f"{name} is given without memory_limit",
        )
    assert pl.Layout.balanced([1] * 8, pp=4, embedding_memory=0.0, mtp_memory=None)
    refused(
        pl.LayoutError,
        lambda: pl.Layout.balanced([1] * 8, pp=4, memory_limit=[3], layer_memory=[1]),
        "layer_memory has 1 entries",
        "8",
    )
    refused(pl.LayoutError, lambda: layout.load([1] * 7), "layer_costs has 7 entries", "8")


def test_the_loss_of_a_v_is_on_rank_0():
    layout = pl.Layout.even(8, pp=4, vp=2, placement="v")
    assert [[layout.stage(r, c) for c in range(2)] for r in range(4)] == [
        [0, 7],
        [1, 6],
        [2, 5],
        [3, 4],
    ]
    assert layout.post_process(0, 1)
    assert layout.layers(0, 1) == [8]
    assert pl.Layout.even(8, pp=4, vp=2, placement="wave") == layout


def test_numpy_numbers_are_numbers():
    counts = np.array([[2, 2], [2, 2]])
    layout = pl.Layout.from_counts(counts)
    assert layout == pl.Layout.even(np.int64(8), pp=np.uint8(2), vp=2)
    assert layout.layers(np.int32(1), np.int64(0)) == [3, 4]


# --------------------------------------------------------------------------------- bad values

BAD_NUMBERS = [0, -1, -(2**63), 2**32, 2**64, 10**400]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize("name", ["num_layers", "pp", "vp"])
def test_numbers_out_of_range_are_named(name, bad):
    arguments = {"num_layers": 8, "pp": 2, "vp": 2} | {name: bad}
    for make in (pl.Layout.even, pl.Layout.megatron):
        with pytest.raises(pl.PlanError, match=rf"(?s){name}=.*\nhint: "):
            make(**arguments)


def test_large_but_representable_numbers_are_refused_before_they_cost_memory():
    big = 2**32 - 1
    with pytest.raises(pl.LayoutError, match=f"mtp_num_layers={big} make more than 1048576"):
        pl.Layout.megatron(8, pp=2, mtp_num_layers=big)
    for make in [
        lambda: pl.Layout.even(8, pp=big),
        lambda: pl.Layout.even(8, pp=2, vp=big),
        lambda: pl.Layout.even(big, pp=2),
        lambda: pl.Layout.megatron(8, pp=2, mtp_num_layers=big),
        lambda: pl.Layout.from_counts([big, big]),
        lambda: pl.Layout.from_string("Et*4294967295L", pp=1),
        lambda: pl.Layout.from_string("E" + "(" * 10_000 + "t" + ")*9" * 10_000 + "L", pp=1),
        lambda: pl.Layout.from_string("Et" + "|*1000000" * 9 + "L", pp=1),
    ]:
        with pytest.raises(pl.PlanError, match="\nhint: "):
            make()


@pytest.mark.parametrize(
    ("make", "error", "part"),
    [
        (lambda: pl.Layout.from_counts([]), pl.LayoutError, "counts is empty"),
        (lambda: pl.Layout.from_counts([[]]), pl.LayoutError, "counts[0] is empty"),
        (lambda: pl.Layout.from_counts([[1], [1, 2]]), pl.LayoutError, "counts[1] has 2 chunks"),
        (lambda: pl.Layout.from_counts([[0], [0]]), pl.LayoutError, "0 decoder layers"),
        (lambda: pl.Layout.from_counts([1, -1]), pl.ConfigError, "counts[1]=-1"),
        (lambda: pl.Layout.from_counts([[1], [-5]]), pl.ConfigError, "counts[1][0]=-5"),
        (lambda: pl.Layout.from_counts([1.5]), TypeError, "counts[0] must be an integer"),
        (lambda: pl.Layout.from_counts("12"), TypeError, "counts must be a list"),
        (lambda: pl.Layout.from_counts(7), TypeError, "counts must be a list"),
        (lambda: pl.Layout.from_names(["Et", "tL"], pp=2), TypeError, "names[0] must be a list"),
        (lambda: pl.Layout.from_names([[1]], pp=1), TypeError, "names[0][0] is not a name"),
        (lambda: pl.Layout.even(True, pp=2), TypeError, "num_layers must be an integer"),
        (lambda: pl.Layout.even(8, pp=2, placement="ring"), pl.ConfigError, '"ring" is unknown'),
        (lambda: pl.Layout.balanced([], pp=2), pl.LayoutError, "layer_costs has 0 entries"),
        (lambda: pl.Layout.balanced([1, -2], pp=2), pl.LayoutError, "layer_costs has -2"),
        (
            lambda: pl.Layout.balanced([1, 2], pp=2, no_cut_after=[-1]),
            pl.ConfigError,
            "no_cut_after=-1",
        ),
        (lambda: pl.Layout.even(8, pp=2).layers(2), pl.LayoutError, "rank=2"),
        (lambda: pl.Layout.even(8, pp=2).layers(-1), pl.ConfigError, "rank=-1"),
        (lambda: pl.Layout.even(8, pp=2).layers(0, 1), pl.LayoutError, "vp_stage=1"),
        (lambda: pl.Layout.even(8, pp=2, vp=2).layers(0), pl.LayoutError, "vp_stage is missing"),
        (lambda: pl.Layout.from_string("Et|Lx", pp=2), pl.LayoutError, "column 5: `x`"),
        (lambda: pl.Layout.from_string("Et|tL|", pp=3), pl.LayoutError, "loss is in stage 1"),
        (
            lambda: pl.Layout.from_string("E|(t|)*10m|m|m|LL|LL", pp=8),
            pl.LayoutError,
            "loss appears 4 times, expected 1",
        ),
        (
            lambda: pl.Layout.from_string("Et|tL", pp=2, num_layers=3),
            pl.LayoutError,
            "2 decoder layers, but num_layers=3",
        ),
        (
            lambda: pl.Layout.from_string("Et|t|tm|L", pp=2),
            pl.LayoutError,
            "on rank 0",
        ),
    ],
)
def test_bad_values_are_refused_by_name(make, error, part):
    with pytest.raises(error, match=re.escape(part)) as caught:
        make()
    assert "\nhint: " in str(caught.value)


DOCTEST_FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def test_the_documentation_runs():
    page = HERE.parent / "docs" / "layouts.md"
    result = doctest.testfile(str(page), module_relative=False, optionflags=DOCTEST_FLAGS)
    assert result.attempted > 20
    assert result.failed == 0


def test_the_examples_of_the_stub_run():
    tree = ast.parse((Path(pl.__file__).parent / "_core.pyi").read_text())
    (layout,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Layout")
    runner = doctest.DocTestRunner(optionflags=DOCTEST_FLAGS)
    for node in (layout, *(n for n in layout.body if isinstance(n, ast.FunctionDef))):
        text = ast.get_docstring(node) or ""
        case = doctest.DocTestParser().get_doctest(text, {"pl": pl}, node.name, "_core.pyi", 0)
        runner.run(case)
    assert runner.tries > 7
    assert runner.failures == 0
