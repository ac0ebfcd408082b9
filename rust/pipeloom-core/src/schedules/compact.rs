//! Pulls the ops of repeated blocks into the holes of warm-up and cool-down, by forward-backward
//! improvement (justification, in the literature on project scheduling).
//!
//! Ops are taken in the order in which they stand and put, one by one, into the first hole of
//! their rank that is long enough and after which one more activation always fits in the block's
//! peak memory; nothing placed before is delayed. That fills the warm-up. The same with time
//! running backwards, on the result, fills the cool-down.

use super::building_block::{Block, Stream};
use super::list::{Ends, Time, duration};
use crate::error::{Error, Result};
use crate::op::{Op, OpKind};
use crate::shape::Shape;

/// The orders of a repeated block, compacted.
pub(super) fn compact(block: &Block<'_>) -> Result<Vec<Vec<Op>>> {
    let (shape, limit) = (block.shape, block.peak());
    let stuck = || {
        Error::config(
            format!("the building block makes no progress at pp={}", shape.pp()),
            "please report this shape",
        )
    };
    let forward = insert(shape, in_cell_order(block), limit, Time::Forward).ok_or_else(stuck)?;
    let latest_first = forward.by_start().rev();
    let backward = insert(shape, latest_first, limit, Time::Backward).ok_or_else(stuck)?;
    let shorter = backward.makespan() < forward.makespan();
    Ok(if shorter { backward } else { forward }.orders())
}

/// The rank (as an index) and op of all ops, by cell, then rank.
fn in_cell_order<'a>(block: &'a Block<'_>) -> impl Iterator<Item = (usize, Op)> + 'a {
    let units = block.shape.num_units();
    let in_cell = move |stream: &Stream, cell| {
        let unit = stream.microbatch_at(cell).filter(|&unit| unit < units)?;
        Some(stream.op(unit))
    };
    (0..=block.last_cell()).flat_map(move |cell| {
        let ranks = block.streams.iter().enumerate();
        ranks.filter_map(move |(rank, streams)| {
            let op = streams.iter().find_map(|stream| in_cell(stream, cell))?;
            Some((rank, op))
        })
    })
}

/// An op with the step in which it starts.
#[derive(Clone, Copy, Debug)]
struct Placed {
    start: u32,
    op: Op,
}

impl Placed {
    fn end(self) -> u32 {
        self.start + duration(self.op.kind)
    }
}

/// Each rank's ops by time, which may run backwards.
#[derive(Clone, Debug)]
struct Timetable {
    time: Time,
    ranks: Vec<Vec<Placed>>,
}

impl Timetable {
    fn makespan(&self) -> u32 {
        let last = self.ranks.iter().filter_map(|ops| ops.last());
        last.map(|placed| placed.end()).max().unwrap_or(0)
    }

    /// All ops by start, then rank.
    fn by_start(&self) -> impl DoubleEndedIterator<Item = (usize, Op)> {
        let ranks = self.ranks.iter().enumerate();
        let mut all: Vec<(u32, usize, Op)> = ranks
            .flat_map(|(rank, ops)| {
                ops.iter()
                    .map(move |placed| (placed.start, rank, placed.op))
            })
            .collect();
        all.sort_unstable_by_key(|&(start, rank, _)| (start, rank));
        all.into_iter().map(|(_, rank, op)| (rank, op))
    }

    fn orders(self) -> Vec<Vec<Op>> {
        let time = self.time;
        let order = |ops: Vec<Placed>| {
            let mut order: Vec<Op> = ops.into_iter().map(|placed| placed.op).collect();
            if time == Time::Backward {
                order.reverse();
            }
            order
        };
        self.ranks.into_iter().map(order).collect()
    }
}

/// What an op adds to its rank's activations, in chunks of a microbatch.
fn memory(kind: OpKind, time: Time) -> i32 {
    let added = match kind {
        OpKind::Forward => 1,
        OpKind::Backward | OpKind::BackwardWeight => -1,
        _ => 0,
    };
    match time {
        Time::Forward => added,
        Time::Backward => -added,
    }
}

/// Puts each op, in the order given, into the first hole of its rank. None if an op comes before
/// one that it waits for.
fn insert(
    shape: &Shape,
    ops: impl Iterator<Item = (usize, Op)>,
    limit: i32,
    time: Time,
) -> Option<Timetable> {
    let mut ends = Ends::new(shape, time);
    let mut ranks: Vec<Vec<Placed>> = vec![Vec::new(); shape.pp() as usize];
    let mut levels = vec![0; ranks.len()];
    for (rank, op) in ops {
        let timeline = &mut ranks[rank];
        let mut ready = ends.ready(op)?;
        let added = memory(op.kind, time);
        if added > 0 {
            ready = room_from(timeline, ready, levels[rank], limit, time)?;
        }
        ends.set(op, place(timeline, op, ready).end());
        levels[rank] += added;
    }
    Some(Timetable { time, ranks })
}

/// From when on, at or after `ready`, one more activation fits at every later time; none if it
/// never does.
fn room_from(
    timeline: &[Placed],
    ready: u32,
    mut level: i32,
    limit: i32,
    time: Time,
) -> Option<u32> {
    if level >= limit {
        return None;
    }
    for placed in timeline.iter().rev() {
        level -= memory(placed.op.kind, time);
        if level >= limit || placed.end() <= ready {
            return Some(placed.end().max(ready));
        }
    }
    Some(ready)
}

/// Puts an op into the first hole from `ready` on.
fn place(timeline: &mut Vec<Placed>, op: Op, ready: u32) -> Placed {
    let later = timeline
        .iter()
        .rev()
        .take_while(|other| other.end() > ready);
    let mut at = timeline.len() - later.count();
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
