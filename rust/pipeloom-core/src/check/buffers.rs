//! The bound on receive buffers: no channel holds more than so many at a time.

use crate::error::Result;
use crate::lower::{in_use, rank_lifetimes};
use crate::plan::Plan;
use crate::violation::Violation;

/// One violation for each channel that needs more than `most` buffers at a time, at the receive
/// that is the first too many.
///
/// # Errors
/// If the plan has no transfers.
pub(super) fn check(plan: &Plan, most: u32) -> Result<Vec<Violation>> {
    let mut violations = Vec::new();
    for rank in plan.shape().ranks() {
        for (channel, lifetimes) in rank_lifetimes(plan, rank)? {
            let held = in_use(&lifetimes);
            let Some(at) = held.iter().position(|&held| held > most) else {
                continue;
            };
            let posted = lifetimes[at].posted as u64;
            let op = plan.op(rank, posted)?;
            let needed = held.iter().copied().max().unwrap_or(0);
            violations.push(Violation {
                rule: "buffers",
                rank,
                position: posted,
                op: op.to_string(),
                message: format!(
                    "{op} needs buffer {} of channel {channel}, which needs {needed} in all, but \
                     max_buffers={most}",
                    most + 1
                ),
                hint: format!(
                    "post receives later (a smaller prefetch), run backwards earlier, or give \
                     max_buffers={needed}"
                ),
                cycle: Vec::new(),
            });
        }
    }
    Ok(violations)
}
