//! What a layout comes to at given weights: each stage, each rank, and why the busiest one is.

use std::fmt::Write as _;

use super::{Weights, solve};
use crate::error::{Error, Result};
use crate::ids::{Rank, Stage};
use crate::layout::{Layout, StageContent};

/// The cost of each part of a layout, in the caller's unit.
#[derive(Clone, Debug)]
pub struct Load {
    /// Of each stage of one replica.
    pub stages: Vec<f64>,
    /// Of each rank: its stages run one after the other.
    pub ranks: Vec<f64>,
    /// The busiest rank, the first of equals.
    pub rank: Rank,
    /// Cost of the busiest rank of the split that [`Layout::balanced`] makes; none: none fits the
    /// memory.
    pub best: Option<f64>,
    /// Whether no split at all has a less busy busiest rank than `best`.
    pub proved: bool,
    /// What the busiest rank holds, and what limits it.
    pub why: String,
}

impl Layout {
    /// What this layout comes to.
    ///
    /// # Errors
    /// If the weights are of another number of layers, or not finite.
    pub fn load(&self, weights: &Weights) -> Result<Load> {
        for (name, found, given) in [
            ("layer_costs", self.num_layers(), weights.layers.len()),
            ("mtp_costs", self.num_mtp_layers(), weights.mtp.len()),
        ] {
            if found as usize != given {
                return Err(Error::layout(
                    format!("{name} has {given} entries, but the layout has {found} such layers"),
                    format!("give {name} one number a layer"),
                ));
            }
        }
        let solved = solve(weights, &self.shape)?;
        let (stages, ranks) = self.sums(weights);
        let busiest = |costs: &[f64]| {
            let first = |best: usize, at: usize| if costs[at] > costs[best] { at } else { best };
            (0..costs.len()).fold(0, first)
        };
        let rank = busiest(&ranks);
        let best = solved.ok().map(|(layout, proved)| {
            let (_, ranks) = layout.sums(weights);
            (ranks[busiest(&ranks)], proved)
        });
        Ok(Load {
            why: self.why(weights, rank, ranks[rank], best),
            rank: Rank(super::size(rank)),
            best: best.map(|(cost, _)| cost),
            proved: best.is_some_and(|(_, proved)| proved),
            stages,
            ranks,
        })
    }

    fn sums(&self, weights: &Weights) -> (Vec<f64>, Vec<f64>) {
        // From 0.0 on: the sum of no floats is -0.0.
        let cost = |content: &StageContent| {
            let parts = parts(weights, *content);
            parts.iter().fold(0.0, |sum, (_, cost)| sum + cost)
        };
        let stages: Vec<f64> = self.stages.iter().map(cost).collect();
        let mut ranks = vec![0.0; self.pp() as usize];
        for stage in 0..self.shape.num_stages() {
            let rank = self.shape.rank_of(Stage(stage)).index();
            ranks[rank] += stages[stage as usize % stages.len()];
        }
        (stages, ranks)
    }

    fn why(&self, weights: &Weights, rank: usize, cost: f64, best: Option<(f64, bool)>) -> String {
        let mut why = format!("rank {rank} is the busiest with {cost}:");
        let mine = (0..self.shape.num_stages()).map(Stage);
        let mine = mine.filter(|&stage| self.shape.rank_of(stage).index() == rank);
        let mut gap = " ";
        for stage in mine.clone() {
            for (name, cost) in parts(weights, self.stage(stage)) {
                let _ = write!(why, "{gap}{name} ({cost})");
                gap = ", ";
            }
        }
        let share = self.sums(weights).1.iter().sum::<f64>() / f64::from(self.pp());
        let _ = write!(why, "; an equal share of all is {share}");
        let alone = mine.flat_map(|stage| single_parts(weights, self.stage(stage)));
        let heaviest = alone.max_by(|one, other| one.1.total_cmp(&other.1));
        if let Some((name, cost)) = heaviest.filter(|(_, cost)| *cost > share) {
            let _ = write!(why, "; {name} alone is {cost}");
        }
        let verdict = match best {
            None => "no split that fits the memory was found".to_owned(),
            Some((best, true)) if best >= cost => "no split does better".to_owned(),
            Some((best, false)) if best >= cost => "no better split was found".to_owned(),
            Some((best, _)) => format!("Layout.balanced comes to {best}"),
        };
        let _ = write!(why, "; {verdict}");
        why
    }
}

/// What a stage holds that can't be divided, and what it costs.
fn single_parts(weights: &Weights, content: StageContent) -> Vec<(String, f64)> {
    let ends = [
        ("embedding", content.pre_process, weights.embedding),
        ("loss", content.post_process, weights.loss),
    ];
    let ends = ends.into_iter().filter(|(_, here, _)| *here);
    let numbered = |kind: &'static str, offset: u32, count: u32, costs: &[f64]| {
        let one = |at: u32| (format!("{kind} {}", at + 1), costs[at as usize]);
        (offset..offset + count).map(one).collect::<Vec<_>>()
    };
    let (mtp, num_mtp) = (content.mtp_offset, content.num_mtp_layers);
    let layers = numbered("layer", content.offset, content.num_layers, &weights.layers);
    ends.map(|(name, _, cost)| (name.to_owned(), cost))
        .chain(layers)
        .chain(numbered("MTP layer", mtp, num_mtp, &weights.mtp))
        .collect()
}

/// What a stage holds, and what each part costs.
fn parts(weights: &Weights, content: StageContent) -> Vec<(String, f64)> {
    let mut parts = Vec::new();
    if content.pre_process && weights.embedding > 0.0 {
        parts.push(("embedding".to_owned(), weights.embedding));
    }
    let kinds = [
        ("layer", content.offset, content.num_layers, &weights.layers),
        (
            "MTP layer",
            content.mtp_offset,
            content.num_mtp_layers,
            &weights.mtp,
        ),
    ];
    for (name, offset, count, costs) in kinds {
        let range = offset as usize..(offset + count) as usize;
        let text = match count {
            0 => continue,
            1 => format!("{name} {}", offset + 1),
            _ => format!("{name}s {} to {}", offset + 1, offset + count),
        };
        parts.push((text, costs[range].iter().sum()));
    }
    if content.post_process && weights.loss > 0.0 {
        parts.push(("loss".to_owned(), weights.loss));
    }
    parts
}
