//! One stream a channel: each send right behind its producer, each receive shortly before its
//! consumer, so that transfers overlap computation.
//!
//! A channel delivers in the order of its sends. Where a consumer's order differs from that, the
//! receives of the channel move forward to the order of the sends (a suffix minimum over their
//! positions); the tensor received early waits in its buffer.

use std::collections::BTreeMap;

use super::compute_ops;
use super::program::{Links, NONE};
use crate::error::{Error, Result};
use crate::ids::{Rank, Stage};
use crate::op::{Flags, Op, OpKind};
use crate::plan::{Plan, RankOps};

pub(super) fn lower(plan: &Plan, prefetch: u32) -> Result<Vec<RankOps>> {
    let links = Links::new(plan.shape());
    let orders: Vec<Vec<Op>> = plan.shape().ranks().map(|r| compute_ops(plan, r)).collect();
    let units = plan.shape().num_units() as usize;
    let consumers = Consumers::new(links.num_stages(), units, &orders);
    let mut channels = Channels::new(&links, units);
    for order in &orders {
        for &op in order {
            if let Some((_, recv, _)) = links.transfer(op) {
                let consumer = consumers.of(recv).ok_or_else(|| missing(recv))?;
                channels.send(op, consumer);
            }
        }
    }
    let mut early = EarlyReceives::default();
    let ranks = (0u32..).zip(&orders).map(|(rank, order)| {
        early.place(&channels, rank, order, prefetch);
        program(&links, Rank(rank), order, &early)
    });
    Ok(ranks.collect())
}

fn missing(recv: Op) -> Error {
    let kind = if recv.kind == OpKind::RecvForward {
        "F"
    } else {
        "B"
    };
    Error::check(
        format!(
            "no rank runs `{}{kind}{}`, though its input is made",
            recv.stage, recv.unit
        ),
        "check the plan first: plan.check()",
        Vec::new(),
    )
}

/// A rank's program: at each slot the receives placed there, the op, its sends.
fn program(links: &Links, rank: Rank, order: &[Op], early: &EarlyReceives) -> RankOps {
    let mut program = links.program(rank, order);
    let mut held_back = None;
    for (at, &op) in order.iter().enumerate() {
        for &consumer in early.at(at) {
            if let Some(recv) = links.receive(order[consumer as usize]) {
                program.transfer(recv);
            }
        }
        program.compute(op);
        let send = links.transfer(op).map(|(send, _, _)| send);
        if op.flags.has(Flags::PAIR_FIRST) {
            // The pair is one op: nothing stands inside it.
            held_back = send;
            continue;
        }
        for send in held_back.take().into_iter().chain(send) {
            program.transfer(send);
        }
    }
    program.finish()
}

/// Position, in its rank's order, of the op that reads each received tensor.
struct Consumers {
    units: usize,
    /// By stage and unit: position of F, and of B or I.
    positions: Vec<[u32; 2]>,
}

impl Consumers {
    fn new(stages: usize, units: usize, orders: &[Vec<Op>]) -> Self {
        let mut positions = vec![[NONE; 2]; stages * units];
        for order in orders {
            for (at, op) in (0u32..).zip(order) {
                let cell = &mut positions[op.stage.index() * units + op.unit.index()];
                match op.kind {
                    OpKind::Forward => cell[0] = at,
                    OpKind::Backward | OpKind::BackwardInput => cell[1] = at,
                    _ => {}
                }
            }
        }
        Self { units, positions }
    }

    #[inline]
    fn of(&self, recv: Op) -> Option<u32> {
        let cell = self.positions[recv.stage.index() * self.units + recv.unit.index()];
        let at = cell[usize::from(recv.kind == OpKind::RecvBackward)];
        (at != NONE).then_some(at)
    }
}

/// The messages of every channel, in send order, each as its consumer's position.
struct Channels {
    /// By stage: the channel of its output and of its input gradient.
    of_stage: Vec<[u32; 2]>,
    /// By channel: where its messages begin, and how many were sent.
    spans: Vec<(usize, usize)>,
    /// By receiving rank: its channels.
    inbound: BTreeMap<u32, Vec<u32>>,
    messages: Vec<u32>,
}

impl Channels {
    fn new(links: &Links, units: usize) -> Self {
        let mut ids: BTreeMap<(u32, u32, usize), u32> = BTreeMap::new();
        let mut of_stage = vec![[NONE; 2]; links.num_stages()];
        let mut lens: Vec<usize> = Vec::new();
        let mut inbound: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (stage, channels) in (0u32..).map(Stage).zip(&mut of_stage) {
            for (direction, kind) in [OpKind::Forward, OpKind::Backward].into_iter().enumerate() {
                let op = Op::new(stage, kind, crate::ids::Unit(0));
                let Some((_, _, receiver)) = links.transfer(op) else {
                    continue;
                };
                let key = (links.rank_of(stage), receiver, direction);
                let id = *ids.entry(key).or_insert_with(|| {
                    let id = u32::try_from(lens.len()).unwrap_or(NONE);
                    inbound.entry(receiver).or_default().push(id);
                    lens.push(0);
                    id
                });
                lens[id as usize] += units;
                channels[direction] = id;
            }
        }
        let mut end = 0;
        let spans = lens.iter().map(|len| {
            end += len;
            (end - len, 0)
        });
        Self {
            of_stage,
            spans: spans.collect(),
            inbound,
            messages: vec![0; end],
        }
    }

    #[inline]
    fn send(&mut self, producer: Op, consumer: u32) {
        let direction = usize::from(producer.kind != OpKind::Forward);
        let channel = self.of_stage[producer.stage.index()][direction];
        let (start, sent) = &mut self.spans[channel as usize];
        self.messages[*start + *sent] = consumer;
        *sent += 1;
    }

    fn inbound(&self, rank: u32) -> impl Iterator<Item = &[u32]> {
        let channels = self.inbound.get(&rank).map_or(&[][..], Vec::as_slice);
        channels.iter().map(|&channel| {
            let (start, sent) = self.spans[channel as usize];
            &self.messages[start..start + sent]
        })
    }
}

/// Which receives stand before each op of one rank: a counting sort of consumers by position.
#[derive(Default)]
struct EarlyReceives {
    /// By position: where its receives begin in `consumers`; one more at the end.
    starts: Vec<u32>,
    consumers: Vec<u32>,
    /// Scratch: position of each receive, in the order of the channels.
    positions: Vec<u32>,
}

impl EarlyReceives {
    fn place(&mut self, channels: &Channels, rank: u32, order: &[Op], prefetch: u32) {
        let ahead = Ahead::new(order, prefetch);
        self.positions.clear();
        self.starts.clear();
        self.starts.resize(order.len() + 2, 0);
        for messages in channels.inbound(rank) {
            let first = self.positions.len();
            let wanted = messages.iter().map(|&consumer| ahead.of(consumer));
            self.positions.extend(wanted);
            let mut earliest = NONE;
            for position in self.positions[first..].iter_mut().rev() {
                earliest = earliest.min(*position);
                *position = earliest;
                self.starts[earliest as usize + 2] += 1;
            }
        }
        for at in 2..self.starts.len() {
            self.starts[at] += self.starts[at - 1];
        }
        self.consumers.clear();
        self.consumers.resize(self.positions.len(), 0);
        let consumers = channels.inbound(rank).flatten();
        for (&position, &consumer) in self.positions.iter().zip(consumers) {
            let next = &mut self.starts[position as usize + 1];
            self.consumers[*next as usize] = consumer;
            *next += 1;
        }
    }

    /// Consumers of the receives that stand before the op at a position.
    #[inline]
    fn at(&self, position: usize) -> &[u32] {
        &self.consumers[self.starts[position] as usize..self.starts[position + 1] as usize]
    }
}

/// Finds the position before which a consumer's receive would stand if it were alone.
struct Ahead {
    back: u32,
    /// Only for orders with overlapped pairs: slot of each op, and first op of each slot.
    slots: Option<(Vec<u32>, Vec<u32>)>,
}

impl Ahead {
    fn new(order: &[Op], prefetch: u32) -> Self {
        let paired = order.iter().any(|op| op.flags.has(Flags::PAIR_FIRST));
        let slots = paired.then(|| {
            let (mut slot_of, mut first) = (Vec::with_capacity(order.len()), Vec::new());
            for (at, op) in (0u32..).zip(order) {
                if !op.flags.has(Flags::PAIR_SECOND) || first.is_empty() {
                    first.push(at);
                }
                slot_of.push(u32::try_from(first.len() - 1).unwrap_or(NONE));
            }
            (slot_of, first)
        });
        Self {
            back: prefetch - 1,
            slots,
        }
    }

    #[inline]
    fn of(&self, consumer: u32) -> u32 {
        match &self.slots {
            None => consumer.saturating_sub(self.back),
            Some((slot_of, first)) => {
                first[slot_of[consumer as usize].saturating_sub(self.back) as usize]
            }
        }
    }
}
