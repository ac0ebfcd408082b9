//! One stream a channel: each send right behind its producer, each receive shortly before its
//! consumer, so that transfers overlap computation.
//!
//! A channel delivers in the order of its sends. Where a consumer's order differs from that, the
//! receives of the channel move forward to the order of the sends (a suffix minimum over their
//! positions); the tensor received early waits in its buffer.

use super::compute_ops;
use super::links::{Links, NONE, receive_of};
use super::program::Program;
use super::runs;
use crate::error::{Error, Result};
use crate::op::{Flags, Op, OpKind};
use crate::plan::{Plan, RankOps};

pub(super) fn lower(plan: &Plan, prefetch: u32) -> Result<Vec<RankOps>> {
    let links = Links::new(plan.shape());
    if prefetch == 1
        && let Some(ranks) = runs::lower(plan, &links)
    {
        return Ok(ranks);
    }
    lower_ops(plan, &links, prefetch)
}

/// The same from the ops of any plan.
fn lower_ops(plan: &Plan, links: &Links, prefetch: u32) -> Result<Vec<RankOps>> {
    let shape = plan.shape();
    let mut consumers = Consumers::new(links.stages().len(), shape.num_units() as usize);
    // By channel, in send order.
    let mut messages: Vec<Vec<Op>> = links.rooms();
    let orders: Vec<Vec<Op>> = shape.ranks().map(|rank| compute_ops(plan, rank)).collect();
    for order in &orders {
        for (at, &op) in (0u32..).zip(order) {
            consumers.add(op, at);
            if let Some(target) = links.target(op).filter(|target| target.channel != NONE) {
                messages[target.channel as usize].push(receive_of(op, target));
            }
        }
    }
    let mut early = EarlyReceives::default();
    let programs = shape.ranks().zip(&orders).map(|(rank, order)| {
        early.clear(order, prefetch);
        for &channel in links.inbound(rank.0) {
            for &recv in &messages[channel as usize] {
                early.add(consumers.of(recv).ok_or_else(|| missing(recv))?);
            }
            early.end_channel();
        }
        early.sort();
        Ok(program(links, order, &early))
    });
    programs.collect()
}

fn missing(recv: Op) -> Error {
    let forward = recv.kind == OpKind::RecvForward;
    let kind = if forward { "F" } else { "B" };
    Error::check(
        format!(
            "no rank runs `{}{kind}{}`, though what it reads is made",
            recv.stage, recv.unit
        ),
        "check the plan first: plan.check()",
        Vec::new(),
    )
}

/// A rank's program: at each slot the receives placed there, the op, its sends.
fn program(links: &Links, order: &[Op], early: &EarlyReceives) -> RankOps {
    let mut program = Program::for_ops(links, order);
    let mut held_back = None;
    for (at, &op) in order.iter().enumerate() {
        for &consumer in early.at(at) {
            if let Some(recv) = links.receive(order[consumer as usize]) {
                program.push(recv);
            }
        }
        program.push(op);
        let send = links.send(op);
        if op.flags.has(Flags::PAIR_FIRST) {
            // The pair is one op: nothing stands inside it.
            held_back = send;
            continue;
        }
        for send in held_back.take().into_iter().chain(send) {
            program.push(send);
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
    fn new(stages: usize, units: usize) -> Self {
        Self {
            units,
            positions: vec![[NONE; 2]; stages * units],
        }
    }

    #[inline]
    fn add(&mut self, op: Op, at: u32) {
        let reads = match op.kind {
            OpKind::Forward => 0,
            OpKind::Backward | OpKind::BackwardInput => 1,
            _ => return,
        };
        self.positions[op.stage.index() * self.units + op.unit.index()][reads] = at;
    }

    #[inline]
    fn of(&self, recv: Op) -> Option<u32> {
        let cell = self.positions[recv.stage.index() * self.units + recv.unit.index()];
        let at = cell[usize::from(recv.kind == OpKind::RecvBackward)];
        (at != NONE).then_some(at)
    }
}

/// Which receives stand before each op of one rank: a counting sort of consumers by position.
#[derive(Default)]
struct EarlyReceives {
    ahead: Ahead,
    /// By position: where its receives begin in `sorted`; one more at the end.
    starts: Vec<u32>,
    sorted: Vec<u32>,
    /// Channel by channel, in send order: each receive's position and consumer.
    receives: Vec<(u32, u32)>,
    /// Where the current channel begins in `receives`.
    channel: usize,
}

impl EarlyReceives {
    fn clear(&mut self, order: &[Op], prefetch: u32) {
        self.ahead = Ahead::new(order, prefetch);
        self.starts.clear();
        self.starts.resize(order.len() + 2, 0);
        self.receives.clear();
        self.channel = 0;
    }

    #[inline]
    fn add(&mut self, consumer: u32) {
        self.receives.push((self.ahead.of(consumer), consumer));
    }

    /// Moves receives forward to where they stand in the order of the sends.
    fn end_channel(&mut self) {
        let mut earliest = NONE;
        for (position, _) in self.receives[self.channel..].iter_mut().rev() {
            earliest = earliest.min(*position);
            *position = earliest;
            self.starts[earliest as usize + 2] += 1;
        }
        self.channel = self.receives.len();
    }

    fn sort(&mut self) {
        for at in 2..self.starts.len() {
            self.starts[at] += self.starts[at - 1];
        }
        self.sorted.clear();
        self.sorted.resize(self.receives.len(), 0);
        for &(position, consumer) in &self.receives {
            let next = &mut self.starts[position as usize + 1];
            self.sorted[*next as usize] = consumer;
            *next += 1;
        }
    }

    /// Consumers of the receives that stand before the op at a position.
    #[inline]
    fn at(&self, position: usize) -> &[u32] {
        &self.sorted[self.starts[position] as usize..self.starts[position + 1] as usize]
    }
}

/// Finds the position before which a consumer's receive would stand if it were alone.
#[derive(Default)]
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedules::{self, FAMILIES, Request};

    #[test]
    fn runs_give_what_single_ops_give() {
        let (mut by_runs, mut all) = (0, 0);
        for family in FAMILIES {
            for (pp, vp, m) in sizes() {
                let request = Request::new(family.name, pp, vp, m);
                let Ok(plan) = schedules::plan(&request) else {
                    continue;
                };
                let links = Links::new(plan.shape());
                all += 1;
                if let Some(ranks) = runs::lower(&plan, &links) {
                    let same = ranks == lower_ops(&plan, &links, 1).unwrap();
                    assert!(same, "{}", plan.describe());
                    assert!(
                        ranks
                            .iter()
                            .all(|held| held.ops.len() == held.ops.capacity())
                    );
                    by_runs += 1;
                }
            }
        }
        assert!(by_runs > 300 && by_runs < all, "{by_runs} of {all}");
    }

    fn sizes() -> impl Iterator<Item = (u32, Option<u32>, u32)> {
        let sizes = (1..=5).flat_map(|pp| [None, Some(2), Some(3)].map(|vp| (pp, vp)));
        sizes.flat_map(|(pp, vp)| [1, 2, 3, 4, 7, 8, 12].map(|m| (pp, vp, m)))
    }
}
