//! The drawing of a simulated plan.

use super::{Block, Drawing, Lane};
use crate::error::Result;
use crate::ids::Rank;
use crate::simulate::Timeline;

impl Drawing {
    /// The drawing of a timeline, with its memory.
    ///
    /// # Errors
    /// Never for a timeline that [`crate::simulate::simulate`] made.
    pub fn predicted(timeline: &Timeline) -> Result<Self> {
        let (plan, ticks) = (timeline.plan(), timeline.ticks());
        Ok(Self {
            schedule: plan.schedule().to_owned(),
            shape: plan.shape().clone(),
            lanes: plan
                .shape()
                .ranks()
                .map(|rank| lane(timeline, rank))
                .collect::<Result<_>>()?,
            ticks_per_unit: 1 << ticks.time_bits,
            memory_ticks_per_unit: 1 << ticks.memory_bits,
            critical_path: Vec::new(),
            simulated: true,
            lower_bound: Some(timeline.bounds().binding().ticks),
            note: String::new(),
        })
    }

    /// This drawing with the timeline's critical path.
    #[must_use]
    pub fn with_critical_path(mut self, timeline: &Timeline) -> Self {
        self.critical_path = timeline
            .critical_path()
            .into_iter()
            .filter_map(|(rank, at)| usize::try_from(at).ok().map(|at| (rank, at)))
            .collect();
        self
    }
}

fn lane(timeline: &Timeline, rank: Rank) -> Result<Lane> {
    let ops = timeline.plan().rank_ops(rank).ops;
    let times = timeline.start(rank)?.into_iter().zip(timeline.end(rank)?);
    let block = |(op, (start, end))| Block { op, start, end };
    Ok(Lane {
        blocks: ops.into_iter().zip(times).map(block).collect(),
        memory: timeline.memory(rank)?,
        base_memory: timeline.ticks().static_memory[rank.index()],
        peak_memory: Some(timeline.peak_memory()[rank.index()]),
    })
}
