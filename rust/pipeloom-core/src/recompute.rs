//! [`Mask`]: which forward steps keep only their input and are run again in the backward.

use crate::ids::Stage;
use crate::op::{Flags, Op, OpKind};

/// The recompute mask of one rank: with `kept` of each `window` forward steps kept, step `k`
/// recomputes iff `k % window >= kept`. A step is a forward of one chunk.
///
/// The window is the rank's warm-up plus one, the most steps that are in flight in the steady
/// phase (Megatron-core's `num_microbatches_with_partial_activation_checkpoints`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mask {
    window: u32,
    kept: u32,
}

impl Mask {
    /// The mask of a rank with `num_warmup` warm-up steps that keeps `kept` steps of a window.
    pub fn new(num_warmup: u32, kept: u32) -> Self {
        Self {
            window: num_warmup + 1,
            kept,
        }
    }

    /// Whether forward step `k` of the rank is recomputed.
    #[inline]
    pub fn recomputes(self, k: u32) -> bool {
        k % self.window >= self.kept
    }

    /// Marks the recomputed forwards of a rank's order, and their backwards.
    pub(crate) fn mark(self, ops: &mut [Op], num_units: u32, chunk_of: impl Fn(Stage) -> u32) {
        let mut recomputed: Vec<bool> = Vec::new();
        let mut step = 0;
        for op in ops {
            let cell = (chunk_of(op.stage) * num_units + op.unit.0) as usize;
            match op.kind {
                OpKind::Forward => {
                    if cell >= recomputed.len() {
                        recomputed.resize(cell + 1, false);
                    }
                    recomputed[cell] = self.recomputes(step);
                    step += 1;
                }
                OpKind::Backward | OpKind::BackwardInput => {}
                OpKind::BackwardWeight
                | OpKind::SendForward
                | OpKind::RecvForward
                | OpKind::SendBackward
                | OpKind::RecvBackward => continue,
            }
            if recomputed.get(cell) == Some(&true) {
                op.flags = op.flags.with(Flags::RECOMPUTE);
            }
        }
    }
}
