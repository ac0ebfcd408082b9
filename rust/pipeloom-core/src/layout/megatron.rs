//! Megatron-core's split arguments: sizes for the first and last rank, or embedding and loss
//! counted as layers. Where that code would lose layers or crash, this one is right or refuses.

use super::{LayerCount, Layout, MAX_LAYERS, check_num_layers, frame, narrow};
use crate::error::{Error, Result};
use crate::ids::{Rank, Stage};
use crate::shape::{Placement, Shape};

/// The arguments, named as there.
#[derive(Clone, Debug)]
pub struct Megatron {
    /// Number of decoder layers of the model.
    pub num_layers: u32,
    /// Number of ranks.
    pub pp: u32,
    /// Number of chunks a rank; none: one.
    pub vp: Option<u32>,
    /// Layers of rank 0, over its chunks.
    pub num_layers_in_first_pipeline_stage: Option<u32>,
    /// Layers of rank `pp - 1`, over its chunks.
    pub num_layers_in_last_pipeline_stage: Option<u32>,
    /// Whether the embedding counts as a layer of the first stage.
    pub account_for_embedding_in_pipeline_split: bool,
    /// Whether the loss counts as a layer of the last stage.
    pub account_for_loss_in_pipeline_split: bool,
    /// MTP layers, all in the last stage; none: zero.
    pub mtp_num_layers: Option<u32>,
    /// Which rank holds which stage.
    pub placement: Placement,
}

/// How many layers a rank holds, over its chunks.
struct RankTotals {
    first: u64,
    middle: u64,
    last: u64,
}

impl Megatron {
    /// `num_layers` on `pp` ranks, all else as if not given.
    pub fn new(num_layers: u32, pp: u32) -> Self {
        Self {
            num_layers,
            pp,
            vp: None,
            num_layers_in_first_pipeline_stage: None,
            num_layers_in_last_pipeline_stage: None,
            account_for_embedding_in_pipeline_split: false,
            account_for_loss_in_pipeline_split: false,
            mtp_num_layers: None,
            placement: Placement::Loop,
        }
    }

    /// The layout that these arguments ask for.
    ///
    /// # Errors
    /// If they leave layers over, contradict each other or are out of range.
    pub fn layout(&self) -> Result<Layout> {
        check_num_layers(self.num_layers)?;
        let mtp = self.mtp_num_layers.unwrap_or(0);
        if u64::from(self.num_layers) + u64::from(mtp) > MAX_LAYERS {
            return Err(Error::layout(
                format!(
                    "num_layers={} and mtp_num_layers={mtp} make more than {MAX_LAYERS} layers",
                    self.num_layers
                ),
                "lower mtp_num_layers: models have one or a few such layers",
            ));
        }
        let vp = self.vp.unwrap_or(1);
        let shape = frame(self.pp, vp, self.placement.clone())?;
        if u64::from(shape.stages_per_replica()) != u64::from(self.pp) * u64::from(vp) {
            return Err(Error::layout(
                format!("the placement table does not give each rank vp={vp} chunks"),
                "give each count with Layout.from_counts",
            ));
        }
        let has_sizes = self.num_layers_in_first_pipeline_stage.is_some()
            || self.num_layers_in_last_pipeline_stage.is_some();
        let totals = if has_sizes {
            self.sized_totals()?
        } else {
            self.counted_totals()?
        };
        Layout::new(shape.clone(), self.stage_counts(&shape, &totals))
    }

    fn stage_counts(&self, shape: &Shape, totals: &RankTotals) -> impl Iterator<Item = LayerCount> {
        let last_stage = Stage(shape.stages_per_replica() - 1);
        let (last_rank, vp) = (Rank(self.pp - 1), u64::from(shape.vp()));
        let embedding = u64::from(self.account_for_embedding_in_pipeline_split);
        let loss = u64::from(self.account_for_loss_in_pipeline_split);
        let mtp = self.mtp_num_layers.unwrap_or(0);
        (0..=last_stage.0).map(Stage).map(move |stage| {
            let total = match shape.rank_of(stage) {
                Rank(0) => totals.first,
                rank if rank == last_rank => totals.last,
                _ => totals.middle,
            };
            let mut layers = total / vp;
            if stage == Stage(0) {
                layers -= embedding;
            }
            if stage == last_stage {
                layers -= loss;
            }
            LayerCount {
                decoder: narrow(layers),
                mtp: if stage == last_stage { mtp } else { 0 },
            }
        })
    }

    /// Without sizes: the same on each rank, embedding and loss perhaps counted as layers.
    fn counted_totals(&self) -> Result<RankTotals> {
        let (layers, pp) = (u64::from(self.num_layers), u64::from(self.pp));
        let counted = layers
            + u64::from(self.account_for_embedding_in_pipeline_split)
            + u64::from(self.account_for_loss_in_pipeline_split);
        let what = match counted - layers {
            0 => format!("num_layers={layers}"),
            1 => format!("num_layers={layers} plus 1 for the embedding or the loss, {counted},"),
            _ => format!("num_layers={layers} plus 2 for embedding and loss, {counted},"),
        };
        if !counted.is_multiple_of(pp) {
            return Err(Error::layout(
                format!(
                    "{what} is not a multiple of pp={pp}: {} would be left over",
                    counted % pp
                ),
                self.even_hint(),
            ));
        }
        let each = counted / pp;
        self.check_chunks(each, "each rank")?;
        Ok(RankTotals {
            first: each,
            middle: each,
            last: each,
        })
    }

    /// With a size for the first rank, the last, or both: the rest is shared by the others.
    fn sized_totals(&self) -> Result<RankTotals> {
        const FIRST: &str = "num_layers_in_first_pipeline_stage";
        const LAST: &str = "num_layers_in_last_pipeline_stage";
        for (counted, argument) in [
            (
                self.account_for_embedding_in_pipeline_split,
                "account_for_embedding_in_pipeline_split",
            ),
            (
                self.account_for_loss_in_pipeline_split,
                "account_for_loss_in_pipeline_split",
            ),
        ] {
            if counted {
                return Err(Error::layout(
                    format!("{argument} can't be used with {FIRST} or {LAST}"),
                    "the sizes say it all: use one or the other",
                ));
            }
        }
        let first = self.num_layers_in_first_pipeline_stage;
        let last = self.num_layers_in_last_pipeline_stage;
        let given: Vec<(&str, u32)> = [(FIRST, first), (LAST, last)]
            .into_iter()
            .filter_map(|(argument, size)| size.map(|size| (argument, size)))
            .collect();
        for &(argument, size) in &given {
            if size == 0 {
                return Err(Error::layout(
                    format!("{argument}=0 must be at least 1"),
                    "leave it out to share the layers evenly; Layout.from_counts allows 0",
                ));
            }
            self.check_chunks(u64::from(size), argument)?;
        }
        let middle = self.middle_total(&given)?;
        let size = |given: Option<u32>| given.map_or(middle, u64::from);
        // With one rank, first and last are the same; only one of them can have been given.
        let (first, last) = match self.pp {
            1 => (size(first.or(last)), size(first.or(last))),
            _ => (size(first), size(last)),
        };
        Ok(RankTotals {
            first,
            middle,
            last,
        })
    }

    /// The layers of each rank that was given no size.
    fn middle_total(&self, given: &[(&str, u32)]) -> Result<u64> {
        let (layers, pp) = (u64::from(self.num_layers), u64::from(self.pp));
        let sizes = given
            .iter()
            .map(|(argument, size)| format!("{argument}={size}"))
            .collect::<Vec<_>>()
            .join(" and ");
        let Some(others) = pp.checked_sub(given.len() as u64) else {
            return Err(Error::layout(
                format!("{sizes} are for two ranks, but pp={pp}"),
                "with one rank, leave both out",
            ));
        };
        let used: u64 = given.iter().map(|&(_, size)| u64::from(size)).sum();
        let Some(left) = layers.checked_sub(used) else {
            return Err(Error::layout(
                format!("{sizes} take {used} layers, more than num_layers={layers}"),
                "lower the sizes",
            ));
        };
        if others == 0 && left > 0 {
            return Err(Error::layout(
                format!(
                    "{sizes} leave {left} of num_layers={layers} layers unassigned: pp={pp} has no \
                     other rank"
                ),
                self.even_hint(),
            ));
        }
        if others > 0 && !left.is_multiple_of(others) {
            return Err(Error::layout(
                format!(
                    "{sizes} leave {left} of num_layers={layers} layers, not a multiple of the \
                     other {others} ranks (pp={pp})"
                ),
                "change a size, or give each count with Layout.from_counts",
            ));
        }
        let each = left.checked_div(others).unwrap_or(0);
        self.check_chunks(each, "each other rank")?;
        Ok(each)
    }

    fn check_chunks(&self, layers: u64, whose: &str) -> Result<()> {
        let vp = u64::from(self.vp.unwrap_or(1));
        if layers.is_multiple_of(vp) {
            return Ok(());
        }
        let verb = if whose.starts_with("num_layers") {
            format!("{whose}={layers} is")
        } else {
            format!("the {layers} layers of {whose} are")
        };
        Err(Error::layout(
            format!(
                "{verb} not a multiple of vp={vp} (num_layers={}, pp={})",
                self.num_layers, self.pp
            ),
            self.even_hint(),
        ))
    }

    fn even_hint(&self) -> String {
        let vp = match self.vp {
            Some(vp) if vp > 1 => format!(", vp={vp}"),
            _ => String::new(),
        };
        let stages = u64::from(self.pp) * u64::from(self.vp.unwrap_or(1));
        let (base, rest) = (
            u64::from(self.num_layers) / stages,
            u64::from(self.num_layers) % stages,
        );
        let split = if rest == 0 {
            format!("{base} a stage")
        } else {
            format!(
                "{rest} stages of {} and {} of {base}",
                base + 1,
                stages - rest
            )
        };
        format!(
            "Layout.even({}, pp={}{vp}) takes any number of layers: {split}",
            self.num_layers, self.pp
        )
    }
}
