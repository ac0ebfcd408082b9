//! The unit-cost simulation: F, I and W take 1, B takes 2, transfers nothing.

use std::collections::VecDeque;

use super::links::{Links, NONE, receive_of};
use crate::check::Violation;
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};

/// The times at which a stage's unit has its input and its gradient; 0: not yet. The clock starts
/// at 1.
type Arrival = [u32; 2];
const INPUT: usize = 0;
const GRADIENT: usize = 1;

/// What a channel carries: when its producer ends, and the receive that takes it.
#[derive(Clone, Copy)]
pub(super) struct Message {
    pub(super) end: u32,
    pub(super) recv: Op,
}

/// When everything happens.
pub(super) struct Times {
    /// The end of every op, by rank and position. Both ops of a pair end with the pair.
    pub(super) ends: Vec<Vec<u32>>,
    /// The messages of every channel, in send order.
    pub(super) messages: Vec<Vec<Message>>,
}

/// Runs all ranks.
///
/// # Errors
/// If ranks wait for each other in a circle.
pub(super) fn simulate(links: &Links, orders: &[Vec<Op>], units: u32) -> Result<Times> {
    let mut simulation = Simulation {
        links,
        orders,
        units: units as usize,
        arrivals: arrivals_at_start(links, units as usize),
        times: Times {
            ends: orders.iter().map(|o| Vec::with_capacity(o.len())).collect(),
            messages: vec![Vec::new(); links.num_channels()],
        },
        waits: vec![false; orders.len()],
        queue: (0u32..).take(orders.len()).collect(),
    };
    while let Some(rank) = simulation.queue.pop_front() {
        simulation.run(rank);
    }
    simulation.result()
}

struct Simulation<'a> {
    links: &'a Links,
    orders: &'a [Vec<Op>],
    units: usize,
    arrivals: Vec<Arrival>,
    times: Times,
    waits: Vec<bool>,
    queue: VecDeque<u32>,
}

impl Simulation<'_> {
    /// Runs a rank until it has to wait. The order in which ranks run does not change times.
    fn run(&mut self, rank: u32) {
        let order = &self.orders[rank as usize];
        let mut ends = std::mem::take(&mut self.times.ends[rank as usize]);
        let mut now = ends.last().copied().unwrap_or(1);
        while let Some(first) = order.get(ends.len()) {
            let width = 1 + usize::from(first.flags.has(Flags::PAIR_FIRST));
            let slot = &order[ends.len()..order.len().min(ends.len() + width)];
            let (mut cost, mut ready) = (0, true);
            for &op in slot {
                let arrived = self.arrived(op);
                ready &= arrived > 0;
                now = now.max(arrived);
                cost += unit_cost(op.kind);
            }
            if !ready {
                self.waits[rank as usize] = true;
                break;
            }
            now += cost;
            for &op in slot {
                ends.push(now);
                self.deliver(op, now);
            }
        }
        self.times.ends[rank as usize] = ends;
    }

    /// When what `op` takes from its neighbour arrived; 0 if it has not.
    #[inline]
    fn arrived(&self, op: Op) -> u32 {
        match needs(op.kind) {
            Some(what) => self.arrivals[op.stage.index() * self.units + op.unit.index()][what],
            None => 1,
        }
    }

    /// Hands what `op` produced to the stage that takes it, and wakes its rank.
    #[inline]
    fn deliver(&mut self, op: Op, now: u32) {
        let Some(target) = self.links.target(op) else {
            return;
        };
        let what = if op.kind == OpKind::Forward {
            INPUT
        } else {
            GRADIENT
        };
        self.arrivals[target.stage as usize * self.units + op.unit.index()][what] = now;
        if target.channel != NONE {
            self.times.messages[target.channel as usize].push(Message {
                end: now,
                recv: receive_of(op, target),
            });
        }
        let waits = &mut self.waits[target.rank as usize];
        if *waits {
            *waits = false;
            self.queue.push_back(target.rank);
        }
    }

    /// The times, or an error if a rank is left waiting.
    fn result(self) -> Result<Times> {
        let stuck: Vec<Violation> = (0u32..)
            .zip(self.times.ends.iter().zip(self.orders))
            .filter_map(|(rank, (ends, order))| {
                Some(violation(Rank(rank), ends.len(), *order.get(ends.len())?))
            })
            .collect();
        if stuck.is_empty() {
            return Ok(self.times);
        }
        let shown = stuck.iter().take(8);
        let places: Vec<String> = shown
            .map(|v| format!("rank {} at position {}: {}", v.rank, v.position, v.message))
            .collect();
        let more = match stuck.len() - places.len() {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        Err(Error::check(
            format!(
                "the compute order deadlocks, {} of {} ranks are stuck: {}{more}",
                stuck.len(),
                self.orders.len(),
                places.join("; ")
            ),
            "put each op behind those that it waits for, on every rank",
            stuck,
        ))
    }
}

fn violation(rank: Rank, position: usize, op: Op) -> Violation {
    let waits_for = |stage: u32, kind: &str| format!("`{op}` waits for `{stage}{kind}{}`", op.unit);
    let message = match needs(op.kind) {
        Some(INPUT) => waits_for(op.stage.0.saturating_sub(1), "F"),
        Some(_) => waits_for(op.stage.0 + 1, "B"),
        None => format!("`{op}` stands beside an op that waits"),
    };
    Violation {
        rule: "progress",
        rank,
        position: position as u64,
        op: op.to_string(),
        message,
        hint: "that op stands behind one that waits for this rank".to_owned(),
    }
}

/// What an op of that kind takes from a neighbour.
#[inline]
fn needs(kind: OpKind) -> Option<usize> {
    match kind {
        OpKind::Forward => Some(INPUT),
        OpKind::Backward | OpKind::BackwardInput => Some(GRADIENT),
        OpKind::BackwardWeight
        | OpKind::SendForward
        | OpKind::RecvForward
        | OpKind::SendBackward
        | OpKind::RecvBackward => None,
    }
}

fn unit_cost(kind: OpKind) -> u32 {
    if kind == OpKind::Backward { 2 } else { 1 }
}

/// The first stages have their input and the last ones their gradient from the beginning.
fn arrivals_at_start(links: &Links, units: usize) -> Vec<Arrival> {
    let mut arrivals = vec![[0, 0]; links.stages().len() * units];
    for (neighbours, row) in links.stages().iter().zip(arrivals.chunks_mut(units)) {
        let input = u32::from(neighbours.previous.stage == NONE);
        let gradient = u32::from(neighbours.next.stage == NONE);
        if input + gradient > 0 {
            row.fill([input, gradient]);
        }
    }
    arrivals
}
