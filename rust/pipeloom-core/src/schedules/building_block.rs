//! Schedules on the V placement that repeat a building block: V-Half, V-Min, V-1F1B.
//!
//! A block says in which cell of a unit grid each rank runs the ops of microbatch 0; microbatch
//! `u` runs the same ops `u` periods later. The cells are such that two ops of a rank never meet,
//! and how long a block's activations live decides the peak memory. Repeated as it stands, a block leaves holes
//! in the warm-up and the cool-down; [`compact`] pulls ops into them without raising the peak.

use super::compact::compact;
use super::one_chunk::accept;
use super::{Argument, BackwardKind, Chunks, Family, Rule};
use crate::ids::{Chunk, Rank, Unit};
use crate::op::{Op, OpKind};
use crate::shape::{Placement, Shape};

/// Half of 1F1B's memory.
pub(super) static V_HALF: Family = Family {
    name: "v_half",
    summary: "half of 1F1B's memory, about half of its bubble at F = I = W",
    source: "pipeline parallelism with controllable memory, arXiv 2405.15362",
    constraints: "vp = 2",
    chunks: Chunks::Exactly(2),
    placement: Placement::V,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Split,
    validate: accept,
    rule: Rule::Whole(|shape, _| compact(&Block::split(shape, v_half))),
    warmup: None,
};

/// A third of 1F1B's memory.
pub(super) static V_MIN: Family = Family {
    name: "v_min",
    summary: "a third of 1F1B's memory; a bubble that grows with m where F, I, W differ",
    source: "pipeline parallelism with controllable memory, arXiv 2405.15362",
    constraints: "vp = 2",
    chunks: Chunks::Exactly(2),
    placement: Placement::V,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Split,
    validate: accept,
    rule: Rule::Whole(|shape, _| compact(&Block::split(shape, v_min))),
    warmup: None,
};

/// Two thirds of 1F1B's memory with full backwards.
pub(super) static V_1F1B: Family = Family {
    name: "v_1f1b",
    summary: "about two thirds of 1F1B's memory with full backwards",
    source: "zero-bubble repository, schedule v1f1b",
    constraints: "vp = 2",
    chunks: Chunks::Exactly(2),
    placement: Placement::V,
    arguments: &[Argument::PartialCheckpoints],
    backward: BackwardKind::Full,
    validate: accept,
    rule: Rule::Whole(|shape, _| compact(&Block::full(shape))),
    warmup: None,
};

/// Cells from one microbatch's block to the next: room for two F, two I, two W.
pub(super) const PERIOD: u32 = 6;

/// One op of each microbatch: the op and the cell of microbatch 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    first: Op,
    cell: u32,
}

impl Stream {
    /// The op on a microbatch.
    pub(super) fn op(self, microbatch: u32) -> Op {
        Op {
            unit: Unit(microbatch),
            ..self.first
        }
    }

    /// The cell of the op on a microbatch.
    pub(super) fn cell(self, microbatch: u32) -> u32 {
        self.cell + PERIOD * microbatch
    }

    /// The microbatch whose op stands in a cell, if there is one.
    pub(super) fn microbatch_at(self, cell: u32) -> Option<u32> {
        let since = cell.checked_sub(self.cell)?;
        since.is_multiple_of(PERIOD).then_some(since / PERIOD)
    }
}

/// The ops of a microbatch on each rank, with their cells.
#[derive(Clone, Debug)]
pub(super) struct Block<'a> {
    pub(super) shape: &'a Shape,
    pub(super) streams: Vec<Vec<Stream>>,
}

impl<'a> Block<'a> {
    /// A block of split backwards from the cells of F on chunk 0 and 1, I on chunk 1 and 0; each
    /// W takes the next cell that the others leave.
    fn split(shape: &'a Shape, cells: fn(u32, u32) -> [u32; 4]) -> Self {
        let rank_cells = |rank: Rank| {
            let [f0, f1, i1, i0] = cells(shape.pp(), rank.0);
            let mut taken = vec![f0, f1, i1, i0];
            let mut next = |after: u32| {
                let meets = |cell: u32| taken.iter().any(|&t| t % PERIOD == cell % PERIOD);
                let cell = (after + 1..=after + PERIOD).find(|&cell| !meets(cell));
                let cell = cell.unwrap_or(after + PERIOD);
                taken.push(cell);
                cell
            };
            let (w1, w0) = (next(i1), next(i0));
            vec![
                (OpKind::Forward, 0, f0),
                (OpKind::Forward, 1, f1),
                (OpKind::BackwardInput, 1, i1),
                (OpKind::BackwardWeight, 1, w1),
                (OpKind::BackwardInput, 0, i0),
                (OpKind::BackwardWeight, 0, w0),
            ]
        };
        Self::new(shape, shape.ranks().map(rank_cells).collect())
    }

    /// V-1F1B's block of full backwards, each two cells long. The two forwards of a rank leave
    /// two places for them: backwards of chunk 1 take the first that comes, those of chunk 0 the
    /// other.
    fn full(shape: &'a Shape) -> Self {
        let pp = shape.pp();
        let forwards = |rank: u32| [rank, 2 * pp - 1 - rank];
        let from = |after: u32, place: u32| after + (place + PERIOD - after % PERIOD) % PERIOD;
        let mut cells = vec![[0; 2]; pp as usize];
        let mut after = pp + pp;
        for (rank, cell) in (0..pp).zip(&mut cells) {
            let first = backward_places(forwards(rank)).map(|place| from(after, place));
            *cell = [first[0].max(first[1]), first[0].min(first[1])];
            after = cell[1] + 2;
        }
        for cell in cells.iter_mut().rev() {
            cell[0] = from(after, cell[0] % PERIOD);
            after = cell[0] + 2;
        }
        let rank_cells = |(rank, [b0, b1]): (u32, [u32; 2])| {
            let [f0, f1] = forwards(rank);
            vec![
                (OpKind::Forward, 0, f0),
                (OpKind::Forward, 1, f1),
                (OpKind::Backward, 1, b1),
                (OpKind::Backward, 0, b0),
            ]
        };
        Self::new(shape, (0..pp).zip(cells).map(rank_cells).collect())
    }

    fn new(shape: &'a Shape, ranks: Vec<Vec<(OpKind, u32, u32)>>) -> Self {
        let stream = |rank: Rank, (kind, chunk, cell): (OpKind, u32, u32)| {
            let stage = shape.stage_at(rank, Chunk(chunk))?;
            Some(Stream {
                first: Op::new(stage, kind, Unit(0)),
                cell,
            })
        };
        let streams = shape.ranks().zip(ranks).map(|(rank, cells)| {
            cells
                .into_iter()
                .filter_map(|cell| stream(rank, cell))
                .collect()
        });
        Self {
            shape,
            streams: streams.collect(),
        }
    }

    /// The last cell that an op stands in.
    pub(super) fn last_cell(&self) -> u32 {
        let last = self.shape.num_units() - 1;
        let cells = self
            .streams
            .iter()
            .flatten()
            .map(|stream| stream.cell(last));
        cells.max().unwrap_or(0)
    }

    /// Most activations of any rank once blocks follow each other, in chunks of a microbatch.
    pub(super) fn peak(&self) -> i32 {
        let rank_peak = |streams: &[Stream]| {
            let longest = streams.iter().map(|stream| stream.cell).max().unwrap_or(0);
            let forwards = streams.iter().filter(|s| s.first.kind == OpKind::Forward);
            let level = |forward: &Stream| {
                // Late enough for every stream to have begun.
                let now = forward.cell(longest / PERIOD + 1);
                let begun = |stream: &Stream| match stream.first.kind {
                    OpKind::Forward => ((now - stream.cell) / PERIOD + 1).cast_signed(),
                    OpKind::Backward | OpKind::BackwardWeight => {
                        -((now - 1 - stream.cell) / PERIOD + 1).cast_signed()
                    }
                    _ => 0,
                };
                streams.iter().map(begun).sum::<i32>()
            };
            forwards.map(level).max().unwrap_or(0)
        };
        let peaks = self.streams.iter().map(|streams| rank_peak(streams));
        peaks.max().unwrap_or(0)
    }
}

fn v_half(pp: u32, rank: u32) -> [u32; 4] {
    // Where two ops would meet, backwards wait half a period.
    let gap = if pp.is_multiple_of(2) { PERIOD / 2 } else { 0 };
    [
        2 * rank,
        3 * pp - rank - 2,
        3 * pp + gap + 2 * rank - 1,
        6 * pp + gap - rank - 2,
    ]
}

fn v_min(pp: u32, rank: u32) -> [u32; 4] {
    // Where two ops would meet, backwards wait a third of a period.
    let gap = if pp.is_multiple_of(3) { PERIOD / 3 } else { 0 };
    [
        rank,
        2 * pp - rank - 1,
        2 * pp + gap + rank,
        4 * pp + gap - rank - 1,
    ]
}

/// Where in the period the two full backwards of a rank can begin, given its forwards: these
/// are an odd number of cells apart, so that pairs of cells remain.
fn backward_places([f0, f1]: [u32; 2]) -> [u32; 2] {
    match (f1 - f0) % PERIOD {
        3 => [(f0 + 1) % PERIOD, (f1 + 1) % PERIOD],
        1 => [(f1 + 1) % PERIOD, (f1 + 3) % PERIOD],
        _ => [(f0 + 1) % PERIOD, (f0 + 3) % PERIOD],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedules::list::{Ends, Time, duration};

    #[test]
    fn no_two_ops_of_a_rank_meet() {
        for pp in 1..=200 {
            let shape = Shape::new(pp, 2, 1, 1, Placement::V).unwrap();
            let blocks = [
                Block::split(&shape, v_half),
                Block::split(&shape, v_min),
                Block::full(&shape),
            ];
            for streams in blocks.iter().flat_map(|block| &block.streams) {
                let mut taken = [false; PERIOD as usize];
                for stream in streams {
                    for step in 0..duration(stream.first.kind) {
                        let cell = ((stream.cell + step) % PERIOD) as usize;
                        assert!(!taken[cell], "pp={pp}: {} in {cell}", stream.first);
                        taken[cell] = true;
                    }
                }
                assert_eq!(taken, [true; PERIOD as usize]);
            }
        }
    }

    #[test]
    fn ops_stand_after_what_they_wait_for() {
        for pp in 1..=64 {
            let shape = Shape::new(pp, 2, 1, 1, Placement::V).unwrap();
            for block in [
                Block::split(&shape, v_half),
                Block::split(&shape, v_min),
                Block::full(&shape),
            ] {
                let mut streams: Vec<&Stream> = block.streams.iter().flatten().collect();
                streams.sort_by_key(|stream| stream.cell);
                let mut ends = Ends::new(&shape, Time::Forward);
                for stream in streams {
                    let ready = ends.ready(stream.first);
                    assert!(ready.is_some_and(|ready| ready <= stream.cell), "pp={pp}");
                    ends.set(stream.first, stream.cell + duration(stream.first.kind));
                }
            }
        }
    }
}
