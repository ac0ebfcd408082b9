//! Splits by cost: layers that differ, an embedding and a loss that weigh something, memory that
//! is limited.
//!
//! | concept | where |
//! |---|---|
//! | what is to be placed, in whole numbers | `problem` |
//! | one stage a rank: exact | `stages` |
//! | several stages a rank: a search, which says whether it proved its result | `ranks` |
//! | what a layout comes to, and why | `load` |

mod load;
mod problem;
mod ranks;
mod stages;
#[cfg(test)]
mod tests;

use super::together::Together;
use super::{Layout, frame, size};
use crate::error::{Error, Result};
use crate::shape::{Placement, Shape};
pub use load::Load;
use problem::Problem;

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
    /// Each multi-token-prediction layer: behind the decoder layers, where a rank may hold them.
    pub mtp: Vec<f64>,
    /// Layers that must stand on one stage.
    pub together: Together,
    /// Whether stages may stay without layers where that helps.
    pub allow_empty: bool,
    /// What may not be exceeded.
    pub memory: Option<Memory>,
}

/// What a model's parts hold in memory, and how much each rank has.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Each decoder layer.
    pub layers: Vec<f64>,
    /// The embedding.
    pub embedding: f64,
    /// Final norm, output layer and loss.
    pub loss: f64,
    /// Each multi-token-prediction layer.
    pub mtp: Vec<f64>,
    /// Of each rank, or one for all.
    pub limits: Vec<f64>,
}

impl Weights {
    /// Refuses numbers that are no cost and no memory, by the argument's name.
    fn require_finite(&self) -> Result<()> {
        let one = std::slice::from_ref::<f64>;
        let costs = [
            ("layer_costs", &*self.layers),
            ("embedding_cost", one(&self.embedding)),
            ("loss_cost", one(&self.loss)),
            ("mtp_costs", &*self.mtp),
        ];
        let memory = self.memory.iter().flat_map(|memory| {
            [
                ("layer_memory", &*memory.layers),
                ("embedding_memory", one(&memory.embedding)),
                ("loss_memory", one(&memory.loss)),
                ("mtp_memory", &*memory.mtp),
                ("memory_limit", &*memory.limits),
            ]
        });
        for (name, numbers) in costs.into_iter().chain(memory) {
            let bad = |number: &&f64| !number.is_finite() || **number < 0.0;
            if let Some(bad) = numbers.iter().find(bad) {
                return Err(Error::layout(
                    format!("{name} has {bad}, but must be finite and not negative"),
                    "give all costs in one unit of time or size, and all memory in one of memory",
                ));
            }
        }
        Ok(())
    }

    /// Embedding, loss, then each layer.
    fn costs(&self) -> Vec<f64> {
        let ends = [self.embedding, self.loss];
        let layers = self.layers.iter().chain(&self.mtp);
        ends.iter().chain(layers).copied().collect()
    }

    /// Memory of embedding, loss and each layer, and each rank's limit, in whole numbers.
    fn memory_ticks(&self, shape: &Shape) -> Result<(Vec<u64>, Vec<u64>)> {
        let pp = shape.pp() as usize;
        let Some(memory) = &self.memory else {
            let parts = 2 + self.layers.len() + self.mtp.len();
            return Ok((vec![0; parts], vec![u64::MAX; pp]));
        };
        for (name, costs, found, expected) in [
            (
                "layer_memory",
                "layer_costs",
                memory.layers.len(),
                self.layers.len(),
            ),
            ("mtp_memory", "mtp_costs", memory.mtp.len(), self.mtp.len()),
        ] {
            if found != expected {
                return Err(Error::layout(
                    format!("{name} has {found} entries, but {costs} has {expected}"),
                    format!("give {name} one number a layer"),
                ));
            }
        }
        if memory.limits.len() != 1 && memory.limits.len() != pp {
            return Err(Error::layout(
                format!(
                    "memory_limit has {} entries, but pp={pp}",
                    memory.limits.len()
                ),
                "give one number, or one for each rank",
            ));
        }
        let ends = [memory.embedding, memory.loss];
        let layers = memory.layers.iter().chain(&memory.mtp);
        let mut numbers: Vec<f64> = ends.iter().chain(layers).copied().collect();
        let parts = numbers.len();
        numbers.extend(&memory.limits);
        let mut ticks = problem::whole(&numbers);
        let limits = ticks.split_off(parts);
        // Each part is rounded by less than a tick, so a sum that just fits stays one that does.
        let whole = numbers.iter().all(|number| number.fract() == 0.0);
        let slack = if whole { 0 } else { parts as u64 };
        let limit = |rank: usize| limits[rank % limits.len()] + slack;
        Ok((ticks, (0..pp).map(limit).collect()))
    }
}

impl Layout {
    /// The split whose busiest rank has as little as can be, then its slowest stage, then the most
    /// even one (least sum of squares). No stage stays empty if there are layers enough, unless
    /// that is allowed. For equal layers alone it is [`Layout::even`].
    ///
    /// Exact where each rank holds one stage; for several see [`Load::proved`].
    ///
    /// # Errors
    /// If a cost is negative or not finite, a number is out of range, or no split fits the memory.
    pub fn balanced(weights: &Weights, pp: u32, vp: u32, placement: Placement) -> Result<Self> {
        let shape = frame(pp, vp, placement)?;
        solve(weights, &shape)?
            .map(|(layout, _)| layout)
            .map_err(|proved| too_little_memory(weights, &shape, proved))
    }
}

/// The best split and whether it is proved to be; or whether it is proved that none fits.
fn solve(weights: &Weights, shape: &Shape) -> Result<std::result::Result<(Layout, bool), bool>> {
    let problem = Problem::new(weights, shape)?;
    let Some(cuts) = stages::cuts(&problem) else {
        return Ok(Err(true));
    };
    let one_each = shape.num_stages() == shape.pp();
    let (cuts, proved) = if one_each {
        (cuts, true)
    } else {
        match ranks::improve(&problem, cuts) {
            Ok(found) => (found.cuts, found.proved),
            Err(proved) => return Ok(Err(proved)),
        }
    };
    let counts = problem.counts(&cuts);
    Ok(Ok((
        Layout::new(shape.clone(), counts.into_iter())?,
        proved,
    )))
}

fn too_little_memory(weights: &Weights, shape: &Shape, proved: bool) -> Error {
    let memory = weights.memory.clone().unwrap_or_default();
    let all = memory.layers.iter().chain(&memory.mtp).sum::<f64>() + memory.embedding + memory.loss;
    let most = memory.limits.iter().copied().fold(0.0, f64::max);
    let verb = if proved {
        "there is no split that fits"
    } else {
        "no split was found that fits"
    };
    let layers = memory.layers.iter().chain(&memory.mtp).copied();
    let ends = [
        ("embedding_memory", memory.embedding),
        ("loss_memory", memory.loss),
    ];
    let parts = layers.map(|layer| ("a layer", layer)).chain(ends);
    let largest = parts.max_by(|one, other| one.1.total_cmp(&other.1));
    let alone = largest.filter(|(_, held)| *held > most);
    let alone = alone.map(|(name, held)| format!(", and {name} alone {held}"));
    Error::layout(
        format!(
            "{verb} memory_limit (at most {most} a rank): the model takes {all} on {} ranks{}",
            shape.pp(),
            alone.unwrap_or_default()
        ),
        "raise memory_limit or pp, or allow_empty=True if embedding or loss fill a rank",
    )
}
