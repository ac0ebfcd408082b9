// Draws plans with times on canvases that share one axis of time. Data: see render/page.rs.

const page = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const LEFT = 78, AXIS = 22, GAP = 5, STRIP = 20, WIRE = 5;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const INKS = ["text", "rule", "idle", "memory", "edge", "mark"];

const plans = page.plans.map((entry) => new Plan(entry));
const whole = {
  from: Math.min(...plans.map((plan) => plan.begin / plan.unit)),
  to: Math.max(...plans.map((plan) => plan.end / plan.unit)),
};
if (!(whole.to > whole.from)) whole.to = whole.from + 1;
const rows = page.ranks ?? [0, Infinity];
const view = { from: page.view[0] ?? whole.from, to: page.view[1] ?? whole.to };
const options = { microbatch: null, critical: page.critical, memory: page.memory };

/** A plan on a canvas. */
class Panel {
  constructor(plan) {
    this.plan = plan;
    const section = document.createElement("section");
    const head = document.createElement("h2");
    head.textContent = plan.name;
    const list = document.createElement("dl");
    for (const [name, value] of Object.entries(plan.facts)) {
      const pair = document.createElement("div");
      pair.append(Object.assign(document.createElement("dt"), { textContent: name }),
        Object.assign(document.createElement("dd"), { textContent: value }));
      list.append(pair);
    }
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("aria-label", `ranks of ${plan.name} over time`);
    section.append(head, list, this.canvas);
    byId("plans").append(section);
    this.listen();
  }

  get first() { return Math.min(rows[0], this.plan.ranks.length - 1); }
  get count() { return Math.min(rows[1], this.plan.ranks.length) - this.first; }
  get row() { return this.count > 32 ? 12 : 22; }
  get hasMemory() { return options.memory && this.plan.mostMemory > 0; }
  get pitch() { return this.row + GAP + (this.plan.wires ? WIRE : 0) + (this.hasMemory ? STRIP : 0); }
  x(ticks) { return LEFT + ((ticks / this.plan.unit - view.from) / (view.to - view.from)) * this.width; }
  time(x) { return view.from + ((x - LEFT) / this.width) * (view.to - view.from); }

  /** The stretch of the row that the plan's time takes, in pixels. */
  get stretch() {
    const left = Math.max(this.x(this.plan.begin), LEFT), right = Math.min(this.x(this.plan.end), LEFT + this.width);
    return [left, Math.max(right - left, 0)];
  }

  get height() { return this.count * this.pitch + AXIS; }

  draw() {
    // Asked for once a frame: each question may lay the page out again.
    this.width = this.canvas.clientWidth - LEFT - 4;
    this.inks = Object.fromEntries(INKS.map((name) => [name, css(`--${name}`)]));
    const height = this.height, scale = devicePixelRatio || 1;
    this.canvas.width = this.canvas.clientWidth * scale;
    this.canvas.height = height * scale;
    const pen = (this.pen = this.canvas.getContext("2d"));
    pen.scale(scale, scale);
    pen.font = "11px Helvetica, Arial, sans-serif";
    pen.textBaseline = "middle";
    this.way = [];
    this.boxes = 0;
    for (let row = 0; row < this.count; row++) this.lane(this.plan.ranks[this.first + row], this.first + row);
    if (this.way.length > 1) this.follow();
    this.axis(height - AXIS);
  }

  lane(lane, rank) {
    const { pen, plan, row } = this, y = (rank - this.first) * this.pitch, right = LEFT + this.width;
    pen.globalAlpha = 1;
    pen.fillStyle = this.inks.text;
    pen.textAlign = "right";
    pen.fillText(`rank ${rank}`, LEFT - 6, y + row / 2);
    pen.fillStyle = this.inks.idle;
    const [idleFrom, idleFor] = this.stretch;
    pen.fillRect(idleFrom, y, idleFor, row);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, y - 1, this.width, this.pitch + 1);
    pen.clip();
    pen.textAlign = "center";
    if (plan.wires) this.transfers(lane, y + row + 1);
    const places = plan.compute[rank], begin = view.from * plan.unit;
    let drawnTo = -Infinity;
    for (let i = firstAfter(places.length, (p) => lane.end[places[p]] >= begin); i < places.length; i++) {
      const at = places[i], left = this.x(lane.start[at]), end = this.x(lane.end[at]);
      if (left > right) break;
      const kind = plan.kinds[lane.kind[at]], chunk = plan.chunkOfStage[lane.stage[at]];
      const chosen = this.choose(lane, at);
      pen.fillStyle = kind.fill[chunk];
      if (chosen) this.way.push([lane.start[at], (left + end) / 2, y + row / 2]);
      // Pixels that a box has taken already show nothing new.
      if (end < drawnTo + 0.4 && !chosen && lane.half[at] !== 2) continue;
      drawnTo = Math.max(drawnTo, end);
      this.boxes++;
      const half = lane.half[at], top = half === 2 ? y + row / 2 : y, high = half ? row / 2 : row;
      const gap = end - left > 4 ? 0.7 : 0;
      pen.fillRect(left, top, Math.max(end - left - gap, 0.5), high - (half ? 0.5 : 0));
      const label = String(lane.microbatch[at]);
      if (end - left > 7 * label.length + 3 && high > 9) {
        pen.fillStyle = kind.ink[chunk];
        pen.fillText(label, (left + end) / 2, top + high / 2 + 0.5);
      }
      if (lane.recompute[at] && end - left > 6) {
        pen.fillStyle = kind.ink[chunk];
        for (let dot = left + 2; dot < end - 4; dot += 5) pen.fillRect(dot, top + high - 3, 3, 1.5);
      }
      if (options.critical && plan.criticalOf.has(rank * 1e9 + at)) {
        pen.globalAlpha = 1;
        pen.strokeStyle = this.inks.mark;
        pen.lineWidth = 2;
        pen.strokeRect(left + 1, y + 1, Math.max(end - left - 2, 0.5), row - 2);
      }
    }
    pen.globalAlpha = 1;
    if (this.hasMemory && lane.memory) this.memory(lane, y + row + (plan.wires ? WIRE : 0) + 2);
    pen.restore();
  }

  /** Whether the op is of the chosen microbatch; if another is chosen, what is drawn is pale. */
  choose(lane, at) {
    const chosen = options.microbatch === lane.microbatch[at];
    this.pen.globalAlpha = options.microbatch === null || chosen ? 1 : 0.18;
    return chosen;
  }

  transfers(lane, top) {
    for (let at = 0; at < lane.kind.length; at++) {
      const kind = this.plan.kinds[lane.kind[at]];
      if (kind.computes || lane.end[at] <= lane.start[at]) continue;
      const left = this.x(lane.start[at]), end = this.x(lane.end[at]);
      if (end < LEFT || left > LEFT + this.width) continue;
      this.choose(lane, at);
      this.pen.fillStyle = kind.fill[this.plan.chunkOfStage[lane.stage[at]]];
      this.pen.fillRect(left, top, Math.max(end - left, 0.5), WIRE - 1);
    }
  }

  memory(lane, top) {
    const { pen } = this, bottom = top + STRIP - 2;
    const high = (level) => bottom - ((STRIP - 3) * Math.max(level, 0)) / this.plan.mostMemory;
    const right = LEFT + this.width, ends = Math.min(this.x(this.plan.end), right);
    let x = Math.max(this.x(this.plan.begin), LEFT);
    let i = firstAfter(lane.memory.length, (step) => this.x(lane.memoryAt[step]) >= x);
    let level = i > 0 ? lane.memory[i - 1] : lane.baseMemory;
    pen.beginPath();
    pen.moveTo(x, bottom);
    pen.lineTo(x, high(level));
    while (i < lane.memory.length && (x = this.x(lane.memoryAt[i])) <= right) {
      pen.lineTo(x, high(level));
      // Of steps within half a pixel the highest shows.
      let most = (level = lane.memory[i++]);
      for (; i < lane.memory.length && this.x(lane.memoryAt[i]) < x + 0.5; i++)
        most = Math.max(most, (level = lane.memory[i]));
      pen.lineTo(x, high(most));
      pen.lineTo(x, high(level));
    }
    pen.lineTo(ends, high(level));
    pen.lineTo(ends, bottom);
    pen.fillStyle = this.inks.memory;
    pen.fill();
    pen.strokeStyle = this.inks.edge;
    pen.lineWidth = 1;
    pen.stroke();
    pen.restore();
    pen.fillStyle = this.inks.edge;
    pen.textAlign = "right";
    pen.fillText(`peak ${text(lane.peakMemory / this.plan.memoryUnit)}`, LEFT - 6, top + STRIP / 2 - 1);
    pen.save();
  }

  /** A line through the ops of the chosen microbatch, in the order of time. */
  follow() {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width, this.count * this.pitch);
    pen.clip();
    pen.beginPath();
    this.way.sort((a, b) => a[0] - b[0]).forEach(([, x, y]) => pen.lineTo(x, y));
    pen.strokeStyle = this.inks.mark;
    pen.setLineDash([4, 3]);
    pen.lineWidth = 1.2;
    pen.stroke();
    pen.restore();
  }

  axis(y) {
    const { pen } = this, length = view.to - view.from;
    const rough = length / Math.max(2, this.width / 90), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    pen.strokeStyle = this.inks.rule;
    pen.fillStyle = this.inks.text;
    pen.lineWidth = 1;
    pen.textAlign = "center";
    for (let mark = Math.ceil(view.from / step) * step; mark <= view.to; mark += step) {
      const x = LEFT + ((mark - view.from) / length) * this.width;
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(x, y + 4);
      pen.stroke();
      const name = String(+mark.toPrecision(10)), half = pen.measureText(name).width / 2;
      pen.fillText(name, Math.min(x, LEFT + this.width + 4 - half), y + 12);
    }
  }

  /** The op at a place of the canvas: [rank, position], or null. */
  opAt(x, y) {
    const row = Math.floor(y / this.pitch), inRow = y - row * this.pitch, rank = this.first + row;
    const lane = row < this.count ? this.plan.ranks[rank] : null;
    if (!lane || x < LEFT) return null;
    const ticks = this.time(x) * this.plan.unit, wire = inRow > this.row;
    for (let at = 0; at < lane.kind.length; at++) {
      if (ticks < lane.start[at] || ticks >= lane.end[at]) continue;
      if (this.plan.kinds[lane.kind[at]].computes === wire || inRow > this.row + WIRE) continue;
      const half = lane.half[at];
      if (!half || (half === 1) === inRow < this.row / 2) return [rank, at];
    }
    return null;
  }

  /** What an idle place of a row tells, or null. */
  idleAt(x, y) {
    const row = Math.floor(y / this.pitch), inRow = y - row * this.pitch;
    if (row < 0 || row >= this.count || x < LEFT || inRow > this.row) return null;
    return this.plan.describeIdle(this.first + row, this.time(x) * this.plan.unit);
  }

  describe(op) {
    const lines = this.plan.describe(...op);
    const lane = this.plan.ranks[op[0]], at = op[1];
    for (const other of page.paired ? plans : []) {
      if (other === this.plan || !this.plan.kinds[lane.kind[at]].computes) continue;
      const found = other.opOf.get(other.key(lane.kind[at], lane.stage[at], lane.microbatch[at]));
      if (!found) continue;
      const [start, end] = [other.ranks[found[0]].start[found[1]], other.ranks[found[0]].end[found[1]]];
      const signed = (value) => (value < 0 ? "" : "+") + text(value);
      const own = (ticks) => ticks / this.plan.unit, its = (ticks) => ticks / other.unit;
      lines.push(`${other.name}: ${text(its(start))} to ${text(its(end))}; here it starts ${signed(own(lane.start[at]) - its(start))}, ` +
        `takes ${signed(own(lane.end[at] - lane.start[at]) - its(end - start))}`);
    }
    return lines.join("\n");
  }

  listen() {
    const canvas = this.canvas;
    let dragged = null;
    canvas.addEventListener("wheel", (event) => {
      if (event.offsetX < LEFT) return; // the page scrolls
      event.preventDefault();
      const by = event.deltaY || event.deltaX;
      if (event.shiftKey) pan((by / this.width) * (view.to - view.from));
      else zoom(Math.exp(by * 0.002), this.time(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      dragged = { x: event.offsetX, moved: false };
      if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (dragged && Math.abs(event.offsetX - dragged.x) > 2) {
        pan(((dragged.x - event.offsetX) / this.width) * (view.to - view.from));
        dragged = { x: event.offsetX, moved: true };
      }
      this.hover(event);
    });
    canvas.addEventListener("pointerup", (event) => {
      const op = dragged && !dragged.moved ? this.opAt(event.offsetX, event.offsetY) : null;
      if (dragged && !dragged.moved) {
        const microbatch = op ? this.plan.ranks[op[0]].microbatch[op[1]] : null;
        choose(microbatch === options.microbatch ? null : microbatch);
      }
      dragged = null;
    });
    canvas.addEventListener("pointerleave", () => (byId("tip").style.display = "none"));
  }

  hover(event) {
    const tip = byId("tip"), op = this.opAt(event.offsetX, event.offsetY);
    const told = op ? this.describe(op) : this.idleAt(event.offsetX, event.offsetY);
    tip.style.display = told ? "block" : "none";
    if (!told) return;
    tip.textContent = told;
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(0, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8))}px`;
  }
}

function pan(by) {
  const length = view.to - view.from;
  view.from = Math.max(whole.from - length / 2, Math.min(view.from + by, whole.to - length / 2));
  view.to = view.from + length;
  redraw();
}

function zoom(factor, around) {
  const length = Math.min(Math.max((view.to - view.from) * factor, (whole.to - whole.from) * 1e-7), whole.to - whole.from);
  const share = (around - view.from) / (view.to - view.from);
  view.from = Math.max(whole.from, Math.min(around - share * length, whole.to - length));
  view.to = view.from + length;
  redraw();
}

function choose(microbatch) {
  options.microbatch = microbatch;
  byId("microbatch").value = microbatch ?? "";
  redraw();
}

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(drawNow);
}
function drawNow() {
  asked = false;
  // All heights first: they decide whether there is a scroll bar, and so the width.
  for (const panel of panels) panel.canvas.style.height = `${panel.height}px`;
  panels.forEach((panel) => panel.draw());
}

function legend() {
  const used = new Set();
  for (const plan of plans) for (const lane of plan.ranks) for (const kind of lane.kind) used.add(kind);
  const most = plans.reduce((a, b) => (b.kinds[0].fill.length > a.kinds[0].fill.length ? b : a));
  most.kinds.forEach((kind, at) => {
    if (!used.has(at)) return;
    const item = document.createElement("span");
    for (const fill of kind.computes ? kind.fill.slice(0, 8) : kind.fill.slice(0, 1))
      item.append(Object.assign(document.createElement("i"), { style: `background:${fill}` }));
    const shades = kind.computes ? shadesOf(kind.fill.length) : "";
    item.append(` ${kind.letter} ${kind.name}${shades && `, ${shades}`}`);
    byId("legend").append(item);
  });
  const idle = document.createElement("span");
  idle.append(Object.assign(document.createElement("i"), { style: "background:var(--idle)" }), " idle");
  byId("legend").append(idle);
  const told = [plans.every((plan) => plan.pieces === 1) && plans[0].numbers];
  const dashes = plans.find((plan) => plan.recomputed)?.recomputed;
  told.push(dashes && `dashes: ${dashes}`);
  for (const words of told.filter(Boolean))
    byId("legend").append(Object.assign(document.createElement("span"), { textContent: words }));
}

/** What so many shades mean: in each plan that has them. */
function shadesOf(count) {
  const all = plans.filter((plan) => plan.kinds[0].fill.length === count).map((plan) => plan.shades);
  return [...new Set(all)].filter(Boolean).join(" or ");
}

const panels = plans.map((plan) => new Panel(plan));
for (const name of ["critical", "memory"]) {
  byId(name).checked = options[name];
  byId(name).addEventListener("change", (event) => { options[name] = event.target.checked; redraw(); });
}
byId("microbatch").addEventListener("input", (event) => {
  options.microbatch = event.target.value === "" ? null : Number(event.target.value);
  redraw();
});
byId("all").addEventListener("click", () => { Object.assign(view, whole); redraw(); });
addEventListener("resize", redraw);
addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT") return;
  const length = view.to - view.from, middle = (view.from + view.to) / 2;
  const actions = {
    "+": () => zoom(0.7, middle), "=": () => zoom(0.7, middle), "-": () => zoom(1 / 0.7, middle),
    ArrowLeft: () => pan(-length / 8), ArrowRight: () => pan(length / 8),
    0: () => byId("all").click(), Escape: () => choose(null),
  };
  actions[event.key]?.();
});
legend();
drawNow();
