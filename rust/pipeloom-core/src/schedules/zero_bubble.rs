//! Zero-bubble schedules with the weight gradient split off: ZB-H1, ZB-H2 on one chunk a rank,
//! interleaved zero bubble on several.

use super::interleaved::{default_group, given_group, group_progresses, refuse_deadlock};
use super::one_chunk::{accept, capped, one_f_one_b_warmup};
use super::{Argument, BackwardKind, Chunks, Family, Params, Rule};
use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank};
use crate::op::OpKind;
use crate::order::{RankOrder, Sequence, Table};
use crate::shape::{Placement, Shape};

/// 1F1B's memory; the weight halves fill its cool-down.
pub(super) static ZB_H1: Family = Family {
    name: "zb_h1",
    summary: "1F1B's memory at a third of its bubble: weight gradients fill the cool-down",
    source: "zero bubble, arXiv 2401.10241",
    constraints: "vp = 1",
    chunks: Chunks::Exactly(1),
    placement: Placement::Loop,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Split,
    validate: accept,
    rule: Rule::Closed(|shape, params, rank| zero_bubble_h(shape, params, rank, 1)),
    warmup: Some(|shape, params, rank| capped(shape, params, one_f_one_b_warmup(shape, rank))),
};

/// Twice the memory; no bubble within a rank's own span at F = I = W.
pub(super) static ZB_H2: Family = Family {
    name: "zb_h2",
    summary: "twice 1F1B's memory; no bubble within a rank's span at F = I = W",
    source: "zero bubble, arXiv 2401.10241",
    constraints: "vp = 1; m >= 2 pp - 1 for its bubble",
    chunks: Chunks::Exactly(1),
    placement: Placement::Loop,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Split,
    validate: accept,
    rule: Rule::Closed(|shape, params, rank| zero_bubble_h(shape, params, rank, 2)),
    warmup: Some(|shape, params, rank| capped(shape, params, 2 * one_f_one_b_warmup(shape, rank))),
};

/// Interleaved with half of its warm-up and split backwards.
pub(super) static INTERLEAVED_ZB: Family = Family {
    name: "interleaved_zb",
    summary: "interleaved 1F1B with split backwards: uniform memory, smallest bubble of its kind",
    source: "torch ScheduleInterleavedZeroBubble",
    constraints: "none; a given group size N needs N >= pp (or N = m) and m mod N = 0 or >= pp",
    chunks: Chunks::Any,
    placement: Placement::Loop,
    arguments: &[Argument::GroupSize, Argument::PartialCheckpoints],
    backward: BackwardKind::Split,
    validate: |shape, request, params| {
        let units = shape.num_units();
        params.group = if let Some(group) = request.microbatch_group_size {
            full_pipeline_group(shape, group)?
        } else {
            let rounds = (units / shape.pp()).max(1);
            if units.is_multiple_of(rounds) {
                units / rounds
            } else {
                default_group(shape.pp(), units)
            }
        };
        Ok(())
    },
    rule: Rule::Closed(|shape, params, rank| {
        let table = Table::forward(shape.num_units(), shape.vp(), params.group);
        let warmup = capped(shape, params, interleaved_zb_warmup(shape, params, rank));
        let (f, b) = (Sequence::Table(table), Sequence::Table(table.mirror()));
        split_order(shape, rank, f, b, warmup, rank.0)
    }),
    warmup: Some(|shape, params, rank| {
        capped(shape, params, interleaved_zb_warmup(shape, params, rank))
    }),
};

/// `PipeOffload`'s building block without the offload.
pub(super) static GROUP_INTERLEAVED: Family = Family {
    name: "group_interleaved",
    summary: "split backwards in small groups: three quarters of interleaved_zb's memory at vp = 2",
    source: "PipeOffload, arXiv 2503.01328",
    constraints: "a group size N that makes progress (N >= pp / 2 and m mod N = 0 always does)",
    chunks: Chunks::Any,
    placement: Placement::Loop,
    arguments: &[Argument::GroupSize, Argument::PartialCheckpoints],
    backward: BackwardKind::Split,
    validate: |shape, request, params| {
        let (pp, units) = (shape.pp(), shape.num_units());
        // Half of interleaved 1F1B's warm-up: half of its round trip.
        let progresses = |group| group_progresses(shape, pp - 1, group, 0);
        let half = pp.div_ceil(2).min(units);
        let default = (half..=units).find(|&group| progresses(group));
        params.group = match request.microbatch_group_size {
            Some(group) => given_group(shape, group)?,
            None => default.unwrap_or(units),
        };
        refuse_deadlock(shape, params.group, default.unwrap_or(units), progresses)
    },
    rule: Rule::Closed(|shape, params, rank| {
        let table = Table::forward(shape.num_units(), shape.vp(), params.group);
        let warmup = capped(shape, params, interleaved_zb_warmup(shape, params, rank));
        let (f, b) = (Sequence::Table(table), Sequence::Table(table.mirror()));
        split_order(shape, rank, f, b, warmup, 0)
    }),
    warmup: Some(|shape, params, rank| {
        capped(shape, params, interleaved_zb_warmup(shape, params, rank))
    }),
};

fn interleaved_zb_warmup(shape: &Shape, params: &Params, rank: Rank) -> u32 {
    one_f_one_b_warmup(shape, rank) + (shape.vp() - 1) * params.group
}

fn full_pipeline_group(shape: &Shape, group: u32) -> Result<u32> {
    let (pp, units) = (shape.pp(), shape.num_units());
    let full = group == units || (group >= pp && group < units);
    if full && (units.is_multiple_of(group) || units % group >= pp) {
        return Ok(group);
    }
    let default = default_group(pp, units);
    Err(Error::config(
        format!(
            "microbatch_group_size={group} does not keep the pipeline of pp={pp} full with \
             num_microbatches={units}"
        ),
        format!("leave it out, or give {default}"),
    ))
}

/// `k` = 1 is H1, 2 is H2: warm-up `k (pp - 1 - r)`; weight halves start once the first rank is
/// through its warm-up, `k r` backwards later.
fn zero_bubble_h(shape: &Shape, params: &Params, rank: Rank, k: u32) -> RankOrder {
    let units = Sequence::Units {
        chunk: Chunk(0),
        first: 0,
        len: shape.num_units(),
    };
    let warmup = capped(shape, params, k * one_f_one_b_warmup(shape, rank));
    split_order(shape, rank, units, units, warmup, k * rank.0)
}

/// `F^warmup`, then at step `i`: F if one is left, I, and W once `i >= delay`; the rest of the W.
fn split_order(
    shape: &Shape,
    rank: Rank,
    forwards: Sequence,
    backwards: Sequence,
    warmup: u32,
    delay: u32,
) -> RankOrder {
    let mut order = RankOrder::new(shape, rank);
    let f = order.stream(OpKind::Forward, forwards);
    let i = order.stream(OpKind::BackwardInput, backwards);
    let w = order.stream(OpKind::BackwardWeight, backwards);
    let steps = backwards.len();
    let (last_f, first_w) = (steps - warmup, delay.min(steps));
    order.phase(&[f], warmup);
    order.phase(&[f, i], last_f.min(first_w));
    if first_w < last_f {
        order.phase(&[f, i, w], last_f - first_w);
    } else {
        order.phase(&[i], first_w - last_f);
    }
    order.phase(&[i, w], order.left(i));
    order.phase(&[w], order.left(w));
    order
}
