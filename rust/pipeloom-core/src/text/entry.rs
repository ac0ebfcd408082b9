//! What a plan that was read must keep: each op once, data before its use, transfers that pair
//! up, and progress.

use std::collections::BTreeMap;

use crate::check::{self, Violation};
use crate::error::{Error, Result};
use crate::ids::{Rank, Stage, Unit};
use crate::lower::{Channel, Direction};
use crate::op::{Op, OpKind};
use crate::plan::Plan;

/// Most broken rules that are listed.
const MOST: usize = 100;

/// Refuses a plan that breaks a rule.
///
/// # Errors
/// With all violations (at most a hundred), or the circle in which ranks wait.
pub(super) fn require(plan: &Plan) -> Result<()> {
    located(plan)?;
    let mut entry = Entry {
        plan,
        units: plan.shape().num_units() as usize,
        found: Vec::new(),
    };
    entry.check();
    let mut found = entry.found;
    if found.is_empty() {
        return check::check(plan, None).into_result().map(|_| ());
    }
    found.truncate(MOST);
    let shown: Vec<String> = found
        .iter()
        .take(5)
        .map(|v| {
            format!(
                "rank {}, position {}, `{}`: {}",
                v.rank, v.position, v.op, v.message
            )
        })
        .collect();
    let more = match found.len() - shown.len() {
        0 => String::new(),
        more => format!("\nand {more} more"),
    };
    let hint = found[0].hint.clone();
    Err(Error::check(shown.join("\n") + &more, hint, found))
}

/// Refuses an op whose stage is not on its rank, so that the rest may index by stage.
fn located(plan: &Plan) -> Result<()> {
    let shape = plan.shape();
    for rank in shape.ranks() {
        let ops = plan.held_ops(rank).map_or(&[][..], |held| &held.ops);
        let stray = |op: &Op| op.stage.0 >= shape.num_stages() || shape.rank_of(op.stage) != rank;
        if let Some(at) = ops.iter().position(stray) {
            return Err(Error::check(
                format!(
                    "rank {rank}, position {at}, `{}`: its stage is not on this rank",
                    ops[at]
                ),
                "all ops of a stage stand on the rank that holds it",
                Vec::new(),
            ));
        }
    }
    Ok(())
}

/// Positions of a (stage, unit)'s ops by kind, counted from 1; 0: there is none.
type Cell = [u32; OpKind::ALL.len()];

struct Entry<'a> {
    plan: &'a Plan,
    units: usize,
    found: Vec<Violation>,
}

impl Entry<'_> {
    fn report(
        &mut self,
        rule: &'static str,
        rank: Rank,
        position: u64,
        op: Op,
        message: impl Into<String>,
        hint: &str,
    ) {
        if self.found.len() < MOST {
            self.found.push(Violation {
                rule,
                rank,
                position,
                op: op.to_string(),
                message: message.into(),
                hint: hint.to_owned(),
            });
        }
    }

    fn check(&mut self) {
        self.forwards_are_complete();
        if !self.found.is_empty() {
            return;
        }
        let cells = self.locate();
        let shape = self.plan.shape();
        for stage in (0..shape.num_stages()).map(Stage) {
            for unit in shape.units_of(stage).map(Unit) {
                self.compute_ops_once(&cells, stage, unit);
                self.order_holds(&cells, stage, unit);
                if self.plan.style().is_some() {
                    self.transfers_stand_right(&cells, stage, unit);
                }
            }
        }
        self.channels_pair_up();
    }

    /// Counts forwards before anything is sized by stages times units.
    fn forwards_are_complete(&mut self) {
        let plan = self.plan;
        let shape = plan.shape();
        let mut counts = vec![0u64; shape.num_stages() as usize];
        for rank in shape.ranks() {
            for op in plan.held_ops(rank).into_iter().flat_map(|held| &held.ops) {
                counts[op.stage.index()] += u64::from(op.kind == OpKind::Forward);
            }
        }
        for (stage, count) in (0u32..).map(Stage).zip(counts) {
            let wanted = shape.units_of(stage);
            if count < u64::from(wanted.end - wanted.start) {
                let rank = shape.rank_of(stage);
                let held = plan.held_ops(rank).into_iter().flat_map(|held| &held.ops);
                let mut have: Vec<u32> = held
                    .filter(|op| op.stage == stage && op.kind == OpKind::Forward)
                    .map(|op| op.unit.0)
                    .collect();
                have.sort_unstable();
                let missing = wanted.filter(|unit| have.binary_search(unit).is_err());
                for unit in missing.take(MOST) {
                    let op = Op::new(stage, OpKind::Forward, Unit(unit));
                    self.missing(op);
                }
            }
        }
    }

    fn missing(&mut self, op: Op) {
        let rank = self.plan.shape().rank_of(op.stage);
        let end = self.plan.len(rank);
        let message = format!("`{op}` is missing");
        let hint = "each stage runs each microbatch once: F, and B or both I and W";
        self.report("structure", rank, end, op, message, hint);
    }

    /// Where every op stands; reports repeated ops and units that a stage does not run.
    fn locate(&mut self) -> Vec<Cell> {
        let plan = self.plan;
        let shape = plan.shape();
        let mut cells = vec![Cell::default(); shape.num_stages() as usize * self.units];
        for rank in shape.ranks() {
            let ops = plan.held_ops(rank).map_or(&[][..], |held| &held.ops);
            for (at, &op) in (0u32..).zip(ops) {
                let position = u64::from(at);
                if !shape.units_of(op.stage).contains(&op.unit.0) {
                    let hint = "each replica of the model runs one half of the microbatches";
                    let message = format!("stage {} does not run microbatch {}", op.stage, op.unit);
                    self.report("structure", rank, position, op, message, hint);
                    continue;
                }
                let cell = &mut cells[op.stage.index() * self.units + op.unit.index()];
                let first = std::mem::replace(&mut cell[op.kind as usize], at + 1);
                if first > 0 {
                    let message = format!("it stands at position {} already", first - 1);
                    self.report("structure", rank, position, op, message, "run each op once");
                }
            }
        }
        cells
    }

    fn at(&self, cells: &[Cell], stage: Stage, unit: Unit) -> Cell {
        cells[stage.index() * self.units + unit.index()]
    }

    fn compute_ops_once(&mut self, cells: &[Cell], stage: Stage, unit: Unit) {
        let cell = self.at(cells, stage, unit);
        let has = |kind: OpKind| cell[kind as usize] > 0;
        let op = |kind| Op::new(stage, kind, unit);
        if !has(OpKind::Forward) {
            self.missing(op(OpKind::Forward));
        }
        if self.plan.forward_only() {
            return;
        }
        let (full, input, weight) = (
            has(OpKind::Backward),
            has(OpKind::BackwardInput),
            has(OpKind::BackwardWeight),
        );
        match (full, input, weight) {
            (true, false, false) | (false, true, true) => {}
            (false, false, false) => self.missing(op(OpKind::Backward)),
            (false, true, false) => self.missing(op(OpKind::BackwardWeight)),
            (false, false, true) => self.missing(op(OpKind::BackwardInput)),
            (true, ..) => {
                let rank = self.plan.shape().rank_of(stage);
                let at = u64::from(cell[OpKind::Backward as usize] - 1);
                let message = "it stands beside its own I or W";
                let hint = "a backward is one B, or one I and one W";
                self.report("structure", rank, at, op(OpKind::Backward), message, hint);
            }
        }
    }

    /// Reports `later` if it stands before `sooner`, and both are there.
    fn require_before(
        &mut self,
        rule: &'static str,
        rank: Rank,
        sooner: (Op, u32),
        later: (Op, u32),
    ) {
        if sooner.1 > 0 && later.1 > 0 && later.1 < sooner.1 {
            let message = format!("it stands before `{}`", sooner.0);
            let hint = "an op stands behind those whose results it takes";
            self.report(rule, rank, u64::from(later.1 - 1), later.0, message, hint);
        }
    }

    /// Own-rank data order, also across a turn inside the rank.
    fn order_holds(&mut self, cells: &[Cell], stage: Stage, unit: Unit) {
        let shape = self.plan.shape();
        let rank = shape.rank_of(stage);
        let cell = self.at(cells, stage, unit);
        let place = |kind: OpKind| (Op::new(stage, kind, unit), cell[kind as usize]);
        let (f, b, i) = (OpKind::Forward, OpKind::Backward, OpKind::BackwardInput);
        self.require_before("order", rank, place(f), place(b));
        self.require_before("order", rank, place(f), place(i));
        self.require_before("order", rank, place(i), place(OpKind::BackwardWeight));
        let Some(next) = shape
            .next(stage)
            .filter(|&next| shape.rank_of(next) == rank)
        else {
            return;
        };
        let there = self.at(cells, next, unit);
        let at_next = |kind: OpKind| (Op::new(next, kind, unit), there[kind as usize]);
        self.require_before("order", rank, place(f), at_next(f));
        for made in [b, i] {
            for taken in [b, i] {
                self.require_before("order", rank, at_next(made), place(taken));
            }
        }
    }

    /// A transfer for each tensor that leaves a rank and for no other, behind its producer and
    /// before its consumer.
    fn transfers_stand_right(&mut self, cells: &[Cell], stage: Stage, unit: Unit) {
        let shape = self.plan.shape();
        let rank = shape.rank_of(stage);
        let cell = self.at(cells, stage, unit);
        let place = |kind: OpKind| (Op::new(stage, kind, unit), cell[kind as usize]);
        let crosses = |next: bool| shape.peer(stage, next).is_some();
        let backward = !self.plan.forward_only();
        for (kind, wanted) in [
            (OpKind::SendForward, crosses(true)),
            (OpKind::RecvForward, crosses(false)),
            (OpKind::SendBackward, crosses(false) && backward),
            (OpKind::RecvBackward, crosses(true) && backward),
        ] {
            let (op, at) = place(kind);
            if wanted && at == 0 {
                let hint = "give the plan all of its transfers, or none and lower it";
                let message = format!("`{op}` is missing");
                self.report("transfers", rank, self.plan.len(rank), op, message, hint);
            } else if !wanted && at > 0 {
                let hint = "tensors that stay on a rank have no transfers";
                let message = "nothing crosses ranks there";
                self.report("transfers", rank, u64::from(at - 1), op, message, hint);
            }
        }
        let forward = place(OpKind::Forward);
        self.require_before("transfers", rank, forward, place(OpKind::SendForward));
        self.require_before("transfers", rank, place(OpKind::RecvForward), forward);
        for kind in [OpKind::Backward, OpKind::BackwardInput] {
            self.require_before("transfers", rank, place(kind), place(OpKind::SendBackward));
            self.require_before("transfers", rank, place(OpKind::RecvBackward), place(kind));
        }
    }

    /// The n-th send and the n-th receive of a channel move the same tensor.
    fn channels_pair_up(&mut self) {
        let plan = self.plan;
        let mut channels: BTreeMap<Channel, [Vec<(u64, Op)>; 2]> = BTreeMap::new();
        for rank in plan.shape().ranks() {
            let ops = plan.held_ops(rank).map_or(&[][..], |held| &held.ops);
            for (at, &op) in (0u64..).zip(ops) {
                if let Some(channel) = Channel::of(plan, rank, op) {
                    let ends = channels.entry(channel).or_default();
                    ends[usize::from(op.kind.is_recv())].push((at, op));
                }
            }
        }
        for (channel, [sends, receives]) in channels {
            // Missing transfers are reported already; only the order is left to compare.
            let differs = sends
                .iter()
                .zip(&receives)
                .position(|(&(_, sent), &(_, received))| {
                    let target = match channel.direction {
                        Direction::Forward => plan.shape().next(sent.stage),
                        Direction::Backward => plan.shape().previous(sent.stage),
                    };
                    target != Some(received.stage) || sent.unit != received.unit
                });
            if let Some(n) = differs {
                let ((_, sent), (at, received)) = (sends[n], receives[n]);
                let message = format!("receive {n} of channel {channel} meets `{sent}`");
                let hint = "receives of a channel stand in the order of its sends";
                self.report("pairing", channel.destination, at, received, message, hint);
            }
        }
    }
}
