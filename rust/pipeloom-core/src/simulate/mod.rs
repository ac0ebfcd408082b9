//! Simulation: when each op runs at given costs, and what that says of time and memory.
//!
//! ```
//! use pipeloom_core::{cost::Costs, schedules, semantics::Semantics, simulate};
//!
//! let plan = schedules::plan(&schedules::Request::new("1f1b", 4, None, 8))?;
//! let timeline = simulate::simulate(&plan, &Costs::default(), Semantics::Buffered, false)?;
//! assert_eq!(timeline.makespan(), 33); // (m + pp - 1) (F + I + W)
//! assert_eq!(timeline.peak_memory(), [4, 3, 2, 1]);
//! # Ok::<(), pipeloom_core::error::Error>(())
//! ```

mod bounds;
mod bubbles;
mod critical_path;
mod memory;

use std::sync::OnceLock;

use crate::check::deadlocks;
use crate::cost::{Costs, Ticks};
use crate::engine::{Engine, Program, Times};
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::plan::Plan;
use crate::semantics::Semantics;
use crate::violation::Violation;

pub use bounds::{Bound, Bounds};
pub use bubbles::Bubbles;

/// Most cells (stages times units) that a run lays out.
const MAX_CELLS: u64 = 1 << 32;

/// When each op of a plan runs.
#[derive(Clone, Debug)]
pub struct Timeline {
    plan: Plan,
    ticks: Ticks,
    semantics: Semantics,
    link_contention: bool,
    times: Times,
    busy: Vec<i64>,
    /// First start and last end of each rank.
    extents: Vec<Option<(i64, i64)>>,
    peak_memory: Vec<i64>,
    /// Found when first asked for: it takes a pass over all ranks.
    bubbles: OnceLock<Vec<Bubbles>>,
}

/// Runs a plan at the given costs.
///
/// # Errors
/// If the costs do not fit, the semantics needs transfers that the plan has not, or the plan gets
/// stuck.
pub fn simulate(
    plan: &Plan,
    costs: &Costs,
    semantics: Semantics,
    link_contention: bool,
) -> Result<Timeline> {
    let shape = plan.shape();
    let cells = u64::from(shape.num_stages()) * u64::from(shape.num_units());
    if cells > MAX_CELLS {
        return Err(Error::config(
            format!("{cells} stages times microbatches are too many to simulate"),
            format!("simulate at most {MAX_CELLS}; fewer microbatches show the same bubble"),
        ));
    }
    let ticks = costs.ticks(shape)?;
    let program = Program::new(plan);
    ticks.require_fits(program.num_ops)?;
    if semantics != Semantics::Buffered && !program.lowered {
        return Err(needs_lowering(semantics));
    }
    let engine = Engine::timed(&program, semantics, &ticks, link_contention);
    if !engine.finished() {
        return Err(stuck(plan, semantics, deadlocks(&program, semantics)));
    }
    let Engine { times, busy, .. } = engine;
    let extents = (0..program.ranks.len()).map(|rank| extent(&program, semantics, &times, rank));
    let peaks = program.ranks.iter().zip(&ticks.static_memory);
    Ok(Timeline {
        plan: plan.clone(),
        semantics,
        link_contention,
        bubbles: OnceLock::new(),
        extents: extents.collect(),
        peak_memory: peaks
            .map(|(ops, &fixed)| memory::peak(&ops.ops, &ticks.stages, fixed))
            .collect(),
        times,
        busy,
        ticks,
    })
}

/// The error for a plan that does not get through: what waits for what, and what it promises.
fn stuck(plan: &Plan, semantics: Semantics, violations: Vec<Violation>) -> Error {
    let told = violations
        .first()
        .map_or("", |violation| &violation.message);
    let promised: Vec<&str> = plan.promises().iter().map(|s| s.name()).collect();
    Error::check(
        format!("the plan gets stuck under {semantics}: {told}"),
        format!(
            "this plan promises to progress under {}; plan.lower(\"fifo\") makes one that \
             progresses under all semantics",
            promised.join(", ")
        ),
        violations,
    )
}

/// First start and last end of a rank; none if it does nothing.
fn extent(
    program: &Program<'_>,
    semantics: Semantics,
    times: &Times,
    rank: usize,
) -> Option<(i64, i64)> {
    let ops = &program.ranks[rank].ops;
    if semantics == Semantics::Buffered {
        // Sends and receives take no turn, and compute ops run one after the other.
        let first = ops.iter().position(|op| op.kind.is_compute())?;
        let last = ops.iter().rposition(|op| op.kind.is_compute())?;
        return Some((times.start(rank, first), times.end(rank, last)));
    }
    let rows = times.of(rank);
    let first = rows.iter().map(|&[start, _]| start).min()?;
    Some((first, rows.iter().map(|&[_, end]| end).max()?))
}

pub(crate) fn needs_lowering(semantics: Semantics) -> Error {
    Error::config(
        format!("semantics {semantics} is about transfers, but the plan has none"),
        "lower it first: plan.lower(), or --lower",
    )
}

impl Timeline {
    /// The plan that ran.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The semantics it ran under.
    pub fn semantics(&self) -> Semantics {
        self.semantics
    }

    /// The costs in ticks.
    pub fn ticks(&self) -> &Ticks {
        &self.ticks
    }

    /// Start of each op of a rank, in ticks.
    ///
    /// # Errors
    /// If the rank is out of range.
    pub fn start(&self, rank: Rank) -> Result<Vec<i64>> {
        self.plan.require_rank(rank)?;
        Ok(self
            .times
            .of(rank.index())
            .iter()
            .map(|row| row[0])
            .collect())
    }

    /// End of each op of a rank, in ticks.
    ///
    /// # Errors
    /// If the rank is out of range.
    pub fn end(&self, rank: Rank) -> Result<Vec<i64>> {
        self.plan.require_rank(rank)?;
        Ok(self
            .times
            .of(rank.index())
            .iter()
            .map(|row| row[1])
            .collect())
    }

    /// From the first start of any rank to the last end, until all transfers are done.
    pub fn makespan(&self) -> i64 {
        let (first, last) = self.whole_extent();
        last - first
    }

    fn whole_extent(&self) -> (i64, i64) {
        let active = || self.active_extents();
        let first = active().map(|(first, _)| first).min().unwrap_or(0);
        (first, active().map(|(_, last)| last).max().unwrap_or(first))
    }

    /// The longest time from a rank's own first start to its own last end.
    pub fn span(&self) -> i64 {
        let spans = self.active_extents().map(|(first, last)| last - first);
        spans.max().unwrap_or(0)
    }

    fn active_extents(&self) -> impl Iterator<Item = (i64, i64)> {
        self.extents.iter().copied().flatten()
    }

    /// Time that each rank computes, in ticks.
    pub fn work(&self) -> &[i64] {
        &self.busy
    }

    /// `1 - work / time`, 0 if there is no time.
    #[allow(clippy::cast_precision_loss)] // a ratio for people
    fn idle(work: i64, time: i64) -> f64 {
        if time == 0 {
            0.0
        } else {
            (time - work) as f64 / time as f64
        }
    }

    fn busiest(&self) -> i64 {
        self.busy.iter().copied().max().unwrap_or(0)
    }

    /// `1 - busiest rank's work / makespan`.
    pub fn bubble_ratio(&self) -> f64 {
        Self::idle(self.busiest(), self.makespan())
    }

    /// `1 - busiest rank's work / span`.
    pub fn bubble_span(&self) -> f64 {
        Self::idle(self.busiest(), self.span())
    }

    /// `1 - the rank's work / makespan`.
    ///
    /// # Errors
    /// If the rank is out of range.
    pub fn bubble(&self, rank: Rank) -> Result<f64> {
        self.plan.require_rank(rank)?;
        Ok(Self::idle(self.busy[rank.index()], self.makespan()))
    }

    /// A rank's idle time by reason, in ticks: it adds up to the makespan without its work.
    ///
    /// # Errors
    /// If the rank is out of range.
    pub fn bubbles(&self, rank: Rank) -> Result<Bubbles> {
        self.plan.require_rank(rank)?;
        let all = self.bubbles.get_or_init(|| {
            let program = Program::new(&self.plan);
            bubbles::bubbles(&program, &self.times, &self.extents, self.whole_extent())
        });
        Ok(all[rank.index()])
    }

    /// Highest memory of each rank, in memory ticks.
    pub fn peak_memory(&self) -> &[i64] {
        &self.peak_memory
    }

    /// Memory of a rank after each of its ops, in memory ticks.
    ///
    /// # Errors
    /// If the rank is out of range.
    pub fn memory(&self, rank: Rank) -> Result<Vec<i64>> {
        self.plan.require_rank(rank)?;
        let fixed = self.ticks.static_memory[rank.index()];
        let ops = self.plan.rank_ops(rank).ops;
        Ok(memory::curve(&ops, &self.ticks.stages, fixed))
    }

    /// A chain of ops from the first start to the last end, each of which starts when the one
    /// before it (and its message) lets it: (rank, position). Where links take one transfer at a
    /// time, an op that waited for such a link follows the op whose message found the link free.
    pub fn critical_path(&self) -> Vec<(Rank, u64)> {
        critical_path::trace(
            &Program::new(&self.plan),
            &self.ticks,
            self.semantics,
            self.link_contention,
            &self.times,
        )
    }

    /// Times that no order of these ops on this placement, within each rank's peak memory here,
    /// can beat.
    pub fn bounds(&self) -> Bounds {
        bounds::bounds(&Program::new(&self.plan), &self.ticks, &self.peak_memory)
    }

    /// By how much the makespan is above the largest bound: `makespan / bound - 1`.
    #[allow(clippy::cast_precision_loss)] // a ratio for people
    pub fn gap(&self) -> f64 {
        let (makespan, bound) = (self.makespan(), self.bounds().binding().ticks);
        if bound == 0 {
            0.0
        } else {
            (makespan - bound) as f64 / bound as f64
        }
    }
}

#[cfg(test)]
mod tests;
