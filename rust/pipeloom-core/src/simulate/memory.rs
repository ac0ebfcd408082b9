//! Memory of a rank: a running sum over its ops.

use crate::cost::StageTicks;
use crate::op::{Flags, Op, OpKind};

/// What an op changes: `(first, after)`, where `first` is there before the op frees anything.
pub(super) fn change(stages: &[StageTicks], op: Op) -> (i64, i64) {
    let Some(stage) = stages.get(op.stage.index()) else {
        return (0, 0);
    };
    let recomputed = op.flags.has(Flags::RECOMPUTE);
    // A recomputed forward keeps its input alone; its backward first makes the rest again.
    let again = if recomputed {
        stage.memory_forward - stage.memory_recompute
    } else {
        0
    };
    match op.kind {
        OpKind::Forward if recomputed => (stage.memory_recompute, 0),
        OpKind::Forward => (stage.memory_forward, 0),
        OpKind::Backward => (
            again,
            stage.memory_backward_input + stage.memory_backward_weight,
        ),
        OpKind::BackwardInput => (again, stage.memory_backward_input),
        OpKind::BackwardWeight => (0, stage.memory_backward_weight),
        OpKind::SendForward | OpKind::RecvForward | OpKind::SendBackward | OpKind::RecvBackward => {
            (0, 0)
        }
    }
}

/// Memory after each op, from `fixed` on.
pub(super) fn curve(ops: &[Op], stages: &[StageTicks], fixed: i64) -> Vec<i64> {
    let step = |held: &mut i64, &op: &Op| {
        let (first, after) = change(stages, op);
        *held += first + after;
        Some(*held)
    };
    ops.iter().scan(fixed, step).collect()
}

/// The highest memory at any time: what is made again in a backward counts.
pub(super) fn peak(ops: &[Op], stages: &[StageTicks], fixed: i64) -> i64 {
    let (mut held, mut peak) = (fixed, fixed);
    for &op in ops {
        let (first, after) = change(stages, op);
        peak = peak.max(held + first);
        held += first + after;
        peak = peak.max(held);
    }
    peak
}
