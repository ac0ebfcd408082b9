//! Checking: all rules a plan must meet; returns every violation, never stops at the first.
//!
//! | rule | meaning |
//! |---|---|
//! | `placement` | each op is of a stage and microbatch that its rank has |
//! | `exactly_once` | each stage runs the forward and the backward of each microbatch once |
//! | `split_backward` | a backward is one `B`, or one `I` and one `W` |
//! | `data_flow` | on each rank an op stands behind what it reads |
//! | `recompute` | a recomputed forward and its backward are both marked |
//! | `pair` | an overlapped pair is a forward and a backward side by side |
//! | `missing_transfer` | every tensor that changes ranks is sent and received |
//! | `unneeded_transfer` | nothing else is |
//! | `channel_pairing` | both ends of a channel name its tensors in the same order |
//! | `group` | members of a group are transfers side by side |
//! | `buffers` | every received tensor is read, so its buffer gets free; no channel holds too many |
//! | `progress` | no ranks wait for each other, under the semantics asked for |
//! | `size` | a plan has about as many ops as its shape needs |

mod buffers;
mod cells;
mod channels;
#[cfg(test)]
mod naive;
mod progress;
mod render;
mod structure;
#[cfg(test)]
mod tests;

use crate::engine::{Engine, Program};
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::plan::Plan;
use crate::semantics::Semantics;
pub use crate::violation::Violation;

/// Whether a plan progresses under a semantics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The semantics.
    pub semantics: Semantics,
    /// Whether the plan promises it.
    pub promised: bool,
    /// Whether every op gets its turn; none: it is about transfers and the plan has none.
    pub progresses: Option<bool>,
}

/// What checking a plan found.
#[derive(Clone, Debug)]
pub struct Report {
    plan: Plan,
    /// Broken rules and broken promises.
    pub violations: Vec<Violation>,
    /// Deadlocks under semantics that were asked for but are not promised.
    pub unpromised: Vec<Violation>,
    /// One entry for each semantics that was asked for.
    pub progress: Vec<Progress>,
}

/// Checks a plan under the given semantics, or under those that it promises. Never panics,
/// whatever the plan holds.
pub fn check(plan: &Plan, semantics: Option<&[Semantics]>) -> Report {
    let mut report = Report {
        plan: plan.clone(),
        violations: size(plan),
        unpromised: Vec::new(),
        progress: Vec::new(),
    };
    let asked = semantics.unwrap_or(plan.promises());
    let entry = |semantics, progresses| Progress {
        semantics,
        promised: plan.promises().contains(&semantics),
        progresses,
    };
    if !report.violations.is_empty() {
        let stuck = |&semantics: &Semantics| entry(semantics, Some(false));
        report.progress = asked.iter().map(stuck).collect();
        return report;
    }
    let program = Program::new(plan);
    report.violations = structure::check(&program);
    report.violations.extend(channels::check(&program));
    let sound = report.violations.is_empty();
    let ordered = report
        .violations
        .iter()
        .all(|violation| violation.rule != "data_flow");
    let mut known = [None; Semantics::ALL.len()];
    // From the strictest on: a plan that progresses there does so under the kinder ones.
    for &semantics in Semantics::ALL
        .iter()
        .rev()
        .filter(|semantics| asked.contains(semantics))
    {
        if semantics != Semantics::Buffered && !program.lowered {
            continue;
        }
        if known[semantics as usize].is_some() {
            continue;
        }
        let engine = Engine::progress(&program, semantics);
        let progresses = engine.finished();
        known[semantics as usize] = Some(progresses);
        if progresses && sound {
            for &kinder in implied(semantics) {
                known[kinder as usize] = Some(true);
            }
        }
        if !progresses {
            // One op out of order, or missing, was told already.
            let least = match (sound, ordered) {
                (true, _) => 0,
                (false, true) => 1,
                (false, false) => 2,
            };
            let found = progress::deadlocks(&engine).into_iter();
            let found = found.filter(|deadlock| deadlock.num_ranks >= least);
            let found = found.map(|deadlock| deadlock.violation);
            if plan.promises().contains(&semantics) {
                report.violations.extend(found);
            } else {
                report.unpromised.extend(found);
            }
        }
    }
    report.progress = asked.iter().map(|&s| entry(s, known[s as usize])).collect();
    report
}

/// Checks a plan under the given semantics, promised or not: a deadlock under any is a violation.
///
/// # Errors
/// If a semantics is about transfers that the plan has not.
pub fn check_strictly(plan: &Plan, semantics: &[Semantics]) -> Result<Report> {
    let mut report = check(plan, Some(semantics));
    let missing = report
        .progress
        .iter()
        .find(|progress| progress.progresses.is_none());
    if let Some(progress) = missing {
        return Err(crate::simulate::needs_lowering(progress.semantics));
    }
    report.violations.append(&mut report.unpromised);
    Ok(report)
}

/// The deadlocks of a plan under a semantics.
pub(crate) fn deadlocks(program: &Program<'_>, semantics: Semantics) -> Vec<Violation> {
    let engine = Engine::progress(program, semantics);
    if engine.finished() {
        return Vec::new();
    }
    let found = progress::deadlocks(&engine).into_iter();
    found.map(|deadlock| deadlock.violation).collect()
}

/// Semantics under which a plan progresses if it does under this one.
pub(crate) fn implied(semantics: Semantics) -> &'static [Semantics] {
    match semantics {
        Semantics::Rendezvous => &Semantics::ALL,
        Semantics::Batched | Semantics::SingleStream => &[Semantics::Streams, Semantics::Buffered],
        Semantics::Streams => &[Semantics::Buffered],
        Semantics::Buffered => &[],
    }
}

/// Refuses a plan with far fewer ops than its shape needs, before anything is laid out and every
/// missing op is listed.
fn size(plan: &Plan) -> Vec<Violation> {
    const SMALL: u64 = 1 << 16;
    let shape = plan.shape();
    let cells = u64::from(shape.num_stages()) * u64::from(shape.num_units());
    let ops = plan.total_len();
    // Each of two replicas runs half of the units.
    if cells <= SMALL || ops >= cells / 2 {
        return Vec::new();
    }
    vec![Violation {
        rule: "size",
        rank: Rank(0),
        position: 0,
        op: String::new(),
        message: format!(
            "the plan has {ops} ops, but its shape needs at least {}",
            cells / 2
        ),
        hint: "lower num_microbatches, or add the ops".to_owned(),
        cycle: Vec::new(),
    }]
}

impl Report {
    /// The plan that was checked.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// This report, with a violation for each channel that needs more than `max_buffers` receive
    /// buffers at a time.
    ///
    /// # Errors
    /// If the plan has no transfers.
    pub fn within_buffers(mut self, max_buffers: u32) -> Result<Self> {
        // Of a plan far smaller than its shape nothing is laid out.
        let fits = self.violations.iter().all(|told| told.rule != "size");
        if fits {
            let found = buffers::check(&self.plan, max_buffers)?;
            self.violations.extend(found);
        }
        Ok(self)
    }

    /// Whether no rule and no promise is broken.
    pub fn ok(&self) -> bool {
        self.violations.is_empty()
    }

    /// This report, or its violations as an error.
    ///
    /// # Errors
    /// If a rule or a promise is broken.
    pub fn into_result(self) -> Result<Self> {
        if self.ok() {
            return Ok(self);
        }
        let message = render::violations(&self.plan, &self.violations);
        let hint = self.violations[0].hint.clone();
        Err(Error::check(message, hint, self.violations))
    }
}
