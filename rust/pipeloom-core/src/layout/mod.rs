//! [`Layout`]: which layers each stage builds.
//!
//! A layout is a list of layer counts in stage order. Offsets are running sums of that list, and
//! embedding and loss follow from a stage's position, so no layout can lose or repeat a layer.
//!
//! | concept | where |
//! |---|---|
//! | the layout and its constructors from numbers | here |
//! | splits by cost | [`balance`] |
//! | Megatron-core's split arguments | [`megatron`] |
//! | the layout language, read and written | [`text`] |
//! | what a list of layers must satisfy | [`rules`] |
//! | layers that may not be parted | [`together`] |
//!
//! ```
//! use pipeloom_core::{ids::{Chunk, Rank}, layout::Layout, shape::Placement};
//!
//! let layout = Layout::even(8, 2, 2, Placement::Loop)?;
//! assert_eq!(layout.at(Rank(1), Some(Chunk(1)))?.layers().collect::<Vec<_>>(), [7, 8]);
//! assert_eq!(layout.to_string(), "Ett|tt|tt|ttL");
//! # Ok::<(), pipeloom_core::error::Error>(())
//! ```

pub mod balance;
pub mod megatron;
pub mod rules;
pub mod text;
pub mod together;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank, Stage};
use crate::shape::{Placement, Shape};

/// Most layers (decoder and MTP together) of a layout: far beyond any model, far from overflow.
pub const MAX_LAYERS: u64 = 1 << 20;
/// Most stages of a layout, which holds an entry for each.
pub const MAX_LAYOUT_STAGES: u64 = 1 << 20;

/// How many layers of each kind a stage holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerCount {
    /// Decoder (transformer) layers.
    pub decoder: u32,
    /// Multi-token-prediction layers.
    pub mtp: u32,
}

/// What one stage builds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StageContent {
    /// Number of decoder layers.
    pub num_layers: u32,
    /// Number of decoder layers in the stages before it.
    pub offset: u32,
    /// Number of MTP layers.
    pub num_mtp_layers: u32,
    /// Number of MTP layers in the stages before it.
    pub mtp_offset: u32,
    /// Whether it holds the embedding: the first stage.
    pub pre_process: bool,
    /// Whether it holds final norm, output layer and loss: the last stage.
    pub post_process: bool,
}

impl StageContent {
    /// The 1-based global numbers of its decoder layers.
    pub fn layers(self) -> std::ops::RangeInclusive<u32> {
        self.offset + 1..=self.offset + self.num_layers
    }
}

/// Which layers each stage builds. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Ranks, chunks and placement; a layout serves any number of microbatches.
    shape: Shape,
    /// One entry a stage of one replica.
    stages: Arc<[StageContent]>,
}

impl Layout {
    /// As many layers on each stage; the remainder goes one each to the first stages.
    ///
    /// # Errors
    /// If a number is out of range.
    pub fn even(num_layers: u32, pp: u32, vp: u32, placement: Placement) -> Result<Self> {
        check_num_layers(num_layers)?;
        let shape = frame(pp, vp, placement)?;
        let num_stages = shape.stages_per_replica();
        let (base, rest) = (num_layers / num_stages, num_layers % num_stages);
        Self::new(
            shape,
            (0..num_stages).map(|stage| LayerCount {
                decoder: base + u32::from(stage < rest),
                mtp: 0,
            }),
        )
    }

    /// From the number of layers of each chunk of each rank: `counts[rank][chunk]`.
    ///
    /// # Errors
    /// If ranks have different numbers of chunks or the sum is out of range.
    pub fn from_counts(counts: &[Vec<u32>], placement: Placement) -> Result<Self> {
        let first = counts.first().map_or(0, Vec::len);
        if first == 0 {
            return Err(Error::layout(
                if counts.is_empty() {
                    "counts is empty, but must hold an entry for each rank"
                } else {
                    "counts[0] is empty, but must hold a number for each chunk"
                },
                "counts[rank][chunk] is the number of layers of that chunk: [[2, 2], [2, 2]]",
            ));
        }
        let is_table = matches!(placement, Placement::Table(_));
        let ragged = counts.iter().position(|chunks| chunks.len() != first);
        if let Some(rank) = ragged.filter(|_| !is_table) {
            return Err(Error::layout(
                format!(
                    "counts[{rank}] has {} chunks, but counts[0] has {first}",
                    counts[rank].len()
                ),
                "each rank holds the same number of chunks; a chunk without layers counts 0",
            ));
        }
        let vp = counts.iter().map(Vec::len).max().unwrap_or(first);
        let shape = frame(size(counts.len()), size(vp), placement)?;
        let stages: Option<Vec<LayerCount>> = (0..shape.stages_per_replica())
            .map(Stage)
            .map(|stage| {
                let (rank, chunk) = (shape.rank_of(stage), shape.chunk_of(stage));
                let decoder = *counts[rank.index()].get(chunk.index())?;
                Some(LayerCount { decoder, mtp: 0 })
            })
            .collect();
        let given: usize = counts.iter().map(Vec::len).sum();
        match stages.filter(|stages| stages.len() == given) {
            Some(stages) => Self::new(shape, stages.into_iter()),
            None => Err(Error::layout(
                format!(
                    "counts does not fit the {} stages of the placement",
                    shape.num_stages()
                ),
                "counts[rank] has one number for each stage that the placement puts on the rank",
            )),
        }
    }

    /// The one place where layouts are made: offsets are running sums over the stages, so that
    /// each layer belongs to exactly one of them.
    fn new(shape: Shape, counts: impl Iterator<Item = LayerCount>) -> Result<Self> {
        let last = shape.stages_per_replica() - 1;
        let (mut decoder, mut mtp) = (0_u64, 0_u64);
        let mut stages = Vec::with_capacity(last as usize + 1);
        for (stage, count) in (0..).zip(counts) {
            let content = StageContent {
                num_layers: count.decoder,
                offset: narrow(decoder),
                num_mtp_layers: count.mtp,
                mtp_offset: narrow(mtp),
                pre_process: stage == 0,
                post_process: stage == last,
            };
            decoder += u64::from(count.decoder);
            mtp += u64::from(count.mtp);
            if decoder + mtp > MAX_LAYERS {
                return Err(Error::layout(
                    format!("the layout has more than {MAX_LAYERS} layers"),
                    "lower the number of layers",
                ));
            }
            stages.push(content);
        }
        assert_eq!(stages.len(), last as usize + 1, "one count a stage");
        if decoder == 0 {
            return Err(Error::layout(
                "the layout has 0 decoder layers, but needs at least 1",
                "give at least one stage a layer",
            ));
        }
        Ok(Self {
            shape,
            stages: stages.into(),
        })
    }

    /// Number of ranks.
    pub fn pp(&self) -> u32 {
        self.shape.pp()
    }

    /// Number of chunks a rank holds of one replica.
    pub fn vp(&self) -> u32 {
        self.shape.vp()
    }

    /// Which rank holds which stage.
    pub fn placement(&self) -> &Placement {
        self.shape.placement()
    }

    /// Number of decoder layers, over all stages.
    pub fn num_layers(&self) -> u32 {
        self.stages
            .last()
            .map_or(0, |last| last.offset + last.num_layers)
    }

    /// Number of MTP layers, over all stages.
    pub fn num_mtp_layers(&self) -> u32 {
        self.stages
            .last()
            .map_or(0, |last| last.mtp_offset + last.num_mtp_layers)
    }

    /// What each stage of one replica builds, in stage order.
    pub fn stages(&self) -> &[StageContent] {
        &self.stages
    }

    /// What `stage` builds; a replica's stages build the same layers.
    pub fn stage(&self, stage: Stage) -> StageContent {
        self.stages[stage.index() % self.stages.len()]
    }

    /// The stage that is chunk `vp_stage` of `rank`. Without `vp_stage`, the rank's only one.
    ///
    /// # Errors
    /// If there is no such chunk, or `vp_stage` is missing and the rank has several.
    pub fn stage_at(&self, rank: Rank, vp_stage: Option<Chunk>) -> Result<Stage> {
        let (pp, chunks) = (self.pp(), self.shape.chunks_per_rank());
        if rank.0 >= pp {
            return Err(Error::layout(
                format!("rank={rank} is out of range: the layout has pp={pp} ranks"),
                format!("ranks are 0 to {}", pp - 1),
            ));
        }
        let chunk = match vp_stage {
            Some(chunk) => chunk,
            None if chunks == 1 => Chunk(0),
            None => {
                return Err(Error::layout(
                    format!("vp_stage is missing: each rank holds {chunks} chunks"),
                    format!("give vp_stage a number from 0 to {}", chunks - 1),
                ));
            }
        };
        self.shape.stage_at(rank, chunk).ok_or_else(|| {
            Error::layout(
                format!("vp_stage={chunk} is out of range: rank {rank} holds {chunks} chunks"),
                format!("chunks are 0 to {}", chunks - 1),
            )
        })
    }

    /// What chunk `vp_stage` of `rank` builds. Without `vp_stage`, the rank's only chunk.
    ///
    /// # Errors
    /// As [`Layout::stage_at`].
    pub fn at(&self, rank: Rank, vp_stage: Option<Chunk>) -> Result<StageContent> {
        Ok(self.stage(self.stage_at(rank, vp_stage)?))
    }

    /// The ranks that hold a copy of the embedding, sorted: that of the first stage, those with
    /// MTP layers (each embeds tokens), and that of the last stage if its output layer is tied.
    pub fn embedding_ranks(&self, tied: bool) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = (0..self.shape.num_stages())
            .map(Stage)
            .filter(|&stage| {
                let content = self.stage(stage);
                content.pre_process || content.num_mtp_layers > 0 || (tied && content.post_process)
            })
            .map(|stage| self.shape.rank_of(stage))
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Whether the layout is for pipelines of this shape.
    ///
    /// # Errors
    /// If ranks, chunks or placement differ; the message has both.
    pub fn matches(&self, plan: &Shape) -> Result<()> {
        for (name, mine, theirs) in [
            ("pp", self.pp(), plan.pp()),
            ("vp", self.vp(), plan.vp()),
            (
                "num_replicas",
                self.shape.num_replicas(),
                plan.num_replicas(),
            ),
            ("num_stages", self.shape.num_stages(), plan.num_stages()),
        ] {
            if mine != theirs {
                return Err(Error::layout(
                    format!("the layout has {name}={mine}, but the plan has {name}={theirs}"),
                    format!("make the layout with {}", describe(plan)),
                ));
            }
        }
        // With one rank or one chunk a rank, placements of different names can be the same.
        let apart = self.shape.placement() != plan.placement()
            && (0..plan.num_stages()).map(Stage).any(|stage| {
                self.shape.rank_of(stage) != plan.rank_of(stage)
                    || self.shape.chunk_of(stage) != plan.chunk_of(stage)
            });
        if apart {
            return Err(Error::layout(
                format!(
                    "the layout has placement=\"{}\", but the plan has placement=\"{}\"",
                    self.placement(),
                    plan.placement()
                ),
                format!("make the layout with {}", describe(plan)),
            ));
        }
        Ok(())
    }
}

fn describe(shape: &Shape) -> String {
    let (pp, vp, placement) = (shape.pp(), shape.vp(), shape.placement());
    format!("pp={pp}, vp={vp}, placement=\"{placement}\"")
}

/// The shape that a layout fills.
fn frame(pp: u32, vp: u32, placement: Placement) -> Result<Shape> {
    let stages = u64::from(pp) * u64::from(vp);
    if stages > MAX_LAYOUT_STAGES {
        return Err(Error::layout(
            format!("pp={pp} times vp={vp} makes {stages} stages, more than {MAX_LAYOUT_STAGES}"),
            "lower pp or vp",
        ));
    }
    Shape::new(pp, vp, 1, 1, placement)
}

/// The shape whose number of stages is `num_stages`, as a list of stages gives it.
fn frame_of_stages(
    num_stages: usize,
    pp: u32,
    vp: Option<u32>,
    placement: Placement,
) -> Result<Shape> {
    let stages = size(num_stages);
    if let Some(vp) = vp {
        let shape = frame(pp, vp, placement)?;
        let expected = shape.stages_per_replica();
        if stages != expected {
            return Err(Error::layout(
                format!("the layout has {stages} stages, but pp={pp} and vp={vp} make {expected}"),
                "stages are separated by `|`; leave vp out to infer it from their number",
            ));
        }
        return Ok(shape);
    }
    if pp == 0 || !stages.is_multiple_of(pp) {
        // `frame` refuses pp=0 in its own words.
        frame(pp, 1, Placement::Loop)?;
        let more = (stages / pp + 1) * pp;
        let fitting = match stages / pp * pp {
            0 => more.to_string(),
            fewer => format!("{fewer} or {more}"),
        };
        return Err(Error::layout(
            format!("the layout has {stages} stages, not a multiple of pp={pp}"),
            format!(
                "each rank holds the same number of stages: use {fitting} of them; an empty stage \
                 counts"
            ),
        ));
    }
    frame(pp, stages / pp, placement)
}

fn check_num_layers(num_layers: u32) -> Result<()> {
    if num_layers == 0 || u64::from(num_layers) > MAX_LAYERS {
        return Err(Error::layout(
            format!("num_layers={num_layers} must be from 1 to {MAX_LAYERS}"),
            "num_layers is the number of transformer layers of the whole model",
        ));
    }
    Ok(())
}

/// A count that was checked against [`MAX_LAYERS`].
fn narrow(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A length as `u32`; one beyond it fails the range checks that follow.
fn size(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
