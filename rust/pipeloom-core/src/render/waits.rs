//! Where a rank waits, and for what: the idle stretches of a drawing.

use super::{Block, Drawing, View, Window};
use crate::error::Result;
use crate::ids::{Rank, Stage};
use crate::op::{Flags, Op, OpKind};
use crate::shape::Shape;

/// What ends an idle stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// The result of an op on another rank.
    Op {
        /// The rank that runs it.
        rank: Rank,
        /// The op.
        op: Op,
    },
    /// Nothing: the rank has run its last op.
    Done,
    /// Something that the times alone don't tell: a transfer of its own, or the program's overhead.
    Unknown,
}

/// An idle stretch of a rank. It may lie partly outside a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// First tick.
    pub start: i64,
    /// First tick after it.
    pub end: i64,
    /// What ends it.
    pub awaited: Awaited,
}

/// The idle stretches of the ranks in a window, cut to it.
///
/// # Errors
/// If the window shows nothing.
pub fn waits(drawing: &Drawing, window: &Window) -> Result<Vec<(Rank, Wait)>> {
    let view = drawing.slice(window)?;
    let waits = Waits::new(drawing);
    let own = |rank| {
        waits
            .seen(view, rank)
            .into_iter()
            .map(move |wait| (rank, wait))
    };
    Ok(view.ranks().flat_map(own).collect())
}

/// Each rank's longest wait in a window, cut to it: the first of equals, and none for a rank that
/// waits for nothing.
///
/// # Errors
/// If the window shows nothing.
pub fn longest(drawing: &Drawing, window: &Window) -> Result<Vec<(Rank, Option<Wait>)>> {
    let view = drawing.slice(window)?;
    let waits = Waits::new(drawing);
    let own = |rank| {
        let seen = waits.seen(view, rank).into_iter();
        let waiting = seen.filter(|wait| wait.awaited != Awaited::Done);
        // The last of equal keys wins, so the order is turned around.
        (rank, waiting.rev().max_by_key(|wait| wait.end - wait.start))
    };
    Ok(view.ranks().map(own).collect())
}

/// The results that cross ranks, found by what they are.
pub struct Waits<'a> {
    drawing: &'a Drawing,
    /// Where each stage's forward of each unit stands in its rank's order, and each backward.
    at: [Vec<u32>; 2],
    /// When each stage's receive of each unit's activation ends, and of its gradient; empty if the
    /// drawing has no transfers.
    arrival: [Vec<i64>; 2],
}

/// No such op.
const NONE: u32 = u32::MAX;

impl Wait {
    /// What the rank waits for, in words.
    pub fn reason(&self) -> String {
        match self.awaited {
            Awaited::Op { rank, op } => format!("waits for {}{} of rank {rank}", op.kind, op.unit),
            Awaited::Done => "done".to_owned(),
            Awaited::Unknown => "waits for no op: a transfer, or the program itself".to_owned(),
        }
    }
}

impl<'a> Waits<'a> {
    /// Looks up the drawing's ops.
    pub fn new(drawing: &'a Drawing) -> Self {
        let shape = &drawing.shape;
        let cells = shape.num_stages() as usize * shape.num_units() as usize;
        let mut found = Self {
            drawing,
            at: [vec![NONE; cells], vec![NONE; cells]],
            arrival: [Vec::new(), Vec::new()],
        };
        let blocks = || drawing.lanes.iter().flat_map(|lane| &lane.blocks);
        if blocks().any(|block| !block.op.kind.is_compute()) {
            found.arrival = [vec![i64::MAX; cells], vec![i64::MAX; cells]];
        }
        for lane in &drawing.lanes {
            for (place, block) in lane.blocks.iter().enumerate() {
                found.note(shape, place, block);
            }
        }
        found
    }

    /// Keeps where an op stands, or when a message arrives.
    fn note(&mut self, shape: &Shape, place: usize, block: &Block) {
        let cell = index(shape, block.op.stage, block.op.unit.0);
        let (which, receives) = match block.op.kind {
            OpKind::Forward => (0, false),
            OpKind::Backward | OpKind::BackwardInput => (1, false),
            OpKind::RecvForward => (0, true),
            OpKind::RecvBackward => (1, true),
            OpKind::BackwardWeight | OpKind::SendForward | OpKind::SendBackward => return,
        };
        if receives {
            if let Some(arrival) = self.arrival[which].get_mut(cell) {
                *arrival = block.end;
            }
        } else if let Some(at) = self.at[which].get_mut(cell) {
            *at = u32::try_from(place).unwrap_or(NONE);
        }
    }

    /// The idle stretches of a rank, in time; all of it if it runs nothing.
    pub fn of(&self, rank: Rank) -> Vec<Wait> {
        let lane = &self.drawing.lanes[rank.index()];
        let mut free = self.drawing.begin();
        let mut waits = Vec::new();
        for (at, block) in lane.compute() {
            if block.start > free {
                // An overlapped pair starts when both of its inputs are there.
                let pair = block.op.flags.has(Flags::PAIR_FIRST);
                let blocks =
                    &lane.blocks[at..=at + usize::from(pair && at + 1 < lane.blocks.len())];
                let awaited = self.awaited(blocks, rank, free);
                waits.push(Wait {
                    start: free,
                    end: block.start,
                    awaited,
                });
            }
            free = free.max(block.end);
        }
        let end = self.drawing.end();
        if end > free {
            waits.push(Wait {
                start: free,
                end,
                awaited: Awaited::Done,
            });
        }
        waits
    }

    /// The stretches that a view shows, cut to it.
    pub(crate) fn seen(&self, view: View<'_>, rank: Rank) -> Vec<Wait> {
        let cut = |wait: Wait| Wait {
            start: wait.start.max(view.from),
            end: wait.end.min(view.to),
            ..wait
        };
        let waits = self.of(rank).into_iter().map(cut);
        waits.filter(|wait| wait.start < wait.end).collect()
    }

    /// What the ops of `blocks`, one or a pair, waited for since `free`, when its rank became free.
    fn awaited(&self, blocks: &[Block], rank: Rank, free: i64) -> Awaited {
        let remote = blocks.iter().filter_map(|block| {
            let found = self.producer(block.op);
            found
                .filter(|found| found.0 != rank)
                .map(|found| (block, found))
        });
        let Some((block, (other, producer))) = remote.max_by_key(|found| found.1.1.end) else {
            return Awaited::Unknown;
        };
        // A result that was there before may still have been on its way. Only a simulation without
        // transfers of its own lets a rank idle for no other reason.
        let which = usize::from(block.op.kind != OpKind::Forward);
        let arrival = &self.arrival[which];
        let on_its_way = if arrival.is_empty() {
            self.drawing.simulated
        } else {
            let cell = index(&self.drawing.shape, block.op.stage, block.op.unit.0);
            arrival
                .get(cell)
                .is_some_and(|&end| end > free && end < i64::MAX)
        };
        if producer.end > free || on_its_way {
            Awaited::Op {
                rank: other,
                op: producer.op,
            }
        } else {
            Awaited::Unknown
        }
    }

    /// The op of the neighbouring stage whose result this one reads.
    fn producer(&self, op: Op) -> Option<(Rank, &'a Block)> {
        let shape = &self.drawing.shape;
        let (which, stage) = match op.kind {
            OpKind::Forward => (0, shape.previous(op.stage)?),
            OpKind::Backward | OpKind::BackwardInput => (1, shape.next(op.stage)?),
            _ => return None,
        };
        let at = *self.at[which].get(index(shape, stage, op.unit.0))?;
        let rank = shape.rank_of(stage);
        let block = self.drawing.lanes[rank.index()].blocks.get(at as usize)?;
        Some((rank, block))
    }
}

fn index(shape: &Shape, stage: Stage, unit: u32) -> usize {
    stage.index() * shape.num_units() as usize + unit as usize
}
