//! A split by cost in whole numbers: blocks to place on stages, what they weigh, what they may.

use std::ops::Range;

use super::{MAX_BALANCED, Weights, size};
use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank, Stage};
use crate::layout::LayerCount;
use crate::shape::Shape;

/// Blocks (layers glued together, MTP layers) in order, to be cut into stages.
pub(super) struct Problem {
    /// Layers of each block.
    blocks: Vec<LayerCount>,
    decoder_blocks: usize,
    /// `costs[i]`: cost of the first i blocks.
    costs: Vec<u64>,
    /// Cost of embedding and loss.
    ends: [u64; 2],
    /// `memory[i]`: memory of the first i blocks.
    memory: Vec<u64>,
    memory_ends: [u64; 2],
    /// Most memory of each rank.
    pub(super) limits: Vec<u64>,
    /// The ranks that hold each stage: one a replica.
    pub(super) owners: Vec<Vec<usize>>,
    /// The first stage that may hold MTP layers.
    first_mtp: usize,
    /// Fewest blocks of a stage.
    pub(super) fewest: usize,
}

impl Problem {
    pub(super) fn new(weights: &Weights, shape: &Shape) -> Result<Self> {
        let num_stages = shape.stages_per_replica() as usize;
        require_sizes(weights, shape, num_stages)?;
        weights.require_finite()?;
        let costs = whole(&weights.costs());
        let (memory, limits) = weights.memory_ticks(shape)?;
        let (blocks, ends) = glue(weights)?;
        let sums = |parts: &[u64]| {
            let parts = &parts[2..];
            let sum = |&end: &usize| parts[..end].iter().sum();
            ends.iter().map(sum).collect::<Vec<u64>>()
        };
        let decoder_blocks = blocks.iter().filter(|block| block.decoder > 0).count();
        let first_mtp = first_mtp(shape);
        let enough = blocks.len() >= num_stages && decoder_blocks >= first_mtp;
        let layers = weights.layers.len();
        if !weights.allow_empty
            && !enough
            && layers + weights.mtp.len() >= num_stages
            && layers >= first_mtp
        {
            return Err(too_few_blocks(weights, shape, blocks.len()));
        }
        let owners = (0..num_stages).map(|stage| {
            let copies = (stage..shape.num_stages() as usize).step_by(num_stages);
            let rank = |copy| shape.rank_of(Stage(size(copy))).index();
            copies.map(rank).collect()
        });
        Ok(Self {
            costs: sums(&costs),
            ends: [costs[0], costs[1]],
            memory: sums(&memory),
            memory_ends: [memory[0], memory[1]],
            limits,
            owners: owners.collect(),
            first_mtp,
            fewest: usize::from(!weights.allow_empty && enough),
            decoder_blocks,
            blocks,
        })
    }

    pub(super) fn num_stages(&self) -> usize {
        self.owners.len()
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Cost of all, once.
    pub(super) fn total(&self) -> u64 {
        self.costs[self.num_blocks()] + self.ends[0] + self.ends[1]
    }

    fn sum(&self, sums: &[u64], ends: [u64; 2], stage: usize, blocks: &Range<usize>) -> u64 {
        let first = if stage == 0 { ends[0] } else { 0 };
        let last = if stage + 1 == self.num_stages() {
            ends[1]
        } else {
            0
        };
        sums[blocks.end] - sums[blocks.start] + first + last
    }

    pub(super) fn cost(&self, stage: usize, blocks: &Range<usize>) -> u64 {
        self.sum(&self.costs, self.ends, stage, blocks)
    }

    pub(super) fn memory(&self, stage: usize, blocks: &Range<usize>) -> u64 {
        self.sum(&self.memory, self.memory_ends, stage, blocks)
    }

    /// Whether a stage of these blocks costs at most `cap` and fits its ranks' memory by itself.
    pub(super) fn holds(&self, stage: usize, blocks: &Range<usize>, cap: u64) -> bool {
        let memory = self.memory(stage, blocks);
        self.cost(stage, blocks) <= cap
            && self.owners[stage]
                .iter()
                .all(|&rank| memory <= self.limits[rank])
    }

    /// The highest end of a stage's blocks: enough are left for the stages behind it.
    pub(super) fn most(&self, stage: usize) -> usize {
        let behind = self.fewest * (self.num_stages() - 1 - stage);
        let all = self.num_blocks() - behind;
        if stage >= self.first_mtp {
            return all;
        }
        all.min(self.decoder_blocks - self.fewest * (self.first_mtp - 1 - stage))
    }

    /// The layers of each stage.
    pub(super) fn counts(&self, cuts: &[usize]) -> Vec<LayerCount> {
        let stage = |cut: &[usize]| {
            let blocks = &self.blocks[cut[0]..cut[1]];
            LayerCount {
                decoder: blocks.iter().map(|block| block.decoder).sum(),
                mtp: blocks.iter().map(|block| block.mtp).sum(),
            }
        };
        cuts.windows(2).map(stage).collect()
    }

    /// Greatest common divisor of all costs: sums of them are multiples of it.
    pub(super) fn unit(&self) -> u64 {
        let blocks = self.costs.windows(2).map(|pair| pair[1] - pair[0]);
        blocks.chain(self.ends).fold(0, gcd).max(1)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn require_sizes(weights: &Weights, shape: &Shape, num_stages: usize) -> Result<()> {
    let num_layers = weights.layers.len() + weights.mtp.len();
    if weights.layers.is_empty() || num_layers > MAX_BALANCED || num_stages > MAX_BALANCED {
        return Err(Error::layout(
            format!(
                "layer_costs has {} entries (mtp_costs {}) and pp={}, vp={} make {num_stages} \
                 stages, but both must be 1 to {MAX_BALANCED}",
                weights.layers.len(),
                weights.mtp.len(),
                shape.pp(),
                shape.vp(),
            ),
            "layer_costs holds the cost of each transformer layer of the model",
        ));
    }
    Ok(())
}

/// Enough layers for all stages, but too many that may not be parted.
fn too_few_blocks(weights: &Weights, shape: &Shape, blocks: usize) -> Error {
    let together = &weights.together;
    let given = [
        ("shared_layers", together.shared.is_empty()),
        ("no_cut_after", together.no_cut_after.is_empty()),
    ];
    let given = given.iter().filter(|(_, empty)| !empty);
    let names: Vec<&str> = given.map(|(name, _)| *name).collect();
    let verb = if names.len() > 1 { "leave" } else { "leaves" };
    Error::layout(
        format!(
            "{} {verb} {blocks} blocks of the {} layers, too few to give each of the {} stages of \
             pp={}, vp={} one",
            names.join(" and "),
            weights.layers.len() + weights.mtp.len(),
            shape.stages_per_replica(),
            shape.pp(),
            shape.vp(),
        ),
        "lower pp or vp, keep fewer layers together, or give allow_empty=True",
    )
}

/// Blocks that are not cut, and where each ends.
fn glue(weights: &Weights) -> Result<(Vec<LayerCount>, Vec<usize>)> {
    let num_layers = size(weights.layers.len());
    let (mut blocks, mut ends, mut decoder) = (Vec::new(), vec![0], 0);
    for (layer, glued) in (1..).zip(weights.together.glued(num_layers)?) {
        decoder += 1;
        if !glued {
            blocks.push(LayerCount { decoder, mtp: 0 });
            ends.push(layer);
            decoder = 0;
        }
    }
    for end in 1..=weights.mtp.len() {
        blocks.push(LayerCount { decoder: 0, mtp: 1 });
        ends.push(weights.layers.len() + end);
    }
    Ok((blocks, ends))
}

/// The first stage from which on all may hold MTP layers: as in `rules`, last chunks of ranks but
/// the first, and the last stage.
fn first_mtp(shape: &Shape) -> usize {
    let last = shape.stages_per_replica() - 1;
    let may = |&stage: &u32| {
        let (rank, chunk) = (shape.rank_of(Stage(stage)), shape.chunk_of(Stage(stage)));
        let above = Chunk(chunk.0 + 1);
        let is_last = above.0 >= shape.vp() || shape.stage_at(rank, above).is_none();
        stage == last || (is_last && rank != Rank(0))
    };
    (0..=last).rev().take_while(may).last().unwrap_or(last) as usize
}

/// Numbers as integers: as they are if they are whole, else in units of 2^-50 of their sum.
pub(super) fn whole(numbers: &[f64]) -> Vec<u64> {
    /// Whole numbers up to here, and sums of them, are exact.
    const EXACT: f64 = 1_125_899_906_842_624.0; // 2^50
    let largest = numbers.iter().fold(0.0_f64, |a, &b| a.max(b));
    // Relative to the largest: a sum of huge numbers would not be finite.
    let relative = |number: f64| if largest > 0.0 { number / largest } else { 0.0 };
    let parts: f64 = numbers.iter().copied().map(relative).sum();
    let exact = numbers.iter().all(|number| number.fract() == 0.0) && largest * parts <= EXACT;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // from 0 to 2^50
    let ticks = |number: f64| {
        if exact {
            number as u64
        } else {
            (relative(number) / parts * EXACT).round() as u64
        }
    };
    numbers.iter().copied().map(ticks).collect()
}
