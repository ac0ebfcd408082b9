//! A slow second checker of a plan's structure, written from the rules alone: it asks of each op
//! what must stand where, by looking through all ops.

use std::collections::BTreeMap;

use crate::ids::{Rank, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::plan::Plan;

/// Whether the structure is right: everything but progress.
pub(super) fn is_sound(plan: &Plan) -> bool {
    let ranks = plan.materialize();
    let all: Vec<(Rank, usize, Op)> = (0..)
        .map(Rank)
        .zip(&ranks)
        .flat_map(|(rank, ops)| {
            ops.ops
                .iter()
                .enumerate()
                .map(move |(at, &op)| (rank, at, op))
        })
        .collect();
    let naive = Naive { plan, all };
    naive.ops_are_known()
        && naive.each_runs_once()
        && naive.needs_stand_before()
        && naive.transfers_are_those_needed()
        && naive.channels_pair_up()
        && ranks
            .iter()
            .all(|ops| pairs_are_whole(&ops.ops) && groups_are_whole(&ops.ops))
}

struct Naive<'a> {
    plan: &'a Plan,
    all: Vec<(Rank, usize, Op)>,
}

fn is(op: Op, stage: Stage, kind: OpKind, unit: Unit) -> bool {
    (op.stage, op.kind, op.unit) == (stage, kind, unit)
}

impl Naive<'_> {
    fn count(&self, stage: Stage, kind: OpKind, unit: Unit) -> usize {
        self.all
            .iter()
            .filter(|(_, _, op)| is(*op, stage, kind, unit))
            .count()
    }

    fn forward_only(&self) -> bool {
        let forwards = |(_, _, op): &(Rank, usize, Op)| {
            matches!(
                op.kind,
                OpKind::Forward | OpKind::SendForward | OpKind::RecvForward
            )
        };
        self.all.iter().all(forwards)
    }

    fn cells(&self) -> Vec<(Stage, Unit)> {
        let shape = self.plan.shape();
        let stages = (0..shape.num_stages()).map(Stage);
        stages
            .flat_map(|stage| shape.units_of(stage).map(move |unit| (stage, Unit(unit))))
            .collect()
    }

    fn ops_are_known(&self) -> bool {
        let cells = self.cells();
        self.all.iter().all(|&(rank, _, op)| {
            cells.contains(&(op.stage, op.unit)) && self.plan.shape().rank_of(op.stage) == rank
        })
    }

    fn each_runs_once(&self) -> bool {
        let none = self.forward_only();
        self.cells().into_iter().all(|(stage, unit)| {
            let count = |kind| self.count(stage, kind, unit);
            let [f, b, i, w] = [
                OpKind::Forward,
                OpKind::Backward,
                OpKind::BackwardInput,
                OpKind::BackwardWeight,
            ]
            .map(count);
            let marked = |forward: bool| {
                let mut ops = self.all.iter().filter(|(_, _, op)| {
                    (op.stage, op.unit) == (stage, unit)
                        && op.flags.has(Flags::RECOMPUTE)
                        && (op.kind == OpKind::Forward) == forward
                });
                ops.next().is_some()
            };
            let whole = if none {
                (b, i, w) == (0, 0, 0)
            } else {
                matches!((b, i, w), (1, 0, 0) | (0, 1, 1))
            };
            f == 1 && whole && marked(true) == marked(false)
        }) && self.all.iter().all(|(_, _, op)| {
            let may = op.kind == OpKind::Forward || op.kind.gives_input_gradient();
            may || !op.flags.has(Flags::RECOMPUTE)
        })
    }

    /// Whether any op of these kinds of a stage and unit stands before a position of its rank.
    fn before(
        &self,
        (rank, at): (Rank, usize),
        stage: Stage,
        kinds: &[OpKind],
        unit: Unit,
    ) -> bool {
        self.all.iter().any(|&(other, position, op)| {
            other == rank && position < at && kinds.iter().any(|&kind| is(op, stage, kind, unit))
        })
    }

    fn needs_stand_before(&self) -> bool {
        const GRADIENT: [OpKind; 2] = [OpKind::Backward, OpKind::BackwardInput];
        let shape = self.plan.shape();
        let lowered = self.plan.style().is_some();
        let k = shape.num_seq_pieces();
        self.all.iter().all(|&(rank, at, op)| {
            let (stage, unit) = (op.stage, op.unit);
            let has = |stage, kinds: &[OpKind], unit| self.before((rank, at), stage, kinds, unit);
            let from = |other: Option<Stage>, recv: OpKind, kinds: &[OpKind]| match other {
                None => true,
                Some(other) if shape.rank_of(other) == rank => has(other, kinds, unit),
                Some(_) => !lowered || has(stage, &[recv], unit),
            };
            match op.kind {
                OpKind::Forward => {
                    (unit.0 % k == 0 || has(stage, &[OpKind::Forward], Unit(unit.0 - 1)))
                        && from(
                            shape.previous(stage),
                            OpKind::RecvForward,
                            &[OpKind::Forward],
                        )
                }
                OpKind::Backward | OpKind::BackwardInput => {
                    has(stage, &[OpKind::Forward], unit)
                        && ((unit.0 + 1) % k == 0 || has(stage, &GRADIENT, Unit(unit.0 + 1)))
                        && from(shape.next(stage), OpKind::RecvBackward, &GRADIENT)
                }
                OpKind::BackwardWeight | OpKind::SendBackward => has(stage, &GRADIENT, unit),
                OpKind::SendForward => has(stage, &[OpKind::Forward], unit),
                OpKind::RecvForward | OpKind::RecvBackward => true,
            }
        })
    }

    fn peer(&self, op: Op) -> Option<Rank> {
        let shape = self.plan.shape();
        let other = match op.kind {
            OpKind::SendForward | OpKind::RecvBackward => shape.next(op.stage)?,
            _ => shape.previous(op.stage)?,
        };
        let rank = shape.rank_of(other);
        (rank != shape.rank_of(op.stage)).then_some(rank)
    }

    fn transfers_are_those_needed(&self) -> bool {
        let (lowered, none) = (self.plan.style().is_some(), self.forward_only());
        let kinds = OpKind::ALL.into_iter().filter(|kind| !kind.is_compute());
        self.cells().into_iter().all(|(stage, unit)| {
            kinds.clone().all(|kind| {
                let backward = matches!(kind, OpKind::SendBackward | OpKind::RecvBackward);
                let crosses = self.peer(Op::new(stage, kind, unit)).is_some();
                let needed = lowered && crosses && !(backward && none);
                self.count(stage, kind, unit) == usize::from(needed)
            })
        })
    }

    fn channels_pair_up(&self) -> bool {
        let mut ends: BTreeMap<_, [Vec<_>; 2]> = BTreeMap::new();
        for &(rank, _, op) in self.all.iter().filter(|(_, _, op)| !op.kind.is_compute()) {
            let Some(peer) = self.peer(op) else {
                return false;
            };
            let forward = matches!(op.kind, OpKind::SendForward | OpKind::RecvForward);
            let send = op.kind.is_send();
            let (source, destination) = if send { (rank, peer) } else { (peer, rank) };
            // A tensor by the stage that makes it.
            let shape = self.plan.shape();
            let made = match op.kind {
                OpKind::RecvForward => shape.previous(op.stage),
                OpKind::RecvBackward => shape.next(op.stage),
                _ => Some(op.stage),
            };
            let tensor = (made.map_or(u32::MAX, |stage| stage.0), op.unit.0);
            let ends = ends.entry((source, destination, forward)).or_default();
            ends[usize::from(send)].push(tensor);
        }
        ends.values().all(|[received, sent]| received == sent)
    }
}

fn pairs_are_whole(ops: &[Op]) -> bool {
    ops.iter().enumerate().all(|(at, op)| {
        let (first, second) = (
            op.flags.has(Flags::PAIR_FIRST),
            op.flags.has(Flags::PAIR_SECOND),
        );
        let partner = match (first, second) {
            (false, false) => return true,
            (true, true) => return false,
            (true, false) => ops
                .get(at + 1)
                .filter(|op| op.flags.has(Flags::PAIR_SECOND)),
            (false, true) => {
                let before = at.checked_sub(1).map(|at| &ops[at]);
                before.filter(|op| op.flags.has(Flags::PAIR_FIRST))
            }
        };
        partner.is_some_and(|other| {
            let one_each = (op.kind == OpKind::Forward && other.kind.gives_input_gradient())
                || (other.kind == OpKind::Forward && op.kind.gives_input_gradient());
            one_each && (op.stage, op.unit) != (other.stage, other.unit)
        })
    })
}

fn groups_are_whole(ops: &[Op]) -> bool {
    let joined = |at: &usize| ops[*at].flags.has(Flags::JOINED);
    (0..ops.len()).filter(joined).all(|at| {
        let transfer = |op: &Op| !op.kind.is_compute();
        at > 0 && transfer(&ops[at]) && transfer(&ops[at - 1])
    })
}
