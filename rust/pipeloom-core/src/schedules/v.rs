//! The hand-crafted schedule on the V placement (two chunks a rank): ZB-V.

use super::one_chunk::accept;
use super::{Argument, BackwardKind, Chunks, Family, Rule};
use crate::ids::{Chunk, Rank};
use crate::op::OpKind;
use crate::order::{RankOrder, Sequence};
use crate::shape::{Placement, Shape};

/// Hand-crafted ZB-V.
pub(super) static ZB_V: Family = Family {
    name: "zb_v",
    summary: "1F1B's memory; no bubble within a rank's span at F = I = W",
    source: "zero bubble, arXiv 2401.10241 section 6; torch ScheduleZBVZeroBubble",
    constraints: "vp = 2; m >= 2 pp - 1 for its bubble",
    chunks: Chunks::Exactly(2),
    placement: Placement::V,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Split,
    validate: accept,
    rule: Rule::Closed(|shape, _, rank| zb_v(shape, rank)),
    warmup: None,
};

/// The rule is written for `n >= 2 pp - 1` microbatches; with fewer, ops on microbatches that do
/// not exist are left out.
fn zb_v(shape: &Shape, rank: Rank) -> RankOrder {
    let (pp, d, m) = (shape.pp(), rank.0, shape.num_units());
    let n = m.max(2 * pp - 1);
    let mut order = RankOrder::new(shape, rank);
    let mut streams = |chunk| {
        let units = Sequence::Units {
            chunk: Chunk(chunk),
            first: 0,
            len: m,
        };
        [
            OpKind::Forward,
            OpKind::BackwardInput,
            OpKind::BackwardWeight,
        ]
        .map(|kind| order.stream(kind, units))
    };
    let ([f0, i0, w0], [f1, i1, w1]) = (streams(0), streams(1));
    order.phase_clipped(&[f0], 2 * (pp - d) - 1);
    order.phase_clipped(&[f1, f0], d);
    order.phase_clipped(&[f1, i1, w1], pp - d);
    // Forwards so far: 2 pp - d - 1 of chunk 0, pp of chunk 1.
    let with_f0 = n - (2 * pp - d - 1);
    order.phase_clipped(&[f0, i0, w0, f1, i1, w1], with_f0);
    order.phase_clipped(&[i0, w0, f1, i1, w1], n - pp - with_f0);
    order.phase_clipped(&[i0, i1], d);
    order.phase_clipped(&[i0, w0], pp - d);
    order.phase(&[w1], order.left(w1));
    order.phase(&[w0], order.left(w0));
    order
}
