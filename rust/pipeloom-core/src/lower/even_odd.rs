//! Megatron-core's synchronous calls: after each step the rank exchanges with both neighbours in
//! one call, and goes on when all of the call's transfers are done.

use super::links::Links;
use super::program::Program;
use super::{compute_ops, fifo};
use crate::error::Result;
use crate::ids::{Rank, Stage};
use crate::op::{Flags, Op, OpKind};
use crate::p2p_order::place;
use crate::plan::Plan;
use crate::rank_ops::{RankOps, join};
use crate::shape::Placement;

pub(super) fn lower(plan: &Plan) -> Result<Vec<RankOps>> {
    let write: fn(&Calls<'_>, &mut Program) = match plan.schedule() {
        "1f1b" | "interleaved_1f1b" if plan.shape().vp() == 1 && plan.family().is_some() => {
            one_chunk
        }
        "interleaved_1f1b" if megatron_accepts(plan) => interleaved,
        _ => return sorted_batches(plan),
    };
    let links = Links::new(plan.shape());
    let lowered = plan.shape().ranks().map(|rank| {
        let ops = compute_ops(plan, rank);
        let of_kind = |kind| ops.iter().copied().filter(|op| op.kind == kind).collect();
        let calls = Calls {
            links: &links,
            rank,
            last_rank: plan.shape().pp() - 1,
            forwards: of_kind(OpKind::Forward),
            backwards: of_kind(OpKind::Backward),
            warmup: plan.num_warmup(rank) as usize,
        };
        let mut program = Program::for_ops(&links, &ops);
        write(&calls, &mut program);
        program.finish()
    });
    Ok(lowered.collect())
}

/// Megatron's condition on an interleaved configuration.
fn megatron_accepts(plan: &Plan) -> bool {
    let (shape, params) = (plan.shape(), plan.params());
    let (pp, m, group) = (shape.pp(), shape.num_microbatches(), params.group);
    plan.family().is_some()
        && *shape.placement() == Placement::Loop
        && shape.num_seq_pieces() == 1
        && params.extra_warmup == 0
        && (pp..=m).contains(&group)
        && (m.is_multiple_of(group) || m % group >= pp)
}

/// The groups of `batched`, each in the even/odd order. Channels keep their order: all members of
/// one kind keep theirs.
fn sorted_batches(plan: &Plan) -> Result<Vec<RankOps>> {
    let mut ranks = fifo::lower_batched(plan)?;
    for (rank, RankOps { ops }) in plan.shape().ranks().zip(&mut ranks) {
        for group in ops.chunk_by_mut(|_, op| op.flags.has(Flags::JOINED)) {
            group.sort_by_key(|op| place(rank, op.kind));
            join(group);
        }
    }
    Ok(ranks)
}

/// What a rank's calls are made of.
struct Calls<'a> {
    links: &'a Links,
    rank: Rank,
    last_rank: u32,
    forwards: Vec<Op>,
    backwards: Vec<Op>,
    /// Forwards before the first backward.
    warmup: usize,
}

impl Calls<'_> {
    /// One call: the present transfers in the even/odd order.
    fn call(&self, program: &mut Program, transfers: &[Option<Op>]) {
        let mut present: Vec<Op> = transfers.iter().copied().flatten().collect();
        present.sort_by_key(|op| place(self.rank, op.kind));
        program.group(present);
    }

    fn send(&self, op: Op) -> Option<Op> {
        self.links.send(op)
    }

    fn receive(&self, op: Option<&Op>) -> Option<Op> {
        op.and_then(|&op| self.links.receive(op))
    }

    /// The activation received with forward step `k`. The first rank gets the tensor that the
    /// last rank made `pp - 1` steps ago; any other rank the input of its next step.
    fn recv_previous(&self, k: usize) -> Option<Op> {
        let next = self.forwards.get(k + 1)?;
        if self.rank.0 > 0 {
            return self.links.receive(*next);
        }
        let made = self.forwards.get(k.checked_sub(self.last_rank as usize)?)?;
        self.carried_over(*made, made.stage.0 + self.last_rank + 1)
    }

    /// The gradient received with backward step `k`: the mirror image.
    fn recv_next(&self, k: usize) -> Option<Op> {
        let next = self.backwards.get(k + 1)?;
        if self.rank.0 < self.last_rank {
            return self.links.receive(*next);
        }
        let made = self
            .backwards
            .get(k.checked_sub(self.last_rank as usize)?)?;
        self.carried_over(*made, made.stage.0.checked_sub(self.last_rank + 1)?)
    }

    /// The receive of this rank's stage `stage` that belongs to the same microbatch as `op`.
    fn carried_over(&self, op: Op, stage: u32) -> Option<Op> {
        let stage = Stage(stage);
        let there = Op { stage, ..op };
        (stage.index() < self.links.stages().len())
            .then(|| self.links.receive(there))
            .flatten()
    }
}

/// Non-interleaved: receive, compute, send; in the steady phase a send and the opposite receive
/// are one call.
fn one_chunk(calls: &Calls<'_>, program: &mut Program) {
    let (forwards, backwards) = (&calls.forwards, &calls.backwards);
    for &op in &forwards[..calls.warmup] {
        calls.call(program, &[calls.receive(Some(&op))]);
        program.push(op);
        calls.call(program, &[calls.send(op)]);
    }
    let steady = forwards.len() - calls.warmup;
    calls.call(program, &[calls.receive(forwards.get(calls.warmup))]);
    for (k, &forward) in forwards[calls.warmup..].iter().enumerate() {
        let backward = backwards[k];
        program.push(forward);
        calls.call(
            program,
            &[calls.send(forward), calls.receive(Some(&backward))],
        );
        program.push(backward);
        let next = forwards.get(calls.warmup + k + 1);
        calls.call(program, &[calls.send(backward), calls.receive(next)]);
    }
    for &op in backwards.iter().skip(steady) {
        calls.call(program, &[calls.receive(Some(&op))]);
        program.push(op);
        calls.call(program, &[calls.send(op)]);
    }
}

/// Interleaved: one call after each step; a steady step's call exchanges with both neighbours in
/// both directions.
fn interleaved(calls: &Calls<'_>, program: &mut Program) {
    let (forwards, backwards) = (&calls.forwards, &calls.backwards);
    let first_backward = calls.receive(backwards.first());
    let steady = forwards.len() - calls.warmup;
    calls.call(program, &[calls.receive(forwards.first())]);
    for (k, &op) in forwards[..calls.warmup].iter().enumerate() {
        program.push(op);
        let last = k + 1 == calls.warmup && steady > 0;
        let gradient = first_backward.filter(|_| last);
        calls.call(program, &[calls.send(op), calls.recv_previous(k), gradient]);
    }
    if steady == 0 {
        calls.call(program, &[first_backward]);
    }
    for (k, &backward) in backwards.iter().enumerate() {
        let mut exchange = [None; 4];
        if let Some(&forward) = forwards.get(calls.warmup + k) {
            program.push(forward);
            exchange[0] = calls.send(forward);
            exchange[1] = calls.recv_previous(calls.warmup + k);
        }
        program.push(backward);
        exchange[2] = calls.send(backward);
        exchange[3] = calls.recv_next(k);
        calls.call(program, &exchange);
    }
}
