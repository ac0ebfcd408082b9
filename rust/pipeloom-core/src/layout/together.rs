//! Layers that may not be parted: a layer that uses what another holds or computes can't do so
//! across a boundary.

use super::Layout;
use crate::error::{Error, Result};
use crate::ids::Stage;

/// Which layers must stand on one stage.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Together {
    /// Numbers (from 1) of the layers that share a stage with the next one.
    pub no_cut_after: Vec<u32>,
    /// (layer, source): layers that use weights or results of another one, on the same stage.
    pub shared: Vec<(u32, u32)>,
}

impl Together {
    /// Whether each layer shares a stage with the next one.
    ///
    /// # Errors
    /// If a number is no layer of a model with `num_layers`.
    pub(super) fn glued(&self, num_layers: u32) -> Result<Vec<bool>> {
        self.require_layers(num_layers)?;
        let mut glued = vec![false; num_layers as usize];
        for &layer in &self.no_cut_after {
            glued[layer as usize - 1] = true;
        }
        for &(layer, source) in &self.shared {
            let (first, last) = (layer.min(source), layer.max(source));
            glued[first as usize - 1..last as usize - 1].fill(true);
        }
        Ok(glued)
    }

    fn require_layers(&self, num_layers: u32) -> Result<()> {
        let there = |layer: u32| (1..=num_layers).contains(&layer);
        let ends = |layer: &&u32| !there(**layer) || **layer == num_layers;
        if let Some(layer) = self.no_cut_after.iter().find(ends) {
            return Err(Error::layout(
                format!("no_cut_after has layer {layer}, but there are layers 1 to {num_layers}"),
                "give the 1-based numbers of layers that have a next one",
            ));
        }
        let strange = |pair: &&(u32, u32)| !there(pair.0) || !there(pair.1);
        if let Some((layer, source)) = self.shared.iter().find(strange) {
            return Err(Error::layout(
                format!(
                    "shared_layers has layer {layer} with source {source}, but there are layers 1 \
                     to {num_layers}"
                ),
                "give the 1-based numbers of the layer and of the layer that it shares with",
            ));
        }
        Ok(())
    }
}

impl Layout {
    /// Whether the layout keeps these layers together.
    ///
    /// # Errors
    /// If a number is no layer, or layers that belong together stand on different stages: the
    /// message names the first such layer, its source, and both stages.
    pub fn require_together(&self, together: &Together) -> Result<()> {
        together.require_layers(self.num_layers())?;
        let parted = |one: u32, other: u32| {
            let (one, other) = (self.stage_of_layer(one), self.stage_of_layer(other));
            (one != other).then_some((one, other))
        };
        let cuts = together.no_cut_after.iter().filter_map(|&layer| {
            let (before, behind) = parted(layer, layer + 1)?;
            Some(format!(
                "the layout cuts after layer {layer}, which no_cut_after forbids: layer {layer} is \
                 on {}, layer {} on {}",
                self.place(before),
                layer + 1,
                self.place(behind)
            ))
        });
        let shared = together.shared.iter().filter_map(|&(layer, source)| {
            let (mine, theirs) = parted(layer, source)?;
            Some(format!(
                "layer {layer} shares with layer {source}, but is on {}, its source on {}",
                self.place(mine),
                self.place(theirs)
            ))
        });
        let mut faults = shared.chain(cuts);
        let Some(first) = faults.next() else {
            return Ok(());
        };
        let more = match faults.count() {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        Err(Error::layout(
            first + &more,
            "move the cut; Layout.balanced with the same arguments finds a split that keeps them \
             together",
        ))
    }

    /// The stage that builds a decoder layer.
    fn stage_of_layer(&self, layer: u32) -> Stage {
        // The first stage that ends at the layer or behind it: stages without layers end before.
        let before = |content: &super::StageContent| content.offset + content.num_layers < layer;
        Stage(super::size(self.stages.partition_point(before)))
    }

    fn place(&self, stage: Stage) -> String {
        format!("stage {stage} (rank {})", self.shape.rank_of(stage))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Placement;

    fn fault(counts: &[u32], together: &Together) -> Option<String> {
        let counts: Vec<Vec<u32>> = counts.iter().map(|&count| vec![count]).collect();
        let layout = Layout::from_counts(&counts, Placement::Loop).unwrap();
        layout.require_together(together).err().map(|e| e.message)
    }

    #[test]
    fn a_parted_layer_is_named_with_its_source() {
        let shared = Together {
            shared: vec![(2, 1), (3, 1), (5, 4), (6, 4)],
            ..Together::default()
        };
        assert_eq!(fault(&[3, 3], &shared), None);
        assert_eq!(fault(&[3, 0, 3], &shared), None);
        assert_eq!(
            fault(&[2, 2, 2], &shared).as_deref(),
            Some(
                "layer 3 shares with layer 1, but is on stage 1 (rank 1), its source on stage 0 \
                 (rank 0) (and 2 more)"
            )
        );
        let uncut = Together {
            no_cut_after: vec![2],
            ..Together::default()
        };
        assert_eq!(
            fault(&[2, 0, 4], &uncut).as_deref(),
            Some(
                "the layout cuts after layer 2, which no_cut_after forbids: layer 2 is on stage 0 \
                 (rank 0), layer 3 on stage 2 (rank 2)"
            )
        );
    }

    #[test]
    fn numbers_that_are_no_layers_are_refused() {
        for (no_cut_after, shared) in [
            (vec![0], vec![]),
            (vec![6], vec![]),
            (vec![], vec![(7, 1)]),
            (vec![], vec![(2, 0)]),
        ] {
            let message = fault(
                &[3, 3],
                &Together {
                    no_cut_after,
                    shared,
                },
            )
            .unwrap();
            assert!(message.contains("layers 1 to 6"), "{message}");
        }
    }
}
