"use strict";
// A plan with times: what the page works out from the data of render/page.rs. No drawing here.

const text = (value) => String(+value.toPrecision(6));

/** One plan: its data, and what the page works out from them once. */
class Plan {
  constructor(entry) {
    Object.assign(this, entry.data);
    this.name = entry.name;
    this.opOf = new Map(); // (class, stage, microbatch) -> [rank, position]
    this.wires = false;
    this.mostMemory = 0;
    this.ranks.forEach((lane, rank) => {
      lane.start = Float64Array.from(lane.start);
      lane.end = Float64Array.from(lane.end);
      for (let at = 0; at < lane.kind.length; at++) {
        if (this.kinds[lane.kind[at]].computes)
          this.opOf.set(this.key(lane.kind[at], lane.stage[at], lane.microbatch[at]), [rank, at]);
        else if (lane.end[at] > lane.start[at]) this.wires = true;
      }
      this.mostMemory = Math.max(this.mostMemory, lane.peakMemory ?? 0);
    });
    // Position of each op that computes, by rank, in the order of time.
    this.compute = this.ranks.map((lane) => {
      const places = [];
      for (let at = 0; at < lane.kind.length; at++) if (this.kinds[lane.kind[at]].computes) places.push(at);
      return places;
    });
    this.criticalOf = new Set(this.critical.map(([rank, at]) => rank * 1e9 + at));
    const makespan = this.end - this.begin;
    const busiest = Math.max(...this.ranks.map((lane) => lane.work));
    this.facts = { makespan: text(makespan / this.unit), bubble: percent(1 - busiest / makespan) };
    if (this.ranks.every((lane) => lane.peakMemory !== undefined))
      this.facts["peak memory"] = peaks(this.ranks.map((lane) => lane.peakMemory / this.memoryUnit));
    const idle = this.ranks.map((lane) => percent(1 - lane.work / makespan));
    if (idle.length <= 16) this.facts.idle = idle.join(" ");
    if (this.pieces > 1) this.facts.numbers = this.numbers.replace("numbers: ", "");
    Object.assign(this.facts, entry.facts);
  }

  // B and I are what the previous stage's backward waits for: one class.
  key(kind, stage, microbatch) {
    const family = kind === 2 ? 1 : kind;
    return (family * this.chunkOfStage.length + stage) * this.units + microbatch;
  }

  /** A unit in words: its microbatch, and its piece where sequences are cut. */
  unitName(unit) {
    if (this.pieces === 1) return `microbatch ${unit}`;
    return `microbatch ${Math.floor(unit / this.pieces)}, piece ${unit % this.pieces}`;
  }

  opName(rank, at) {
    const lane = this.ranks[rank];
    return `${lane.stage[at]}${this.kinds[lane.kind[at]].letter}${lane.microbatch[at]}`;
  }

  /** Ops that must end before this one: [rank, position, why]. */
  needs(rank, at) {
    const lane = this.ranks[rank], kind = lane.kind[at];
    const stage = lane.stage[at], microbatch = lane.microbatch[at], found = [];
    const add = (ofKind, ofStage) => {
      const op = this.opOf.get(this.key(ofKind, ofStage, microbatch));
      if (op) found.push([...op, op[0] === rank ? "" : `from rank ${op[0]}`]);
    };
    const place = stage % this.replicaStages;
    if (kind === 0 && place > 0) add(0, stage - 1);
    if (kind === 1 || kind === 2) {
      if (place < this.replicaStages - 1) add(1, stage + 1);
      else add(0, stage);
    }
    if (kind === 3) add(2, stage);
    let before = at - 1;
    while (before >= 0 && !this.kinds[lane.kind[before]].computes) before--;
    if (before >= 0 && lane.half[at] !== 2) found.push([rank, before, "before it on this rank"]);
    return found;
  }

  /** The ops that start with this one: an overlapped pair starts when both have what they need. */
  pair(rank, at) {
    const half = this.ranks[rank].half[at];
    return half === 0 ? [at] : half === 1 ? [at, at + 1] : [at - 1, at];
  }

  /** The need that ends last. */
  lastOf(needed) {
    return needed.reduce((a, b) => (!a || this.ranks[b[0]].end[b[1]] > this.ranks[a[0]].end[a[1]] ? b : a), null);
  }

  /** What an idle moment of a rank tells: until when, and for what it waits. */
  describeIdle(rank, ticks) {
    const lane = this.ranks[rank], places = this.compute[rank], time = (value) => text(value / this.unit);
    if (!(ticks >= this.begin && ticks < this.end)) return null;
    const next = firstAfter(places.length, (i) => lane.start[places[i]] > ticks);
    const free = next > 0 ? Math.max(lane.end[places[next - 1]], next > 1 ? lane.end[places[next - 2]] : 0) : this.begin;
    if (next === places.length) return `rank ${rank} idle from ${time(free)} to ${time(this.end)}: done`;
    const at = places[next], needed = this.pair(rank, at).flatMap((op) => this.needs(rank, op));
    const last = this.lastOf(needed.filter((need) => need[0] !== rank || need[2] === ""));
    const why = last && last[0] !== rank ? ` waits for ${this.opName(last[0], last[1])} ${last[2]}` : "";
    return `rank ${rank} idle from ${time(free)} to ${time(lane.start[at])}:${why} before ${this.opName(rank, at)}`;
  }

  /** What an op tells about itself, a line each. */
  describe(rank, at) {
    const lane = this.ranks[rank], kind = this.kinds[lane.kind[at]];
    const [start, end] = [lane.start[at], lane.end[at]], time = (ticks) => text(ticks / this.unit);
    const lines = [
      `${this.opName(rank, at)}: ${kind.name} of ${this.unitName(lane.microbatch[at])}, stage ${lane.stage[at]}, rank ${rank}`,
      `start ${time(start)}, end ${time(end)}, takes ${time(end - start)}${lane.recompute[at] ? ", recomputed" : ""}`,
    ];
    if (!kind.computes) return lines;
    const needed = this.pair(rank, at).flatMap((op) => this.needs(rank, op));
    const last = this.lastOf(needed);
    const own = needed.find((need) => need[2].startsWith("before"));
    const idle = start - (own ? lane.end[own[1]] : this.begin);
    if (idle > 0 && last) {
      const ended = this.ranks[last[0]].end[last[1]], travel = start - ended;
      lines.push(`rank idle for ${time(idle)}: waited for ${this.opName(last[0], last[1])} ${last[2]}, which ended at ${time(ended)}` +
        (travel > 0 ? ` and took ${time(travel)} to arrive` : ""));
    } else if (last) lines.push(`no wait: last needed ${this.opName(last[0], last[1])} ${last[2]}`);
    if (this.criticalOf.has(rank * 1e9 + at)) lines.push("on the critical path");
    return lines;
  }
}

/** The first of `count` places that holds, where all after it hold too. */
function firstAfter(count, holds) {
  let [low, high] = [0, count];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

const percent = (ratio) => `${(100 * ratio).toFixed(1)}%`;
function peaks(values) {
  if (values.length <= 16) return values.map(text).join(" ");
  return `${text(Math.min(...values))} to ${text(Math.max(...values))} a rank`;
}
