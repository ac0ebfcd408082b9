//! Checking: all rules a plan must meet; returns every violation, never stops at the first.

use crate::engine::Program;
use crate::ids::Rank;
use crate::semantics::Semantics;

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Name of the rule.
    pub rule: &'static str,
    /// The rank.
    pub rank: Rank,
    /// Position in the rank's order.
    pub position: u64,
    /// The op's text.
    pub op: String,
    /// What is wrong.
    pub message: String,
    /// How to mend it.
    pub hint: String,
}
pub(crate) fn deadlocks(_: &Program<'_>, _: Semantics) -> Vec<Violation> {
    Vec::new()
}
