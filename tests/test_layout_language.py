"""The layout language: Megatron-core's results, a textual twin, what we add and what we refuse."""

from __future__ import annotations

import enum
import gzip
import itertools
import json
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

import pipeloom as pl

with gzip.open(Path(__file__).parent / "golden" / "layouts.jsonl.gz", "rt") as file:
    GOLDEN = [r for r in map(json.loads, file) if r["kind"] == "layout"]


def parse(record: dict) -> pl.Layout:
    """The layout of a record of kind `layout`."""
    read = pl.Layout.from_string if isinstance(record["in"], str) else pl.Layout.from_names
    return read(
        record["in"],
        pp=record["pp"],
        vp=record["vp_arg"],
        num_layers=record["num_layers"],
        mtp_num_layers=record["mtp"] or 0,
    )


def places(layout: pl.Layout) -> list[tuple[int, int]]:
    """All (rank, chunk), in stage order."""
    chunks = layout.vp * (2 if layout.placement == "bidirectional" else 1)
    pairs = itertools.product(range(layout.pp), range(chunks))
    return sorted(pairs, key=lambda place: layout.stage(*place))


@pytest.mark.parametrize("record", GOLDEN, ids=lambda r: str(r["in"])[:40])
def test_the_layout_language_means_what_it_means_in_megatron(record):
    if "stages" not in record:
        with pytest.raises(pl.LayoutError, match="\nhint: "):
            parse(record)
        return
    layout = parse(record)
    assert layout.vp == (record["vp"] or 1)
    assert layout.num_layers_total == record["num_layers"]
    for r, c in places(layout):
        expected = record["stages"][r][c]
        assert layout.layers(r, c) == [i + 1 for i in expected["ids"]]
        assert layout.offset(r, c) == expected["off"]
        assert layout.pre_process(r, c) == ("E" in expected["s"])
        assert layout.post_process(r, c) == ("L" in expected["s"])
        assert [layout.num_mtp_layers(r, c), layout.mtp_offset(r, c)] == expected["m"]


# Megatron-core's two textual passes, as the slow readable twin of our reader.
def two_passes(text: str) -> str | None:
    text = text.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*([0-9]+)", lambda m: m[1] * int(m[2]), text)
    text = re.sub(r"(.)\*([0-9]+)", lambda m: m[1] * int(m[2]), text)
    return text if set(text) <= set("EtmL|") else None


def read_or_none(text: str, pp: int) -> pl.Layout | None:
    try:
        return pl.Layout.from_string(text, pp=pp)
    except pl.LayoutError:
        return None


ITEMS = st.recursive(
    st.tuples(
        st.sampled_from(["t", "t", "tt", "t|", "|", "t,"]), st.sampled_from(["", "*2", "*0"])
    ),
    lambda inner: st.tuples(
        st.lists(inner, min_size=1, max_size=4).map(
            lambda items: "(" + "".join(map("".join, items)) + ")"
        ),
        st.sampled_from(["", "*1", "*2", "*3", "*2*3"]),
    ),
    max_leaves=8,
)
NESTED = st.lists(ITEMS, max_size=5).map(lambda items: "".join(map("".join, items)))


# Without nesting, so that Megatron-core reads it too: (body, multiplier) pairs.
GROUPS = st.tuples(
    st.lists(
        st.sampled_from(["t", "t*2", "|", "t|", "|*3", "t*0", "t,"]), min_size=1, max_size=4
    ).map(lambda body: f"({''.join(body)})"),
    st.sampled_from(["*0", "*1", "*2", "*3,", "*10"]),
)
SYMBOLS = st.tuples(st.sampled_from(["t", "tt", "|", "t,|"]), st.sampled_from(["", "*2", "*0"]))
FLAT = st.lists(st.one_of(GROUPS, SYMBOLS), max_size=6).map(
    lambda items: "".join(map("".join, items))
)


@given(FLAT)
def test_where_both_read_a_text_they_agree(body):
    text = f"Et{body}L"
    expanded = two_passes(text)
    assert expanded is not None
    assert expanded.count("E") == expanded.count("L") == 1
    stages = expanded.split("|")
    layout = pl.Layout.from_string(text, pp=len(stages))
    assert [layout.num_layers(r) for r in range(layout.pp)] == [s.count("t") for s in stages]


@given(NESTED, st.integers(1, 4))
def test_a_text_with_nesting_is_read_or_refused_but_never_miscounted(body, pp):
    layout = read_or_none(f"E{body}tL", pp)
    if layout is None:
        return
    numbers = [n for place in places(layout) for n in layout.layers(*place)]
    assert numbers == list(range(1, layout.num_layers_total + 1))
    assert pl.Layout.from_string(layout.to_string(), pp=pp) == layout


def test_every_text_that_we_write_is_read_by_megatron_too():
    for counts in itertools.product([0, 1, 2, 5], repeat=4):
        if any(counts):
            text = pl.Layout.from_counts(counts).to_string()
            stages = two_passes(text).split("|")
            assert [s.count("t") for s in stages] == list(counts), text


def test_reported_layouts():
    layout = pl.Layout.from_string("Et|t|t|tL", pp=2)
    assert (layout.vp, layout.layers(1, 1)) == (2, [4])
    layout = pl.Layout.from_string("E(|tt)*30,|mL", pp=32)
    assert (layout.num_layers_total, layout.num_mtp_layers_total) == (60, 1)
    assert layout.layers(0) == layout.layers(31) == []
    for pp, vp in [(16, 1), (8, 2), (4, 4)]:
        assert pl.Layout.from_string("Et*4|(tttt|)*14tmL", pp=pp, num_layers=61).vp == vp
    layout = pl.Layout.from_string("E|(t|)*11m|m|m|L", pp=8, mtp_num_layers=3)
    assert [layout.num_mtp_layers(r, 1) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 0]
    assert layout.embedding_ranks() == [0, 4, 5, 6]
    assert layout.embedding_ranks(tied=True) == [0, 4, 5, 6, 7]
    layout = pl.Layout.from_string("E,(t)*13|(t)*14,L", pp=2)
    assert [layout.num_layers(r) for r in range(2)] == [13, 14]
    with pytest.raises(pl.LayoutError, match="2 stages, not a multiple of pp=4"):
        pl.Layout.from_string("Et|tL", pp=4)


def test_from_names_takes_what_megatron_takes():
    kind = enum.Enum("LayerType", ["embedding", "decoder", "loss", "mtp"])
    layout = pl.Layout.from_names(
        [[kind.embedding, " Decoder "], ["t", kind.mtp, "L"]], pp=2, num_layers=2, mtp_num_layers=1
    )
    assert layout == pl.Layout.from_string("Et|tmL", pp=2)


def test_an_error_points_at_the_place_in_the_text():
    with pytest.raises(pl.LayoutError) as caught:
        pl.Layout.from_string("Et*3|(tt|)29|mL", pp=32)
    lines = str(caught.value).splitlines()
    assert lines[1:3] == ["  Et*3|(tt|)29|mL", "            ^"]
