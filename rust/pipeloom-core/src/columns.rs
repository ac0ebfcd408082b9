//! [`Columns`]: a rank's order as arrays, one value an op.

use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};
use crate::order::{RankOrder, Run};
use crate::plan::Plan;

/// `peer` of an op that is no transfer.
pub const NO_PEER: u32 = u32::MAX;
/// `pair` of an op that belongs to no overlapped pair.
pub const NO_PAIR: u32 = u32::MAX;

/// The ops of one rank as arrays of equal length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// [`OpKind`] as its discriminant.
    pub kind: Vec<u8>,
    /// Stage.
    pub stage: Vec<u32>,
    /// Chunk of the stage on this rank.
    pub chunk: Vec<u32>,
    /// Microbatch.
    pub microbatch: Vec<u32>,
    /// Piece of the microbatch's sequence; none if sequences are not cut: all are 0.
    pub piece: Option<Vec<u32>>,
    /// Whether a forward keeps only its input, or a backward first runs the forward again; none
    /// if nothing is recomputed: all are false.
    pub recompute: Option<Vec<bool>>,
    /// Number of the overlapped pair, or [`NO_PAIR`]; only for plans that have pairs.
    pub pair: Option<Vec<u32>>,
    /// The other rank of a transfer, or [`NO_PEER`]; only for lowered plans.
    pub peer: Option<Vec<u32>>,
    /// The group of a transfer, or [`crate::plan::NO_GROUP`]; only for lowered plans.
    pub group: Option<Vec<u32>>,
}

impl Plan {
    /// The ops of a rank as columns.
    pub fn columns(&self, rank: Rank) -> Columns {
        match self.closed_form(rank) {
            Some(order) => self.closed_columns(rank, &order),
            None => self.held_columns(rank),
        }
    }

    fn closed_columns(&self, rank: Rank, order: &RankOrder) -> Columns {
        let len = usize::try_from(order.len()).unwrap_or(0);
        let mut columns = Columns {
            kind: vec![0; len],
            stage: vec![0; len],
            chunk: vec![0; len],
            microbatch: vec![0; len],
            ..Columns::default()
        };
        let mut at = 0;
        order.for_each_run(|run| {
            let end = at + run.slots().len() * run.rounds as usize;
            let rows = at..end;
            fill(&mut columns.kind[rows.clone()], run, |slot| {
                (slot.op.kind as u8, 0)
            });
            fill(&mut columns.stage[rows.clone()], run, |slot| {
                (slot.op.stage.0, 0)
            });
            fill(&mut columns.chunk[rows.clone()], run, |slot| {
                (slot.chunk.0, 0)
            });
            fill(&mut columns.microbatch[rows], run, |slot| {
                (slot.op.unit.0, slot.step.cast_unsigned())
            });
            at = end;
        });
        let pieces = self.shape().num_seq_pieces();
        if pieces > 1 {
            columns.piece = Some(
                columns
                    .microbatch
                    .iter()
                    .map(|unit| unit % pieces)
                    .collect(),
            );
            columns
                .microbatch
                .iter_mut()
                .for_each(|unit| *unit /= pieces);
        }
        if order.has_pairs() || self.mask(rank).is_some() {
            let ops = self.rank_ops(rank).ops;
            mark(&mut columns, &ops);
        }
        columns
    }

    fn held_columns(&self, rank: Rank) -> Columns {
        let Some(held) = self.held_ops(rank) else {
            return Columns::default();
        };
        let (shape, ops) = (self.shape(), &held.ops);
        let mut columns = Columns {
            kind: ops.iter().map(|op| op.kind as u8).collect(),
            stage: ops.iter().map(|op| op.stage.0).collect(),
            chunk: ops.iter().map(|op| shape.chunk_of(op.stage).0).collect(),
            microbatch: ops.iter().map(|op| shape.split_unit(op.unit).0).collect(),
            ..Columns::default()
        };
        if shape.num_seq_pieces() > 1 {
            columns.piece = Some(ops.iter().map(|op| shape.split_unit(op.unit).1).collect());
        }
        mark(&mut columns, ops);
        if self.style().is_some() {
            columns.peer = Some(ops.iter().map(|op| self.peer(*op)).collect());
            columns.group = Some((0..ops.len()).map(|at| held.group(at)).collect());
        }
        columns
    }

    /// The other rank of a transfer; [`NO_PEER`] for a compute op.
    pub fn peer(&self, op: Op) -> u32 {
        let towards_next = match op.kind {
            OpKind::SendForward | OpKind::RecvBackward => true,
            OpKind::RecvForward | OpKind::SendBackward => false,
            OpKind::Forward | OpKind::Backward | OpKind::BackwardInput | OpKind::BackwardWeight => {
                return NO_PEER;
            }
        };
        self.shape()
            .peer(op.stage, towards_next)
            .map_or(NO_PEER, |rank| rank.0)
    }
}

/// Fills a run's rows: each slot's value, moving on by its step from round to round.
#[inline]
fn fill<T: Column>(rows: &mut [T], run: &Run, value: impl Fn(&crate::order::Slot) -> (T, T)) {
    match run.slots() {
        [only] => {
            let (start, step) = value(only);
            for (round, row) in (0..run.rounds).zip(rows) {
                *row = start.advance(step, round);
            }
        }
        [first, second] => {
            let ((a, a_step), (b, b_step)) = (value(first), value(second));
            for (round, pair) in (0..run.rounds).zip(rows.chunks_exact_mut(2)) {
                pair[0] = a.advance(a_step, round);
                pair[1] = b.advance(b_step, round);
            }
        }
        slots => {
            for (round, rows) in (0..run.rounds).zip(rows.chunks_exact_mut(slots.len())) {
                for (row, slot) in rows.iter_mut().zip(slots) {
                    let (start, step) = value(slot);
                    *row = start.advance(step, round);
                }
            }
        }
    }
}

/// A column's number: `start + step * round`, wrapping, so that a step can be -1.
trait Column: Copy {
    fn advance(self, step: Self, round: u32) -> Self;
}

impl Column for u32 {
    #[inline]
    fn advance(self, step: Self, round: u32) -> Self {
        self.wrapping_add(step.wrapping_mul(round))
    }
}

impl Column for u8 {
    #[inline]
    fn advance(self, _: Self, _: u32) -> Self {
        self
    }
}

/// Copies the marks of ops into their columns.
fn mark(columns: &mut Columns, ops: &[Op]) {
    if ops.iter().any(|op| op.flags.has(Flags::RECOMPUTE)) {
        columns.recompute = Some(
            ops.iter()
                .map(|op| op.flags.has(Flags::RECOMPUTE))
                .collect(),
        );
    }
    if !ops.iter().any(|op| op.flags.has(Flags::PAIR_FIRST)) {
        return;
    }
    let mut number = NO_PAIR;
    let pairs = ops.iter().map(|op| {
        if op.flags.has(Flags::PAIR_FIRST) {
            number = number.wrapping_add(1);
            number
        } else if op.flags.has(Flags::PAIR_SECOND) {
            number
        } else {
            NO_PAIR
        }
    });
    columns.pair = Some(pairs.collect());
}
