//! [`Columns`]: a rank's order as arrays, one value an op.

use std::iter::repeat_n;

use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};
use crate::order::{RankOrder, Run, Slot};
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
            kind: Vec::with_capacity(len),
            stage: Vec::with_capacity(len),
            chunk: Vec::with_capacity(len),
            microbatch: Vec::with_capacity(len),
            ..Columns::default()
        };
        order.for_each_run(|run| {
            repeat(&mut columns.kind, run, |slot| slot.op.kind as u8);
            repeat(&mut columns.stage, run, |slot| slot.op.stage.0);
            repeat(&mut columns.chunk, run, |slot| slot.chunk.0);
            count(&mut columns.microbatch, run);
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
            columns.group = Some(held.groups());
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

/// Appends a run's rows: one value a slot, the same in each round.
///
/// The usual widths are spelled out: an iterator over arrays has a known length, so the rows are
/// written straight into the column, each byte once.
fn repeat<T: Copy>(column: &mut Vec<T>, run: &Run, value: impl Fn(&Slot) -> T) {
    let rounds = run.rounds as usize;
    match run.slots() {
        [a] => column.extend(repeat_n(value(a), rounds)),
        [a, b] => column.extend(repeat_n([value(a), value(b)], rounds).flatten()),
        [a, b, c] => column.extend(repeat_n([value(a), value(b), value(c)], rounds).flatten()),
        slots => (0..rounds).for_each(|_| column.extend(slots.iter().map(&value))),
    }
}

/// Appends a run's units: each slot's moves on by its step from round to round.
fn count(column: &mut Vec<u32>, run: &Run) {
    let rounds = 0..run.rounds;
    let unit = |slot: &Slot, round: u32| {
        slot.op
            .unit
            .0
            .wrapping_add(slot.step.cast_unsigned().wrapping_mul(round))
    };
    // Forward streams count up; telling so spares a multiplication that SSE2 does not have.
    match run.slots() {
        [a] if a.step == 1 => column.extend(a.op.unit.0..a.op.unit.0 + run.rounds),
        [a, b] if a.step == 1 && b.step == 1 => {
            let (a, b) = (a.op.unit.0, b.op.unit.0);
            column.extend(rounds.flat_map(|round| [a + round, b + round]));
        }
        [a, b, c] if a.step == 1 && b.step == 1 && c.step == 1 => {
            let (a, b, c) = (a.op.unit.0, b.op.unit.0, c.op.unit.0);
            column.extend(rounds.flat_map(|round| [a + round, b + round, c + round]));
        }
        slots => {
            rounds.for_each(|round| column.extend(slots.iter().map(|slot| unit(slot, round))));
        }
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
