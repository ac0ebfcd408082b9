//! [`RankOrder`]: the closed form of one rank's order.
//!
//! Every textbook schedule is a few *phases* (warm-up, steady, cool-down), each a short pattern
//! repeated: `F F F`, then `F B F B …`, then `B B B`. What the n-th `F` works on is given by a
//! *stream*: a sequence of (chunk, unit) that has a formula in both directions. So a rank's order
//! takes a few hundred bytes whatever its length, any op is found in O(1), and bulk readers get
//! *runs*: stretches in which each slot of the pattern keeps its chunk and moves on by one unit.

use crate::ids::{Chunk, Rank, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::shape::Shape;

/// Most slots of a phase's pattern.
pub const MAX_PATTERN: usize = 8;

/// A sequence of (chunk, unit), addressed by a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequence {
    /// One chunk, units `first..first + len` in order.
    Units {
        /// The chunk.
        chunk: Chunk,
        /// First unit.
        first: u32,
        /// Number of units.
        len: u32,
    },
    /// The schedule table: groups of `group` units, chunk after chunk inside a group.
    Table(Table),
}

/// The schedule table of interleaved schedules (Megatron's `get_schedule_table`), in closed form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table {
    /// Number of units.
    pub units: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// Units of a group; the last group takes the rest.
    pub group: u32,
    /// Whether chunks go from last to first (backward).
    pub mirrored: bool,
    /// Whether units go from last to first inside a run.
    pub reversed: Reversal,
}

/// In which stretches a table's units run backwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reversal {
    /// Nowhere.
    None,
    /// Within each group.
    Group,
    /// Within each microbatch of so many pieces.
    Microbatch(u32),
}

/// Where a counter stands in a sequence: the op's chunk and unit, and for how many further
/// counters the chunk stays and the unit moves on by `step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// The chunk.
    pub chunk: Chunk,
    /// The unit.
    pub unit: Unit,
    /// Change of the unit from one counter to the next: 1 or -1.
    pub step: i32,
    /// Counters left in the run, this one included.
    pub left: u32,
}

impl Table {
    /// A table in forward order.
    pub fn forward(units: u32, chunks: u32, group: u32) -> Self {
        Self {
            units,
            chunks,
            group,
            mirrored: false,
            reversed: Reversal::None,
        }
    }

    /// The same table with chunks from last to first.
    #[must_use]
    pub fn mirror(self) -> Self {
        Self {
            mirrored: true,
            ..self
        }
    }

    /// The same table with units backwards where `reversed` says.
    #[must_use]
    pub fn reverse(self, reversed: Reversal) -> Self {
        Self { reversed, ..self }
    }

    fn len(&self) -> u32 {
        self.units * self.chunks
    }

    /// Index of the last group, and its size.
    fn group_of(&self, q: u32) -> (u32, u32) {
        let start = q * self.group;
        (start, self.group.min(self.units - start))
    }

    fn at(&self, k: u32) -> Cursor {
        let last_group = (self.units - 1) / self.group;
        let q = (k / (self.group * self.chunks)).min(last_group);
        let (start, size) = self.group_of(q);
        let j = k - start * self.chunks;
        let (c, i) = (j / size, j % size);
        let chunk = Chunk(if self.mirrored {
            self.chunks - 1 - c
        } else {
            c
        });
        match self.reversed {
            Reversal::None => Cursor {
                chunk,
                unit: Unit(start + i),
                step: 1,
                left: size - i,
            },
            Reversal::Group => Cursor {
                chunk,
                unit: Unit(start + size - 1 - i),
                step: -1,
                left: size - i,
            },
            Reversal::Microbatch(pieces) => {
                let (mb, piece) = ((start + i) / pieces, (start + i) % pieces);
                let unit = Unit(mb * pieces + pieces - 1 - piece);
                Cursor {
                    chunk,
                    unit,
                    step: -1,
                    left: pieces - piece,
                }
            }
        }
    }

    fn find(&self, chunk: Chunk, unit: Unit) -> Option<u32> {
        if chunk.0 >= self.chunks || unit.0 >= self.units {
            return None;
        }
        let c = if self.mirrored {
            self.chunks - 1 - chunk.0
        } else {
            chunk.0
        };
        let (start, size) = self.group_of(unit.0 / self.group);
        let i = match self.reversed {
            Reversal::None => unit.0 - start,
            Reversal::Group => size - 1 - (unit.0 - start),
            Reversal::Microbatch(pieces) => {
                let (mb, piece) = (unit.0 / pieces, unit.0 % pieces);
                mb * pieces + pieces - 1 - piece - start
            }
        };
        Some(start * self.chunks + c * size + i)
    }
}

impl Sequence {
    /// Number of counters.
    pub fn len(&self) -> u32 {
        match self {
            Self::Units { len, .. } => *len,
            Self::Table(table) => table.len(),
        }
    }

    /// Whether it has no counter.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Chunk and unit of counter `k`, which must be below [`Sequence::len`].
    #[inline]
    pub fn at(&self, k: u32) -> Cursor {
        match self {
            Self::Units { chunk, first, len } => Cursor {
                chunk: *chunk,
                unit: Unit(first + k),
                step: 1,
                left: len - k,
            },
            Self::Table(table) => table.at(k),
        }
    }

    /// The counter of (chunk, unit), if the sequence has it.
    #[inline]
    pub fn find(&self, chunk: Chunk, unit: Unit) -> Option<u32> {
        match self {
            Self::Units {
                chunk: own,
                first,
                len,
            } => {
                let k = unit.0.checked_sub(*first)?;
                (*own == chunk && k < *len).then_some(k)
            }
            Self::Table(table) => table.find(chunk, unit),
        }
    }
}

/// All ops of one kind that share a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    /// What the ops do.
    pub kind: OpKind,
    /// Marks that all of them carry.
    pub flags: Flags,
    /// What they work on.
    pub sequence: Sequence,
}

/// A pattern of streams, repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Phase {
    /// Indices into [`RankOrder::streams`].
    pattern: Vec<u8>,
    /// How often the pattern is run.
    repeats: u32,
    /// Position of the phase's first op.
    start: u64,
    /// Counter of each stream when the phase begins.
    counters: Vec<u32>,
}

/// One slot of a [`Run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The op in the run's first round.
    pub op: Op,
    /// The chunk of the op's stage.
    pub chunk: Chunk,
    /// Change of the unit from round to round: 1 or -1.
    pub step: i32,
    /// The op's counter in its stream in the first round; it advances by `stride` a round.
    pub counter: u32,
}

/// A stretch of an order: `rounds` repetitions of the slots, each slot moving on by its step.
#[derive(Clone, Debug)]
pub struct Run {
    slots: [Slot; MAX_PATTERN],
    width: usize,
    /// Number of repetitions.
    pub rounds: u32,
}

impl Run {
    /// The slots of a round.
    #[inline]
    pub fn slots(&self) -> &[Slot] {
        &self.slots[..self.width]
    }
}

/// The order of one rank in closed form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankOrder {
    shape: Shape,
    rank: Rank,
    streams: Vec<Stream>,
    phases: Vec<Phase>,
    len: u64,
}

impl RankOrder {
    /// An order without ops; [`RankOrder::stream`] and [`RankOrder::phase`] fill it.
    pub fn new(shape: &Shape, rank: Rank) -> Self {
        Self {
            shape: shape.clone(),
            rank,
            streams: Vec::new(),
            phases: Vec::new(),
            len: 0,
        }
    }

    /// Adds a stream and gives its number, for [`RankOrder::phase`].
    pub fn stream(&mut self, kind: OpKind, sequence: Sequence) -> u8 {
        self.marked_stream(kind, Flags::NONE, sequence)
    }

    /// Adds a stream whose ops carry marks.
    pub fn marked_stream(&mut self, kind: OpKind, flags: Flags, sequence: Sequence) -> u8 {
        self.streams.push(Stream {
            kind,
            flags,
            sequence,
        });
        #[allow(clippy::cast_possible_truncation)] // a family has a handful of streams
        let number = (self.streams.len() - 1) as u8;
        number
    }

    /// Appends `repeats` rounds of `pattern`. Nothing is added for zero rounds.
    ///
    /// # Panics
    /// If a stream would run past its end, which is a fault of the family's rule.
    pub fn phase(&mut self, pattern: &[u8], repeats: u32) {
        if repeats == 0 || pattern.is_empty() {
            return;
        }
        assert!(
            pattern.len() <= MAX_PATTERN,
            "a pattern has at most {MAX_PATTERN} slots"
        );
        let counters = self.counters_at_end();
        for (id, stream) in self.streams.iter().enumerate() {
            let used = pattern.iter().filter(|&&s| usize::from(s) == id).count() as u64;
            let end = u64::from(counters[id]) + used * u64::from(repeats);
            assert!(
                end <= u64::from(stream.sequence.len()),
                "stream {id} runs past its end"
            );
        }
        let start = self.len;
        self.len += pattern.len() as u64 * u64::from(repeats);
        self.phases.push(Phase {
            pattern: pattern.to_vec(),
            repeats,
            start,
            counters,
        });
    }

    fn counters_at_end(&self) -> Vec<u32> {
        let Some(last) = self.phases.last() else {
            return vec![0; self.streams.len()];
        };
        let mut counters = last.counters.clone();
        counters.resize(self.streams.len(), 0);
        for &stream in &last.pattern {
            counters[usize::from(stream)] += last.repeats;
        }
        counters
    }

    /// How often a stream has been used so far: its next counter.
    pub fn used(&self, stream: u8) -> u32 {
        self.counters_at_end()[usize::from(stream)]
    }

    /// Counters of a stream not yet used.
    pub fn left(&self, stream: u8) -> u32 {
        self.streams[usize::from(stream)].sequence.len() - self.used(stream)
    }

    /// Number of ops.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether some of its ops are overlapped pairs.
    pub fn has_pairs(&self) -> bool {
        self.streams
            .iter()
            .any(|stream| stream.flags.has(Flags::PAIR_FIRST))
    }

    /// Whether the rank has no op.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn make(&self, stream: &Stream, cursor: Cursor) -> Op {
        let stage = self
            .shape
            .stage_at(self.rank, cursor.chunk)
            .unwrap_or(Stage(u32::MAX));
        Op {
            stage,
            unit: cursor.unit,
            kind: stream.kind,
            flags: stream.flags,
        }
    }

    /// The op at a position, with its counter among the ops of its stream.
    pub fn get(&self, position: u64) -> Option<(Op, u32)> {
        if position >= self.len {
            return None;
        }
        let at = self.phases.partition_point(|phase| phase.start <= position) - 1;
        let phase = &self.phases[at];
        let width = phase.pattern.len() as u64;
        let offset = position - phase.start;
        // Both fit: the quotient is below `repeats`, the remainder below the width.
        #[allow(clippy::cast_possible_truncation)]
        let (round, slot) = ((offset / width) as u32, (offset % width) as usize);
        let id = phase.pattern[slot];
        let (per_round, before) = occurrences(&phase.pattern, slot);
        let counter = phase.counters[usize::from(id)] + round * per_round + before;
        let stream = &self.streams[usize::from(id)];
        Some((self.make(stream, stream.sequence.at(counter)), counter))
    }

    /// Where an op stands, with its counter among the ops of its stream.
    pub fn find(&self, op: Op) -> Option<(u64, u32)> {
        if op.stage.0 >= self.shape.num_stages() || self.shape.rank_of(op.stage) != self.rank {
            return None;
        }
        let chunk = self.shape.chunk_of(op.stage);
        self.streams
            .iter()
            .enumerate()
            .filter(|(_, stream)| stream.kind == op.kind)
            .find_map(|(id, stream)| {
                let counter = stream.sequence.find(chunk, op.unit)?;
                self.position_of(id, counter)
                    .map(|position| (position, counter))
            })
    }

    fn position_of(&self, id: usize, counter: u32) -> Option<u64> {
        for phase in &self.phases {
            let first = phase.counters.get(id).copied().unwrap_or(0);
            let slots: Vec<u64> = (0u64..)
                .zip(&phase.pattern)
                .filter_map(|(slot, &s)| (usize::from(s) == id).then_some(slot))
                .collect();
            let per_round = slots.len() as u64;
            let Some(ahead) = counter.checked_sub(first).map(u64::from) else {
                return None;
            };
            if per_round > 0 && ahead < per_round * u64::from(phase.repeats) {
                let (round, which) = (ahead / per_round, ahead % per_round);
                #[allow(clippy::cast_possible_truncation)] // below the pattern's length
                let slot = slots[which as usize];
                return Some(phase.start + round * phase.pattern.len() as u64 + slot);
            }
        }
        None
    }

    /// Calls `f` with each run, in order.
    #[inline]
    pub fn for_each_run(&self, mut f: impl FnMut(&Run)) {
        let blank = Slot {
            op: Op::new(Stage(0), OpKind::Forward, Unit(0)),
            chunk: Chunk(0),
            step: 1,
            counter: 0,
        };
        let mut run = Run {
            slots: [blank; MAX_PATTERN],
            width: 0,
            rounds: 0,
        };
        for phase in &self.phases {
            run.width = phase.pattern.len();
            // Per slot: counters left before the slot's chunk or direction changes.
            let mut left = [0; MAX_PATTERN];
            let mut round = 0;
            while round < phase.repeats {
                let mut rounds = phase.repeats - round;
                for (at, &id) in phase.pattern.iter().enumerate() {
                    let (per_round, before) = occurrences(&phase.pattern, at);
                    if left[at] == 0 {
                        let counter = phase.counters[usize::from(id)] + round * per_round + before;
                        let stream = &self.streams[usize::from(id)];
                        let cursor = stream.sequence.at(counter);
                        let op = self.make(stream, cursor);
                        run.slots[at] = Slot {
                            op,
                            chunk: cursor.chunk,
                            step: cursor.step,
                            counter,
                        };
                        // A stream used twice a round moves by two: such rounds go one by one.
                        left[at] = if per_round == 1 { cursor.left } else { 1 };
                    }
                    rounds = rounds.min(left[at]);
                }
                run.rounds = rounds;
                f(&run);
                round += rounds;
                for (slot, left) in run.slots[..run.width].iter_mut().zip(&mut left) {
                    *left -= rounds;
                    let moved = slot.step * rounds.cast_signed();
                    slot.op.unit = Unit(slot.op.unit.0.wrapping_add_signed(moved));
                    slot.counter += rounds;
                }
            }
        }
    }
}

/// How often a slot's stream occurs in a pattern, and how often before the slot.
fn occurrences(pattern: &[u8], slot: usize) -> (u32, u32) {
    let id = pattern[slot];
    let mut counts = (0, 0);
    for (at, &other) in pattern.iter().enumerate() {
        counts.0 += u32::from(other == id);
        counts.1 += u32::from(other == id && at < slot);
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Placement;

    fn tables() -> impl Iterator<Item = Table> {
        let sizes = (1..=7u32).flat_map(|m| (1..=3u32).map(move |v| (m, v)));
        sizes.flat_map(|(m, v)| {
            (1..=m).flat_map(move |g| {
                let table = Table::forward(m, v, g);
                [
                    table,
                    table.mirror(),
                    table.mirror().reverse(Reversal::Group),
                ]
            })
        })
    }

    #[test]
    fn table_is_a_bijection_and_runs_are_true() {
        for table in tables() {
            let mut seen = vec![false; table.len() as usize];
            for k in 0..table.len() {
                let cursor = table.at(k);
                assert_eq!(table.find(cursor.chunk, cursor.unit), Some(k), "{table:?}");
                let cell = (cursor.chunk.0 * table.units + cursor.unit.0) as usize;
                assert!(
                    !std::mem::replace(&mut seen[cell], true),
                    "{table:?} repeats {cursor:?}"
                );
                for ahead in 1..cursor.left {
                    let then = table.at(k + ahead);
                    assert_eq!(then.chunk, cursor.chunk);
                    let moved = i64::from(then.unit.0) - i64::from(cursor.unit.0);
                    assert_eq!(moved, i64::from(cursor.step) * i64::from(ahead));
                }
            }
        }
    }

    #[test]
    fn get_find_and_runs_agree() {
        let shape = Shape::new(2, 2, 5, 1, Placement::Loop).unwrap();
        let mut order = RankOrder::new(&shape, Rank(1));
        let f = order.stream(OpKind::Forward, Sequence::Table(Table::forward(5, 2, 2)));
        let b = order.stream(
            OpKind::Backward,
            Sequence::Table(Table::forward(5, 2, 2).mirror()),
        );
        order.phase(&[f], 3);
        order.phase(&[f, b, b], 2);
        order.phase(&[f, b], 5);
        order.phase(&[b], 1);
        let mut ops = Vec::new();
        order.for_each_run(|run| {
            for round in 0..run.rounds {
                for slot in run.slots() {
                    let unit = slot.op.unit.0.wrapping_add_signed(slot.step * round as i32);
                    ops.push(Op {
                        unit: Unit(unit),
                        ..slot.op
                    });
                }
            }
        });
        assert_eq!(ops.len() as u64, order.len());
        for (position, &op) in (0u64..).zip(&ops) {
            assert_eq!(order.get(position).map(|found| found.0), Some(op));
            assert_eq!(order.find(op).map(|found| found.0), Some(position));
        }
        assert_eq!(order.get(order.len()), None);
        assert_eq!(
            order.find(Op::new(Stage(0), OpKind::Forward, Unit(0))),
            None
        );
    }
}
