//! Random plans for tests: always right, unless something is done to them afterwards.

use crate::cost::{Costs, Links, Number, Values};
use crate::ids::{Chunk, Rank, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::plan::{Plan, RankOps};
use crate::semantics::Style;
use crate::shape::{Placement, Shape};

/// A small deterministic generator (`SplitMix64`).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z >> 33) % n as u64).unwrap()
    }

    fn number(&mut self, from: u32, to: u32) -> u32 {
        from + u32::try_from(self.below((to - from + 1) as usize)).unwrap()
    }
}

/// A small shape, with all kinds of placement, pieces and replicas.
pub(crate) fn shape(rng: &mut Rng) -> Shape {
    let (pp, vp) = (rng.number(1, 4), rng.number(1, 3));
    let pieces = rng.number(1, 2);
    let placement = match rng.below(4) {
        0 => Placement::Loop,
        1 => Placement::V,
        2 => Placement::Bidirectional,
        _ => {
            // Any stage anywhere, as long as every (rank, chunk) has one.
            let places = (0..pp).flat_map(|r| (0..vp).map(move |c| (Rank(r), Chunk(c))));
            let mut table: Vec<_> = places.collect();
            for at in (1..table.len()).rev() {
                table.swap(at, rng.below(at + 1));
            }
            Placement::Table(table.into())
        }
    };
    let m = rng.number(1, 3)
        * if placement == Placement::Bidirectional {
            2
        } else {
            1
        };
    Shape::new(pp, vp, m, pieces, placement).unwrap()
}

/// One compute order that runs: (rank, op) in one global order.
fn global_order(rng: &mut Rng, shape: &Shape) -> Vec<(Rank, Op)> {
    let split = rng.below(3);
    let mut left: Vec<Op> = Vec::new();
    for stage in (0..shape.num_stages()).map(Stage) {
        let halves = split == 1 || (split == 2 && rng.below(2) == 0);
        for unit in shape.units_of(stage).map(Unit) {
            left.push(Op::new(stage, OpKind::Forward, unit));
            if halves {
                left.push(Op::new(stage, OpKind::BackwardInput, unit));
                left.push(Op::new(stage, OpKind::BackwardWeight, unit));
            } else {
                left.push(Op::new(stage, OpKind::Backward, unit));
            }
        }
    }
    let mut done: Vec<Op> = Vec::new();
    let k = shape.num_seq_pieces();
    while !left.is_empty() {
        let has = |stage: Option<Stage>, unit: u32, gradient: bool| {
            stage.is_none_or(|stage| {
                done.iter().any(|op| {
                    op.stage == stage
                        && op.unit.0 == unit
                        && if gradient {
                            op.kind.gives_input_gradient()
                        } else {
                            op.kind == OpKind::Forward
                        }
                })
            })
        };
        let ready = |op: &Op| {
            let (here, u) = (Some(op.stage), op.unit.0);
            match op.kind {
                OpKind::Forward => {
                    has(shape.previous(op.stage), u, false)
                        && (u.is_multiple_of(k) || has(here, u - 1, false))
                }
                OpKind::BackwardWeight => has(here, u, true),
                _ => {
                    has(here, u, false)
                        && has(shape.next(op.stage), u, true)
                        && ((u + 1).is_multiple_of(k) || has(here, u + 1, true))
                }
            }
        };
        let candidates: Vec<usize> = (0..left.len()).filter(|&at| ready(&left[at])).collect();
        let chosen = left.swap_remove(candidates[rng.below(candidates.len())]);
        done.push(chosen);
    }
    done.into_iter()
        .map(|op| (shape.rank_of(op.stage), op))
        .collect()
}

/// Marks some recomputed (stage, unit)s.
fn recompute(rng: &mut Rng, shape: &Shape, order: &mut [(Rank, Op)]) {
    if rng.below(3) > 0 {
        return;
    }
    let marked: Vec<bool> = (0..shape.num_stages() * shape.num_units())
        .map(|_| rng.below(2) == 0)
        .collect();
    for (_, op) in order {
        let cell = (op.stage.0 * shape.num_units() + op.unit.0) as usize;
        if op.kind != OpKind::BackwardWeight && marked[cell] {
            op.flags = op.flags.with(Flags::RECOMPUTE);
        }
    }
}

/// A right plan without transfers.
pub(crate) fn plan(rng: &mut Rng) -> Plan {
    let shape = shape(rng);
    let mut order = global_order(rng, &shape);
    recompute(rng, &shape, &mut order);
    let mut ranks = vec![RankOps::default(); shape.pp() as usize];
    for (rank, op) in order {
        ranks[rank.index()].ops.push(op);
    }
    for ops in &mut ranks {
        pair_up(rng, &mut ops.ops);
    }
    let plan = Plan::held("sample", shape, ranks);
    // Pairs may tie a knot; then do without them.
    if crate::check::check(&plan, None).ok() {
        return plan;
    }
    let unpaired = |ops: &RankOps| RankOps {
        ops: ops
            .ops
            .iter()
            .map(|op| Op {
                flags: op
                    .flags
                    .without(Flags::PAIR_FIRST)
                    .without(Flags::PAIR_SECOND),
                ..*op
            })
            .collect(),
    };
    let ranks = plan.materialize().iter().map(unpaired).collect();
    Plan::held("sample", plan.shape().clone(), ranks)
}

fn pair_up(rng: &mut Rng, ops: &mut [Op]) {
    let mut at = 0;
    while at + 1 < ops.len() {
        let (one, two) = (ops[at], ops[at + 1]);
        let kinds = (one.kind == OpKind::Forward && two.kind.gives_input_gradient())
            || (two.kind == OpKind::Forward && one.kind.gives_input_gradient());
        if kinds && (one.stage, one.unit) != (two.stage, two.unit) && rng.below(4) == 0 {
            ops[at].flags = one.flags.with(Flags::PAIR_FIRST);
            ops[at + 1].flags = two.flags.with(Flags::PAIR_SECOND);
            at += 1;
        }
        at += 1;
    }
}

/// A plan with its transfers put in: each send somewhere behind its producer, each receive
/// somewhere before its reader, in one global order (so that all semantics progress) or anywhere.
pub(crate) fn lowered(rng: &mut Rng) -> Plan {
    let plan = plan(rng);
    let eager = rng.below(2) == 0;
    let shape = plan.shape();
    let mut ranks: Vec<Vec<Op>> = plan.materialize().into_iter().map(|ops| ops.ops).collect();
    let computes: Vec<Op> = ranks.iter().flatten().copied().collect();
    for op in computes {
        let (neighbour, send, recv) = match op.kind {
            OpKind::Forward => (
                shape.next(op.stage),
                OpKind::SendForward,
                OpKind::RecvForward,
            ),
            OpKind::Backward | OpKind::BackwardInput => (
                shape.previous(op.stage),
                OpKind::SendBackward,
                OpKind::RecvBackward,
            ),
            _ => continue,
        };
        let Some(neighbour) = neighbour.filter(|&n| shape.rank_of(n) != shape.rank_of(op.stage))
        else {
            continue;
        };
        let (source, destination) = (
            shape.rank_of(op.stage).index(),
            shape.rank_of(neighbour).index(),
        );
        let send = Op::new(op.stage, send, op.unit);
        let recv = Op::new(neighbour, recv, op.unit);
        let made = ranks[source]
            .iter()
            .position(|other| other.same(op))
            .unwrap()
            + 1;
        let late = if eager {
            made
        } else {
            made + rng.below(ranks[source].len() - made + 1).min(3)
        };
        insert(&mut ranks[source], late, send);
        let reads = |other: &Op| {
            other.stage == neighbour
                && other.unit == op.unit
                && if recv.kind == OpKind::RecvForward {
                    other.kind == OpKind::Forward
                } else {
                    other.kind.gives_input_gradient()
                }
        };
        let read = ranks[destination].iter().position(reads).unwrap();
        let early = read - rng.below(read + 1).min(if eager { 0 } else { 3 });
        insert(&mut ranks[destination], early, recv);
    }
    let ranks = ranks.into_iter().map(|ops| group(rng, ops)).collect();
    plan.with_transfers(Style::Streams, ranks)
}

/// Inserts a transfer, never between the halves of a pair.
fn insert(ops: &mut Vec<Op>, at: usize, op: Op) {
    let splits = |at: usize| {
        ops.get(at)
            .is_some_and(|op| op.flags.has(Flags::PAIR_SECOND))
    };
    let at = match (splits(at), op.kind.is_send()) {
        (false, _) => at,
        (true, true) => at + 1,
        (true, false) => at - 1,
    };
    ops.insert(at, op);
}

fn group(rng: &mut Rng, ops: Vec<Op>) -> RankOps {
    let mut ops = ops;
    for at in 1..ops.len() {
        let transfers = !ops[at].kind.is_compute() && !ops[at - 1].kind.is_compute();
        if transfers && rng.below(2) == 0 {
            ops[at].flags = ops[at].flags.with(Flags::JOINED);
        }
    }
    RankOps { ops }
}

/// Small whole costs; some are 0.
pub(crate) fn costs(rng: &mut Rng, shape: &Shape) -> Costs {
    let mut values = |highest: u32| {
        let mut number = || Number::Int(i64::from(rng.number(0, highest)));
        if number() == Number::Int(0) {
            Values::All(number())
        } else {
            Values::Each((0..shape.num_stages()).map(|_| number()).collect())
        }
    };
    let mut costs = Costs {
        forward: values(4),
        backward_input: values(4),
        backward_weight: values(4),
        memory_recompute: Values::All(Number::Int(0)),
        ..Costs::default()
    };
    let (overlapped, recompute) = (values(6), values(3));
    costs.overlapped = (rng.below(2) == 0).then_some(overlapped);
    costs.recompute = (rng.below(2) == 0).then_some(recompute);
    costs.latency = Links::All(Number::Int(i64::from(rng.number(0, 3))));
    costs
}

/// Something is done to a plan: an op lost, doubled, moved, swapped, renamed.
pub(crate) fn mutate(rng: &mut Rng, plan: &Plan) -> Plan {
    let mut ranks = plan.materialize();
    for _ in 0..=rng.below(2) {
        let full: Vec<usize> = (0..ranks.len())
            .filter(|&r| !ranks[r].ops.is_empty())
            .collect();
        if full.is_empty() {
            break;
        }
        let rank = full[rng.below(full.len())];
        let (from, to) = (
            rng.below(ranks[rank].ops.len()),
            rng.below(ranks[rank].ops.len()),
        );
        let other = rng.below(ranks.len());
        let op = ranks[rank].ops[from];
        let drop = |ranks: &mut Vec<RankOps>| {
            ranks[rank].ops.remove(from);
        };
        let add = |ranks: &mut Vec<RankOps>, rank: usize, at: usize, op: Op| {
            let at = at.min(ranks[rank].ops.len());
            ranks[rank].ops.insert(at, op);
        };
        // Ops of one kind in another order: often sound, and often stuck.
        let alike: Vec<usize> = (0..ranks[rank].ops.len())
            .filter(|&at| ranks[rank].ops[at].kind == op.kind)
            .collect();
        match rng.below(14) {
            7.. => ranks[rank].ops.swap(from, alike[rng.below(alike.len())]),
            0 => drop(&mut ranks),
            1 => add(&mut ranks, rank, to, op),
            2 => {
                drop(&mut ranks);
                add(&mut ranks, other, to, op);
            }
            3 => ranks[rank].ops.swap(from, to),
            4 => ranks[rank].ops[from].stage.0 += 1,
            5 => ranks[rank].ops[from].unit.0 ^= 1,
            _ => ranks[rank].ops[from].kind = OpKind::ALL[rng.below(8)],
        }
    }
    match plan.style() {
        Some(style) => plan.with_transfers(style, ranks),
        None => Plan::held("mutant", plan.shape().clone(), ranks),
    }
}
