//! Schedules made of units of `pp` microbatches, one after the other: Chimera, Hanayo. Within a
//! unit, a rank that is free runs a backward if it can, else the forward nearest to the loss.

use super::list;
use super::one_chunk::accept;
use super::{Argument, BackwardKind, Chunks, Family, Rule};
use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank, Unit};
use crate::op::{Op, OpKind};
use crate::shape::{Placement, Shape};

/// Two replicas in opposite directions, without overlapped pairs.
pub(super) static CHIMERA: Family = Family {
    name: "chimera",
    summary: "two replicas in opposite directions: half of 1F1B's bubble for twice its weights",
    source: "Chimera, arXiv 2107.06925",
    constraints: "vp = 1, pp even, m even; bubbles are the paper's where m is a multiple of pp",
    chunks: Chunks::Exactly(1),
    placement: Placement::Bidirectional,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: |shape, _, _| {
        let (pp, m) = (shape.pp(), shape.num_microbatches());
        for (name, value, why) in [
            ("pp", pp, "the two directions meet between two ranks"),
            ("num_microbatches", m, "each direction runs half of them"),
        ] {
            if !value.is_multiple_of(2) {
                return Err(Error::config(
                    format!("chimera needs an even {name} ({why}), but got {value}"),
                    format!("raise {name} to {}", value.saturating_add(1)),
                ));
            }
        }
        Ok(())
    },
    rule: Rule::Whole(|shape, _| in_units(shape)),
    warmup: None,
};

/// A wave: the zig-zag placement with any even number of chunks, on one replica.
pub(super) static HANAYO: Family = Family {
    name: "hanayo",
    summary: "waves over vp chunks, zig-zag: interleaved 1F1B's bubble in units of pp microbatches",
    source: "Hanayo, arXiv 2308.15762",
    constraints: "vp even (vp / 2 waves); best where m = pp",
    chunks: Chunks::Even,
    placement: Placement::V,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: accept,
    rule: Rule::Whole(|shape, _| in_units(shape)),
    warmup: None,
};

/// Units of `pp` microbatches, and a last one of what remains.
fn in_units(shape: &Shape) -> Result<Vec<Vec<Op>>> {
    let (pp, m) = (shape.pp(), shape.num_microbatches());
    let (whole, rest) = (m / pp, m % pp);
    let mut orders: Vec<Vec<Op>> = vec![Vec::new(); pp as usize];
    let mut first = 0;
    for (microbatches, times) in [(pp, whole), (rest, rest.min(1))] {
        if times == 0 {
            continue;
        }
        let placement = shape.placement().clone();
        let unit = Shape::new(pp, shape.vp(), microbatches, 1, placement)?;
        let Some(ops) = backward_first(&unit) else {
            return Err(Error::config(
                format!("a unit of {microbatches} microbatches makes no progress"),
                "please report this shape",
            ));
        };
        for _ in 0..times {
            append(&mut orders, shape, &ops, &unit, first);
            first += microbatches / shape.num_replicas();
        }
    }
    Ok(orders)
}

/// Appends a unit whose microbatches are each replica's `first..`.
fn append(orders: &mut [Vec<Op>], shape: &Shape, ops: &[Vec<Op>], unit: &Shape, first: u32) {
    for (order, ops) in orders.iter_mut().zip(ops) {
        order.extend(ops.iter().map(|&op| {
            let local = op.unit.0 - unit.units_of(op.stage).start;
            let global = Unit(shape.units_of(op.stage).start + first + local);
            Op { unit: global, ..op }
        }));
    }
}

/// The list schedule: backward first, then the deepest forward.
fn backward_first(shape: &Shape) -> Option<Vec<Vec<Op>>> {
    // The next unit of each rank's chunks, forward and backward: microbatches keep their order.
    let chunks = shape.chunks_per_rank() as usize;
    let mut next = vec![[0u32; 2]; shape.pp() as usize * chunks];
    let ops = u64::from(shape.num_units()) * u64::from(shape.pp() * shape.vp()) * 2;
    list::schedule(shape, ops, |rank, now, ends| {
        let mine = rank.index() * chunks;
        let mut best: Option<(u32, usize, Op)> = None;
        for chunk in 0..chunks {
            let Some((depth, candidates)) = candidates(shape, rank, chunk, next[mine + chunk])
            else {
                continue;
            };
            for (way, op) in candidates.into_iter().enumerate() {
                let Some(op) = op else { continue };
                let ready = ends.ready(op).is_some_and(|ready| ready <= now);
                // Backwards before forwards; nearest to the input, and nearest to the loss.
                let last = shape.stages_per_replica();
                let key = if way == 1 { depth } else { 2 * last - depth };
                if ready && best.is_none_or(|(least, _, _)| key < least) {
                    best = Some((key, 2 * (mine + chunk) + way, op));
                }
            }
        }
        let (_, slot, op) = best?;
        next[slot / 2][slot % 2] += 1;
        Some(op)
    })
}

/// A chunk's depth in its replica, and its next forward and backward.
fn candidates(
    shape: &Shape,
    rank: Rank,
    chunk: usize,
    next: [u32; 2],
) -> Option<(u32, [Option<Op>; 2])> {
    let stage = shape.stage_at(rank, Chunk(u32::try_from(chunk).ok()?))?;
    let units = shape.units_of(stage);
    let op = |kind, done: u32| {
        let unit = units.start + done;
        (unit < units.end).then(|| Op::new(stage, kind, Unit(unit)))
    };
    let depth = stage.0 % shape.stages_per_replica();
    Some((
        depth,
        [op(OpKind::Forward, next[0]), op(OpKind::Backward, next[1])],
    ))
}
