//! [`RankOrder`]: the closed form of one rank's order.
//!
//! Every textbook schedule is a few *phases* (warm-up, steady, cool-down), each a short pattern
//! repeated: `F F F`, then `F B F B …`, then `B B B`. What the n-th `F` works on is given by a
//! *stream*: a sequence of (chunk, unit) that has a formula in both directions. So a rank's order
//! takes a few hundred bytes whatever its length, any op is found in O(1), and bulk readers get
//! *runs*: stretches in which each slot of the pattern keeps its chunk and moves on by one unit.

mod sequence;

use crate::ids::{Chunk, Rank, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::shape::Shape;

pub use sequence::{Cursor, Reversal, Sequence, Table};

/// Most slots of a phase's pattern.
pub const MAX_PATTERN: usize = 8;

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
    /// Actions before the phase: as `start`, but an overlapped pair counts once.
    actions_before: u64,
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
    ///
    /// # Panics
    /// If there are 256 streams already, which is a fault of the family's rule.
    pub fn marked_stream(&mut self, kind: OpKind, flags: Flags, sequence: Sequence) -> u8 {
        self.streams.push(Stream {
            kind,
            flags,
            sequence,
        });
        let number = u8::try_from(self.streams.len() - 1);
        number.expect("a family has a handful of streams, whatever the shape")
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
        let (start, actions_before) = (self.len, self.num_actions());
        self.len += pattern.len() as u64 * u64::from(repeats);
        let pattern = pattern.to_vec();
        self.phases.push(Phase {
            pattern,
            repeats,
            start,
            actions_before,
            counters,
        });
    }

    /// Number of actions: ops, an overlapped pair counted once.
    pub fn num_actions(&self) -> u64 {
        let Some(last) = self.phases.last() else {
            return 0;
        };
        let width = last.pattern.len() as u64 - self.pairs_within(&last.pattern);
        last.actions_before + width * u64::from(last.repeats)
    }

    fn pairs_within(&self, pattern: &[u8]) -> u64 {
        pattern.iter().filter(|&&id| self.is_second(id)).count() as u64
    }

    fn is_second(&self, id: u8) -> bool {
        self.streams[usize::from(id)].flags.has(Flags::PAIR_SECOND)
    }

    /// Position of the (first) op of an action.
    pub fn position_of_action(&self, action: u64) -> Option<u64> {
        if action >= self.num_actions() {
            return None;
        }
        let at = self
            .phases
            .partition_point(|phase| phase.actions_before <= action)
            - 1;
        let phase = &self.phases[at];
        let width = phase.pattern.len() as u64 - self.pairs_within(&phase.pattern);
        let offset = action - phase.actions_before;
        let (round, nth) = (offset / width, offset % width);
        let mut firsts = (0u64..)
            .zip(&phase.pattern)
            .filter(|(_, id)| !self.is_second(**id));
        let slot = usize::try_from(nth).ok().and_then(|nth| firsts.nth(nth))?.0;
        Some(phase.start + round * phase.pattern.len() as u64 + slot)
    }

    /// The action that the op at a position belongs to.
    pub fn action_of_position(&self, position: u64) -> Option<u64> {
        if position >= self.len {
            return None;
        }
        let at = self.phases.partition_point(|phase| phase.start <= position) - 1;
        let phase = &self.phases[at];
        let width = phase.pattern.len() as u64;
        let offset = position - phase.start;
        let slot = usize::try_from(offset % width).ok()?;
        let before = slot as u64 - self.pairs_within(&phase.pattern[..=slot]);
        let per_round = width - self.pairs_within(&phase.pattern);
        Some(phase.actions_before + offset / width * per_round + before)
    }

    /// As [`RankOrder::phase`], but slots whose stream has ended are left out.
    pub fn phase_clipped(&mut self, pattern: &[u8], repeats: u32) {
        let mut repeats = repeats;
        while repeats > 0 {
            let alive: Vec<u8> = pattern
                .iter()
                .copied()
                .filter(|&s| self.left(s) > 0)
                .collect();
            let Some(rounds) = alive.iter().map(|&s| self.left(s)).min() else {
                return;
            };
            let rounds = rounds.min(repeats);
            self.phase(&alive, rounds);
            repeats -= rounds;
        }
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
            let ahead = counter.checked_sub(first).map(u64::from)?;
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
            let mut uses = [(0, 0); MAX_PATTERN];
            for (at, uses) in uses[..run.width].iter_mut().enumerate() {
                *uses = occurrences(&phase.pattern, at);
            }
            let mut round = 0;
            while round < phase.repeats {
                let mut rounds = phase.repeats - round;
                for (at, &id) in phase.pattern.iter().enumerate() {
                    if left[at] == 0 {
                        let (per_round, before) = uses[at];
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
                    let unit = slot
                        .op
                        .unit
                        .0
                        .wrapping_add_signed(slot.step * round.cast_signed());
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
