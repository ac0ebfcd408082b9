//! [`Times`]: start and end of every op, in one block.

use super::Program;

/// Rows between two ranks' blocks. Ranks move through their blocks side by side; without a shift
/// blocks of equal length would all fall into the same lines of the cache.
const SHIFT: usize = 4;

/// Start and end of each op of each rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Times {
    /// First row and number of rows of each rank.
    blocks: Vec<(usize, usize)>,
    rows: Vec<[i64; 2]>,
}

impl Times {
    pub(super) fn new(program: &Program<'_>) -> Self {
        let mut len = 0;
        let block = |ops: &[crate::op::Op]| {
            let block = (len, ops.len());
            len += ops.len() + SHIFT;
            block
        };
        let blocks = program
            .ranks
            .iter()
            .map(|rank| rank.ops.as_slice())
            .map(block)
            .collect();
        Self {
            blocks,
            rows: vec![[0; 2]; len],
        }
    }

    #[inline]
    pub(super) fn set(&mut self, rank: usize, at: usize, start: i64, end: i64) {
        self.rows[self.blocks[rank].0 + at] = [start, end];
    }

    /// (start, end) of each op of a rank.
    pub(crate) fn of(&self, rank: usize) -> &[[i64; 2]] {
        let (first, len) = self.blocks[rank];
        &self.rows[first..first + len]
    }

    pub(crate) fn start(&self, rank: usize, at: usize) -> i64 {
        self.of(rank)[at][0]
    }

    pub(crate) fn end(&self, rank: usize, at: usize) -> i64 {
        self.of(rank)[at][1]
    }
}
