"""What pictures say beside their boxes: legends, axes, numbers in words."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

import pipeloom as pl
from pipeloom import legend, plot
from pipeloom._core import Drawing
from pipeloom.cli import options

SVG = "{http://www.w3.org/2000/svg}"


def timeline(name, pp=4, m=8, costs=None, **shape):
    return pl.plan(name, pp=pp, num_microbatches=m, **shape).simulate(costs or pl.Costs())


def words(picture):
    return [text.text for text in ET.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("name", "shape", "shades", "numbers"),
    [
        ("1f1b", {}, None, "microbatches"),
        ("interleaved_1f1b", {"vp": 3}, "chunks 0 to 2", "microbatches"),
        ("dualpipe", {}, "replicas 0 to 1", "microbatches"),
        ("chimera", {}, "replicas 0 to 1", "microbatches"),
        ("seq1f1b", {"num_seq_pieces": 2}, None, "microbatch x 2 + piece"),
    ],
)
def test_legends_name_shades_and_numbers_for_what_they_are(name, shape, shades, numbers, tmp_path):
    made = timeline(name, **shape)
    forward = "F forward" if shades is None else f"F forward, {shades}"
    assert {forward, f"numbers: {numbers}"} <= set(words(plot.svg(made)))
    rows = Drawing.predicted(made).legend((None, None, None))
    assert rows[0][0] == forward
    assert len(rows[0][1]) == (1 if shades is None else int(shades[-1]) + 1)
    assert rows[-1] == (f"numbers: {numbers}", [])
    plot.png(made, tmp_path / "legend.png")
    grid = plot.grid(made)
    assert (shades is None) != (f": {shades}" in grid)
    assert ("pieces" in grid) == (f"numbers: {numbers}" in grid)


def test_titles_name_the_microbatch_and_the_piece():
    picture = plot.svg(timeline("seq1f1b", m=6, num_seq_pieces=2))
    assert "1F11: forward of microbatch 5, piece 1 on stage 1" in picture


def test_recomputed_ops_are_in_the_legend_where_there_are_any(tmp_path):
    kept = {"num_microbatches_with_partial_activation_checkpoints": 1}
    made, plain = timeline("1f1b", **kept), timeline("1f1b")
    meaning = Drawing.predicted(made).recomputed
    assert meaning.startswith("recomputed")
    assert meaning in words(plot.svg(made))
    assert meaning not in words(plot.svg(plain))
    assert Drawing.predicted(plain).recomputed == ""
    plot.png(made, tmp_path / "dashes.png")
    marked = [box[8] for box in Drawing.predicted(made).boxes((None, None, None))]
    masks = [made.plan.columns(rank)["recompute"].tolist() for rank in range(4)]
    assert marked == [flag for mask in masks for flag in mask]


@pytest.mark.parametrize(
    ("pp", "m", "costs"),
    [
        (1, 1, pl.Costs()),
        (2, 1, pl.Costs(forward=2, backward=4)),
        (4, 8, pl.Costs(forward=0.37, backward=1.113, latency=0.0137)),
        (4, 8, pl.Costs(forward=1e6, backward=3e6)),
    ],
)
def test_each_mark_of_the_axis_stands_at_its_time(pp, m, costs):
    made = timeline("1f1b", pp=pp, m=m, costs=costs)
    root = ET.fromstring(plot.svg(made))
    [time] = [text for text in root.iter(f"{SVG}text") if text.text == "time"]
    row = [text for text in root.iter(f"{SVG}text") if text.get("y") == time.get("y")]
    marks = {float(t.text): float(t.get("x")) for t in row if t.text != "time"}
    [idle, *_] = [box for box in root.iter(f"{SVG}rect") if box.get("class") == "idle"]
    left, width = float(idle.get("x")), float(idle.get("width"))
    assert len(marks) >= 2
    for at, x in marks.items():
        assert x == pytest.approx(left + width * at / made.makespan, abs=0.02)


def test_narrow_pngs_break_headline_and_legend_into_lines(tmp_path):
    made = timeline("1f1b")
    heights = {}
    for width in (300, 1200):
        path = tmp_path / f"{width}.png"
        plot.png(made, path, width=width, memory=True, critical_path=True)
        heights[width] = int.from_bytes(path.read_bytes()[20:24], "big")
    assert heights[300] > heights[1200] + 8 * 15
    drawing, whole = Drawing.predicted(made), (None, None, None)
    asked = {"memory": True, "critical_path": True, "limits": drawing.limits}
    wide = legend.entries(drawing, whole, **asked, room=200)
    narrow = legend.entries(drawing, whole, **asked, room=20)
    assert [entry.text.split() for entry in narrow] == [entry.text.split() for entry in wide]
    assert all(len(line) <= 20 for entry in narrow for line in entry.text.split("\n"))
    assert {entry.line for entry in wide} == {"", "-", "--"}


@pytest.mark.parametrize("scale", [1e-3, 1e-4, 1, 1e5])
def test_numbers_keep_three_digits_in_any_unit(scale):
    costs = pl.Costs(forward=1.234 * scale, backward=2.345 * scale)
    made = timeline("1f1b", costs=costs)
    [told] = re.findall(r"makespan (\S+)", plot.grid(made))
    assert "e" not in told
    assert float(told) == pytest.approx(made.makespan, rel=5e-3)
    limits = Drawing.predicted(made).limits
    assert [float(text) for _, text, _, _ in limits] == pytest.approx(
        [time for time, _, _, _ in limits], rel=5e-3
    )


@pytest.mark.parametrize("value", [0.0, 4.0, -3.5, 123456789.25, 6.25e15, 0.00647068, 1e-7])
def test_plain_numbers_have_no_exponent(value):
    text = options.number(value)
    assert "e" not in text
    assert float(text) == pytest.approx(value, rel=1e-5)


def test_traces_count_memory_in_its_unit():
    made = timeline("1f1b", costs=pl.Costs(memory_forward=0.1, memory_backward_weight=-0.1))
    counted = {rank: [] for rank in range(4)}
    for event in json.loads(plot.trace(made))["traceEvents"]:
        if event["ph"] == "C":
            counted[event["pid"]].append(event["args"]["memory"])
    for rank, levels in counted.items():
        assert levels
        assert max(levels) == pytest.approx(made.peak_memory(rank), abs=1e-3)


def test_pictures_of_lowered_plans_have_each_transfer_and_outline_the_critical_ones():
    plan = pl.plan("1f1b", pp=4, num_microbatches=8).lower("fifo")
    made = plan.simulate(pl.Costs(latency=5), semantics="single_stream")
    drawing = Drawing.predicted(made, critical_path=True)
    sends = [row for row in drawing.transfers((None, None, None)) if row[4]]
    expected = [
        (rank, made.start(rank)[at], made.end(rank)[at])
        for rank in range(4)
        for at, kind in enumerate(made.plan.columns(rank)["kind"].tolist())
        if kind in (pl.OpKind.SEND_F, pl.OpKind.SEND_B)
    ]
    assert [(rank, start, end) for rank, _, start, end, _ in sends] == expected
    outlined = [
        box
        for box in ET.fromstring(plot.svg(made, critical_path=True)).iter(f"{SVG}rect")
        if box.get("fill") == "none"
    ]
    path = made.critical_path
    moving = [(rank, at) for rank, at in path if made.plan.columns(rank)["kind"][at] > pl.OpKind.W]
    assert moving
    # One more outline is the legend's.
    long = [(rank, at) for rank, at in path if made.end(rank)[at] > made.start(rank)[at]]
    assert len(outlined) == len(long) + 1
