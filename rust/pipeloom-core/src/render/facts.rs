//! What pictures say in words and numbers beside their boxes.

use std::fmt::Write as _;

use super::{Drawing, decimal};
use crate::error::{Error, Result};
use crate::ids::Unit;
use crate::op::{Flags, OpKind};
use crate::shape::Shape;

/// Most ranks whose peak memory the headline lists one by one.
const LISTED_RANKS: usize = 16;

/// A time that the makespan can't go below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The drawing's begin plus the limit.
    pub ticks: i64,
    /// Whether it is the busiest rank's work, not the bound on orders.
    pub of_work: bool,
    /// Its number.
    pub text: String,
}

impl Limit {
    /// What it means.
    pub fn meaning(&self) -> &'static str {
        if self.of_work {
            "work of the busiest rank: no schedule is faster"
        } else {
            "lower bound: no order of these ops is faster"
        }
    }
}

impl Drawing {
    /// Schedule, shape, makespan, bubble, peak memory: the numbers people ask for first.
    pub fn headline(&self) -> String {
        let drawing = self;
        let shape = &drawing.shape;
        let mut text = format!(
            "{}  pp={} vp={} m={}",
            drawing.schedule,
            shape.pp(),
            shape.vp(),
            shape.num_microbatches()
        );
        if shape.num_seq_pieces() > 1 {
            let _ = write!(text, " pieces={}", shape.num_seq_pieces());
        }
        if !drawing.note.is_empty() {
            let _ = write!(text, "   {}", drawing.note);
        }
        let _ = write!(
            text,
            "   makespan {}   bubble {}%",
            drawing.time_text(drawing.makespan(), 3),
            decimal(i128::from(drawing.bubble_thousandths()), 10, 1)
        );
        let peaks: Option<Vec<i64>> = drawing.lanes.iter().map(|lane| lane.peak_memory).collect();
        if let Some(peaks) = peaks {
            text.push_str("   peak memory");
            if peaks.len() <= LISTED_RANKS {
                for peak in &peaks {
                    let _ = write!(text, " {}", drawing.memory_text(*peak));
                }
            } else {
                let most = peaks.iter().max().copied().unwrap_or(0);
                let least = peaks.iter().min().copied().unwrap_or(0);
                let (least, most) = (drawing.memory_text(least), drawing.memory_text(most));
                let _ = write!(text, " {least} to {most} a rank");
            }
        }
        text
    }

    /// The limits of a simulated plan; the lesser is left out where both are the same.
    pub fn limits(&self) -> Vec<Limit> {
        let Some(bound) = self.lower_bound.filter(|&bound| bound > 0) else {
            return Vec::new();
        };
        let limit = |ticks: i64, of_work| Limit {
            ticks: self.begin() + ticks,
            of_work,
            text: self.time_text(ticks, 3),
        };
        let work = self.busiest();
        let mut limits = Vec::new();
        if work < bound {
            limits.push(limit(work, true));
        }
        limits.push(limit(bound, false));
        limits
    }

    /// What a kind's shades mean, from dark to light; none if it has one.
    pub fn shades(&self) -> Option<String> {
        let (vp, replicas) = (self.shape.vp(), self.shape.num_replicas());
        match (replicas, vp) {
            (1, 1) => None,
            (1, _) => Some(format!("chunks 0 to {}", vp - 1)),
            (_, 1) => Some(format!("replicas 0 to {}", replicas - 1)),
            _ => Some(format!("chunks 0 to {} of each replica", vp - 1)),
        }
    }

    /// What the numbers in the boxes count.
    pub fn numbers(&self) -> String {
        match self.shape.num_seq_pieces() {
            1 => "numbers: microbatches".to_owned(),
            pieces => format!("numbers: microbatch x {pieces} + piece"),
        }
    }

    /// Whether any op is recomputed.
    pub fn recomputes(&self) -> bool {
        let mut blocks = self.lanes.iter().flat_map(|lane| &lane.blocks);
        blocks.any(|block| block.op.flags.has(Flags::RECOMPUTE))
    }

    /// Refuses a drawing without memory.
    pub(crate) fn require_memory(&self) -> Result<()> {
        if self.lanes.iter().all(|lane| lane.peak_memory.is_some()) {
            return Ok(());
        }
        Err(Error::config(
            "memory=True, but this drawing knows no memory",
            "draw a simulated plan, or leave memory out",
        ))
    }

    /// Refuses a drawing without critical path.
    pub(crate) fn require_critical_path(&self) -> Result<()> {
        if !self.critical_path.is_empty() {
            return Ok(());
        }
        Err(Error::config(
            "critical_path=True, but this drawing knows no critical path",
            "draw a simulated plan, or leave critical_path out",
        ))
    }

    /// What the memory curves count in: what a forward adds, if all add the same.
    pub fn memory_meaning(&self) -> String {
        let mut added = self.lanes.iter().flat_map(|lane| {
            let before = std::iter::once(&lane.base_memory).chain(&lane.memory);
            let steps = lane.blocks.iter().zip(before).zip(&lane.memory);
            let alone = |flags: Flags| {
                let marks = [Flags::RECOMPUTE, Flags::PAIR_FIRST, Flags::PAIR_SECOND];
                !marks.into_iter().any(|mark| flags.has(mark))
            };
            steps
                .filter(move |((block, _), _)| {
                    block.op.kind == OpKind::Forward && alone(block.op.flags)
                })
                .map(|((_, before), after)| after - before)
        });
        let mut text = "memory, all ranks to one scale".to_owned();
        if let Some(first) = added.next()
            && added.all(|other| other == first)
        {
            let _ = write!(text, "; a forward adds {}", self.memory_text(first));
        }
        text
    }
}

/// A unit in words: its microbatch, and its piece where sequences are cut.
pub(crate) fn unit_name(shape: &Shape, unit: Unit) -> String {
    match shape.split_unit(unit) {
        (microbatch, _) if shape.num_seq_pieces() == 1 => format!("microbatch {microbatch}"),
        (microbatch, piece) => format!("microbatch {microbatch}, piece {piece}"),
    }
}

/// What the dashes of a recomputed op mean.
pub const RECOMPUTED: &str = "recomputed: F keeps its input, its backward runs it again";
