"""The interactive page, in a headless Chromium: what it draws, tells and does."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

import pipeloom as pl
from pipeloom import page, plot

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def browse(tmp_path, html, script):
    """What `script`, run in the page, leaves in `found`."""
    probe = (
        f"<script>const found = {{}};\n{script}\ndocument.title = JSON.stringify(found);</script>"
    )
    file = tmp_path / "page.html"
    file.write_text(html.replace("</body>", f"{probe}</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--window-size=1200,800", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--dump-dom", file.as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", page, re.DOTALL)[1]
    for name, character in (("quot", '"'), ("lt", "<"), ("gt", ">"), ("amp", "&")):
        title = title.replace(f"&{name};", character)
    return json.loads(title)


def timeline(name="1f1b", m=4, pp=4, costs=None, style=None, **shape):
    plan = pl.plan(name, pp=pp, num_microbatches=m, **shape)
    plan = plan if style is None else plan.lower(style)
    return plan.simulate(costs or pl.Costs())


# The centre of an op on the canvas, and an event there.
HELPERS = """
const [panel] = panels;
function place(name, of = panel) {
  for (let rank = 0; rank < of.plan.ranks.length; rank++) {
    const lane = of.plan.ranks[rank];
    for (let at = 0; at < lane.kind.length; at++)
      if (of.plan.opName(rank, at) === name)
        return [
          of.x((lane.start[at] + lane.end[at]) / 2),
          (rank - of.first) * of.pitch + of.row / 4,
        ];
  }
}
function send(type, [x, y], more = {}, of = panel) {
  const box = of.canvas.getBoundingClientRect();
  const Kind = type === "wheel" ? WheelEvent : PointerEvent;
  const there = { clientX: box.x + x, clientY: box.y + y, cancelable: true };
  of.canvas.dispatchEvent(new Kind(type, { ...there, ...more }));
  drawNow();
}
"""


@needs_chromium
def test_hover_tells_what_an_op_waited_for(tmp_path):
    found = browse(
        tmp_path,
        plot.html(timeline(costs=pl.Costs(latency=0.5)), critical_path=True),
        HELPERS
        + """
for (const name of ["0F0", "1F0", "3B0", "0B0", "0F1"]) {
  send("pointermove", place(name));
  found[name] = document.getElementById("tip").textContent.split("\\n");
}
send("pointermove", [5, 5]);
found.hidden = document.getElementById("tip").style.display;
""",
    )
    assert found["0F0"][0] == "0F0: forward of microbatch 0, stage 0, rank 0"
    assert found["0F0"][1] == "start 0, end 1, takes 1"
    waited = (
        "rank idle for 1.5: waited for 0F0 from rank 0, which ended at 1 and took 0.5 to arrive"
    )
    assert waited in found["1F0"]
    assert any(line.startswith("no wait: last needed 3F0") for line in found["3B0"])
    assert any("waited for 1B0 from rank 1" in line for line in found["0B0"])
    assert "no wait: last needed 0F0 before it on this rank" in found["0F1"]
    assert "on the critical path" in found["1F0"]
    assert found["hidden"] == "none"


@needs_chromium
def test_idle_places_tell_what_they_wait_for(tmp_path):
    found = browse(
        tmp_path,
        plot.html(timeline(m=8), ranks=(1, 3)),
        HELPERS
        + """
const at = (time, rank) => [panel.x(time), (rank - panel.first) * panel.pitch + panel.row / 2];
for (const [name, time, rank] of [["first", 0.5, 1], ["long", 5, 1], ["done", 32, 2]]) {
  send("pointermove", at(time, rank));
  found[name] = document.getElementById("tip").textContent;
}
found.rows = [panel.first, panel.count, panel.canvas.clientHeight];
send("pointermove", at(0.5, 3));
found.outside = document.getElementById("tip").style.display;
found.idle = panel.plan.facts.idle;
""",
    )
    assert found["first"] == "rank 1 idle from 0 to 1: waits for 0F0 from rank 0 before 1F0"
    assert found["long"] == "rank 1 idle from 4 to 8: waits for 2B0 from rank 2 before 1B0"
    assert found["done"] == "rank 2 idle from 29 to 33: done"
    assert found["rows"][:2] == [1, 2]
    assert found["rows"][2] < 100
    assert found["outside"] == "none"
    assert found["idle"] == "27.3% 27.3% 27.3% 27.3%"


@needs_chromium
def test_zoom_pan_and_follow(tmp_path):
    found = browse(
        tmp_path,
        plot.html(timeline("interleaved_1f1b", m=8, vp=2)),
        HELPERS
        + """
const middle = place("0F3").map(Math.round), around = panel.time(middle[0]);
send("wheel", middle, { deltaY: -400 });
found.zoomed = (view.to - view.from) / (whole.to - whole.from);
found.fixed = Math.abs(panel.time(middle[0]) - around);
const before = view.from;
send("pointerdown", [600, 10]); send("pointermove", [500, 10]); send("pointerup", [500, 10]);
found.panned = view.from - before;
document.getElementById("all").click();
found.whole = [view.from, view.to];
send("pointerdown", place("0F3")); send("pointerup", place("0F3"));
found.chosen = options.microbatch;
found.way = panel.way.length;
dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
found.cleared = options.microbatch;
""",
    )
    assert found["zoomed"] < 0.5
    assert found["fixed"] < 1e-6
    assert found["panned"] > 0
    assert found["whole"] == [0, 57]
    # Of each of 8 stages, a forward and a backward.
    assert (found["chosen"], found["way"], found["cleared"]) == (3, 16, None)


@needs_chromium
def test_several_plans_stand_side_by_side_with_their_numbers(tmp_path):
    made = {name: timeline(name, m=8) for name in ("1f1b", "zb_h1", "dualpipe_v")}
    found = browse(
        tmp_path,
        plot.html(made, memory=True),
        """
for (const panel of panels)
  found[panel.plan.name] = [panel.plan.facts, panel.boxes, panel.hasMemory];
""",
    )
    for name, one in made.items():
        facts, boxes, has_memory = found[name]
        assert facts["makespan"] == f"{one.makespan:g}"
        assert facts["bubble"] == f"{one.bubble_ratio:.1%}"
        assert facts["gap to the lower bound"] == f"{one.gap:.1%}"
        assert facts["peak memory"].split() == [f"{one.peak_memory(r):g}" for r in range(4)]
        assert boxes == one.plan.num_ops
        assert has_memory


@needs_chromium
def test_a_run_tells_how_it_differs_from_its_plan(tmp_path):
    planned = timeline(pp=2, m=2)
    start = [planned.start(r) * 1.0 for r in range(2)]
    end = [planned.end(r) + 0.25 for r in range(2)]
    start[1][0] += 0.5
    run = plot.measured(planned.plan, start, end)
    found = browse(
        tmp_path,
        plot.html({"plan": planned, "run": run}, paired=True),
        HELPERS
        + """
send("pointermove", place("1F0", panels[1]), {}, panels[1]);
found.tip = document.getElementById("tip").textContent.split("\\n").at(-1);
""",
    )
    assert found["tip"] == "plan: 1 to 2; here it starts +0.5, takes -0.25"


@needs_chromium
def test_a_hundred_thousand_ops_draw_in_a_moment(tmp_path):
    made = timeline(pp=16, m=3200, style="streams", costs=pl.Costs(latency=0.25))
    assert made.plan.num_ops > 100_000
    begin = time.perf_counter()
    html = plot.html(made, memory=True)
    assert len(html) < 20_000_000
    assert time.perf_counter() - begin < 60
    found = browse(
        tmp_path,
        html,
        """
found.ms = Infinity;
for (let i = 0; i < 5; i++) {
  const from = performance.now();
  drawNow();
  found.ms = Math.min(found.ms, performance.now() - from);
}
found.boxes = panels[0].boxes;
""",
    )
    assert 1000 < found["boxes"] < 60_000  # no more than pixels can show
    assert found["ms"] < 5000


@needs_chromium
def test_keys_zoom_and_pan(tmp_path):
    found = browse(
        tmp_path,
        plot.html(timeline(m=8)),
        """
const press = (key) => { dispatchEvent(new KeyboardEvent("keydown", { key })); drawNow(); };
press("+"); press("+");
found.zoomed = (view.to - view.from) / (whole.to - whole.from);
const before = view.from;
press("ArrowRight");
found.right = view.from - before;
press("ArrowLeft"); press("ArrowLeft");
found.left = view.from - before;
press("-"); press("0");
found.whole = [view.from, view.to];
""",
    )
    assert found["zoomed"] == pytest.approx(0.49)
    assert found["right"] > 0 > found["left"]
    assert found["whole"] == [0, 33]


@needs_chromium
def test_memory_is_drawn_in_steps_and_idle_time_ends_with_the_plan(tmp_path):
    """A pair adds and frees at once: what follows is level, not a slope to the next step."""
    plans = {
        "pairs": timeline("dualpipe_v", m=8),
        "long": timeline("1f1b", m=16, costs=pl.Costs(latency=1)),
    }
    found = browse(
        tmp_path,
        plot.html(plans, memory=True),
        """
found.slopes = 0;
const Pen = CanvasRenderingContext2D.prototype, { lineTo, moveTo, fillRect } = Pen;
let last = null;
Pen.moveTo = function (x, y) { last = [x, y]; return moveTo.call(this, x, y); };
Pen.lineTo = function (x, y) {
  if (Math.abs(x - last[0]) > 0.5 && Math.abs(y - last[1]) > 0.01) found.slopes++;
  last = [x, y];
  return lineTo.call(this, x, y);
};
found.idle = [];
Pen.fillRect = function (x, y, width, height) {
  if (this.fillStyle === panels[0].inks.idle) found.idle.push(x + width);
  return fillRect.call(this, x, y, width, height);
};
drawNow();
found.ends = panels.map((panel) => panel.x(panel.plan.end));
""",
    )
    assert found["slopes"] == 0
    assert found["idle"] == pytest.approx([end for end in found["ends"] for _ in range(4)])


@needs_chromium
@pytest.mark.parametrize(
    ("name", "m", "style", "shape"),
    [
        ("dualpipe_v", 10, None, {}),
        ("zb_h1", 8, "streams", {}),
        ("seq1f1b", 4, "fifo", {"num_seq_pieces": 3}),
        ("chimera", 8, None, {}),
    ],
)
def test_every_op_tells_its_times_and_how_long_its_rank_idled(tmp_path, name, m, style, shape):
    costs = pl.Costs(forward=1.25, backward_weight=0.75, latency=0.5)
    made = timeline(name, m=m, costs=costs, style=style, **shape)
    script = """
const told = (lane, rank) => Array.from(lane.kind, (_, at) => panel.plan.describe(rank, at));
found.told = panel.plan.ranks.map(told);
"""
    found = browse(tmp_path, plot.html(made), HELPERS + script)
    for rank, told in enumerate(found["told"]):
        starts, ends = made.start(rank).tolist(), made.end(rank).tolist()
        kinds = made.plan.columns(rank)["kind"].tolist()
        free = before = 0.0
        for kind, start, end, lines in zip(kinds, starts, ends, told, strict=True):
            assert lines[1].startswith(f"start {start:g}, end {end:g}, takes {end - start:g}")
            if kind > pl.OpKind.W:
                continue
            idle = re.findall(r"rank idle for (\S+):", "".join(lines))
            # The second op of a pair starts with the first, which has counted the wait.
            expected = start - free if start >= free else start - before
            assert idle == ([f"{expected:g}"] if expected > 0 else []), lines
            before, free = (free, end) if start >= free else (before, max(free, end))


@needs_chromium
def test_the_page_names_replicas_and_pieces(tmp_path):
    plans = {
        "replicas": timeline("dualpipe", m=8),
        "pieces": timeline("seq1f1b", m=4, num_seq_pieces=2),
    }
    found = browse(
        tmp_path,
        plot.html(plans),
        HELPERS
        + """
found.legend = document.getElementById("legend").textContent;
found.facts = panels[1].plan.facts;
found.told = panels[1].plan.describe(1, 3)[0];
""",
    )
    assert "F forward, replicas 0 to 1" in found["legend"]
    assert "chunks" not in found["legend"]
    assert found["facts"]["numbers"] == "microbatch x 2 + piece"
    assert found["facts"]["lower bound"] == "33"
    assert re.fullmatch(
        r"\d[FB]\d+: \w+ of microbatch \d, piece \d, stage 1, rank 1", found["told"]
    )


def test_words_of_the_page_have_contrast():
    template = (Path(page.__file__).parent / "page.html").read_text()
    schemes = [
        dict(re.findall(r"--(\w+): (#\w+)", s)) for s in re.findall(r":root \{.*?\}", template)
    ]
    assert len(schemes) == 2

    def luminance(color):
        digits = color.removeprefix("#")
        digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
        channels = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for scheme in schemes:
        for ink in ("text", "edge"):
            dark, light = sorted((luminance(scheme[ink]), luminance(scheme["paper"])))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (scheme, ink)


def test_the_page_loads_nothing_and_holds_any_name():
    plan = pl.plan("1f1b", pp=2, num_microbatches=2)
    html = plot.html({"</script><b>&@DATA@": plan.simulate(pl.Costs())})
    assert html.count("</script>") == 2
    assert "<b>" not in html
    assert not re.search(r"""(?:src|href)\s*=|https?://|@import|\bfetch\(""", html)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1]
    assert json.loads(data)["plans"][0]["name"] == "</script><b>&@DATA@"
