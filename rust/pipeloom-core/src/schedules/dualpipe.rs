//! DualPipe on two replicas and its cut-in-half form on a V: overlapped forward/backward pairs.

use super::{Argument, BackwardKind, Chunks, Family, Rule};
use crate::error::Error;
use crate::ids::{Chunk, Rank};
use crate::op::{Flags, OpKind};
use crate::order::{RankOrder, Sequence};
use crate::shape::{Placement, Shape};

/// Two replicas in opposite directions.
pub(super) static DUALPIPE: Family = Family {
    name: "dualpipe",
    summary: "two replicas in opposite directions with overlapped F/B pairs: twice the weights",
    source: "DualPipe, DeepSeek-V3",
    constraints: "vp = 1, pp even, m even, m >= 2 pp",
    chunks: Chunks::Exactly(1),
    placement: Placement::Bidirectional,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Mixed,
    validate: |shape, _, _| {
        let (pp, m) = (shape.pp(), shape.num_microbatches());
        if !pp.is_multiple_of(2) {
            return Err(Error::config(
                format!("dualpipe needs an even pp, but got pp={pp}"),
                format!("give pp={}, or use \"dualpipe_v\"", pp + 1),
            ));
        }
        if m >= 2 * pp && m.is_multiple_of(2) {
            return Ok(());
        }
        let least = (2 * pp).max(m.next_multiple_of(2));
        Err(Error::config(
            format!(
                "dualpipe needs an even num_microbatches >= 2 pp = {}, but got {m}",
                2 * pp
            ),
            format!("raise num_microbatches to {least}"),
        ))
    },
    rule: Rule::Closed(|shape, _, rank| dualpipe(shape, rank)),
    warmup: None,
};

/// DualPipe cut in half: overlapped forward and backward of the two chunks.
pub(super) static DUALPIPE_V: Family = Family {
    name: "dualpipe_v",
    summary: "overlapped F/B pairs of two chunks: hides expert-parallel communication",
    source: "DualPipe (cut-in-half), DeepSeek; torch ScheduleDualPipeV",
    constraints: "vp = 2; m >= 2 pp",
    chunks: Chunks::Exactly(2),
    placement: Placement::V,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Mixed,
    validate: |shape, _, _| {
        let (pp, m) = (shape.pp(), shape.num_microbatches());
        if m >= 2 * pp {
            return Ok(());
        }
        Err(Error::config(
            format!(
                "dualpipe_v needs num_microbatches >= 2 pp = {}, but got {m}",
                2 * pp
            ),
            format!("raise num_microbatches to {}, or use \"zb_v\"", 2 * pp),
        ))
    },
    rule: Rule::Closed(|shape, _, rank| dualpipe_v(shape, rank)),
    warmup: None,
};

/// Hands out the ops of two chunks stretch by stretch: each stretch is a stream of its own that
/// begins where the chunk's last one of that role ended. Streams used twice a round share.
struct Stretches {
    order: RankOrder,
    /// Chunk of (phase 0, phase 1): swapped on the far half of a bidirectional pipeline.
    chunks: [Chunk; 2],
    first_unit: [u32; 2],
    forwards: [u32; 2],
    backwards: [u32; 2],
    weights: [u32; 2],
}

impl Stretches {
    fn new(shape: &Shape, rank: Rank, chunks: [Chunk; 2]) -> Self {
        let first_unit = chunks.map(|chunk| {
            shape
                .stage_at(rank, chunk)
                .map_or(0, |stage| shape.units_of(stage).start)
        });
        Self {
            order: RankOrder::new(shape, rank),
            chunks,
            first_unit,
            forwards: [0; 2],
            backwards: [0; 2],
            weights: [0; 2],
        }
    }

    fn take(&mut self, kind: OpKind, flags: Flags, chunk: usize, len: u32) -> u8 {
        let counter = match kind {
            OpKind::Forward => &mut self.forwards[chunk],
            OpKind::BackwardWeight => &mut self.weights[chunk],
            OpKind::Backward
            | OpKind::BackwardInput
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => &mut self.backwards[chunk],
        };
        // A full backward does the weight half too.
        let first = self.first_unit[chunk] + *counter;
        *counter += len;
        if kind == OpKind::Backward {
            self.weights[chunk] += len;
        }
        let sequence = Sequence::Units {
            chunk: self.chunks[chunk],
            first,
            len,
        };
        self.order.marked_stream(kind, flags, sequence)
    }

    /// `len` rounds of the given ops; `FB(a, b)` is a pair: forward of chunk a with backward of b.
    /// An op that is named twice takes two units a round.
    fn rounds(&mut self, len: u32, slots: &[Slot]) {
        if len == 0 {
            return;
        }
        let mut pattern = Vec::new();
        let mut starts: Vec<usize> = Vec::new();
        for (at, slot) in slots.iter().enumerate() {
            let earlier = slots[..at].iter().position(|other| other == slot);
            starts.push(pattern.len());
            if let Some(earlier) = earlier {
                pattern.push(pattern[starts[earlier]]);
                continue;
            }
            let twice = slots[at + 1..].contains(slot);
            let len = if twice { 2 * len } else { len };
            match *slot {
                Slot::F(c) => pattern.push(self.take(OpKind::Forward, Flags::NONE, c, len)),
                Slot::B(c) => pattern.push(self.take(OpKind::Backward, Flags::NONE, c, len)),
                Slot::I(c) => pattern.push(self.take(OpKind::BackwardInput, Flags::NONE, c, len)),
                Slot::W(c) => pattern.push(self.take(OpKind::BackwardWeight, Flags::NONE, c, len)),
                Slot::FB(f, b) => {
                    pattern.push(self.take(OpKind::Forward, Flags::PAIR_FIRST, f, len));
                    pattern.push(self.take(OpKind::Backward, Flags::PAIR_SECOND, b, len));
                }
            }
        }
        self.order.phase(&pattern, len);
    }
}

/// One op of a round, with its chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slot {
    F(usize),
    B(usize),
    I(usize),
    W(usize),
    FB(usize, usize),
}

/// Each half of the ranks is one direction's near side.
fn dualpipe(shape: &Shape, rank: Rank) -> RankOrder {
    let (pp, half) = (shape.pp(), shape.pp() / 2);
    let far = rank.0 >= half;
    let chunks = if far {
        [Chunk(1), Chunk(0)]
    } else {
        [Chunk(0), Chunk(1)]
    };
    let d = rank.0.min(pp - 1 - rank.0);
    let spare = shape.num_units() / 2 - pp;
    dual(
        Stretches::new(shape, rank, chunks),
        half,
        d,
        spare,
        d == half - 1,
    )
}

fn dualpipe_v(shape: &Shape, rank: Rank) -> RankOrder {
    let (pp, d, m) = (shape.pp(), rank.0, shape.num_units());
    let chunks = [Chunk(0), Chunk(1)];
    dual(
        Stretches::new(shape, rank, chunks),
        pp,
        d,
        m - 2 * pp,
        d == pp - 1,
    )
}

/// The eight steps of DualPipe on a rank `d` of a pipeline of `pp`, with `spare` microbatches
/// more than it needs; at the `turn`, the first pair can't overlap: its backward needs its own
/// forward.
fn dual(mut to: Stretches, pp: u32, d: u32, spare: u32, turn: bool) -> RankOrder {
    let (before, after) = (pp - d - 1, d + 1);
    to.rounds(2 * before, &[Slot::F(0)]);
    to.rounds(after, &[Slot::F(0), Slot::F(1)]);
    to.rounds(before, &[Slot::I(1), Slot::W(1), Slot::F(1)]);
    let mut pairs = spare + after;
    if turn {
        to.rounds(1, &[Slot::F(0), Slot::B(1), Slot::FB(1, 0)]);
        pairs -= 1;
    }
    to.rounds(pairs, &[Slot::FB(0, 1), Slot::FB(1, 0)]);
    to.rounds(before, &[Slot::B(1), Slot::FB(1, 0)]);
    // From the middle of the cool-down on, weight halves are put off to fill the tail.
    let whole = after / 2;
    to.rounds(whole, &[Slot::B(1), Slot::B(0)]);
    if after.is_multiple_of(2) {
        to.rounds(after - whole, &[Slot::I(1), Slot::I(0)]);
    } else {
        to.rounds(1, &[Slot::B(1), Slot::I(0)]);
        to.rounds(after - whole - 1, &[Slot::I(1), Slot::I(0)]);
    }
    // They are done first in, first out: alternating chunks, then chunk 0 alone.
    let first = usize::from(after.is_multiple_of(2));
    let mut alternating = after;
    for (count, with_input) in [(before, true), (after, false)] {
        let mixed = count.min(alternating);
        let next = (first + (after - alternating) as usize) % 2;
        let pop = |c: usize| {
            if with_input {
                vec![Slot::W(c), Slot::I(0)]
            } else {
                vec![Slot::W(c)]
            }
        };
        let both = [pop(next), pop(1 - next)].concat();
        to.rounds(mixed / 2, &both);
        to.rounds(mixed % 2, &pop(next));
        to.rounds(count - mixed, &pop(0));
        alternating -= mixed;
    }
    to.order
}
