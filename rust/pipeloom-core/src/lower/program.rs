//! What the styles share: who talks to whom, and a rank's program under construction.

use crate::ids::{Rank, Stage};
use crate::op::{Op, OpKind};
use crate::plan::{NO_GROUP, RankOps};
use crate::shape::Shape;

/// No such stage or rank.
pub(super) const NONE: u32 = u32::MAX;

/// The neighbours of one stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbours {
    /// The stage that takes this one's output, and its rank.
    pub(super) next: (u32, u32),
    /// The stage that takes this one's input gradient, and its rank.
    pub(super) previous: (u32, u32),
}

/// The neighbours of every stage, looked up once.
pub(super) struct Links {
    stages: Vec<Neighbours>,
    ranks: Vec<u32>,
}

impl Links {
    pub(super) fn new(shape: &Shape) -> Self {
        let place =
            |stage: Option<Stage>| stage.map_or((NONE, NONE), |s| (s.0, shape.rank_of(s).0));
        let stages = (0..shape.num_stages()).map(Stage);
        Self {
            stages: stages
                .clone()
                .map(|stage| Neighbours {
                    next: place(shape.next(stage)),
                    previous: place(shape.previous(stage)),
                })
                .collect(),
            ranks: stages.map(|stage| shape.rank_of(stage).0).collect(),
        }
    }

    pub(super) fn num_stages(&self) -> usize {
        self.stages.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Neighbours> {
        self.stages.iter()
    }

    #[inline]
    pub(super) fn rank_of(&self, stage: Stage) -> u32 {
        self.ranks[stage.index()]
    }

    #[inline]
    pub(super) fn of(&self, stage: Stage) -> Neighbours {
        self.stages[stage.index()]
    }

    /// The stage that takes what `op` produces, with its rank; [`NONE`] if nothing does.
    #[inline]
    pub(super) fn target(&self, op: Op) -> (u32, u32) {
        match op.kind {
            OpKind::Forward => self.of(op.stage).next,
            OpKind::Backward | OpKind::BackwardInput => self.of(op.stage).previous,
            _ => (NONE, NONE),
        }
    }

    /// The send that follows `op` and the receive that it matches, with the receiver's rank, if
    /// what `op` produces leaves its rank.
    #[inline]
    pub(super) fn transfer(&self, op: Op) -> Option<(Op, Op, u32)> {
        let (stage, rank) = self.target(op);
        if rank == NONE || rank == self.ranks[op.stage.index()] {
            return None;
        }
        let (send, recv) = if op.kind == OpKind::Forward {
            (OpKind::SendForward, OpKind::RecvForward)
        } else {
            (OpKind::SendBackward, OpKind::RecvBackward)
        };
        let there = Stage(stage);
        Some((
            Op::new(op.stage, send, op.unit),
            Op::new(there, recv, op.unit),
            rank,
        ))
    }

    /// The receive that brings what `op` reads, if that comes from another rank.
    #[inline]
    pub(super) fn receive(&self, op: Op) -> Option<Op> {
        let neighbours = self.of(op.stage);
        let (kind, (_, rank)) = match op.kind {
            OpKind::Forward => (OpKind::RecvForward, neighbours.previous),
            OpKind::Backward | OpKind::BackwardInput => (OpKind::RecvBackward, neighbours.next),
            _ => return None,
        };
        let local = rank == NONE || rank == self.ranks[op.stage.index()];
        (!local).then(|| Op::new(op.stage, kind, op.unit))
    }

    /// The program of a rank with room for its ops and all their transfers.
    pub(super) fn program(&self, rank: Rank, ops: &[Op]) -> Program {
        // Transfers a stage's F and its B take part in, so that each op costs one look-up.
        let crosses = |(_, other): (u32, u32)| u8::from(other != NONE && other != rank.0);
        let transfers: usize = ops
            .iter()
            .map(|op| match op.kind {
                OpKind::Forward | OpKind::Backward | OpKind::BackwardInput => {
                    let neighbours = self.of(op.stage);
                    usize::from(crosses(neighbours.previous) + crosses(neighbours.next))
                }
                _ => 0,
            })
            .sum();
        Program::with_capacity(ops.len() + transfers)
    }
}

/// A rank's program under construction. Groups are numbered from 0 in program order.
pub(super) struct Program {
    ops: Vec<Op>,
    groups: Vec<u32>,
    next_group: u32,
}

impl Program {
    fn with_capacity(len: usize) -> Self {
        Self {
            ops: Vec::with_capacity(len),
            groups: Vec::with_capacity(len),
            next_group: 0,
        }
    }

    #[inline]
    pub(super) fn compute(&mut self, op: Op) {
        self.ops.push(op);
        self.groups.push(NO_GROUP);
    }

    /// Adds a transfer in a group of its own.
    #[inline]
    pub(super) fn transfer(&mut self, op: Op) {
        self.ops.push(op);
        self.groups.push(self.next_group);
        self.next_group += 1;
    }

    /// Adds transfers that form one group; nothing if there are none.
    pub(super) fn group(&mut self, transfers: impl IntoIterator<Item = Op>) {
        let before = self.ops.len();
        self.ops.extend(transfers);
        if self.ops.len() > before {
            self.groups.resize(self.ops.len(), self.next_group);
            self.next_group += 1;
        }
    }

    pub(super) fn finish(self) -> RankOps {
        RankOps {
            ops: self.ops,
            groups: self.groups,
        }
    }
}
