//! A drawing through a window: the part that is drawn.

use super::{Block, Drawing, Lane, Limit, Window, decimal};
use crate::error::{Error, Result};
use crate::ids::Rank;

/// A drawing through a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    pub(crate) drawing: &'a Drawing,
    pub(crate) from: i64,
    pub(crate) to: i64,
    ranks: (u32, u32),
}

impl<'a> View<'a> {
    /// The ranks in the window.
    pub(crate) fn ranks(self) -> impl Iterator<Item = Rank> {
        (self.ranks.0..self.ranks.1).map(Rank)
    }

    /// A rank's whole lane.
    pub(crate) fn lane(self, rank: Rank) -> &'a Lane {
        &self.drawing.lanes[rank.index()]
    }

    /// Whether the block is seen; one that takes no time is, also at the window's edges.
    pub(crate) fn shows(self, block: &Block) -> bool {
        let overlaps = block.start < self.to && block.end > self.from;
        let instant = block.start == block.end;
        overlaps || (instant && self.from <= block.start && block.start <= self.to)
    }

    /// The limits that are seen.
    pub(crate) fn limits(self) -> Vec<Limit> {
        let mut limits = self.drawing.limits();
        limits.retain(|limit| self.from < limit.ticks && limit.ticks <= self.to);
        limits
    }

    /// The blocks of a rank that are seen, each with its position.
    pub(crate) fn blocks(self, rank: Rank) -> impl Iterator<Item = (usize, &'a Block)> {
        let blocks = self.lane(rank).blocks.iter().enumerate();
        blocks.filter(move |found| self.shows(found.1))
    }

    /// About `count` round times inside the window, each with its text.
    pub(crate) fn marks(self, count: usize) -> Vec<(i64, String)> {
        let unit = i128::from(self.drawing.ticks_per_unit);
        let length = i128::from((self.to - self.from).max(1));
        let count = i128::try_from(count.max(1)).unwrap_or(1);
        // Steps of 1, 2 or 5 times a power of ten of the unit, from the finest that a tick allows.
        let mut step = (1, 9_u32);
        for digits in (0..=9).rev() {
            let found = [1, 2, 5].into_iter().find(|mantissa| {
                let scale = 10_i128.pow(digits);
                mantissa * unit >= scale && mantissa * unit * count >= length * scale
            });
            if let Some(mantissa) = found {
                step = (mantissa, digits);
                break;
            }
            step = (1, 0);
        }
        let (mut mantissa, digits) = step;
        if digits == 0 {
            let nice = |k: u32| [1, 2, 5][(k % 3) as usize] * 10_i128.pow(k / 3);
            mantissa = (0..60)
                .map(nice)
                .find(|&n| n * unit * count >= length)
                .unwrap_or(1);
        }
        let scale = 10_i128.pow(digits);
        let ticks = |n: i128| (n * mantissa * unit).div_euclid(scale);
        let first = (i128::from(self.from) * scale).div_euclid(mantissa * unit);
        (first..)
            .take(usize::try_from(2 * count + 2).unwrap_or(2))
            .map(|n| (ticks(n), decimal(n * mantissa, scale, digits)))
            .filter_map(|(at, name)| i64::try_from(at).ok().map(|at| (at, name)))
            .filter(|&(at, _)| at >= self.from && at <= self.to)
            .collect()
    }

    /// Refuses a picture of more than `limit` blocks.
    pub(crate) fn limit(self, what: &str, limit: usize) -> Result<()> {
        let count: usize = self.ranks().map(|rank| self.blocks(rank).count()).sum();
        if count <= limit {
            return Ok(());
        }
        Err(Error::config(
            format!("{what} of {count} ops is too big: the limit is {limit}"),
            "draw a part: slice it in time with --from and --to, or in ranks with --ranks \
             (window= and ranks= in Python)",
        ))
    }
}

impl Drawing {
    /// The part inside a window: ranks outside are empty, ops are those that overlap it.
    ///
    /// # Errors
    /// If the window is empty or lies outside the drawing.
    pub(crate) fn slice(&self, window: &Window) -> Result<View<'_>> {
        let (begin, end) = (self.begin(), self.end());
        let (from, to) = (
            window.from.unwrap_or(begin).max(begin),
            window.to.unwrap_or(end).min(end),
        );
        if from >= to && begin < end {
            let text = |ticks| self.time_text(ticks, 6);
            return Err(Error::config(
                format!(
                    "the window from={} to={} shows nothing",
                    text(window.from.unwrap_or(begin)),
                    text(window.to.unwrap_or(end))
                ),
                format!("the drawing goes from {} to {}", text(begin), text(end)),
            ));
        }
        let pp = self.shape.pp();
        let (first, past) = window.ranks.unwrap_or((0, pp));
        if first >= past || past > pp {
            return Err(Error::config(
                format!("the window of ranks {first}:{past} is out of range for pp={pp}"),
                format!("give FIRST:PAST with 0 <= FIRST < PAST <= {pp}"),
            ));
        }
        Ok(View {
            drawing: self,
            from,
            to,
            ranks: (first, past),
        })
    }
}
