//! Lowering: a plan's compute order becomes a plan with sends and receives.
//!
//! A transfer exists wherever a stage and its neighbour are on different ranks; a turn inside a
//! rank (the tip of a V) is local. A *channel* is (source rank, destination rank, forward or
//! backward). In every style the n-th send and the n-th receive of a channel name the same tensor,
//! so that transports need neither tags nor searches.
//!
//! | style | where transfers stand | progresses under |
//! |---|---|---|
//! | [`Style::Streams`] | send behind its producer, receive just ahead of its consumer | buffered, streams |
//! | [`Style::Fifo`] | both at the producer's end, in one global order | all |
//! | [`Style::Batched`] | as `Fifo`, neighbours in one group | buffered, streams, batched |
//! | [`Style::EvenOdd`] | Megatron's synchronous calls | buffered, streams, batched |

mod buffers;
mod even_odd;
mod fifo;
mod links;
mod program;
mod runs;
mod streams;
mod unit_time;

use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::Op;
use crate::plan::Plan;
use crate::semantics::Style;

pub use buffers::{Channel, Direction, Lifetime, buffer_lifetimes, buffers, sources};
pub(crate) use buffers::{in_use, rank_lifetimes};

/// Most compute ops of a plan that can be lowered: a lowered plan holds all its ops, at 16 bytes.
pub const MAX_OPS: u64 = 1 << 27;

/// Adds sends and receives to a plan. Transfers that the plan already has are dropped first.
///
/// `prefetch` matters for [`Style::Streams`] only: each receive stands before the `prefetch`-th
/// compute op, counted back from its consumer, which is the first (an overlapped pair counts as
/// one op). With 1 it stands directly before its consumer.
///
/// # Errors
/// If `prefetch` is 0, the style is [`Style::Text`], the plan is beyond [`MAX_OPS`], or its
/// compute order can't make progress.
pub fn lower(plan: &Plan, style: Style, prefetch: u32) -> Result<Plan> {
    if prefetch == 0 {
        return Err(Error::config(
            "prefetch is 0, but must be at least 1",
            "1 posts each receive directly before its consumer",
        ));
    }
    let total = plan.total_len();
    if total > MAX_OPS {
        return Err(Error::config(
            format!("the plan has {total} ops, too many to lower (limit {MAX_OPS})"),
            "lower num_microbatches, pp or vp",
        ));
    }
    let ops = match style {
        Style::Streams => streams::lower(plan, prefetch)?,
        Style::Fifo => fifo::lower(plan)?,
        Style::Batched => fifo::lower_batched(plan)?,
        Style::EvenOdd => even_odd::lower(plan)?,
        Style::Text => {
            return Err(Error::config(
                "style \"text\" marks plans that were read; it can't be asked for",
                "one of \"auto\", \"streams\", \"fifo\", \"batched\", \"even_odd\"",
            ));
        }
    };
    Ok(plan.with_transfers(style, ops))
}

/// Reads the name of a style, or picks one for `auto`.
///
/// The rule: transports of this library (`local`, `gloo`, `nccl`, none given) open one stream a
/// channel, so `streams` overlaps most and can't get stuck. Any other backend may order all of a
/// rank's transfers on one stream; `fifo` progresses there too.
///
/// # Errors
/// If the name is unknown.
pub fn style_from_name(name: &str, backend: Option<&str>) -> Result<Style> {
    if name == "auto" {
        return Ok(match backend {
            None | Some("local" | "gloo" | "nccl" | "cpu:gloo,cuda:nccl") => Style::Streams,
            Some(_) => Style::Fifo,
        });
    }
    let found = Style::ALL.into_iter().find(|style| style.name() == name);
    found.ok_or_else(|| {
        Error::config(
            format!("p2p={name:?} is unknown"),
            "one of \"auto\", \"streams\", \"fifo\", \"batched\", \"even_odd\"",
        )
    })
}

/// The compute ops of a rank.
fn compute_ops(plan: &Plan, rank: Rank) -> Vec<Op> {
    let mut ops = plan.rank_ops(rank).ops;
    if plan.style().is_some() {
        ops.retain(|op| op.kind.is_compute());
    }
    ops
}
