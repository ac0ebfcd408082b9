//! The boxes of a picture as data, for renderers outside the core.

use std::collections::BTreeSet;

use super::palette::{self, Color};
use super::svg::MAX_OPS;
use super::{Block, COMPUTE_KINDS, Drawing, Half, View, Window, half_of_pair, kind_name};
use crate::error::Result;
use crate::ids::Rank;
use crate::op::{Flags, OpKind};

/// One box.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaintedBox {
    /// The rank whose row it is in.
    pub rank: Rank,
    /// What is written on it.
    pub label: String,
    /// Its colour.
    pub fill: Color,
    /// First tick.
    pub start: i64,
    /// First tick after it.
    pub end: i64,
    /// Which half of the row it takes; none: all of it.
    pub half: Option<Half>,
    /// Whether it is on the critical path, if that is asked for.
    pub critical: bool,
    /// Whether it is recomputed.
    pub recompute: bool,
}

/// The boxes of the ops that compute, cut to the window.
///
/// # Errors
/// If the window shows nothing or too much, or the critical path is asked for but unknown.
pub fn boxes(drawing: &Drawing, window: &Window, critical_path: bool) -> Result<Vec<PaintedBox>> {
    let view = drawing.slice(window)?;
    view.limit("a picture", MAX_OPS)?;
    let chunks = drawing.shape.chunks_per_rank();
    if critical_path {
        drawing.require_critical_path()?;
    }
    let path = drawing.critical_path.iter().filter(|_| critical_path);
    let critical: BTreeSet<_> = path.copied().collect();
    let mut boxes = Vec::new();
    for rank in view.ranks() {
        for (at, block) in view
            .blocks(rank)
            .filter(|found| found.1.op.kind.is_compute())
        {
            let chunk = drawing.shape.chunk_of(block.op.stage).0;
            boxes.push(PaintedBox {
                rank,
                label: block.op.unit.to_string(),
                fill: palette::fill(block.op.kind, chunk, chunks),
                start: block.start.max(view.from),
                end: block.end.min(view.to),
                half: half_of_pair(view.lane(rank), at),
                critical: critical.contains(&(rank, at)),
                recompute: block.op.flags.has(Flags::RECOMPUTE),
            });
        }
    }
    Ok(boxes)
}

/// A transfer that takes time: its rank, colour, first tick, first tick after it, and whether it
/// sends.
pub type PaintedTransfer = (Rank, Color, i64, i64, bool);

/// The transfers that take time, cut to the window.
///
/// # Errors
/// If the window shows nothing or too much.
pub fn transfers(drawing: &Drawing, window: &Window) -> Result<Vec<PaintedTransfer>> {
    let view = drawing.slice(window)?;
    view.limit("a picture", MAX_OPS)?;
    let own = |rank| {
        let moves = |block: &&Block| !block.op.kind.is_compute() && block.end > block.start;
        let blocks = view.blocks(rank).map(|found| found.1).filter(moves);
        blocks.map(move |block| {
            let (start, end) = (block.start.max(view.from), block.end.min(view.to));
            let fill = palette::fill(block.op.kind, 0, 1);
            (rank, fill, start, end, block.op.kind.is_send())
        })
    };
    Ok(view.ranks().flat_map(own).collect())
}

/// Most shades of a kind that a legend shows.
const MAX_SHADES: u32 = 8;

/// What the colours mean: the kinds that are seen, each with its shades from dark to light.
pub(crate) fn kinds(view: View<'_>) -> Vec<(String, Vec<Color>)> {
    let drawing = view.drawing;
    let chunks = drawing.shape.chunks_per_rank();
    let shades = drawing.shades().map(|text| format!(", {text}"));
    let seen = |kind: &OpKind| {
        let mut blocks = view.ranks().flat_map(|rank| view.blocks(rank));
        blocks.any(|found| found.1.op.kind == *kind)
    };
    let entry = |kind| {
        let fills = (0..chunks.min(MAX_SHADES)).map(|chunk| palette::fill(kind, chunk, chunks));
        let name = kind_name(kind);
        let text = format!("{kind} {name}{}", shades.as_deref().unwrap_or_default());
        (text, fills.collect())
    };
    COMPUTE_KINDS.into_iter().filter(seen).map(entry).collect()
}

/// The legend of a part: kinds with their shades, and what the numbers count.
///
/// # Errors
/// If the window shows nothing.
pub fn legend(drawing: &Drawing, window: &Window) -> Result<Vec<(String, Vec<Color>)>> {
    let mut rows = kinds(drawing.slice(window)?);
    rows.push((drawing.numbers(), Vec::new()));
    Ok(rows)
}
