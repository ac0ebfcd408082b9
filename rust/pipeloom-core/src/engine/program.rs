//! [`Program`]: a plan laid out for running: all ops, and dense tables of stages and channels.

use std::borrow::Cow;

use crate::cost::Ticks;
use crate::ids::{Rank, Stage};
use crate::op::{Flags, Op, OpKind};
use crate::plan::{Plan, RankOps};
use crate::shape::Shape;

/// No stage, or no channel.
pub(crate) const NONE: u32 = u32::MAX;

/// All transfers of one direction from one rank to another; the n-th send and the n-th receive
/// belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Channel {
    pub(crate) source: Rank,
    pub(crate) destination: Rank,
    /// Whether it carries gradients.
    pub(crate) backward: bool,
}

impl Channel {
    /// The rank at one end.
    pub(crate) fn end(&self, source: bool) -> Rank {
        if source {
            self.source
        } else {
            self.destination
        }
    }
}

/// A stage's neighbours, looked up for each op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageLinks {
    pub(crate) rank: u32,
    pub(crate) previous: u32,
    pub(crate) next: u32,
    /// Channel of this stage's `SEND_F`, `RECV_F`, `SEND_B`, `RECV_B`; [`NONE`] where the
    /// neighbour is on the same rank or there is none.
    pub(super) channels: [u32; 4],
}

/// A plan laid out for running. Ops may be garbage: stages and units out of range are skipped.
pub(crate) struct Program<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) ranks: Vec<Cow<'a, RankOps>>,
    pub(crate) stages: Vec<StageLinks>,
    pub(crate) channels: Vec<Channel>,
    /// For each channel, which (source, destination) pair it runs over.
    pub(crate) links: Vec<u32>,
    /// Whether transfers are ops of the plan.
    pub(crate) lowered: bool,
    /// Whether there are no backwards.
    pub(crate) forward_only: bool,
    pub(crate) num_units: usize,
    /// Cells from one stage's row to the next's.
    pub(crate) stride: usize,
    pub(crate) num_ops: u64,
}

impl<'a> Program<'a> {
    pub(crate) fn new(plan: &'a Plan) -> Self {
        let shape = plan.shape();
        let ranks: Vec<Cow<'a, RankOps>> = shape
            .ranks()
            .map(|rank| match plan.held_ops(rank) {
                Some(held) => Cow::Borrowed(held),
                None => Cow::Owned(plan.rank_ops(rank)),
            })
            .collect();
        let has = |wanted: fn(&Op) -> bool| ranks.iter().any(|rank| rank.ops.iter().any(wanted));
        let lowered = plan.style().is_some()
            || (plan.closed_form(Rank(0)).is_none() && has(|op| !op.kind.is_compute()));
        let forward_only =
            plan.forward_only() || !has(|op| op.kind.is_compute() && op.kind != OpKind::Forward);
        let num_ops = ranks.iter().map(|rank| rank.ops.len() as u64).sum();
        let (stages, channels) = tables(shape);
        let mut pairs: Vec<(Rank, Rank)> =
            channels.iter().map(|c| (c.source, c.destination)).collect();
        pairs.dedup();
        let links = channels
            .iter()
            .map(|c| index_in(&pairs, &(c.source, c.destination)));
        Self {
            shape,
            links: links.collect(),
            ranks,
            stages,
            channels,
            lowered,
            forward_only,
            num_units: shape.num_units() as usize,
            stride: stride(shape.num_units() as usize),
            num_ops,
        }
    }

    /// Number of (stage, unit) cells.
    pub(crate) fn num_cells(&self) -> usize {
        self.stages.len() * self.stride
    }

    /// Whether stage and unit are in range.
    #[inline]
    pub(crate) fn in_range(&self, op: Op) -> bool {
        op.stage.index() < self.stages.len() && op.unit.index() < self.num_units
    }

    /// The op of the neighbouring stage whose output or gradient a compute op reads, if there is
    /// one; of a split backward it is named by the same kind.
    pub(crate) fn producer(&self, op: Op) -> Option<Op> {
        let links = self.stages[op.stage.index()];
        let from = match op.kind {
            OpKind::Forward => links.previous,
            OpKind::Backward | OpKind::BackwardInput => links.next,
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => return None,
        };
        (from != NONE).then_some(Op {
            stage: Stage(from),
            ..op
        })
    }

    /// Index of an op's (stage, unit).
    #[inline]
    pub(crate) fn cell(&self, op: Op) -> usize {
        op.stage.index() * self.stride + op.unit.index()
    }

    /// The channel of a transfer in range, or [`NONE`].
    #[inline]
    pub(crate) fn channel(&self, op: Op) -> u32 {
        let kind = op.kind as usize - OpKind::SendForward as usize;
        self.stages[op.stage.index()].channels[kind]
    }

    /// Time of a transfer on each channel.
    pub(crate) fn channel_times(&self, ticks: &Ticks) -> Vec<i64> {
        let mut times = vec![0; self.channels.len()];
        for (links, ticks) in self.stages.iter().zip(&ticks.stages) {
            let [send_forward, _, send_backward, _] = links.channels;
            for (channel, time) in [
                (send_forward, ticks.to_next),
                (send_backward, ticks.to_previous),
            ] {
                if channel != NONE {
                    times[channel as usize] = time;
                }
            }
        }
        times
    }

    /// For each channel, the positions of its sends and of its receives, in order. Transfers on
    /// the wrong rank are left out.
    pub(crate) fn channel_ends(&self) -> Vec<[Vec<usize>; 2]> {
        let mut ends = vec![[Vec::new(), Vec::new()]; self.channels.len()];
        if !self.lowered {
            return ends;
        }
        for (rank, ops) in self.ranks.iter().enumerate() {
            for (at, &op) in ops.ops.iter().enumerate() {
                if op.kind.is_compute() || !self.in_range(op) {
                    continue;
                }
                let channel = self.channel(op) as usize;
                if self
                    .channels
                    .get(channel)
                    .is_some_and(|c| c.end(op.kind.is_send()).index() == rank)
                {
                    ends[channel][usize::from(op.kind.is_recv())].push(at);
                }
            }
        }
        ends
    }

    /// Where the group that starts at `from` ends.
    pub(crate) fn group_end(&self, rank: usize, from: usize) -> usize {
        let behind = &self.ranks[rank].ops[from + 1..];
        let joined = |op: &&Op| op.flags.has(Flags::JOINED) && !op.kind.is_compute();
        from + 1 + behind.iter().take_while(joined).count()
    }
}

/// The length of a row of cells: at least one for each unit, and an odd number of cache lines, so
/// that the cells of neighbouring stages, which are in use at the same time, do not compete for
/// the same lines.
fn stride(units: usize) -> usize {
    const LINE: usize = 8;
    if units < 4 * LINE {
        return units;
    }
    (units.div_ceil(LINE) | 1) * LINE
}

fn index_in<T: Ord>(sorted: &[T], wanted: &T) -> u32 {
    let found = sorted.binary_search(wanted).ok();
    found.and_then(|at| u32::try_from(at).ok()).unwrap_or(NONE)
}

/// The tables of a shape's stages and channels; channels are sorted.
fn tables(shape: &Shape) -> (Vec<StageLinks>, Vec<Channel>) {
    let stages = || (0..shape.num_stages()).map(Stage);
    let between = |from: Option<Stage>, to: Option<Stage>, backward| {
        let (source, destination) = (shape.rank_of(from?), shape.rank_of(to?));
        (source != destination).then_some(Channel {
            source,
            destination,
            backward,
        })
    };
    let all_of = |stage: Stage| {
        let (previous, next) = (shape.previous(stage), shape.next(stage));
        [
            between(Some(stage), next, false),
            between(previous, Some(stage), false),
            between(Some(stage), previous, true),
            between(next, Some(stage), true),
        ]
    };
    let mut channels: Vec<Channel> = stages().flat_map(all_of).flatten().collect();
    channels.sort_unstable();
    channels.dedup();
    let links = stages()
        .map(|stage| StageLinks {
            rank: shape.rank_of(stage).0,
            previous: shape.previous(stage).map_or(NONE, |stage| stage.0),
            next: shape.next(stage).map_or(NONE, |stage| stage.0),
            channels: all_of(stage)
                .map(|channel| channel.map_or(NONE, |channel| index_in(&channels, &channel))),
        })
        .collect();
    (links, channels)
}
