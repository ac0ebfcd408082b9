//! [`RankOps`]: the ops of one rank, held, and the groups of its transfers.

use crate::op::{Flags, Op};

/// Group of an op that belongs to no group of transfers.
pub const NO_GROUP: u32 = u32::MAX;

/// The ops of one rank, held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankOps {
    /// The ops in order. Transfers marked [`Flags::JOINED`] are of the group of the one before.
    pub ops: Vec<Op>,
}

impl RankOps {
    /// The group of each op: transfers of one number are posted and completed together. Numbered
    /// from 0 in program order; [`NO_GROUP`] for compute ops.
    pub fn groups(&self) -> Vec<u32> {
        let mut next = 0u32;
        let number = |op: &Op| {
            if op.kind.is_compute() {
                return NO_GROUP;
            }
            next += u32::from(next == 0 || !op.flags.has(Flags::JOINED));
            next - 1
        };
        self.ops.iter().map(number).collect()
    }
}

/// Makes transfers that stand side by side one group.
pub(crate) fn join(group: &mut [Op]) {
    for (at, op) in group.iter_mut().enumerate() {
        op.flags = if at == 0 {
            op.flags.without(Flags::JOINED)
        } else {
            op.flags.with(Flags::JOINED)
        };
    }
}
