//! Pictures of a plan: [`Drawing`] is what all of them draw; [`grid`], [`svg`] and [`trace`] are
//! the ways to draw it, [`palette`] their colours.
//!
//! A drawing holds each op with a start and an end, wherever these come from: a simulation or a
//! clock. Renderers are pure: same drawing, same bytes.

pub mod boxes;
mod facts;
pub mod grid;
pub mod page;
pub mod palette;
mod predicted;
pub mod svg;
pub mod trace;
mod view;
pub mod waits;

pub use facts::{Limit, RECOMPUTED};
pub(crate) use view::View;

use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};
use crate::plan::Plan;
use crate::shape::Shape;

/// The four kinds that compute, in the order of legends.
pub const COMPUTE_KINDS: [OpKind; 4] = [
    OpKind::Forward,
    OpKind::Backward,
    OpKind::BackwardInput,
    OpKind::BackwardWeight,
];

/// An op and when it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The op.
    pub op: Op,
    /// First tick.
    pub start: i64,
    /// First tick after it.
    pub end: i64,
}

/// One rank of a drawing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lane {
    /// The rank's ops, in its order.
    pub blocks: Vec<Block>,
    /// Memory after each op, in memory ticks; empty if unknown.
    pub memory: Vec<i64>,
    /// Memory before the first op.
    pub base_memory: i64,
    /// The most memory the rank ever holds; none if unknown. At least [`Lane::memory`]'s highest:
    /// what an op holds only while it runs counts.
    pub peak_memory: Option<i64>,
}

impl Lane {
    /// The ops that compute, each with its position.
    pub fn compute(&self) -> impl Iterator<Item = (usize, &Block)> {
        let computes = |found: &(usize, &Block)| found.1.op.kind.is_compute();
        self.blocks.iter().enumerate().filter(computes)
    }

    /// When memory changes, and to what; nothing if it is unknown.
    pub fn memory_steps(&self) -> impl Iterator<Item = (i64, i64)> {
        let mut level = self.base_memory;
        let steps = self.blocks.iter().zip(&self.memory);
        steps.filter_map(move |(block, &after)| {
            let changed = after != level;
            level = after;
            changed.then_some((block.end, after))
        })
    }

    /// Ticks in which the rank computes; an overlapped pair counts once.
    pub fn work(&self) -> i64 {
        let mut busy_until = i64::MIN;
        let mut work = 0;
        for (_, block) in self.compute() {
            work += (block.end - block.start.max(busy_until)).max(0);
            busy_until = busy_until.max(block.end);
        }
        work
    }
}

/// A plan with a start and an end for each op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawing {
    /// Name of the schedule.
    pub schedule: String,
    /// The pipeline's shape.
    pub shape: Shape,
    /// The ranks.
    pub lanes: Vec<Lane>,
    /// Ticks in one unit of the caller's time.
    pub ticks_per_unit: i64,
    /// Memory ticks in one unit of the caller's memory.
    pub memory_ticks_per_unit: i64,
    /// The critical path as (rank, position); empty if unknown.
    pub critical_path: Vec<(Rank, usize)>,
    /// Whether the times are a simulation's.
    pub simulated: bool,
    /// Ticks that no order of these ops can beat; none if unknown.
    pub lower_bound: Option<i64>,
    /// What the headline says about where the times are from; empty for nothing.
    pub note: String,
}

/// What part of a drawing is drawn. The default is all of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// First tick; none: the beginning.
    pub from: Option<i64>,
    /// First tick after the window; none: the end.
    pub to: Option<i64>,
    /// First rank and first rank after the window; none: all.
    pub ranks: Option<(u32, u32)>,
}

impl Drawing {
    /// A drawing of `plan` whose op `i` of rank `r` runs from `starts[r][i]` to `ends[r][i]`.
    ///
    /// # Errors
    /// If the times don't cover the plan's ops, or an op ends before it starts.
    pub fn new(
        plan: &Plan,
        starts: &[Vec<i64>],
        ends: &[Vec<i64>],
        ticks_per_unit: i64,
    ) -> Result<Self> {
        let ranks = plan.shape().pp() as usize;
        if starts.len() != ranks || ends.len() != ranks {
            return Err(Error::config(
                format!(
                    "times are for {} starts and {} ends, but pp={ranks}",
                    starts.len(),
                    ends.len()
                ),
                "give one list of starts and one of ends for each rank",
            ));
        }
        let lane = |rank: Rank| {
            let ops = plan.rank_ops(rank).ops;
            let (starts, ends) = (&starts[rank.index()], &ends[rank.index()]);
            lane_of(rank, &ops, starts, ends)
        };
        Ok(Self {
            schedule: plan.schedule().to_owned(),
            shape: plan.shape().clone(),
            lanes: plan.shape().ranks().map(lane).collect::<Result<_>>()?,
            ticks_per_unit: ticks_per_unit.max(1),
            memory_ticks_per_unit: 1,
            critical_path: Vec::new(),
            simulated: false,
            lower_bound: None,
            note: String::new(),
        })
    }

    /// This drawing with a word in its headline about where its times are from.
    #[must_use]
    pub fn with_note(mut self, note: &str) -> Self {
        note.clone_into(&mut self.note);
        self
    }

    /// First tick of the first op.
    pub fn begin(&self) -> i64 {
        let starts = self.lanes.iter().flat_map(|lane| &lane.blocks);
        starts.map(|block| block.start).min().unwrap_or(0)
    }

    /// Last tick of the last op.
    pub fn end(&self) -> i64 {
        let ends = self.lanes.iter().flat_map(|lane| &lane.blocks);
        ends.map(|block| block.end).max().unwrap_or(0)
    }

    /// Ticks from the first op's start to the last op's end.
    pub fn makespan(&self) -> i64 {
        self.end() - self.begin()
    }

    /// Share of the makespan in which even the busiest rank idles, in thousandths, rounded.
    pub fn bubble_thousandths(&self) -> i64 {
        let makespan = i128::from(self.makespan());
        if makespan == 0 {
            return 0;
        }
        let idle = makespan - i128::from(self.busiest());
        i64::try_from((2000 * idle + makespan) / (2 * makespan)).unwrap_or(i64::MAX)
    }

    /// Ticks that the busiest rank works: no schedule of this work on these ranks takes less.
    pub fn busiest(&self) -> i64 {
        self.lanes.iter().map(Lane::work).max().unwrap_or(0)
    }

    /// Share of the makespan in which a rank idles, in percent, rounded.
    pub fn idle_percent(&self, rank: Rank) -> i64 {
        let makespan = i128::from(self.makespan().max(1));
        let idle = i128::from(self.makespan() - self.lanes[rank.index()].work());
        i64::try_from((200 * idle + makespan) / (2 * makespan)).unwrap_or(100)
    }

    /// A number of ticks in the caller's unit: a decimal with at most `digits` digits after the
    /// point, but at least three that count, rounded, without trailing zeros.
    pub fn time_text(&self, ticks: i64, digits: u32) -> String {
        told(i128::from(ticks), i128::from(self.ticks_per_unit), digits)
    }

    /// Memory in the caller's unit, as [`Drawing::time_text`].
    pub fn memory_text(&self, ticks: i64) -> String {
        told(i128::from(ticks), i128::from(self.memory_ticks_per_unit), 3)
    }
}

fn lane_of(rank: Rank, ops: &[Op], starts: &[i64], ends: &[i64]) -> Result<Lane> {
    if starts.len() != ops.len() || ends.len() != ops.len() {
        return Err(Error::config(
            format!(
                "rank {rank} has {} ops, but {} starts and {} ends",
                ops.len(),
                starts.len(),
                ends.len()
            ),
            "give the times of this very plan: lowered plans have more ops",
        ));
    }
    let mut blocks = Vec::with_capacity(ops.len());
    for ((&op, &start), &end) in ops.iter().zip(starts).zip(ends) {
        if end < start {
            return Err(Error::config(
                format!("rank {rank}: op {op} ends at {end}, before it starts at {start}"),
                "an op's end must not be before its start",
            ));
        }
        blocks.push(Block { op, start, end });
    }
    Ok(Lane {
        blocks,
        ..Lane::default()
    })
}

/// Half of a row: the ops of an overlapped pair share their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The first op's.
    Upper,
    /// The second op's.
    Lower,
}

/// Which half of its row the block at `at` takes; none if it isn't one of an overlapped pair.
pub(crate) fn half_of_pair(lane: &Lane, at: usize) -> Option<Half> {
    let op = lane.blocks[at].op;
    if is_pair_second(op) {
        Some(Half::Lower)
    } else if op.flags.has(Flags::PAIR_FIRST) {
        Some(Half::Upper)
    } else {
        None
    }
}

/// Whether an op is the second of an overlapped pair, drawn beside the first.
pub(crate) fn is_pair_second(op: Op) -> bool {
    op.flags.has(Flags::PAIR_SECOND)
}

/// A decimal of at most `digits` digits after the point, or of as many more as small values need
/// for three that count.
fn told(numerator: i128, denominator: i128, digits: u32) -> String {
    let below = |zeros: &u32| numerator.abs() * 10_i128.pow(*zeros) < denominator;
    let zeros = (1..=9).take_while(below).last().unwrap_or(0);
    decimal(numerator, denominator, digits.max(3 + zeros))
}

/// `numerator / denominator` as a decimal, rounded half up, without trailing zeros.
pub(crate) fn decimal(numerator: i128, denominator: i128, digits: u32) -> String {
    let scale = 10_i128.pow(digits);
    let scaled = (2 * numerator * scale + denominator).div_euclid(2 * denominator);
    let sign = if scaled < 0 { "-" } else { "" };
    let (whole, rest) = (scaled.abs() / scale, scaled.abs() % scale);
    if rest == 0 {
        return format!("{sign}{whole}");
    }
    let rest = format!("{rest:0width$}", width = digits as usize);
    format!("{sign}{whole}.{}", rest.trim_end_matches('0'))
}

/// A chunk's letter: a, b, ..., z, aa, ab, ...
pub(crate) fn chunk_letter(chunk: u32) -> String {
    let mut left = chunk + 1;
    let mut letters = Vec::new();
    while left > 0 {
        left -= 1;
        letters.push(char::from(b'a' + u8::try_from(left % 26).unwrap_or(0)));
        left /= 26;
    }
    letters.iter().rev().collect()
}

/// What a kind is called in legends.
pub(crate) fn kind_name(kind: OpKind) -> &'static str {
    match kind {
        OpKind::Forward => "forward",
        OpKind::Backward => "backward",
        OpKind::BackwardInput => "input gradient",
        OpKind::BackwardWeight => "weight gradient",
        OpKind::SendForward => "send activation",
        OpKind::RecvForward => "receive activation",
        OpKind::SendBackward => "send gradient",
        OpKind::RecvBackward => "receive gradient",
    }
}

#[cfg(test)]
mod tests;
