//! A rank's program under construction.

use super::links::{Links, NONE};
use crate::op::{Op, OpKind};
use crate::rank_ops::{RankOps, join};

/// A rank's program under construction.
pub(super) struct Program {
    ops: Vec<Op>,
}

impl Program {
    /// An empty program with room for a rank's compute ops and all their transfers.
    pub(super) fn for_ops(links: &Links, ops: &[Op]) -> Self {
        let transfers = |op: &Op| match op.kind {
            OpKind::Forward | OpKind::Backward | OpKind::BackwardInput => {
                let neighbours = links.of(op.stage);
                usize::from(neighbours.next.channel != NONE)
                    + usize::from(neighbours.previous.channel != NONE)
            }
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => 0,
        };
        let len = ops.len() + ops.iter().map(transfers).sum::<usize>();
        Self {
            ops: Vec::with_capacity(len),
        }
    }

    /// Adds a compute op, or a transfer that is a group of its own.
    #[inline]
    pub(super) fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Adds transfers that form one group; nothing if there are none.
    pub(super) fn group(&mut self, transfers: impl IntoIterator<Item = Op>) {
        let first = self.ops.len();
        self.ops.extend(transfers);
        join(&mut self.ops[first..]);
    }

    pub(super) fn finish(self) -> RankOps {
        RankOps { ops: self.ops }
    }
}
