//! Splits by cost: layers that differ, an embedding and a loss that weigh something.

use super::{LayerCount, Layout, frame, size};
use crate::error::{Error, Result};
use crate::shape::Placement;

#[cfg(test)]
mod tests;

/// Most layers and stages that are balanced: the search is cubic in them at worst.
pub const MAX_BALANCED: usize = 1 << 10;

/// What a model's parts cost, in one unit: time, parameters or bytes.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    /// Each decoder layer.
    pub layers: Vec<f64>,
    /// The embedding, on the first stage.
    pub embedding: f64,
    /// Final norm, output layer and loss, on the last stage.
    pub loss: f64,
    /// Numbers (from 1) of the layers that must share a stage with the next one.
    pub no_cut_after: Vec<u32>,
}

impl Layout {
    /// The split whose heaviest stage is as light as can be; of several the most even one (least
    /// sum of squares); of these, the one with the smallest last stages. No stage stays empty if
    /// there are layers enough. For equal layers alone it is [`Layout::even`].
    ///
    /// # Errors
    /// If a cost is negative or not finite, or a number is out of range.
    pub fn balanced(weights: &Weights, pp: u32, vp: u32, placement: Placement) -> Result<Self> {
        let num_layers = weights.layers.len();
        let shape = frame(pp, vp, placement)?;
        let num_stages = shape.stages_per_replica() as usize;
        if num_layers == 0 || num_layers > MAX_BALANCED || num_stages > MAX_BALANCED {
            return Err(Error::layout(
                format!(
                    "layer_costs has {num_layers} entries and pp={pp}, vp={vp} make {num_stages} \
                     stages, but both must be 1 to {MAX_BALANCED}"
                ),
                "layer_costs holds the cost of each transformer layer of the model",
            ));
        }
        let blocks = Blocks::new(weights)?;
        let cap = blocks.lightest_bottleneck(num_stages);
        let cuts = blocks.most_even_cuts(num_stages, cap);
        let counts = cuts.windows(2).map(|cut| LayerCount {
            decoder: blocks.lengths[cut[0]..cut[1]].iter().sum(),
            mtp: 0,
        });
        Self::new(shape, counts)
    }
}

/// Layers glued by `no_cut_after`, with integer costs so that results are exact.
struct Blocks {
    /// Number of layers of each block.
    lengths: Vec<u32>,
    /// `sums[i]`: cost of the first i blocks.
    sums: Vec<u64>,
    embedding: u64,
    loss: u64,
}

impl Blocks {
    fn new(weights: &Weights) -> Result<Self> {
        let num_layers = size(weights.layers.len());
        for &layer in &weights.no_cut_after {
            if layer == 0 || layer >= num_layers {
                return Err(Error::layout(
                    format!(
                        "no_cut_after has layer {layer}, but there are layers 1 to {num_layers}"
                    ),
                    "give the 1-based numbers of layers that have a next one",
                ));
            }
        }
        let parts: Vec<f64> = [weights.embedding, weights.loss]
            .iter()
            .chain(&weights.layers)
            .copied()
            .collect();
        let costs = whole(&parts)?;
        let (mut lengths, mut sums) = (Vec::new(), vec![0_u64]);
        let (mut length, mut sum) = (0, 0);
        for (layer, cost) in (1..).zip(&costs[2..]) {
            length += 1;
            sum += cost;
            if !weights.no_cut_after.contains(&layer) {
                lengths.push(length);
                sums.push(sum);
                length = 0;
            }
        }
        Ok(Self {
            lengths,
            sums,
            embedding: costs[0],
            loss: costs[1],
        })
    }

    fn cost(&self, stage: usize, num_stages: usize, blocks: std::ops::Range<usize>) -> u64 {
        let mut cost = self.sums[blocks.end] - self.sums[blocks.start];
        if stage == 0 {
            cost += self.embedding;
        }
        if stage + 1 == num_stages {
            cost += self.loss;
        }
        cost
    }

    /// Fewest blocks of a stage: one, unless there are too few.
    fn fewest(&self, num_stages: usize) -> usize {
        usize::from(self.lengths.len() >= num_stages)
    }

    /// The smallest cost that the heaviest stage can have, by bisection.
    fn lightest_bottleneck(&self, num_stages: usize) -> u64 {
        let all = self.sums[self.lengths.len()] + self.embedding + self.loss;
        let (mut low, mut high) = (0, all);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.fits(num_stages, middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        high
    }

    /// Whether stages of at most `cap` suffice, each filled as far as it goes.
    fn fits(&self, num_stages: usize, cap: u64) -> bool {
        let (blocks, fewest) = (self.lengths.len(), self.fewest(num_stages));
        let mut start = 0;
        for stage in 0..num_stages {
            let most = blocks - fewest * (num_stages - 1 - stage);
            let mut end = start + fewest;
            while end < most && self.cost(stage, num_stages, start..end + 1) <= cap {
                end += 1;
            }
            if self.cost(stage, num_stages, start..end) > cap {
                return false;
            }
            start = end;
        }
        start == blocks
    }

    /// Where to cut, so that no stage costs more than `cap` and the sum of squares is least.
    fn most_even_cuts(&self, num_stages: usize, cap: u64) -> Vec<usize> {
        let (blocks, fewest) = (self.lengths.len(), self.fewest(num_stages));
        // best[i]: the least sums of squares (of costs, then of lengths, for layers that cost
        // nothing) of the stages so far, if they hold i blocks.
        let mut best: Vec<Option<(u128, u64)>> = vec![None; blocks + 1];
        best[0] = Some((0, 0));
        let mut starts = Vec::with_capacity(num_stages);
        for stage in 0..num_stages {
            let mut next = vec![None; blocks + 1];
            let mut from = vec![0_usize; blocks + 1];
            for end in fewest..=blocks {
                for start in (0..=end - fewest).rev() {
                    let cost = self.cost(stage, num_stages, start..end);
                    if cost > cap {
                        break;
                    }
                    let Some(before) = best[start] else { continue };
                    let length = (end - start) as u64;
                    let squares = (
                        before.0 + u128::from(cost) * u128::from(cost),
                        before.1 + length * length,
                    );
                    if next[end].is_none_or(|least| squares < least) {
                        next[end] = Some(squares);
                        from[end] = start;
                    }
                }
            }
            best = next;
            starts.push(from);
        }
        let mut cuts = vec![blocks];
        for from in starts.iter().rev() {
            cuts.push(from[cuts[cuts.len() - 1]]);
        }
        cuts.reverse();
        cuts
    }
}

/// Costs as integers: as they are if they are whole, else in units of 2^-50 of their sum.
fn whole(costs: &[f64]) -> Result<Vec<u64>> {
    /// Whole numbers up to here, and sums of them, are exact.
    const EXACT: f64 = 1_125_899_906_842_624.0; // 2^50
    if let Some(bad) = costs.iter().find(|cost| !cost.is_finite() || **cost < 0.0) {
        return Err(Error::layout(
            format!("a cost is {bad}, but costs must be finite and not negative"),
            "give layer_costs, embedding_cost and loss_cost in one unit of time or size",
        ));
    }
    let largest = costs.iter().fold(0.0_f64, |a, &b| a.max(b));
    // Relative to the largest: a sum of huge costs would not be finite.
    let relative = |cost: f64| if largest > 0.0 { cost / largest } else { 0.0 };
    let parts: f64 = costs.iter().copied().map(relative).sum();
    let exact = costs.iter().all(|cost| cost.fract() == 0.0) && largest * parts <= EXACT;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // from 0 to 2^50
    let ticks = |cost: f64| {
        if exact {
            cost as u64
        } else {
            (relative(cost) / parts * EXACT).round() as u64
        }
    };
    Ok(costs.iter().copied().map(ticks).collect())
}
