//! A slow, plain simulator of a lowered plan under each semantics, written from their definition
//! alone: every rank walks as far as it can, every transfer that can happens, until nothing moves.

use std::collections::BTreeMap;

use pipeloom_core::ids::Rank;
use pipeloom_core::lower::Channel;
use pipeloom_core::op::{Flags, Op};
use pipeloom_core::plan::{NO_GROUP, Plan, RankOps};
use pipeloom_core::semantics::Semantics;

/// (rank, position).
type At = (usize, usize);

pub(crate) struct Sim<'a> {
    plan: &'a Plan,
    ranks: Vec<RankOps>,
    /// The other end of each transfer.
    mate: BTreeMap<At, At>,
}

/// Ends of a run: of each compute op by rank, or none if it got stuck.
pub(crate) type Ends = Option<Vec<Vec<u64>>>;

impl<'a> Sim<'a> {
    /// Pairs the n-th send with the n-th receive of each channel; they must name one tensor.
    pub(crate) fn new(plan: &'a Plan) -> Self {
        let ranks = plan.materialize();
        let mut channels: BTreeMap<Channel, [Vec<At>; 2]> = BTreeMap::new();
        for (rank, held) in ranks.iter().enumerate() {
            let groups = held.groups();
            assert_eq!(held.ops.len(), groups.len());
            for (at, &op) in held.ops.iter().enumerate() {
                assert_eq!(groups[at] == NO_GROUP, op.kind.is_compute(), "{op}");
                if op.kind.is_compute() {
                    continue;
                }
                let channel = Channel::of(plan, Rank(rank as u32), op).expect("it crosses ranks");
                let ends = channels.entry(channel).or_default();
                ends[usize::from(op.kind.is_recv())].push((rank, at));
            }
        }
        let mut mate = BTreeMap::new();
        for (channel, [sends, receives]) in channels {
            assert_eq!(sends.len(), receives.len(), "{channel}");
            for (&send, &receive) in sends.iter().zip(&receives) {
                let (s, r) = (ranks[send.0].ops[send.1], ranks[receive.0].ops[receive.1]);
                let wanted = if s.kind.text() == "SEND_F" {
                    plan.shape().next(s.stage)
                } else {
                    plan.shape().previous(s.stage)
                };
                assert_eq!(
                    (wanted, s.unit),
                    (Some(r.stage), r.unit),
                    "{channel}: {s} meets {r}"
                );
                mate.insert(send, receive);
                mate.insert(receive, send);
            }
        }
        Self { plan, ranks, mate }
    }

    /// Runs with the given costs of compute ops and free transfers.
    pub(crate) fn run(&self, semantics: Semantics, cost: impl Fn(Op) -> u64) -> Ends {
        let n = self.ranks.len();
        let mut state = State {
            sim: self,
            semantics,
            at: vec![0; n],
            clock: vec![0; n],
            posted: BTreeMap::new(),
            done: BTreeMap::new(),
            queues: BTreeMap::new(),
            ends: vec![Vec::new(); n],
        };
        loop {
            let mut moved = false;
            for rank in 0..n {
                while state.step(rank, &cost) {
                    moved = true;
                }
            }
            moved |= state.transfer();
            if !moved {
                break;
            }
        }
        let drained = state
            .queues
            .values()
            .all(|(queue, head, _)| *head == queue.len());
        let finished = (0..n).all(|rank| state.at[rank] == self.ranks[rank].ops.len());
        (drained && finished).then_some(state.ends)
    }

    fn op(&self, (rank, at): At) -> Op {
        self.ranks[rank].ops[at]
    }

    /// The ops of the group (or the lone op) at a position.
    fn group_end(&self, rank: usize, at: usize, semantics: Semantics) -> usize {
        let held = &self.ranks[rank];
        if semantics == Semantics::Rendezvous {
            return at + 1;
        }
        let joined = |op: &&Op| op.flags.has(Flags::JOINED);
        at + 1 + held.ops[at + 1..].iter().take_while(joined).count()
    }
}

/// Members, position of the head, when it is free.
type Fifo = (Vec<At>, usize, u64);

struct State<'a> {
    sim: &'a Sim<'a>,
    semantics: Semantics,
    at: Vec<usize>,
    clock: Vec<u64>,
    /// When each transfer was posted.
    posted: BTreeMap<At, u64>,
    /// When each transfer was done.
    done: BTreeMap<At, u64>,
    queues: BTreeMap<(usize, Option<Channel>), Fifo>,
    ends: Vec<Vec<u64>>,
}

impl State<'_> {
    fn blocking(&self) -> bool {
        matches!(self.semantics, Semantics::Batched | Semantics::Rendezvous)
    }

    fn queue(&self, at: At) -> (usize, Option<Channel>) {
        let one_per_channel = self.semantics != Semantics::SingleStream;
        let channel = Channel::of(self.sim.plan, Rank(at.0 as u32), self.sim.op(at));
        (at.0, channel.filter(|_| one_per_channel))
    }

    /// Moves a rank by one op, or by one group where transfers block.
    fn step(&mut self, rank: usize, cost: &impl Fn(Op) -> u64) -> bool {
        let at = self.at[rank];
        let Some(&op) = self.sim.ranks[rank].ops.get(at) else {
            return false;
        };
        if op.kind.is_compute() {
            let Some(ready) = self.input_ready(rank, op) else {
                return false;
            };
            self.clock[rank] = self.clock[rank].max(ready) + cost(op);
            self.ends[rank].push(self.clock[rank]);
            self.at[rank] += 1;
            return true;
        }
        let end = self.sim.group_end(rank, at, self.semantics);
        if !self.blocking() {
            self.posted.insert((rank, at), self.clock[rank]);
            if self.semantics != Semantics::Buffered {
                let key = self.queue((rank, at));
                self.queues.entry(key).or_default().0.push((rank, at));
            }
            self.at[rank] += 1;
            return true;
        }
        for member in at..end {
            self.posted
                .entry((rank, member))
                .or_insert(self.clock[rank]);
        }
        let done: Option<Vec<u64>> = (at..end)
            .map(|member| self.done.get(&(rank, member)).copied())
            .collect();
        let Some(last) = done.and_then(|done| done.into_iter().max()) else {
            return false;
        };
        self.clock[rank] = self.clock[rank].max(last);
        self.at[rank] = end;
        true
    }

    /// When what the op reads is there. Under `Buffered` a message is there once it is produced.
    fn input_ready(&self, rank: usize, op: Op) -> Option<u64> {
        let kind = match op.kind.text() {
            "F" => "RECV_F",
            "B" | "I" => "RECV_B",
            _ => return Some(0),
        };
        let ops = &self.sim.ranks[rank].ops;
        let is_mine = |r: &Op| r.kind.text() == kind && r.stage == op.stage && r.unit == op.unit;
        let Some(at) = ops.iter().position(is_mine) else {
            return Some(0);
        };
        self.done.get(&(rank, at)).copied()
    }

    fn transfer(&mut self) -> bool {
        let mut moved = false;
        let posted: Vec<(At, u64)> = self.posted.iter().map(|(&at, &time)| (at, time)).collect();
        for (send, time) in posted {
            if !self.sim.op(send).kind.is_send() || self.done.contains_key(&send) {
                continue;
            }
            let receive = self.sim.mate[&send];
            let end = match (self.semantics, self.posted.get(&receive)) {
                (Semantics::Buffered, _) => Some(time),
                (Semantics::Batched | Semantics::Rendezvous, Some(&other)) => Some(time.max(other)),
                (Semantics::Streams | Semantics::SingleStream, Some(&other)) => {
                    let keys = [self.queue(send), self.queue(receive)];
                    let head = |key, member| {
                        let (queue, head, free): &Fifo = &self.queues[key];
                        (queue.get(*head) == Some(member)).then_some(*free)
                    };
                    let free = head(&keys[0], &send).zip(head(&keys[1], &receive));
                    let end = free.map(|(a, b)| time.max(other).max(a).max(b));
                    if let Some(end) = end {
                        for key in keys {
                            let queue = self.queues.get_mut(&key).expect("posted on it");
                            queue.1 += 1;
                            queue.2 = end;
                        }
                    }
                    end
                }
                (_, None) => None,
            };
            if let Some(end) = end {
                self.done.insert(send, end);
                self.done.insert(receive, end);
                moved = true;
            }
        }
        moved
    }
}
