//! Lower bounds on the makespan: what no order of a plan's ops can beat, given their durations,
//! their placement, and memory no higher than each rank's peak.
//!
//! | bound | why |
//! |---|---|
//! | `work` | a rank can't start before the first microbatch reaches it, and has its work to do |
//! | `drain` | a stage's last backward still has to travel back to the first stage |
//! | `memory` | until its first backward a rank can do only the forwards that fit |
//! | `round_trip` | a microbatch holds its memory on the first stage for a whole round trip |
//! | `occupancy` | memory times time: what all microbatches of a rank hold, for as long as they must |
//!
//! Ops of one kind and stage may differ (recompute, overlapped pairs): paths take the shortest,
//! sums take each as it is, and a pair counts once.

use crate::cost::Ticks;
use crate::engine::{NONE, Program, StageLinks, duration, pair_second};
use crate::op::{Op, OpKind};

use super::memory;

/// A lower bound on the makespan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Which.
    pub name: &'static str,
    /// Ticks.
    pub ticks: i64,
}

/// All lower bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// In the order of the module's table.
    pub all: [Bound; 5],
    /// A bound on the span: the most work of a rank.
    pub span: i64,
}

impl Bounds {
    /// The largest; the first of equals.
    pub fn binding(&self) -> Bound {
        let [mut best, ..] = self.all;
        for bound in self.all {
            if bound.ticks > best.ticks {
                best = bound;
            }
        }
        best
    }
}

/// What the ops of one stage come to.
#[derive(Clone, Copy, Debug)]
struct StageSum {
    forward: i64,
    backward: i64,
    weight: i64,
    /// All blocks with a forward or a backward (`B`, `I`) of the stage.
    busy: i64,
    forwards: i64,
    weights: i64,
    /// Sum and longest of the forwards that are in no pair.
    lone_forwards: i64,
    longest_forward: i64,
    paired: bool,
    /// Least memory that a forward holds until its backward.
    held: i64,
}

const EMPTY: StageSum = StageSum {
    forward: i64::MAX,
    backward: i64::MAX,
    weight: i64::MAX,
    busy: 0,
    forwards: 0,
    weights: 0,
    lone_forwards: 0,
    longest_forward: 0,
    paired: false,
    held: i64::MAX,
};

/// Shortest times from the start of a microbatch, by stage.
struct Paths {
    /// To the start of its forward.
    to_forward: Vec<i64>,
    /// To the start of its backward; to the end of the last forward without backwards.
    to_backward: Vec<i64>,
    /// From the end of its backward to the end of its step; of its forward without backwards.
    home: Vec<i64>,
}

pub(super) fn bounds(program: &Program<'_>, ticks: &Ticks, peaks: &[i64]) -> Bounds {
    let sums = stage_sums(program, ticks);
    let paths = paths(program, ticks, &sums);
    let works: Vec<i64> = (0..program.ranks.len())
        .map(|rank| rank_work(program, ticks, rank))
        .collect();
    let on_rank = |rank: usize| {
        let stages = program.stages.iter().enumerate();
        stages
            .filter(move |(_, links)| links.rank as usize == rank)
            .map(|(stage, _)| stage)
    };
    let ramp = |rank: usize| on_rank(rank).map(|stage| paths.to_forward[stage]).min();
    let work = (0..works.len()).map(|rank| ramp(rank).unwrap_or(0) + works[rank]);
    let drain = sums.iter().enumerate().filter(|(_, sum)| sum.forwards > 0);
    let drain = drain.map(|(stage, sum)| paths.to_forward[stage] + sum.busy + paths.home[stage]);
    let memory = (0..works.len())
        .filter(|_| !program.forward_only)
        .map(|rank| {
            let stages: Vec<usize> = on_rank(rank).collect();
            let wait = stages
                .iter()
                .map(|&stage| paths.to_backward[stage])
                .min()
                .unwrap_or(0);
            let room = peaks[rank] - ticks.static_memory[rank];
            wait + works[rank] - forwards_that_fit(&sums, &stages, room)
        });
    let plain = !program.forward_only && memory_is_plain(ticks, &sums);
    let round_trip = plain.then(|| round_trip(program, ticks, &sums, &paths, peaks));
    let occupancy = (0..works.len()).filter(|_| plain).filter_map(|rank| {
        let stages: Vec<usize> = on_rank(rank).collect();
        let room = peaks[rank] - ticks.static_memory[rank];
        occupancy(ticks, &sums, &paths, &stages, room)
    });
    let bound = |name, ticks: Option<i64>| Bound {
        name,
        ticks: ticks.unwrap_or(0),
    };
    Bounds {
        all: [
            bound("work", work.max()),
            bound("drain", drain.max()),
            bound("memory", memory.max()),
            bound("round_trip", round_trip),
            bound("occupancy", occupancy.max()),
        ],
        span: works.iter().copied().max().unwrap_or(0),
    }
}

/// Visits a rank's blocks: single compute ops and overlapped pairs, with their durations.
fn for_each_block(
    program: &Program<'_>,
    ticks: &Ticks,
    rank: usize,
    mut visit: impl FnMut(Op, Option<Op>, i64),
) {
    let ops = &program.ranks[rank].ops;
    let mut at = 0;
    while let Some(&op) = ops.get(at) {
        let usable = op.kind.is_compute() && program.in_range(op);
        let second = pair_second(ops, at).filter(|&op| usable && program.in_range(op));
        if usable {
            visit(op, second, duration(&ticks.stages, op, second));
        }
        at += 1 + usize::from(second.is_some());
    }
}

fn rank_work(program: &Program<'_>, ticks: &Ticks, rank: usize) -> i64 {
    let mut work = 0;
    for_each_block(program, ticks, rank, |_, _, time| work += time);
    work
}

fn stage_sums(program: &Program<'_>, ticks: &Ticks) -> Vec<StageSum> {
    let mut sums = vec![EMPTY; program.stages.len()];
    for rank in 0..program.ranks.len() {
        for_each_block(program, ticks, rank, |first, second, time| {
            for op in [Some(first), second].into_iter().flatten() {
                let sum = &mut sums[op.stage.index()];
                sum.paired |= second.is_some();
                match op.kind {
                    OpKind::Forward => {
                        sum.forward = sum.forward.min(time);
                        sum.forwards += 1;
                        if second.is_none() {
                            sum.lone_forwards += time;
                            sum.longest_forward = sum.longest_forward.max(time);
                        }
                        sum.held = sum.held.min(memory::change(&ticks.stages, op).0);
                    }
                    OpKind::Backward | OpKind::BackwardInput => {
                        sum.backward = sum.backward.min(time);
                    }
                    OpKind::BackwardWeight => {
                        sum.weight = sum.weight.min(time);
                        sum.weights += 1;
                    }
                    OpKind::SendForward
                    | OpKind::RecvForward
                    | OpKind::SendBackward
                    | OpKind::RecvBackward => {}
                }
            }
            let counts = |op: &Op| op.kind != OpKind::BackwardWeight;
            let both = second.filter(|second| second.stage != first.stage && counts(second));
            for op in [Some(first).filter(counts), both].into_iter().flatten() {
                sums[op.stage.index()].busy += time;
            }
        });
    }
    sums
}

fn paths(program: &Program<'_>, ticks: &Ticks, sums: &[StageSum]) -> Paths {
    let len = sums.len();
    let neighbour = |links: &StageLinks, forward: bool| {
        let stage = if forward { links.next } else { links.previous };
        (stage != NONE).then_some(stage as usize)
    };
    let mut to_forward = vec![0; len];
    for (stage, links) in program.stages.iter().enumerate() {
        if let Some(from) = neighbour(links, false) {
            to_forward[stage] =
                to_forward[from] + least(sums[from].forward) + ticks.stages[from].to_next;
        }
    }
    let mut to_backward = vec![0; len];
    for (stage, links) in program.stages.iter().enumerate().rev() {
        to_backward[stage] = match neighbour(links, true) {
            Some(from) => {
                to_backward[from] + least(sums[from].backward) + ticks.stages[from].to_previous
            }
            None => to_forward[stage] + least(sums[stage].forward),
        };
    }
    let mut home = vec![0; len];
    if program.forward_only {
        for (stage, links) in program.stages.iter().enumerate().rev() {
            if let Some(to) = neighbour(links, true) {
                home[stage] = home[to] + least(sums[to].forward) + ticks.stages[stage].to_next;
            }
        }
    } else {
        for (stage, links) in program.stages.iter().enumerate() {
            home[stage] = match neighbour(links, false) {
                Some(to) => home[to] + least(sums[to].backward) + ticks.stages[stage].to_previous,
                // Only if every microbatch has a weight half of its own is there one last.
                None if sums[stage].weights >= sums[stage].forwards => least(sums[stage].weight),
                None => 0,
            };
        }
    }
    Paths {
        to_forward,
        to_backward,
        home,
    }
}

/// The most time that a rank can spend on forwards that fit into `room` together.
fn forwards_that_fit(sums: &[StageSum], stages: &[usize], room: i64) -> i64 {
    let of = |field: fn(&StageSum) -> i64| stages.iter().map(move |&stage| field(&sums[stage]));
    let held = of(|sum| sum.held).min().unwrap_or(0);
    let lone = of(|sum| sum.lone_forwards).sum();
    if held <= 0 {
        return lone;
    }
    let longest = of(|sum| sum.longest_forward).max().unwrap_or(0);
    (room / held).saturating_mul(longest).min(lone)
}

/// Whether memory that a forward takes stays taken until its backward ends: a pair's backward may
/// free what its forward takes, and memory that a stage gives without having taken it would hide
/// what others hold.
fn memory_is_plain(ticks: &Ticks, sums: &[StageSum]) -> bool {
    let honest = ticks.stages.iter().all(|stage| {
        let after_input = stage.memory_forward + stage.memory_backward_input;
        stage
            .memory_forward
            .min(stage.memory_recompute)
            .min(after_input)
            >= 0
            && after_input + stage.memory_backward_weight >= 0
    });
    honest && !sums.iter().any(|sum| sum.paired)
}

/// The least memory that a microbatch of a stage holds until its backward ends, and from then on
/// until its weight half ends, if each has one, with that half's time.
fn holdings(ticks: &Ticks, sums: &[StageSum], stage: usize) -> (i64, Option<(i64, i64)>) {
    let (sum, costs) = (&sums[stage], &ticks.stages[stage]);
    let kept = (costs.memory_forward + costs.memory_backward_input).min(sum.held);
    let split = sum.weights >= sum.forwards;
    (sum.held, split.then_some((kept, least(sum.weight))))
}

/// What the microbatches of a rank's stages hold at least, times how long, fits into `room` times
/// the time from its first forward on; none without such memory.
fn occupancy(
    ticks: &Ticks,
    sums: &[StageSum],
    paths: &Paths,
    stages: &[usize],
    room: i64,
) -> Option<i64> {
    let (mut until_backward, mut until_weight) = (0_i128, 0_i128);
    for &stage in stages.iter().filter(|&&stage| sums[stage].forwards > 0) {
        let trip = paths.to_backward[stage] - paths.to_forward[stage] + least(sums[stage].backward);
        let (held, kept) = holdings(ticks, sums, stage);
        let count = i128::from(sums[stage].forwards);
        until_backward += count * i128::from(held) * i128::from(trip);
        if let Some((kept, time)) = kept {
            until_weight += count * i128::from(kept) * i128::from(time);
        }
    }
    let least_of = |times: &[i64]| stages.iter().map(|&stage| times[stage]).min();
    let (start, home) = (least_of(&paths.to_forward)?, least_of(&paths.home)?);
    let room = i128::from(room);
    let time = |area: i128| i64::try_from((area + room - 1) / room).ok();
    if room <= 0 {
        return None;
    }
    // Until the last backward, which still travels home; or until the last weight half.
    let (backward, weight) = (time(until_backward)?, time(until_backward + until_weight)?);
    Some(start + (backward + home).max(weight))
}

/// Each of the first stage's microbatches holds memory there for a round trip, and only so many
/// fit at once.
fn round_trip(
    program: &Program<'_>,
    ticks: &Ticks,
    sums: &[StageSum],
    paths: &Paths,
    peaks: &[i64],
) -> i64 {
    let trips = |links: &StageLinks, stage: usize| {
        let sum = &sums[stage];
        let until_backward = paths.to_backward[stage] + least(sum.backward);
        let (held, until_weight) = holdings(ticks, sums, stage);
        let rank = links.rank as usize;
        let room = peaks[rank] - ticks.static_memory[rank];
        let holds = [Some((held, 0)), until_weight].into_iter().flatten();
        let bound = holds
            .filter(|&(held, _)| held > 0 && room >= held)
            .map(|(held, weight)| {
                let fit = room / held;
                let rounds = (sum.forwards + fit - 1) / fit;
                rounds.saturating_mul(until_backward + weight)
            });
        bound.max()
    };
    let firsts = program
        .stages
        .iter()
        .enumerate()
        .filter(|(_, links)| links.previous == NONE);
    firsts
        .filter_map(|(stage, links)| trips(links, stage))
        .max()
        .unwrap_or(0)
}

/// The shortest duration found; 0 if there was none.
fn least(found: i64) -> i64 {
    if found == i64::MAX { 0 } else { found }
}
