//! How many receive buffers a rank needs for a channel.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Op, OpKind};
use crate::plan::Plan;

/// Whether a channel carries activations or gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// Activations, towards the next stage.
    Forward,
    /// Gradients, towards the previous stage.
    Backward,
}

impl Direction {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        }
    }

    /// Reads a name.
    ///
    /// # Errors
    /// If it is neither `forward` nor `backward`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "forward" => Ok(Self::Forward),
            "backward" => Ok(Self::Backward),
            _ => Err(Error::config(
                format!("direction {name:?} is unknown"),
                "one of \"forward\", \"backward\"",
            )),
        }
    }
}

/// All transfers from one rank to another in one direction; they are matched in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Channel {
    /// The rank that sends.
    pub source: Rank,
    /// The rank that receives.
    pub destination: Rank,
    /// What it carries.
    pub direction: Direction,
}

impl Channel {
    /// The channel of a transfer that stands in `rank`'s program; none for a compute op or a
    /// transfer that does not cross ranks.
    pub fn of(plan: &Plan, rank: Rank, op: Op) -> Option<Self> {
        let shape = plan.shape();
        let forward = matches!(op.kind, OpKind::SendForward | OpKind::RecvForward);
        if op.kind.is_compute() {
            return None;
        }
        let peer = shape.peer(op.stage, forward == op.kind.is_send())?;
        let (source, destination) = if op.kind.is_send() {
            (rank, peer)
        } else {
            (peer, rank)
        };
        let direction = if forward {
            Direction::Forward
        } else {
            Direction::Backward
        };
        Some(Self {
            source,
            destination,
            direction,
        })
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.direction.name();
        write!(f, "{} -> {} {name}", self.source, self.destination)
    }
}

/// The ranks from which `rank` receives in a direction, in order.
pub fn sources(plan: &Plan, rank: Rank, direction: Direction) -> Vec<Rank> {
    let shape = plan.shape();
    let chunks = (0..shape.chunks_per_rank()).map(crate::ids::Chunk);
    let mut found: Vec<Rank> = chunks
        .filter_map(|chunk| shape.stage_at(rank, chunk))
        .filter_map(|stage| shape.peer(stage, direction == Direction::Backward))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// When a receive buffer is in use, as positions in the receiving rank's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// The receive that takes the buffer.
    pub posted: usize,
    /// The last op that reads it, after which it is free; none: nothing reads it.
    pub last_read: Option<usize>,
}

/// The lifetimes of the messages that a rank of a lowered plan receives on a channel, in the
/// channel's order.
///
/// A buffer is taken when its receive stands in the program, and free after the last op that reads
/// it: B of its stage and unit (W if the backward is split), or F where there is no backward.
///
/// # Errors
/// If the plan has no transfers, or the channel does not end at the rank.
pub fn buffer_lifetimes(plan: &Plan, rank: Rank, channel: Channel) -> Result<Vec<Lifetime>> {
    plan.require_rank(rank)?;
    plan.require_rank(channel.source)?;
    if channel.destination != rank {
        return Err(Error::config(
            format!("channel {channel} does not end at rank {rank}"),
            "buffers are those of the receiving rank",
        ));
    }
    let mut all = rank_lifetimes(plan, rank)?;
    Ok(all.remove(&channel).unwrap_or_default())
}

/// The lifetimes of all messages that a rank receives, by channel.
///
/// # Errors
/// If the plan has no transfers.
pub(crate) fn rank_lifetimes(plan: &Plan, rank: Rank) -> Result<BTreeMap<Channel, Vec<Lifetime>>> {
    let Some(held) = plan.held_ops(rank).filter(|_| plan.style().is_some()) else {
        return Err(Error::config(
            "the plan has no transfers, so no receive buffers",
            "lower it first: plan.lower()",
        ));
    };
    let shape = plan.shape();
    let (stages, units) = (shape.num_stages(), shape.num_units());
    let cell = |op: Op| {
        let there = op.stage.0 < stages && op.unit.0 < units;
        there.then(|| shape.chunk_of(op.stage).index() * units as usize + op.unit.index())
    };
    // The last reader of each (stage, unit) is its last compute op.
    let mut last = vec![None; shape.chunks_per_rank() as usize * units as usize];
    for (at, &op) in held.ops.iter().enumerate() {
        if let Some(cell) = cell(op).filter(|_| op.kind.is_compute()) {
            last[cell] = Some(at);
        }
    }
    let mut all: BTreeMap<Channel, Vec<Lifetime>> = BTreeMap::new();
    for (posted, &op) in held.ops.iter().enumerate() {
        let Some(cell) = cell(op).filter(|_| op.kind.is_recv()) else {
            continue;
        };
        if let Some(channel) = Channel::of(plan, rank, op) {
            let last_read = last[cell].filter(|&reader| reader > posted);
            let life = Lifetime { posted, last_read };
            all.entry(channel).or_default().push(life);
        }
    }
    Ok(all)
}

/// Number of receive buffers that a rank of a lowered plan needs for a channel: the most of its
/// messages that are posted and not yet free at one time.
///
/// # Errors
/// As [`buffer_lifetimes`].
pub fn buffers(plan: &Plan, rank: Rank, channel: Channel) -> Result<u32> {
    let lifetimes = buffer_lifetimes(plan, rank, channel)?;
    Ok(in_use(&lifetimes).into_iter().max().unwrap_or(0))
}

/// How many buffers are in use as each message's is taken, its own included.
pub(crate) fn in_use(lifetimes: &[Lifetime]) -> Vec<u32> {
    let mut freed: Vec<usize> = lifetimes.iter().filter_map(|life| life.last_read).collect();
    freed.sort_unstable();
    let mut gone = 0;
    let held = (1..).zip(lifetimes).map(|(taken, life)| {
        while freed.get(gone).is_some_and(|&read| read < life.posted) {
            gone += 1;
        }
        u32::try_from(taken - gone).unwrap_or(u32::MAX)
    });
    held.collect()
}
