//! Actions: a plan's order as text, in which an overlapped pair is one entry.

use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Flags, Op};
use crate::plan::Plan;

impl Plan {
    /// The ops of a rank as PyTorch's action text, an overlapped pair as one action.
    pub fn actions(&self, rank: Rank) -> Vec<String> {
        let ops = self.rank_ops(rank).ops;
        let mut actions = Vec::with_capacity(ops.len());
        let mut rest = ops.as_slice();
        while let Some((&op, tail)) = rest.split_first() {
            rest = tail;
            match tail.split_first() {
                Some((second, tail)) if op.flags.has(Flags::PAIR_FIRST) => {
                    actions.push(format!("({op};{second})OVERLAP_F_B"));
                    rest = tail;
                }
                _ => actions.push(op.to_string()),
            }
        }
        actions
    }

    /// Number of actions of a rank: ops, an overlapped pair counted once.
    pub fn num_actions(&self, rank: Rank) -> u64 {
        match self.held_ops(rank) {
            Some(held) => held
                .ops
                .iter()
                .filter(|op| !op.flags.has(Flags::PAIR_SECOND))
                .count() as u64,
            None => self
                .closed_form(rank)
                .map_or(0, |order| order.num_actions()),
        }
    }

    /// The text of a rank's action `i`: entry `i` of [`Plan::actions`], in O(1) for closed-form
    /// families.
    ///
    /// # Errors
    /// If the rank or `i` is out of range.
    pub fn action(&self, rank: Rank, i: u64) -> Result<String> {
        self.require_rank(rank)?;
        let position = match self.held_ops(rank) {
            Some(held) => (0u64..)
                .zip(&held.ops)
                .filter(|(_, op)| !op.flags.has(Flags::PAIR_SECOND))
                .nth(usize::try_from(i).unwrap_or(usize::MAX))
                .map(|(position, _)| position),
            None => self
                .closed_form(rank)
                .and_then(|order| order.position_of_action(i)),
        };
        let Some(position) = position else {
            let len = self.num_actions(rank);
            return Err(Error::config(
                format!("i={i} is out of range: rank {rank} has {len} actions"),
                format!("actions of rank {rank} are 0..{len}"),
            ));
        };
        let op = self.op(rank, position)?;
        if op.flags.has(Flags::PAIR_FIRST) {
            let second = self.op(rank, position + 1)?;
            return Ok(format!("({op};{second})OVERLAP_F_B"));
        }
        Ok(op.to_string())
    }

    /// Which action of a rank an op belongs to: its index in [`Plan::actions`].
    ///
    /// # Errors
    /// If the rank is out of range or does not run the op.
    pub fn action_of(&self, rank: Rank, op: Op) -> Result<u64> {
        let position = self.position(rank, op)?;
        if let Some(held) = self.held_ops(rank) {
            let upto = usize::try_from(position).map_or(held.ops.len(), |at| at + 1);
            let second = |op: &&Op| op.flags.has(Flags::PAIR_SECOND);
            Ok(position - held.ops[..upto].iter().filter(second).count() as u64)
        } else {
            let order = self.closed_form(rank);
            Ok(order
                .and_then(|order| order.action_of_position(position))
                .unwrap_or(position))
        }
    }
}
