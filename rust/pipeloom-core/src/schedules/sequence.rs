//! Schedules over pieces of a sequence: `Seq1F1B`.

use super::one_chunk::{accept, capped, warm_steady_cool};
use super::{Argument, BackwardKind, Chunks, Family, Rule};
use crate::ids::Rank;
use crate::order::{Reversal, Sequence, Table};
use crate::shape::{Placement, Shape};

/// 1F1B over the pieces of each sequence.
pub(super) static SEQ_1F1B: Family = Family {
    name: "seq1f1b",
    summary: "1F1B over k pieces of each sequence: about 1/k of its bubble and memory",
    source: "Seq1F1B, arXiv 2406.03488",
    constraints: "vp = 1; causal attention",
    chunks: Chunks::Exactly(1),
    placement: Placement::Loop,
    arguments: &[Argument::SeqPieces, Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: accept,
    rule: Rule::Closed(|shape, params, rank| {
        let units = shape.num_units();
        let forwards = Table::forward(units, 1, units);
        // Pieces of a microbatch go backwards last piece first: its keys and values get their
        // gradients from all later pieces.
        let backwards = forwards.reverse(Reversal::Microbatch(shape.num_seq_pieces()));
        let warmup = seq_warmup(shape, rank);
        let (f, b) = (Sequence::Table(forwards), Sequence::Table(backwards));
        warm_steady_cool(shape, params, rank, warmup, f, b)
    }),
    warmup: Some(|shape, params, rank| capped(shape, params, seq_warmup(shape, rank))),
};

fn seq_warmup(shape: &Shape, rank: Rank) -> u32 {
    shape.pp() - 1 - rank.0 + (shape.num_seq_pieces() - 1)
}
