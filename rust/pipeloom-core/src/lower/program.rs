//! A rank's program under construction.

use super::links::{Links, NONE};
use crate::op::{Op, OpKind};
use crate::plan::{NO_GROUP, RankOps};

/// A rank's program under construction. Groups are numbered from 0 in program order.
pub(super) struct Program {
    ops: Vec<Op>,
    groups: Vec<u32>,
    next_group: u32,
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
