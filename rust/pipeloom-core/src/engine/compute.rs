//! Compute ops: what they wait for, how long they take, whom they serve.

use super::{BACKWARD_DONE, Engine, FORWARD_DONE, NO_SLOT, NONE, Program, StageLinks};
use crate::cost::{StageTicks, Ticks};
use crate::op::{Flags, Op, OpKind};
use crate::semantics::Semantics;

/// Where a stage's messages of one direction go.
#[derive(Clone, Copy)]
struct Reader {
    /// Rank of the stage that reads them; [`NONE`] if there is none.
    rank: u32,
    /// [`NONE`] if they stay on the rank.
    channel: u32,
    time: i64,
}

/// What running an op of a stage takes, in as few look-ups as can be.
pub(super) struct Row {
    /// By kind.
    durations: [i64; 4],
    /// Forward and backward.
    readers: [Reader; 2],
}

/// The rows of a program; without ticks nothing takes time.
pub(super) fn rows(program: &Program<'_>, ticks: Option<&Ticks>) -> Vec<Row> {
    let rank_of = |stage: u32| {
        program
            .stages
            .get(stage as usize)
            .map_or(NONE, |links| links.rank)
    };
    let row = |(at, links): (usize, &StageLinks)| {
        let ticks = ticks.map(|ticks| &ticks.stages[at]);
        let reader = |stage, channel, time: Option<i64>| Reader {
            rank: rank_of(stage),
            channel,
            time: time.unwrap_or(0),
        };
        let [send_forward, _, send_backward, _] = links.channels;
        Row {
            durations: ticks.map_or([0; 4], |ticks| {
                [
                    ticks.forward,
                    ticks.backward,
                    ticks.backward_input,
                    ticks.backward_weight,
                ]
            }),
            readers: [
                reader(links.next, send_forward, ticks.map(|ticks| ticks.to_next)),
                reader(
                    links.previous,
                    send_backward,
                    ticks.map(|ticks| ticks.to_previous),
                ),
            ],
        }
    };
    program.stages.iter().enumerate().map(row).collect()
}

impl<const TIMED: bool> Engine<'_, TIMED> {
    /// Runs compute ops that stand alone, until one has to wait or another kind of op comes.
    #[inline]
    pub(super) fn compute_run(&mut self, rank: usize, ops: &[Op]) {
        let (mut at, mut now, mut busy) = (self.at[rank], self.now[rank], 0);
        while let Some(&op) = ops.get(at) {
            let plain = op.kind.is_compute() && !op.flags.has(Flags::PAIR_FIRST);
            if !plain || !self.program.in_range(op) {
                break;
            }
            let start = match self.ready(op) {
                Ok(ready) => ready.max(now),
                Err(slot) => {
                    self.waits_for[rank] = slot;
                    break;
                }
            };
            if TIMED {
                let mut duration = self.rows[op.stage.index()].durations[op.kind as usize & 3];
                if op.flags.has(Flags::RECOMPUTE) {
                    duration += self
                        .ticks
                        .map_or(0, |ticks| recompute_duration(&ticks.stages, op));
                }
                now = start + duration;
                busy += duration;
                self.times.set(rank, at, start, now);
            }
            at += 1;
            self.finish(op, now);
        }
        self.at[rank] = at;
        self.now[rank] = now;
        self.busy[rank] += busy;
    }

    /// Runs an overlapped pair when both halves can run, or its first half if it has no second.
    #[cold]
    pub(super) fn compute_block(
        &mut self,
        rank: usize,
        op: Op,
        second: Option<Op>,
    ) -> Result<(), usize> {
        let second = second.filter(|&op| self.program.in_range(op));
        let mut start = self.ready(op)?.max(self.now[rank]);
        if let Some(second) = second {
            start = start.max(self.ready(second)?);
        }
        let duration = self
            .ticks
            .map_or(0, |ticks| duration(&ticks.stages, op, second));
        let at = self.at[rank];
        self.at[rank] = at + 1 + usize::from(second.is_some());
        self.now[rank] = start + duration;
        self.busy[rank] += duration;
        for at in at..self.at[rank] {
            if TIMED {
                self.times.set(rank, at, start, start + duration);
            }
        }
        for op in [Some(op), second].into_iter().flatten() {
            self.finish(op, start + duration);
        }
        Ok(())
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
        let (mark, direction, slot) = match op.kind {
            OpKind::Forward => (FORWARD_DONE, 0, cell + self.program.stride),
            OpKind::Backward | OpKind::BackwardInput => {
                let slot = (cell + self.done.len()).wrapping_sub(self.program.stride);
                (BACKWARD_DONE, 1, slot)
            }
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => return,
        };
        self.done[cell] |= mark;
        let reader = self.rows[op.stage.index()].readers[direction];
        if reader.rank == NONE {
            return;
        }
        if reader.channel == NONE {
            self.messages[slot] = end;
        } else if self.semantics == Semantics::Buffered {
            let usable = if TIMED { self.usable(reader, end) } else { end };
            if self.program.lowered {
                self.messages[slot] = !usable;
            } else {
                self.deliver(reader.rank, slot, usable);
            }
        }
    }

    /// When a buffered message made at `end` can be used.
    #[inline]
    fn usable(&mut self, reader: Reader, end: i64) -> i64 {
        if !self.link_contention {
            return end + reader.time;
        }
        // One rank sends on a link, in its own order, so that order is the order of the link.
        let link = self.program.links[reader.channel as usize] as usize;
        let free = self.link_free[link].max(end) + reader.time;
        self.link_free[link] = free;
        free
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
