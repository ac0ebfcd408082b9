//! Who talks to whom: the neighbours of every stage and the channels between ranks, looked up
//! once.

use std::collections::BTreeMap;

use crate::ids::Stage;
use crate::op::{Op, OpKind};
use crate::shape::Shape;

/// No such stage, rank or channel.
pub(super) const NONE: u32 = u32::MAX;

/// The stage on one side of a stage; all [`NONE`] if there is none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbour {
    pub(super) stage: u32,
    /// The channel towards it; [`NONE`] if it is on the same rank.
    pub(super) channel: u32,
}

/// Both neighbours of a stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbours {
    pub(super) next: Neighbour,
    pub(super) previous: Neighbour,
}

/// The neighbours of every stage, and the channels.
pub(super) struct Links {
    stages: Vec<Neighbours>,
    /// By channel: the rank that sends.
    sources: Vec<u32>,
    /// By channel: how many messages it carries at most.
    lens: Vec<usize>,
    /// By receiving rank: its channels, by source, that of gradients first.
    inbound: Vec<Vec<u32>>,
}

impl Links {
    pub(super) fn new(shape: &Shape) -> Self {
        // By (receiver, source, forward): numbered as they come, listed in this order.
        let mut ids: BTreeMap<(u32, u32, bool), u32> = BTreeMap::new();
        let mut towards = |stage: Stage, other: Option<Stage>, forward: bool| {
            let Some(other) = other else {
                return Neighbour {
                    stage: NONE,
                    channel: NONE,
                };
            };
            let (source, rank) = (shape.rank_of(stage).0, shape.rank_of(other).0);
            let fresh = u32::try_from(ids.len()).unwrap_or(NONE);
            let channel = if source == rank {
                NONE
            } else {
                *ids.entry((rank, source, forward)).or_insert(fresh)
            };
            Neighbour {
                stage: other.0,
                channel,
            }
        };
        let stages = (0..shape.num_stages()).map(Stage).map(|stage| Neighbours {
            next: towards(stage, shape.next(stage), true),
            previous: towards(stage, shape.previous(stage), false),
        });
        let stages: Vec<Neighbours> = stages.collect();
        let mut lens = vec![0; ids.len()];
        for towards in stages.iter().flat_map(|s| [s.next, s.previous]) {
            if let Some(len) = lens.get_mut(towards.channel as usize) {
                *len += shape.num_units() as usize;
            }
        }
        let mut inbound = vec![Vec::new(); shape.pp() as usize];
        let mut sources = vec![NONE; ids.len()];
        for (&(receiver, source, _), &channel) in &ids {
            inbound[receiver as usize].push(channel);
            sources[channel as usize] = source;
        }
        Self {
            stages,
            sources,
            lens,
            inbound,
        }
    }

    /// The neighbours of all stages, in stage order.
    pub(super) fn stages(&self) -> &[Neighbours] {
        &self.stages
    }

    /// Room for the messages of every channel.
    pub(super) fn rooms<T>(&self) -> Vec<Vec<T>> {
        self.lens
            .iter()
            .map(|&len| Vec::with_capacity(len))
            .collect()
    }

    /// The rank that sends on a channel.
    pub(super) fn source(&self, channel: u32) -> u32 {
        self.sources[channel as usize]
    }

    /// The channels that end at a rank, by source; of a source, that of gradients first.
    pub(super) fn inbound(&self, rank: u32) -> &[u32] {
        &self.inbound[rank as usize]
    }

    #[inline]
    pub(super) fn of(&self, stage: Stage) -> Neighbours {
        self.stages[stage.index()]
    }

    /// The neighbour that takes what `op` produces, if it produces anything.
    #[inline]
    pub(super) fn target(&self, op: Op) -> Option<Neighbour> {
        let neighbour = match op.kind {
            OpKind::Forward => self.of(op.stage).next,
            OpKind::Backward | OpKind::BackwardInput => self.of(op.stage).previous,
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => return None,
        };
        (neighbour.stage != NONE).then_some(neighbour)
    }

    /// The send that follows `op`, if what it produces leaves the rank.
    #[inline]
    pub(super) fn send(&self, op: Op) -> Option<Op> {
        let kind = if op.kind == OpKind::Forward {
            OpKind::SendForward
        } else {
            OpKind::SendBackward
        };
        let target = self.target(op)?;
        (target.channel != NONE).then(|| Op::new(op.stage, kind, op.unit))
    }

    /// The channel that brings what `op` reads; [`NONE`] if that is made on the same rank.
    pub(super) fn source_of(&self, op: Op) -> u32 {
        let neighbours = self.of(op.stage);
        let of = |stage: u32| self.stages.get(stage as usize);
        let channel = match op.kind {
            OpKind::Forward => of(neighbours.previous.stage).map(|from| from.next.channel),
            OpKind::Backward | OpKind::BackwardInput => {
                of(neighbours.next.stage).map(|from| from.previous.channel)
            }
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => None,
        };
        channel.unwrap_or(NONE)
    }

    /// Number of channels.
    pub(super) fn num_channels(&self) -> usize {
        self.sources.len()
    }

    /// The receive that brings what `op` reads, if that comes from another rank.
    #[inline]
    pub(super) fn receive(&self, op: Op) -> Option<Op> {
        let neighbours = self.of(op.stage);
        // There is a channel from a neighbour where there is one towards it.
        let (kind, source) = match op.kind {
            OpKind::Forward => (OpKind::RecvForward, neighbours.previous),
            OpKind::Backward | OpKind::BackwardInput => (OpKind::RecvBackward, neighbours.next),
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => return None,
        };
        (source.channel != NONE).then(|| Op::new(op.stage, kind, op.unit))
    }
}

/// The receive at the other end of what `made` sends to `target`.
#[inline]
pub(super) fn receive_of(made: Op, target: Neighbour) -> Op {
    let kind = if made.kind == OpKind::Forward {
        OpKind::RecvForward
    } else {
        OpKind::RecvBackward
    };
    Op::new(Stage(target.stage), kind, made.unit)
}
