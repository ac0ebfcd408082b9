//! The critical path: from the last end back to the first start, along what each op waited for.

use crate::cost::Ticks;
use crate::engine::{NONE, Program, Times, pair_second};
use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};
use crate::semantics::Semantics;

/// (rank, position)
type Place = (usize, usize);

/// No position.
pub(super) const NOWHERE: usize = usize::MAX;

/// What a message waited for on a link that takes one at a time.
#[derive(Clone, Copy, Debug, Default)]
struct Journey {
    /// The op whose message found the link free; those between it and this one follow it directly.
    first: usize,
    arrival: i64,
}

struct Trace<'a> {
    program: &'a Program<'a>,
    times: &'a Times,
    channel_times: Vec<i64>,
    /// With link contention, for each rank and compute op the journey of its message.
    journeys: Vec<Vec<Journey>>,
    semantics: Semantics,
    /// Position by cell of `F`, of `B` or `I`, of `RECV_F`, of `RECV_B`.
    positions: [Vec<usize>; 4],
    /// For each rank and transfer, the position of its other end.
    partners: Vec<Vec<usize>>,
}

pub(super) fn trace(
    program: &Program<'_>,
    ticks: &Ticks,
    semantics: Semantics,
    link_contention: bool,
    times: &Times,
) -> Vec<(Rank, u64)> {
    let channel_times = program.channel_times(ticks);
    let contended = link_contention && semantics == Semantics::Buffered;
    let trace = Trace {
        program,
        times,
        journeys: if contended {
            journeys(program, times, &channel_times)
        } else {
            Vec::new()
        },
        channel_times,
        semantics,
        positions: positions(program),
        partners: partners(program),
    };
    let mut path = Vec::new();
    let mut next = trace.last();
    while let Some((rank, at)) = next {
        path.push((Rank(u32::try_from(rank).unwrap_or(NONE)), at as u64));
        next = trace.cause((rank, at));
    }
    path.reverse();
    path
}

pub(super) fn table(kind: OpKind) -> Option<usize> {
    match kind {
        OpKind::Forward => Some(0),
        OpKind::Backward | OpKind::BackwardInput => Some(1),
        OpKind::RecvForward => Some(2),
        OpKind::RecvBackward => Some(3),
        OpKind::BackwardWeight | OpKind::SendForward | OpKind::SendBackward => None,
    }
}

pub(super) fn positions(program: &Program<'_>) -> [Vec<usize>; 4] {
    let mut positions = [const { Vec::new() }; 4];
    for table in &mut positions[..if program.lowered { 4 } else { 2 }] {
        table.resize(program.num_cells(), NOWHERE);
    }
    for rank in &program.ranks {
        for (at, &op) in rank.ops.iter().enumerate() {
            if let Some(table) = table(op.kind).filter(|_| program.in_range(op)) {
                positions[table][program.cell(op)] = at;
            }
        }
    }
    positions
}

/// The journeys of all buffered messages: a rank's links carry them in the order of its program.
fn journeys(program: &Program<'_>, times: &Times, channel_times: &[i64]) -> Vec<Vec<Journey>> {
    let mut links = vec![Journey::default(); program.channels.len()];
    let mut journey = |rank: usize, at: usize, op: Op| {
        let send = match op.kind {
            OpKind::Forward => OpKind::SendForward,
            OpKind::Backward | OpKind::BackwardInput => OpKind::SendBackward,
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => return Journey::default(),
        };
        let channel = program.channel(Op { kind: send, ..op });
        if channel == NONE {
            return Journey::default();
        }
        let link = &mut links[program.links[channel as usize] as usize];
        let end = times.end(rank, at);
        if link.arrival <= end {
            link.first = at;
        }
        link.arrival = link.arrival.max(end) + channel_times[channel as usize];
        *link
    };
    let rank = |(rank, ops): (usize, &std::borrow::Cow<'_, crate::plan::RankOps>)| {
        let ops = ops.ops.iter().enumerate();
        ops.map(|(at, &op)| journey(rank, at, op)).collect()
    };
    program.ranks.iter().enumerate().map(rank).collect()
}

fn partners(program: &Program<'_>) -> Vec<Vec<usize>> {
    let unmatched = |rank: &std::borrow::Cow<'_, crate::plan::RankOps>| {
        vec![NOWHERE; if program.lowered { rank.ops.len() } else { 0 }]
    };
    let mut partners: Vec<Vec<usize>> = program.ranks.iter().map(unmatched).collect();
    for (channel, [sends, recvs]) in program.channels.iter().zip(program.channel_ends()) {
        for (&send, &recv) in sends.iter().zip(&recvs) {
            partners[channel.source.index()][send] = recv;
            partners[channel.destination.index()][recv] = send;
        }
    }
    partners
}

impl Trace<'_> {
    fn op(&self, (rank, at): Place) -> Op {
        self.program.ranks[rank].ops[at]
    }

    fn end(&self, (rank, at): Place) -> i64 {
        self.times.end(rank, at)
    }

    /// The op that ends last; the lowest rank's if several do.
    fn last(&self) -> Option<Place> {
        let ranks = self.program.ranks.iter().enumerate();
        ranks
            .flat_map(|(rank, ops)| (0..ops.ops.len()).map(move |at| (rank, at)))
            .filter(|&at| self.semantics != Semantics::Buffered || self.op(at).kind.is_compute())
            .min_by_key(|&place| std::cmp::Reverse(self.end(place)))
    }

    /// The op that an op waited for, if it waited at all.
    fn cause(&self, (rank, at): Place) -> Option<Place> {
        let start = self.times.start(rank, at);
        let op = self.op((rank, at));
        if op.kind.is_compute() {
            return self
                .program_cause((rank, at), start)
                .or_else(|| self.message_cause((rank, at), start));
        }
        let partner = (self.peer(rank, op)?, self.partners[rank][at]);
        self.transfer_cause((rank, at), start)
            .or_else(|| self.transfer_cause(partner, start))
            .or_else(|| self.link_cause((rank, at), partner.0, start))
    }

    /// The transfer that used the link until another one's start, if it was the link that held
    /// that one up.
    fn link_cause(&self, (rank, at): Place, peer: usize, start: i64) -> Option<Place> {
        let op = self.op((rank, at));
        let source = if op.kind.is_send() { rank } else { peer };
        let link = |op: Op| {
            let channel = self.program.channel(op) as usize;
            self.program.links.get(channel).copied()
        };
        let mine = link(op)?;
        let ops = self.program.ranks[source].ops.iter().enumerate();
        ops.filter(|(_, other)| other.kind.is_send() && link(**other) == Some(mine))
            .map(|(at, _)| (source, at))
            .filter(|&other| other != (rank, at) && self.end(other) == start)
            .find(|&other| self.times.start(other.0, other.1) < start)
    }

    /// The op of the program that let a compute op start, if it started when that ended.
    fn program_cause(&self, (rank, at): Place, start: i64) -> Option<Place> {
        let ops = &self.program.ranks[rank].ops;
        let second = at > 0 && ops[at].flags.has(Flags::PAIR_SECOND);
        let first = if second && pair_second(ops, at - 1).is_some() {
            at - 1
        } else {
            at
        };
        let compute = ops[..first].iter().rposition(|op| op.kind.is_compute());
        // Where transfers block the program, those behind the last compute op count as well.
        let blocking = matches!(self.semantics, Semantics::Batched | Semantics::Rendezvous);
        let candidates = if blocking {
            compute.unwrap_or(0)..first
        } else {
            compute.map_or(0..0, |at| at..at + 1)
        };
        let mut places = candidates.rev().map(|before| (rank, before));
        places.find(|&before| self.end(before) == start)
    }

    /// The op that made the message for which a compute op (or either half of a pair) waited.
    fn message_cause(&self, (rank, at): Place, start: i64) -> Option<Place> {
        let ops = &self.program.ranks[rank].ops;
        let second = at > 0 && ops[at].flags.has(Flags::PAIR_SECOND);
        let first = if second && pair_second(ops, at - 1).is_some() {
            at - 1
        } else {
            at
        };
        let halves = [Some(ops[first]), pair_second(ops, first)];
        halves
            .into_iter()
            .flatten()
            .filter_map(|op| self.provider(rank, op))
            .filter(|&(place, lag)| self.end(place) + lag == start)
            .map(|(place, _)| place)
            .next()
    }

    /// What the message that an op reads comes from, and the time in between.
    fn provider(&self, rank: usize, op: Op) -> Option<(Place, i64)> {
        let producer = self.program.producer(op)?;
        let recv = if op.kind == OpKind::Forward {
            OpKind::RecvForward
        } else {
            OpKind::RecvBackward
        };
        let channel = self.program.channel(Op { kind: recv, ..op });
        if channel != NONE && self.semantics != Semantics::Buffered {
            let at = self.positions[table(recv)?][self.program.cell(op)];
            return (at != NOWHERE).then_some(((rank, at), 0));
        }
        let at = self.positions[table(op.kind)?][self.program.cell(producer)];
        let source = self.program.stages[producer.stage.index()].rank as usize;
        if let Some(ranks) = self.journeys.get(source).filter(|_| channel != NONE) {
            let journey = *ranks.get(at)?;
            let place = (source, journey.first);
            return Some((place, journey.arrival - self.end(place)));
        }
        let lag = self.channel_times.get(channel as usize).copied();
        (at != NOWHERE).then_some(((source, at), lag.unwrap_or(0)))
    }

    fn peer(&self, rank: usize, op: Op) -> Option<usize> {
        let channel = self
            .program
            .channels
            .get(self.program.channel(op) as usize)?;
        let (source, destination) = (channel.source.index(), channel.destination.index());
        Some(if source == rank { destination } else { source })
    }

    /// What one end of a transfer waited for: its program up to the last compute op, or the
    /// transfer before it in its stream.
    fn transfer_cause(&self, (rank, at): Place, start: i64) -> Option<Place> {
        let ops = self.program.ranks.get(rank)?;
        let op = ops.ops.get(at)?;
        let channel = self.program.channel(*op);
        let blocking = matches!(self.semantics, Semantics::Batched | Semantics::Rendezvous);
        let (mut in_program, mut in_group) = (true, self.semantics == Semantics::Batched);
        for before in (0..at).rev() {
            let other = ops.ops[before];
            let compute = other.kind.is_compute();
            let in_stream = !compute
                && (self.semantics == Semantics::SingleStream
                    || self.program.channel(other) == channel);
            in_group &= ops.ops[before + 1].flags.has(Flags::JOINED) && !compute;
            let counts = in_stream || (in_program && !in_group && (compute || blocking));
            let end = self.end((rank, before));
            if counts && end == start {
                return Some((rank, before));
            }
            in_program &= !compute;
            if in_stream && !in_program {
                return None;
            }
        }
        None
    }
}
