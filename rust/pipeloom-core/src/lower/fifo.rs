//! One ordered stream of transfers a rank, and the same transfers in groups.
//!
//! A simulation with unit costs (F, I, W take 1, B takes 2, transfers nothing) finishes compute
//! ops in order of their end. At that moment the op joins its rank's program, its sends follow it,
//! and the matching receives join the receivers' programs: all programs are projections of one
//! global order, so no wait can be circular, under any semantics. A receive stands behind only
//! those compute ops of its rank that end no later than its producer, so with free transfers it
//! is posted in time and delays nothing.

use super::compute_ops;
use super::program::{Links, NONE, Program};
use crate::check::Violation;
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};
use crate::plan::{NO_GROUP, Plan, RankOps};

/// Longest unit-cost op, a pair of F and B, plus one: how far ahead ends are kept.
const HORIZON: usize = 4;
/// A stage's input from the previous stage is there.
const INPUT: u8 = 1;
/// A stage's gradient from the next stage is there.
const GRADIENT: u8 = 2;

/// Transfers in one global order, each a group of its own.
pub(super) fn lower(plan: &Plan) -> Result<Vec<RankOps>> {
    let links = Links::new(plan.shape());
    let orders: Vec<Vec<Op>> = plan.shape().ranks().map(|r| compute_ops(plan, r)).collect();
    let mut programs: Vec<Program> = (0u32..)
        .zip(&orders)
        .map(|(rank, ops)| links.program(Rank(rank), ops))
        .collect();
    run(plan, &links, &orders, |rank, finished| {
        for &op in finished {
            programs[rank].compute(op);
        }
        for &op in finished {
            if let Some((send, recv, peer)) = links.transfer(op) {
                programs[rank].transfer(send);
                programs[peer as usize].transfer(recv);
            }
        }
    })?;
    Ok(programs.into_iter().map(Program::finish).collect())
}

/// The order of [`lower`] with all transfers between two compute ops in one group.
pub(super) fn lower_batched(plan: &Plan) -> Result<Vec<RankOps>> {
    let mut ranks = lower(plan)?;
    for RankOps { groups, .. } in &mut ranks {
        let (mut next, mut inside) = (0, false);
        for group in groups {
            if *group == NO_GROUP {
                next += u32::from(inside);
                inside = false;
            } else {
                *group = next;
                inside = true;
            }
        }
    }
    Ok(ranks)
}

/// Whether the compute order of every rank comes to its end, if sends never wait.
pub(crate) fn progress(plan: &Plan) -> Result<()> {
    let links = Links::new(plan.shape());
    let orders: Vec<Vec<Op>> = plan.shape().ranks().map(|r| compute_ops(plan, r)).collect();
    run(plan, &links, &orders, |_, _| {})
}

/// A rank's place in the simulation.
#[derive(Clone, Copy, Default)]
struct Walker {
    /// Position of the op that runs or waits.
    at: usize,
    /// End of that op's slot: two further for an overlapped pair.
    end: usize,
    waits: bool,
}

/// The unit-cost simulation.
struct Simulation<'a> {
    links: &'a Links,
    orders: &'a [Vec<Op>],
    walkers: Vec<Walker>,
    units: usize,
    /// [`INPUT`] and [`GRADIENT`] of each stage's units, as far as they have arrived.
    arrived: Vec<u8>,
    now: usize,
    /// The running ranks by the time at which their op ends, modulo the horizon.
    ends: [Vec<u32>; HORIZON],
}

/// Runs the simulation; `finish` is called with the rank and its finished op (or pair), in order
/// of ends.
fn run(
    plan: &Plan,
    links: &Links,
    orders: &[Vec<Op>],
    mut finish: impl FnMut(usize, &[Op]),
) -> Result<()> {
    let units = plan.shape().num_units() as usize;
    let mut simulation = Simulation {
        links,
        orders,
        walkers: vec![Walker::default(); orders.len()],
        units,
        arrived: links.arrived_at_start(units),
        now: 0,
        ends: std::array::from_fn(|_| Vec::new()),
    };
    for rank in plan.shape().ranks() {
        simulation.start(rank.0);
    }
    let mut ending = Vec::new();
    // Nobody runs once all ends within the horizon are behind.
    let mut idle = 0;
    while idle < HORIZON {
        simulation.now += 1;
        let slot = simulation.now % HORIZON;
        std::mem::swap(&mut ending, &mut simulation.ends[slot]);
        idle = if ending.is_empty() { idle + 1 } else { 0 };
        for rank in ending.drain(..) {
            let walker = &mut simulation.walkers[rank as usize];
            let finished = &orders[rank as usize][walker.at..walker.end];
            walker.at = walker.end;
            finish(rank as usize, finished);
            for &op in finished {
                simulation.deliver(op);
            }
            simulation.start(rank);
        }
    }
    simulation.result()
}

impl Simulation<'_> {
    /// Starts a rank's next op, or lets it wait for what is missing.
    #[inline]
    fn start(&mut self, rank: u32) {
        let order = &self.orders[rank as usize];
        let walker = &mut self.walkers[rank as usize];
        let Some(first) = order.get(walker.at) else {
            return;
        };
        let width = 1 + usize::from(first.flags.has(Flags::PAIR_FIRST));
        walker.end = order.len().min(walker.at + width);
        let mut cost = 0;
        walker.waits = false;
        for op in &order[walker.at..walker.end] {
            let (need, own) = needs(op.kind);
            let arrived = self.arrived[op.stage.index() * self.units + op.unit.index()];
            walker.waits |= need & !arrived != 0;
            cost += own;
        }
        if !walker.waits {
            self.ends[(self.now + cost) % HORIZON].push(rank);
        }
    }

    /// Hands what `op` produced to the stage that takes it, and wakes its rank.
    #[inline]
    fn deliver(&mut self, op: Op) {
        let (stage, rank) = self.links.target(op);
        if stage == NONE {
            return;
        }
        let what = if op.kind == OpKind::Forward {
            INPUT
        } else {
            GRADIENT
        };
        self.arrived[stage as usize * self.units + op.unit.index()] |= what;
        if self.walkers[rank as usize].waits {
            self.start(rank);
        }
    }

    /// An error if a rank is left waiting.
    fn result(&self) -> Result<()> {
        let stuck: Vec<Violation> = (0u32..)
            .zip(self.walkers.iter().zip(self.orders))
            .filter_map(|(rank, (walker, order))| {
                Some(self.violation(Rank(rank), walker.at, *order.get(walker.at)?))
            })
            .collect();
        if stuck.is_empty() {
            return Ok(());
        }
        let first: Vec<String> = stuck
            .iter()
            .take(8)
            .map(|v| format!("rank {} at position {}: {}", v.rank, v.position, v.message))
            .collect();
        let more = match stuck.len().saturating_sub(first.len()) {
            0 => String::new(),
            more => format!("; and {more} more ranks"),
        };
        Err(Error::check(
            format!(
                "the compute order deadlocks: {} of {} ranks are stuck: {}{more}",
                stuck.len(),
                self.orders.len(),
                first.join("; ")
            ),
            "put each op behind those that it waits for, on every rank",
            stuck,
        ))
    }

    fn violation(&self, rank: Rank, position: usize, op: Op) -> Violation {
        let source =
            |stage: u32, kind: &str| format!("`{op}` waits for `{stage}{kind}{}`", op.unit);
        let message = match needs(op.kind).0 {
            INPUT => source(op.stage.0.saturating_sub(1), "F"),
            GRADIENT => source(op.stage.0 + 1, "B"),
            _ => format!("`{op}` stands behind a stuck op"),
        };
        Violation {
            rule: "progress",
            rank,
            position: position as u64,
            op: op.to_string(),
            message,
            hint: "that op stands behind a wait for this rank".to_owned(),
        }
    }
}

/// What an op of that kind takes from its neighbours, and its unit cost.
#[inline]
fn needs(kind: OpKind) -> (u8, usize) {
    match kind {
        OpKind::Forward => (INPUT, 1),
        OpKind::Backward => (GRADIENT, 2),
        OpKind::BackwardInput => (GRADIENT, 1),
        OpKind::BackwardWeight
        | OpKind::SendForward
        | OpKind::RecvForward
        | OpKind::SendBackward
        | OpKind::RecvBackward => (0, 1),
    }
}

impl Links {
    /// The first stages have their input and the last ones their gradient from the beginning.
    fn arrived_at_start(&self, units: usize) -> Vec<u8> {
        let mut arrived = vec![0; self.num_stages() * units];
        for (links, row) in self.iter().zip(arrived.chunks_mut(units)) {
            let first = u8::from(links.previous.0 == NONE) * INPUT;
            let last = u8::from(links.next.0 == NONE) * GRADIENT;
            row.fill(first | last);
        }
        arrived
    }
}
