//! Compute ops: what they wait for, how long they take, whom they serve.

use super::{BACKWARD_DONE, Engine, FORWARD_DONE, NO_SLOT, NONE};
use crate::cost::StageTicks;
use crate::op::{Flags, Op, OpKind};
use crate::semantics::Semantics;

impl<const TIMED: bool> Engine<'_, TIMED> {
    /// Runs one compute op if what it reads is there; if not, says which slot it waits for.
    #[inline]
    pub(super) fn compute(&mut self, rank: usize, op: Op) -> Result<(), usize> {
        let start = self.ready(op)?.max(self.now[rank]);
        let end = start + self.take(rank, 1, start, |stages| duration(stages, op, None));
        self.finish(op, end);
        Ok(())
    }

    /// Runs an overlapped pair when both halves can run.
    #[cold]
    pub(super) fn compute_pair(&mut self, rank: usize, op: Op, second: Op) -> Result<(), usize> {
        let start = self.ready(op)?.max(self.ready(second)?).max(self.now[rank]);
        let end = start + self.take(rank, 2, start, |stages| duration(stages, op, Some(second)));
        self.finish(op, end);
        self.finish(second, end);
        Ok(())
    }

    /// The rank is busy with its next `num_ops` ops; returns for how long.
    #[inline]
    fn take(
        &mut self,
        rank: usize,
        num_ops: usize,
        start: i64,
        duration: impl Fn(&[StageTicks]) -> i64,
    ) -> i64 {
        let at = self.at[rank];
        self.at[rank] = at + num_ops;
        let Some(ticks) = self.ticks.filter(|_| TIMED) else {
            return 0;
        };
        let duration = duration(&ticks.stages);
        self.now[rank] = start + duration;
        self.busy[rank] += duration;
        for at in at..at + num_ops {
            self.times.set(rank, at, start, start + duration);
        }
        duration
    }

    /// When the op's message can be used, or the slot it waits for.
    #[inline]
    fn ready(&self, op: Op) -> Result<i64, usize> {
        let cell = self.program.cell(op);
        let slot = match op.kind {
            OpKind::Forward => cell,
            OpKind::Backward | OpKind::BackwardInput => cell + self.done.len(),
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => {
                return if self.has_own_at(cell, op) {
                    Ok(0)
                } else {
                    Err(NO_SLOT)
                };
            }
        };
        let ready = self.messages[slot];
        if ready < 0 {
            Err(slot)
        } else if self.has_own_at(cell, op) {
            Ok(ready)
        } else {
            Err(NO_SLOT)
        }
    }

    /// Whether what an op needs of its own stage is done.
    #[inline]
    fn has_own_at(&self, cell: usize, op: Op) -> bool {
        let pieces = self.program.shape.num_seq_pieces();
        let piece = if pieces == 1 { 0 } else { op.unit.0 % pieces };
        match op.kind {
            OpKind::Forward => piece == 0 || self.done[cell - 1] & FORWARD_DONE != 0,
            OpKind::Backward | OpKind::BackwardInput => {
                let later = piece + 1 == pieces || self.done[cell + 1] & BACKWARD_DONE != 0;
                later && self.done[cell] & FORWARD_DONE != 0
            }
            OpKind::BackwardWeight => self.done[cell] & BACKWARD_DONE != 0,
            OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => true,
        }
    }

    /// Whether the op's inputs are there.
    pub(crate) fn is_ready(&self, op: Op) -> bool {
        self.ready(op).is_ok()
    }

    /// Whether what an op needs of its own stage is done.
    pub(crate) fn has_own(&self, op: Op) -> bool {
        self.has_own_at(self.program.cell(op), op)
    }

    /// Marks an op as done and makes the message that it owes a neighbour.
    #[inline]
    fn finish(&mut self, op: Op, end: i64) {
        let cell = self.program.cell(op);
        let links = &self.program.stages[op.stage.index()];
        let (mark, reader, slot, channel) = match op.kind {
            OpKind::Forward => {
                let slot = cell + self.program.stride;
                (FORWARD_DONE, links.next, slot, links.channels[0])
            }
            OpKind::Backward | OpKind::BackwardInput => {
                let slot = (cell + self.done.len()).wrapping_sub(self.program.stride);
                (BACKWARD_DONE, links.previous, slot, links.channels[2])
            }
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => return,
        };
        self.done[cell] |= mark;
        if reader == NONE {
            return;
        }
        if channel == NONE {
            self.messages[slot] = end;
        } else if self.semantics == Semantics::Buffered {
            let usable = self.usable(channel, end);
            if self.program.lowered {
                self.messages[slot] = !usable;
            } else {
                self.deliver(self.program.stages[reader as usize].rank, slot, usable);
            }
        }
    }

    /// When a buffered message made at `end` can be used.
    #[inline]
    fn usable(&mut self, channel: u32, end: i64) -> i64 {
        if !TIMED {
            return end;
        }
        let time = self.channel_time(channel);
        if !self.link_contention {
            return end + time;
        }
        // One rank sends on a link, in its own order, so that order is the order of the link.
        let free = &mut self.link_free[self.program.links[channel as usize] as usize];
        *free = (*free).max(end) + time;
        *free
    }
}

/// The second half of an overlapped pair that starts at `at`.
#[inline]
pub(crate) fn pair_second(ops: &[Op], at: usize) -> Option<Op> {
    if !ops[at].flags.has(Flags::PAIR_FIRST) {
        return None;
    }
    let second = ops.get(at + 1)?;
    (second.flags.has(Flags::PAIR_SECOND) && second.kind.is_compute()).then_some(*second)
}

/// How long a compute op takes.
#[inline]
fn op_duration(stages: &[StageTicks], op: Op) -> i64 {
    let stage = &stages[op.stage.index()];
    match op.kind {
        OpKind::Forward => stage.forward,
        OpKind::Backward => stage.backward,
        OpKind::BackwardInput => stage.backward_input,
        OpKind::BackwardWeight => stage.backward_weight,
        OpKind::SendForward | OpKind::RecvForward | OpKind::SendBackward | OpKind::RecvBackward => {
            0
        }
    }
}

/// The time that a compute op spends running its forward again.
#[inline]
fn recompute_duration(stages: &[StageTicks], op: Op) -> i64 {
    let again = op.flags.has(Flags::RECOMPUTE) && op.kind.gives_input_gradient();
    if again {
        stages[op.stage.index()].recompute
    } else {
        0
    }
}

/// How long a compute op, or an overlapped pair, takes.
#[inline]
pub(crate) fn duration(stages: &[StageTicks], op: Op, second: Option<Op>) -> i64 {
    let alone = |op| op_duration(stages, op) + recompute_duration(stages, op);
    let Some(second) = second else {
        return alone(op);
    };
    let forward = if op.kind == OpKind::Forward {
        op
    } else {
        second
    };
    match stages[forward.stage.index()].overlapped {
        Some(pair) => pair + recompute_duration(stages, op) + recompute_duration(stages, second),
        None => alone(op) + alone(second),
    }
}
