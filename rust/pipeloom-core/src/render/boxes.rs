//! The boxes of a picture as data, for renderers outside the core.

use std::collections::BTreeSet;

use super::palette::{self, Color};
use super::svg::MAX_OPS;
use super::{COMPUTE_KINDS, Drawing, Half, Window, half_of_pair, kind_name};
use crate::error::Result;
use crate::ids::Rank;

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
            });
        }
    }
    Ok(boxes)
}

/// What the colours mean: the kinds that the drawing has, each in the colour of its first chunk.
pub fn legend(drawing: &Drawing) -> Vec<(String, Color)> {
    let chunks = drawing.shape.chunks_per_rank();
    let has = |kind| {
        let mut ops = drawing.lanes.iter().flat_map(|lane| &lane.blocks);
        ops.any(|block| block.op.kind == kind)
    };
    let kinds = COMPUTE_KINDS.into_iter().filter(|&kind| has(kind));
    kinds
        .map(|kind| {
            (
                format!("{kind} {}", kind_name(kind)),
                palette::fill(kind, 0, chunks),
            )
        })
        .collect()
}
