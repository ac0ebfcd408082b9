"""Pictures: what readers of SVG, trace, PNG and text would find in them."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom import cli, plot
from pipeloom._core import Drawing
from pipeloom.testing import costs, plans

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).parents[1]


@st.composite
def timelines(draw: st.DrawFn, *, lowered: bool = False) -> tuple[pl.Plan, pl.Timeline]:
    plan = draw(plans(lowered=lowered and draw(st.booleans())))
    return plan, plan.simulate(draw(costs(plan)))


def compute_ops(plan: pl.Plan, rank: int) -> list[tuple[int, str]]:
    """Position and text of the ops that compute; those of a pair one by one."""
    columns = plan.columns(rank)
    units = columns["microbatch"] * plan.num_seq_pieces + columns["piece"]
    rows = zip(columns["kind"].tolist(), columns["stage"], units, strict=True)
    texts = (f"{stage}{pl.OpKind(kind).name}{unit}" for kind, stage, unit in rows)
    return [(at, text) for at, text in enumerate(texts) if "_" not in text]


@given(timelines(lowered=True))
def test_svg_is_xml_with_a_box_for_each_op_that_takes_time(case):
    plan, timeline = case
    root = ET.fromstring(plot.svg(timeline, memory=True, critical_path=True))
    titles = [box.findtext(f"{SVG}title") for box in root.iter(f"{SVG}rect")]
    found = sorted(title.partition(":")[0] for title in titles if title)
    expected = sorted(op for rank in range(plan.pp) for _, op in compute_ops(plan, rank))
    # Boxes too thin to see are merged; they have no title.
    assert set(found) <= set(expected)
    lengths = {
        op: timeline.end(rank)[at] - timeline.start(rank)[at]
        for rank in range(plan.pp)
        for at, op in compute_ops(plan, rank)
    }
    visible = [op for op in expected if lengths[op] * 600 > 3 * timeline.makespan]
    assert set(visible) <= set(found)
    assert len(found) == len(set(found))


@given(timelines())
def test_boxes_of_a_row_do_not_overlap(case):
    _, timeline = case
    root = ET.fromstring(plot.svg(timeline))
    rows = defaultdict(list)
    for box in root.iter(f"{SVG}rect"):
        if box.find(f"{SVG}title") is not None:
            x, width = float(box.get("x")), float(box.get("width"))
            rows[box.get("y")].append((x, x + width))
    for row in rows.values():
        row.sort()
        for (_, end), (start, _) in itertools.pairwise(row):
            assert end <= start + 0.02


@given(timelines(lowered=True))
def test_trace_slices_nest_and_each_arrow_has_two_ends(case):
    plan, timeline = case
    events = json.loads(plot.trace(timeline, microseconds_per_unit=1))["traceEvents"]
    threads, arrows = defaultdict(list), defaultdict(dict)
    for event in events:
        if event["ph"] == "X":
            thread = threads[event["pid"], event["tid"]]
            thread.append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
    for thread in threads.values():
        open_until: list[float] = []
        for start, end in sorted(thread, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "a slice outlives the one around it"
            open_until.append(end)
    assert sum(map(len, threads.values())) == sum(map(plan.num_ops_of, range(plan.pp)))
    for arrow in arrows.values():
        sent, received = arrow["s"], arrow["f"]
        assert sent["pid"] != received["pid"]
        assert sent["ts"] <= received["ts"]
        around = threads[sent["pid"], sent["tid"]]
        assert any(start <= sent["ts"] <= end for start, end in around)
        assert any(
            start <= received["ts"] <= end
            for start, end in threads[received["pid"], received["tid"]]
        )
    assert len(arrows) == num_messages(plan)


@pytest.mark.skipif(
    shutil.which("trace_processor_shell") is None, reason="trace_processor_shell is not installed"
)
def test_perfettos_trace_processor_reads_the_trace(tmp_path):
    plan = pl.plan("interleaved_1f1b", pp=4, vp=2, num_microbatches=8).lower("streams")
    timeline = plan.simulate(pl.Costs(latency=0.25), semantics="streams")
    (tmp_path / "trace.json").write_text(plot.trace(timeline))
    query = (
        "select (select count(*) from slice) || ' ' || (select count(*) from flow) || ' ' || "
        "(select ifnull(sum(value), 0) from stats where severity = 'error') as found"
    )
    (tmp_path / "query.sql").write_text(query)
    command = ["trace_processor_shell", "-q", tmp_path / "query.sql", tmp_path / "trace.json"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    numbers = re.search(r"(\d+) (\d+) (\d+)", found)
    assert numbers, found
    # Slices that don't nest and flows without two ends are errors there.
    assert [int(number) for number in numbers.groups()] == [plan.num_ops, num_messages(plan), 0]


def num_messages(plan: pl.Plan) -> int:
    """Messages between ranks: one for each stage's unit that crosses, and one back."""
    count = 0
    per_replica = plan.num_stages // plan.num_replicas
    for rank in range(plan.pp):
        for _, op in compute_ops(plan, rank):
            stage, kind = re.match(r"(\d+)([FBIW])", op).groups()
            other = int(stage) + {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
            same_replica = other // per_replica == int(stage) // per_replica and other >= 0
            if kind != "W" and same_replica and plan.stages[other][0] != rank:
                count += 1
    return count


@given(timelines())
def test_full_scale_grids_name_every_op(case):
    plan, timeline = case
    if min(map(float, timeline.end(0) - timeline.start(0))) == 0:
        return
    for rank in range(plan.pp):
        row = plot.grid(timeline, ranks=(rank, rank + 1)).splitlines()[2]
        assert row.startswith(f"rank {rank}")


@given(timelines(), st.integers(40, 120))
def test_grids_keep_to_their_width(case, width):
    plan, timeline = case
    lines = plot.grid(timeline, width=width).splitlines()
    rows = [line for line in lines if "|" in line]
    assert len(rows) == plan.pp + 1
    assert all(len(row) <= width for row in rows)


def test_unit_costs_show_each_op_in_its_column():
    plan = pl.plan("zb_h1", pp=4, num_microbatches=6)
    timeline = plan.simulate(pl.Costs())
    lines = plot.grid(timeline).splitlines()
    for rank in range(4):
        cells = lines[2 + rank].partition("|")[2]
        columns = [cells[at : at + 3].strip() for at in range(0, len(cells), 3)]
        for op, start in zip(plan.ops(rank), timeline.start(rank), strict=True):
            assert columns[int(start)] == op[1:]


def test_pictures_are_the_same_in_every_process(tmp_path):
    script = (
        "import pipeloom as pl; from pipeloom import plot;"
        "t = pl.plan('dualpipe_v', pp=4, num_microbatches=10).simulate(pl.Costs());"
        "print(plot.svg(t, memory=True, critical_path=True) + plot.trace(t) + plot.grid(t))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]


PICTURES = re.compile(
    r"^\*?(?:Made by )?`?(pipeloom \S+ .*--svg (?:docs/)?(\S+?\.svg))`?\.?\*?$", re.M
)


def pictures() -> dict[str, str]:
    """The commands in README and docs that make the pictures in docs/, by file name."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [match for page in pages for match in PICTURES.findall(page.read_text())]
    here = {path.name for path in (ROOT / "docs").glob("*.svg")}
    return {name: command for command, name in found if name in here}


def test_each_picture_in_the_documentation_has_its_command():
    assert set(pictures()) == {path.name for path in (ROOT / "docs").glob("*.svg")}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for shown in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / shown).is_file(), f"{page.name} shows {shown}"


@pytest.mark.parametrize("name", sorted(pictures()))
def test_pictures_in_the_documentation_are_drawn_by_their_commands(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert cli.main(shlex.split(pictures()[name])[1:]) == 0
    [drawn] = tmp_path.rglob(name)
    assert drawn.read_text() == (ROOT / "docs" / name).read_text()


def test_legends_and_headlines_keep_inside_the_picture():
    timeline = pl.plan("zb_v", pp=16, num_microbatches=32).lower("streams")
    timeline = timeline.simulate(pl.Costs(latency=0.1))
    root = ET.fromstring(plot.svg(timeline, width=500, memory=True, critical_path=True))
    texts = [t for t in root.iter(f"{SVG}text") if t.get("class") in ("head", "s")]
    assert len({t.get("y") for t in texts if t.get("class") == "s"}) > 1
    for text in texts:
        width = len(text.text) * (7 if text.get("class") == "head" else 5)
        assert float(text.get("x")) + width < 500
        assert float(text.get("y")) < float(root.get("height"))


def test_stacked_plans_share_one_scale():
    made = [pl.plan(n, pp=2, num_microbatches=4).simulate(pl.Costs()) for n in ("gpipe", "zb_h1")]
    made.append(made[0].plan.simulate(pl.Costs(forward=1.5)))  # other ticks, same unit
    root = ET.fromstring(plot.stacked(made, memory=True))
    scales = []
    for group, timeline in zip(root.iter(f"{SVG}g"), made, strict=True):
        [idle, *_] = [box for box in group.iter(f"{SVG}rect") if box.get("class") == "idle"]
        scales.append((float(idle.get("width")) / timeline.makespan, idle.get("x")))
    assert len({x for _, x in scales}) == 1
    assert scales[1][0] == pytest.approx(scales[0][0], rel=1e-3)
    assert scales[2][0] == pytest.approx(scales[0][0], rel=1e-3)
    # Each picture's colours are its own: classes are not shared.
    styles = [style.text for style in root.iter(f"{SVG}style")][1:]
    classes = [set(re.findall(r"\.(p\d\w+)\{", style)) for style in styles]
    assert all(classes)
    assert not classes[0] & classes[1]


def test_grids_mark_the_critical_path():
    timeline = pl.plan("1f1b", pp=3, num_microbatches=3).simulate(pl.Costs())
    rows = plot.grid(timeline, critical_path=True).splitlines()[2:5]
    marked = {
        (rank, word.rstrip("-!"))
        for rank, row in enumerate(rows)
        for word in row.partition("|")[2].split()
        if "!" in word
    }
    expected = {(rank, timeline.plan.ops(rank)[at][1:]) for rank, at in timeline.critical_path}
    assert marked == expected
    colored = plot.grid(timeline, critical_path=True, color=True, width=40)
    assert colored.count("\x1b[1;4;38") == len(expected)


def test_notebooks_show_plans_and_timelines():
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    timeline = plan.simulate(pl.Costs(forward=2))
    assert plan._repr_svg_() == plot.svg(plan.simulate(pl.Costs()))
    assert timeline._repr_svg_() == plot.svg(timeline, memory=True)
    assert pl.plan("1f1b", pp=2, num_microbatches=1_000_000)._repr_svg_() is None


def test_png_is_written_for_any_part(tmp_path):
    timeline = pl.plan("dualpipe_v", pp=2, num_microbatches=6).simulate(pl.Costs())
    parts = {
        "all": {"memory": True, "critical_path": True},
        "part": {"window": (3, 9), "ranks": (1, 2)},
    }
    for name, part in parts.items():
        path = tmp_path / f"{name}.png"
        plot.png(timeline, path, width=640, **part)
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(head[16:20], "big") == 640


@given(timelines())
def test_waits_and_work_fill_the_makespan(case):
    plan, timeline = case
    drawing = Drawing.predicted(timeline)
    idle = [0.0] * plan.pp
    for rank, start, end, _, _ in drawing.waits((None, None, None)):
        idle[rank] += end - start
    for rank in range(plan.pp):
        share = idle[rank] / timeline.makespan if timeline.makespan else 0
        assert share == pytest.approx(timeline.bubble(rank), abs=1e-9)
        assert drawing.idle_percent[rank] == pytest.approx(100 * share, abs=0.5001)


def test_pictures_say_who_waits_for_what_and_what_could_be_gained():
    timeline = pl.plan("1f1b", pp=4, num_microbatches=8).simulate(pl.Costs())
    picture = plot.svg(timeline, memory=True, width=1400)
    root = ET.fromstring(picture)
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("waits for B0 of rank 1") == 1
    assert words.count("27% idle") == 4
    assert {"peak 4", "peak 3", "peak 2", "peak 1"} <= set(words)
    assert "memory, all ranks to one scale; a forward adds 1" in words
    # The busiest rank works for 24; a bound on 1F1B's orders is its makespan.
    assert {"24", "33"} <= set(words)
    assert "work of the busiest rank: no schedule is faster" in words
    assert "lower bound: no order of these ops is faster" in words
    # A window before both has neither line, nor their meanings.
    part = ET.fromstring(plot.svg(timeline, window=(0, 20)))
    assert not any("is faster" in (text.text or "") for text in part.iter(f"{SVG}text"))
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "rank 0 idle, 4 to 10: waits for B0 of rank 1" in titles


def test_a_png_of_several_plans_has_all_of_them(tmp_path, refused):
    made = [
        pl.plan(name, pp=2, num_microbatches=4).simulate(pl.Costs()) for name in ("1f1b", "zb_h1")
    ]
    height = {}
    for name, what in (("one", made[0]), ("both", made)):
        path = tmp_path / f"{name}.png"
        plot.png(what, path, memory=True, critical_path=True)
        height[name] = int.from_bytes(path.read_bytes()[20:24], "big")
    assert height["both"] > 1.9 * height["one"]
    # A run knows neither memory nor critical path; its plan beside it does.
    run = plot.measured(made[0].plan, *([c(r) * 1.0 for r in (0, 1)] for c in times(made[0])))
    plot.png([made[0], run], tmp_path / "run.png", memory=True, critical_path=True)
    window = {"window": (0, 1)}
    refused(pl.ConfigError, lambda: plot.png(made, tmp_path / "x.png", **window), "drawn whole")
    refused(pl.ConfigError, lambda: plot.png([], tmp_path / "x.png"), "there must be one")


def times(timeline):
    return timeline.start, timeline.end


def test_grids_draw_memory_below_each_rank(refused):
    timeline = pl.plan("1f1b", pp=2, num_microbatches=3).simulate(pl.Costs())
    lines = plot.grid(timeline, memory=True).splitlines()
    # One character a time unit would be 3 wide: F0 takes 0 to 1 and leaves 1.
    assert lines[3].startswith("peak 2 |000111222222")
    assert lines[5].startswith("peak 1 |000000111111000")
    assert lines[-1] == "memory, all ranks to one scale; a forward adds 1; digits are memory"
    bars = plot.grid(timeline, memory=True, color=True).splitlines()
    assert bars[3].startswith("peak 2 |   ▄▄▄██████")
    run = plot.measured(timeline.plan, *([c(r) * 1.0 for r in (0, 1)] for c in times(timeline)))
    refused(pl.ConfigError, lambda: plot.grid(run, memory=True), "knows no memory")


def test_loss_curves_are_drawn(tmp_path, refused):
    path = tmp_path / "loss.svg"
    plot.loss_curve({"train": ([0, 1, 2], [3.0, 2.0, 1.5]), "valid": ([2], [1.7])}, path)
    assert ET.parse(path).getroot().tag == f"{SVG}svg"
    refused(
        pl.ConfigError,
        lambda: plot.loss_curve({"train": ([0, 1], [3.0])}, path),
        "2 steps",
        "1 losses",
    )


def test_pictures_without_matplotlib_say_what_to_install(monkeypatch, tmp_path, refused):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    timeline = pl.plan("1f1b", pp=2, num_microbatches=2).simulate(pl.Costs())
    refused(pl.ConfigError, lambda: plot.png(timeline, tmp_path / "x.png"), "pipeloom[plot]")


@pytest.mark.parametrize(
    ("start", "end", "word"),
    [
        ([[0.0], [0.0, 1.0]], [[1.0], [1.0, 2.0]], "rank 0 has 2 ops"),
        ([[0.0, 1.0]], [[1.0, 2.0]], "pp=2"),
        ([[0.0, 5.0], [1.0, 2.0]], [[1.0, 3.0], [2.0, 3.0]], "before it starts"),
    ],
)
def test_measured_times_must_fit(start, end, word, refused):
    plan = pl.plan("1f1b", pp=2, num_microbatches=1)
    refused(pl.ConfigError, lambda: plot.measured(plan, start, end), word)


@settings(max_examples=20)
@given(timelines())
def test_measured_drawings_are_those_of_the_same_times(case):
    plan, timeline = case
    ranks = range(plan.pp)
    drawing = plot.measured(
        plan, [timeline.start(r) for r in ranks], [timeline.end(r) for r in ranks]
    )
    rows = [line for line in plot.grid(drawing).splitlines() if line.startswith("rank")]
    assert rows == [line for line in plot.grid(timeline).splitlines() if line.startswith("rank")]
