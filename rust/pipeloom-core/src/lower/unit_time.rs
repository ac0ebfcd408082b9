//! The unit-cost simulation: F, I and W take 1, B takes 2, transfers nothing.
//!
//! Ranks depend on each other at every step or two, so the simulation hops between them all the
//! time and its speed is that of the cache. Hence it works on 4 bytes an op: a code that says what
//! the op waits for, overwritten by the op's end.

use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::ids::{Rank, Stage};
use crate::op::{Flags, Op, OpKind};
use crate::shape::Shape;
use crate::violation::Violation;

/// Marks an arrival that a rank waits for; the rest is the rank.
const WAITED_FOR: u32 = 1 << 31;

/// The end of every op, by rank and position. Both ops of a pair end with the pair. The clock
/// starts at 1.
///
/// # Errors
/// If ranks wait for each other in a circle.
pub(super) fn ends(shape: &Shape, orders: &[Vec<Op>]) -> Result<Vec<Vec<u32>>> {
    let cells = Cells::new(shape);
    let mut simulation = Simulation {
        units: cells.units,
        arrivals: cells.at_start(shape),
        walkers: vec![Walker { at: 0, now: 1 }; orders.len()],
        queue: (0u32..).take(orders.len()).collect(),
    };
    let mut codes: Vec<Vec<u32>> = orders
        .iter()
        .map(|order| order.iter().map(|&op| cells.code(op)).collect())
        .collect();
    while let Some(rank) = simulation.queue.pop_front() {
        simulation.run(rank, &mut codes[rank as usize]);
    }
    let stuck: Vec<Violation> = (0u32..)
        .map(Rank)
        .zip(simulation.walkers.iter().zip(orders))
        .filter_map(|(rank, (walker, order))| Some(waiting(rank, walker.at, order.get(walker.at)?)))
        .collect();
    if stuck.is_empty() {
        Ok(codes)
    } else {
        Err(deadlock(stuck, orders.len()))
    }
}

/// Where inputs and gradients arrive: a row of units for each stage. Each replica has a row before
/// its first stage and one behind its last, which take what nobody needs.
struct Cells {
    units: usize,
    stages_per_replica: u32,
}

impl Cells {
    fn new(shape: &Shape) -> Self {
        Self {
            units: shape.num_units() as usize,
            stages_per_replica: shape.stages_per_replica(),
        }
    }

    fn row(&self, stage: Stage) -> usize {
        let replica = stage.0 / self.stages_per_replica;
        (stage.0 + 2 * replica + 1) as usize * self.units
    }

    /// A cell, whether the op begins a pair, and what it is, in 29 + 1 + 2 bits:
    /// [`super::MAX_OPS`] sees to it that cells fit.
    #[inline]
    fn code(&self, op: Op) -> u32 {
        let kind = match op.kind {
            OpKind::Forward => 0,
            OpKind::Backward => 1,
            OpKind::BackwardInput => 2,
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => 3,
        };
        #[allow(clippy::cast_possible_truncation)] // below 2^29
        let cell = (self.row(op.stage) + op.unit.index()) as u32;
        cell << 3 | u32::from(op.flags.has(Flags::PAIR_FIRST)) << 2 | kind
    }

    /// First stages have their input and last ones their gradient from the beginning.
    fn at_start(&self, shape: &Shape) -> [Vec<u32>; 2] {
        let len = (shape.num_stages() + 2 * shape.num_replicas()) as usize * self.units;
        let mut arrivals = [vec![0; len], vec![0; len]];
        for stage in (0..shape.num_stages()).map(Stage) {
            let row = self.row(stage)..self.row(stage) + self.units;
            if shape.previous(stage).is_none() {
                arrivals[INPUT][row.clone()].fill(1);
            }
            if shape.next(stage).is_none() {
                arrivals[GRADIENT][row].fill(1);
            }
        }
        arrivals
    }
}

const INPUT: usize = 0;
const GRADIENT: usize = 1;

/// A rank's place: its next op, and when it is free.
#[derive(Clone, Copy)]
struct Walker {
    at: usize,
    now: u32,
}

struct Simulation {
    units: usize,
    /// By cell: when a stage's input and its gradient arrive; 0: not yet.
    arrivals: [Vec<u32>; 2],
    walkers: Vec<Walker>,
    queue: VecDeque<u32>,
}

impl Simulation {
    /// Runs a rank until it has to wait. The order in which ranks run does not change times.
    fn run(&mut self, rank: u32, codes: &mut [u32]) {
        let Walker { mut at, mut now } = self.walkers[rank as usize];
        while let Some(&code) = codes.get(at) {
            let second = match codes.get(at + 1) {
                Some(&second) if code & 4 != 0 => Some(second),
                _ => None,
            };
            let ready = self.arrival(rank, code);
            let ready = second.map_or(ready, |second| {
                Some(ready?.max(self.arrival(rank, second)?))
            });
            let Some(ready) = ready else {
                break;
            };
            now = now.max(ready) + cost(code) + second.map_or(0, cost);
            codes[at] = now;
            at += 1;
            self.deliver(code, now);
            if let Some(second) = second {
                codes[at] = now;
                at += 1;
                self.deliver(second, now);
            }
        }
        self.walkers[rank as usize] = Walker { at, now };
    }

    /// When what an op takes from its neighbour arrived. If it has not, the rank is called when it
    /// does.
    #[inline]
    fn arrival(&mut self, rank: u32, code: u32) -> Option<u32> {
        let what = match code & 3 {
            0 => INPUT,
            3 => return Some(1),
            _ => GRADIENT,
        };
        let arrival = &mut self.arrivals[what][(code >> 3) as usize];
        if *arrival == 0 {
            *arrival = WAITED_FOR | rank;
            return None;
        }
        Some(*arrival)
    }

    /// Hands what an op produced to the neighbour that takes it, and calls who waits for it.
    #[inline]
    fn deliver(&mut self, code: u32, now: u32) {
        let cell = (code >> 3) as usize;
        let (what, target) = match code & 3 {
            0 => (INPUT, cell + self.units),
            3 => return,
            _ => (GRADIENT, cell - self.units),
        };
        let before = std::mem::replace(&mut self.arrivals[what][target], now);
        if before & WAITED_FOR != 0 {
            self.queue.push_back(before ^ WAITED_FOR);
        }
    }
}

fn cost(code: u32) -> u32 {
    1 + u32::from(code & 3 == 1)
}

fn waiting(rank: Rank, position: usize, op: &Op) -> Violation {
    let waits_for = |stage: u32, kind: &str| format!("`{op}` waits for `{stage}{kind}{}`", op.unit);
    let message = match op.kind {
        // A pair may wait for its backward.
        OpKind::Forward if op.stage.0 > 0 => waits_for(op.stage.0 - 1, "F"),
        OpKind::Backward | OpKind::BackwardInput => waits_for(op.stage.0 + 1, "B"),
        _ => format!("`{op}` waits for the backward that it is paired with"),
    };
    Violation {
        rule: "progress",
        rank,
        position: position as u64,
        op: op.to_string(),
        message,
        hint: "that op stands behind one that waits for this rank".to_owned(),
        cycle: Vec::new(),
    }
}

fn deadlock(stuck: Vec<Violation>, ranks: usize) -> Error {
    let shown = stuck.iter().take(8);
    let places: Vec<String> = shown
        .map(|v| format!("rank {} at position {}: {}", v.rank, v.position, v.message))
        .collect();
    let more = match stuck.len() - places.len() {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Error::check(
        format!(
            "the compute order deadlocks, {} of {ranks} ranks are stuck: {}{more}",
            stuck.len(),
            places.join("; ")
        ),
        "put each op behind those that it waits for, on every rank",
        stuck,
    )
}
