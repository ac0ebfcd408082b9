//! [`Sequence`]: what the n-th op of a stream works on, by formula in both directions.

use crate::ids::{Chunk, Unit};

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
        // True of the last group too: it is no longer than the others.
        let (start, size) = self.group_of(k / (self.group * self.chunks));
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
