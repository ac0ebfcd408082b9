//! Schedules with one chunk a rank: no pipelining, GPipe, 1F1B, eager 1F1B.

use super::{Argument, BackwardKind, Chunks, Family, Params, Request, Rule};
use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank};
use crate::op::OpKind;
use crate::order::{RankOrder, Sequence};
use crate::shape::{Placement, Shape};

/// F and B of each microbatch, one after the other, on one rank.
pub(super) static NO_PIPELINING: Family = Family {
    name: "no_pipelining",
    summary: "one rank runs forward and backward of each microbatch in turn",
    source: "gradient accumulation; Megatron-core forward_backward_no_pipelining",
    constraints: "pp = 1, vp = 1",
    chunks: Chunks::Exactly(1),
    placement: Placement::Loop,
    arguments: &[Argument::ForwardOnly, Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: |shape, _, _| {
        if shape.pp() == 1 {
            return Ok(());
        }
        Err(Error::config(
            format!("no_pipelining runs on one rank, but got pp={}", shape.pp()),
            "give pp=1, or a pipelined schedule such as \"1f1b\"",
        ))
    },
    rule: Rule::Closed(|shape, params, rank| one_f_one_b_order(shape, params, rank, 0)),
    warmup: Some(|shape, params, _| capped(shape, params, 0)),
};

/// All forwards, then all backwards.
pub(super) static GPIPE: Family = Family {
    name: "gpipe",
    summary: "all forwards, then all backwards; simplest, most memory",
    source: "GPipe, arXiv 1811.06965",
    constraints: "vp = 1",
    chunks: Chunks::Exactly(1),
    placement: Placement::Loop,
    arguments: &[Argument::ForwardOnly, Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: accept,
    rule: Rule::Closed(|shape, params, rank| {
        one_f_one_b_order(shape, params, rank, shape.num_units())
    }),
    warmup: Some(|shape, params, _| capped(shape, params, shape.num_units())),
};

/// Warm-up `pp - 1 - r`, then one forward, one backward.
pub(super) static ONE_F_ONE_B: Family = Family {
    name: "1f1b",
    summary: "one forward, one backward: GPipe's bubble with at most pp microbatches in memory",
    source: "PipeDream-flush, arXiv 2006.09503; Megatron-core",
    constraints: "vp = 1",
    chunks: Chunks::Exactly(1),
    placement: Placement::Loop,
    arguments: &[Argument::ForwardOnly, Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: accept,
    rule: Rule::Closed(|shape, params, rank| {
        one_f_one_b_order(shape, params, rank, one_f_one_b_warmup(shape, rank))
    }),
    warmup: Some(|shape, params, rank| capped(shape, params, one_f_one_b_warmup(shape, rank))),
};

/// Warm-up `2 (pp - 1 - r)`: two more in flight, so that transfers hide behind computation.
pub(super) static EAGER_ONE_F_ONE_B: Family = Family {
    name: "eager_1f1b",
    summary: "1F1B with twice the warm-up: more memory, transfers hidden behind computation",
    source: "nnScaler 1f1b_plus, JaxPP Eager1F1B",
    constraints: "vp = 1",
    chunks: Chunks::Exactly(1),
    placement: Placement::Loop,
    arguments: &[Argument::ForwardOnly, Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: accept,
    rule: Rule::Closed(|shape, params, rank| {
        one_f_one_b_order(shape, params, rank, 2 * one_f_one_b_warmup(shape, rank))
    }),
    warmup: Some(|shape, params, rank| capped(shape, params, 2 * one_f_one_b_warmup(shape, rank))),
};

#[allow(clippy::unnecessary_wraps)] // the signature is `Family::validate`'s
pub(super) fn accept(_: &Shape, _: &Request, _: &mut Params) -> Result<()> {
    Ok(())
}

/// 1F1B's warm-up before capping; interleaved 1F1B with one chunk uses it too.
pub(super) fn one_f_one_b_warmup(shape: &Shape, rank: Rank) -> u32 {
    shape.pp() - 1 - rank.0
}

/// A warm-up capped at the number of forwards; all of them without backwards.
pub(super) fn capped(shape: &Shape, params: &Params, warmup: u32) -> u32 {
    let forwards = shape.num_units() * shape.vp();
    if params.forward_only {
        forwards
    } else {
        warmup.min(forwards)
    }
}

/// `F^w (F B)^(m-w) B^w` on chunk 0.
pub(super) fn one_f_one_b_order(
    shape: &Shape,
    params: &Params,
    rank: Rank,
    warmup: u32,
) -> RankOrder {
    let units = Sequence::Units {
        chunk: Chunk(0),
        first: 0,
        len: shape.num_units(),
    };
    warm_steady_cool(shape, params, rank, warmup, units, units)
}

/// `F^w (F B)^(n-w) B^w` over any two sequences of equal length.
pub(super) fn warm_steady_cool(
    shape: &Shape,
    params: &Params,
    rank: Rank,
    warmup: u32,
    forwards: Sequence,
    backwards: Sequence,
) -> RankOrder {
    let mut order = RankOrder::new(shape, rank);
    let warmup = capped(shape, params, warmup);
    let f = order.stream(OpKind::Forward, forwards);
    order.phase(&[f], warmup);
    if !params.forward_only {
        let b = order.stream(OpKind::Backward, backwards);
        order.phase(&[f, b], forwards.len() - warmup);
        order.phase(&[b], warmup);
    }
    order
}
