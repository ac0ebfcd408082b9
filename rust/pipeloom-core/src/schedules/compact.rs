//! Pulls the ops of repeated blocks into the holes of warm-up and cool-down.
//!
//! Four attempts, all within the block's peak memory; the shortest at F = I = W wins. Each is
//! safe from deadlock: ops run ahead of the block's order only where all that stand before them
//! in it still fit in memory, so that order remains a way out.

use super::building_block::{Block, Stream, memory};
use super::list::{self, Ends, Timetable, duration};
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Op, OpKind};

/// The shortest of the attempts.
pub(super) fn compact(block: &Block<'_>) -> Result<Vec<Vec<Op>>> {
    use Preference::{BackwardFirst, BlockOrder, ForwardFirst};
    let limit = block.peak();
    let mut best = insert(block, limit);
    for (warmup, cooldown) in [
        (BlockOrder, BlockOrder),
        (BlockOrder, ForwardFirst),
        (BackwardFirst, ForwardFirst),
    ] {
        let attempt = greedy(block, limit, warmup, cooldown);
        best = [best, attempt]
            .into_iter()
            .flatten()
            .min_by_key(|timetable| timetable.makespan);
    }
    best.map(|timetable| timetable.orders).ok_or_else(|| {
        Error::config(
            format!(
                "the building block makes no progress at pp={}",
                block.shape.pp()
            ),
            "please report this shape",
        )
    })
}

/// An op with the step in which it starts.
#[derive(Clone, Copy)]
struct Placed {
    start: u32,
    op: Op,
}

impl Placed {
    fn end(self) -> u32 {
        self.start + duration(self.op.kind)
    }
}

/// Takes ops in the order of their cells and puts each into the first hole of its rank that is
/// long enough; none of those placed before it is delayed.
fn insert(block: &Block<'_>, limit: i32) -> Option<Timetable> {
    let units = block.shape.num_units();
    let mut ends = Ends::new(block.shape);
    let mut timelines: Vec<Vec<Placed>> = vec![Vec::new(); block.streams.len()];
    let mut levels = vec![0; block.streams.len()];
    for cell in 0..=block.last_cell() {
        for ((streams, timeline), level) in
            block.streams.iter().zip(&mut timelines).zip(&mut levels)
        {
            let here = |stream: &Stream| {
                let unit = stream.microbatch_at(cell).filter(|&unit| unit < units)?;
                Some(stream.op(unit))
            };
            let Some(op) = streams.iter().find_map(here) else {
                continue;
            };
            let mut ready = ends.ready(op)?;
            if op.kind == OpKind::Forward {
                ready = ready.max(room_from(timeline, *level, limit)?);
            }
            let placed = place(timeline, op, ready);
            ends.set(op, placed.end());
            *level += memory(op.kind);
        }
    }
    let makespan = timelines.iter().filter_map(|line| line.last());
    let makespan = makespan.map(|placed| placed.end()).max().unwrap_or(0);
    let orders = timelines
        .into_iter()
        .map(|line| line.into_iter().map(|placed| placed.op).collect())
        .collect();
    Some(Timetable { orders, makespan })
}

/// From when on one more activation fits at every later time; none if it never does.
fn room_from(timeline: &[Placed], mut level: i32, limit: i32) -> Option<u32> {
    if level >= limit {
        return None;
    }
    for placed in timeline.iter().rev() {
        level -= memory(placed.op.kind);
        if level >= limit {
            return Some(placed.end());
        }
    }
    Some(0)
}

/// Puts an op into the first hole from `ready` on.
fn place(timeline: &mut Vec<Placed>, op: Op, ready: u32) -> Placed {
    let before = timeline
        .iter()
        .rev()
        .take_while(|placed| placed.end() > ready);
    let mut at = timeline.len() - before.count();
    let mut start = ready;
    while let Some(next) = timeline.get(at) {
        if next.start >= start + duration(op.kind) {
            break;
        }
        start = next.end();
        at += 1;
    }
    let placed = Placed { start, op };
    timeline.insert(at, placed);
    placed
}

/// Which of the ops that can start a rank prefers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Preference {
    /// The first in the block's order.
    BlockOrder,
    /// F before I before W.
    ForwardFirst,
    /// I before F before W, chunk 1 before chunk 0.
    BackwardFirst,
}

impl Preference {
    /// The smallest is preferred.
    fn key(self, stream: Stream, unit: u32) -> (u32, u32, u32) {
        let cell = stream.cell(unit);
        let (forward, backward) = match self {
            Self::BlockOrder => return (0, 0, cell),
            Self::ForwardFirst => (0, 1),
            Self::BackwardFirst => (1, 0),
        };
        let class = match stream.kind() {
            OpKind::Forward => forward,
            OpKind::BackwardWeight => 2,
            _ => backward,
        };
        let nearest = if self == Self::BackwardFirst {
            u32::MAX - stream.op(unit).stage.0
        } else {
            0
        };
        (class, nearest, cell)
    }
}

/// How far each rank is in each of its streams, and its activations.
struct Progress<'a> {
    block: &'a Block<'a>,
    limit: i32,
    next: Vec<Vec<u32>>,
    levels: Vec<i32>,
}

impl Progress<'_> {
    /// Whether a forward can run now and all that stand before it in the block's order still fit.
    fn fits(&self, rank: Rank, forward: usize) -> bool {
        let (streams, units) = (
            &self.block.streams[rank.index()],
            self.block.shape.num_units(),
        );
        let mut next = self.next[rank.index()].clone();
        let target = streams[forward].cell(next[forward]);
        let mut level = self.levels[rank.index()];
        loop {
            if level >= self.limit {
                return false;
            }
            let ahead = streams
                .iter()
                .zip(&mut next)
                .filter(|(stream, unit)| **unit < units && stream.memory() != 0)
                .min_by_key(|(stream, unit)| stream.cell(**unit));
            match ahead {
                Some((stream, unit)) if stream.cell(*unit) < target => {
                    level += stream.memory();
                    *unit += 1;
                }
                _ => return true,
            }
        }
    }

    /// The preferred stream of those whose next op can start.
    fn pick(&self, rank: Rank, now: u32, ends: &Ends<'_>, prefer: Preference) -> Option<usize> {
        let (streams, units) = (
            &self.block.streams[rank.index()],
            self.block.shape.num_units(),
        );
        let next = &self.next[rank.index()];
        let can_start = |&at: &usize| {
            let ready = || ends.ready(streams[at].op(next[at]));
            next[at] < units
                && ready().is_some_and(|ready| ready <= now)
                && (streams[at].kind() != OpKind::Forward || self.fits(rank, at))
        };
        (0..streams.len())
            .filter(can_start)
            .min_by_key(|&at| prefer.key(streams[at], next[at]))
    }

    fn take(&mut self, rank: Rank, at: usize) -> Op {
        let stream = self.block.streams[rank.index()][at];
        let unit = &mut self.next[rank.index()][at];
        *unit += 1;
        self.levels[rank.index()] += stream.memory();
        stream.op(*unit - 1)
    }
}

/// In each step, each free rank runs what it prefers: by one rule until rank 0 begins its first
/// backward of chunk 0, in the block's order until rank 0 begins its last forward of chunk 0, by
/// another rule from then on.
fn greedy(
    block: &Block<'_>,
    limit: i32,
    warmup: Preference,
    cooldown: Preference,
) -> Option<Timetable> {
    let units = block.shape.num_units();
    let next = block.streams.iter().map(|streams| vec![0; streams.len()]);
    let mut progress = Progress {
        block,
        limit,
        next: next.collect(),
        levels: vec![0; block.streams.len()],
    };
    let ops_a_unit: usize = block.streams.iter().map(Vec::len).sum();
    let (mut steady_from, mut drains_from) = (u32::MAX, u32::MAX);
    list::schedule(
        block.shape,
        ops_a_unit as u64 * u64::from(units),
        |rank, now, ends| {
            let prefer = if now >= drains_from {
                cooldown
            } else if now >= steady_from {
                Preference::BlockOrder
            } else {
                warmup
            };
            let op = progress.take(rank, progress.pick(rank, now, ends, prefer)?);
            if op.stage.0 == 0 {
                if op.kind != OpKind::Forward {
                    steady_from = steady_from.min(now + 1);
                } else if op.unit.0 + 1 == units {
                    drains_from = now + 1;
                }
            }
            Some(op)
        },
    )
}
