//! [`Violation`]: one broken rule of a plan, as checks report it and errors carry it.

use crate::ids::Rank;

/// One broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Name of the rule.
    pub rule: &'static str,
    /// The rank.
    pub rank: Rank,
    /// Position in the rank's order; of something missing, one past the end.
    pub position: u64,
    /// The op's text.
    pub op: String,
    /// What is wrong.
    pub message: String,
    /// How to mend it.
    pub hint: String,
    /// Of a deadlock, where each rank of its cycle stands, this one first; else empty.
    pub cycle: Vec<(Rank, u64)>,
}
