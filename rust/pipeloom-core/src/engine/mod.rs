//! Runs a plan under a semantics: the one machine behind progress checks and simulation.
//!
//! Each rank runs its ops in order until one has to wait; whoever provides what it waits for puts
//! it back on the work-list. Since a start is the maximum of times that do not depend on the order
//! of work, neither does the result. What crosses ranks is a *message*: one slot for each (stage,
//! unit) and direction, holding the time at which it can be used.

mod compute;
#[cfg(test)]
pub(crate) mod naive;
mod program;
#[cfg(test)]
pub(crate) mod samples;
#[cfg(test)]
mod tests;
mod times;
mod transfers;

use std::collections::BinaryHeap;

use crate::cost::Ticks;
use crate::op::{Op, OpKind};
use crate::semantics::Semantics;
pub(crate) use compute::{duration, pair_second};
pub(crate) use program::{NONE, Program, StageLinks};
pub(crate) use times::Times;
pub(crate) use transfers::Posted;
use transfers::{Lane, Stream};

/// A message that nobody has made yet.
const NOT_YET: i64 = i64::MIN;
/// A rank that waits for nothing, or for something no other rank provides.
const NO_SLOT: usize = usize::MAX;

const FORWARD_DONE: u8 = 1;
const BACKWARD_DONE: u8 = 2;

/// The machine. With `TIMED` false it only finds out whether every op gets its turn.
pub(crate) struct Engine<'a, const TIMED: bool> {
    pub(crate) program: &'a Program<'a>,
    pub(crate) semantics: Semantics,
    ticks: Option<&'a Ticks>,
    /// Time of a transfer on each channel; empty without times.
    channel_times: Vec<i64>,
    link_contention: bool,
    /// Messages: forward ones by the reader's cell, then backward ones. Negative: not sent; the
    /// complement of a time: made, and usable at that time once sent.
    messages: Vec<i64>,
    done: Vec<u8>,
    /// Position of each rank.
    pub(crate) at: Vec<usize>,
    now: Vec<i64>,
    waits_for: Vec<usize>,
    work: Vec<u32>,
    queued: Vec<bool>,
    link_free: Vec<i64>,
    pub(crate) busy: Vec<i64>,
    pub(crate) times: Times,
    /// State of each channel's ends.
    pub(crate) lanes: Vec<Lane>,
    /// State of each rank's own stream and of its open group.
    pub(crate) streams: Vec<Stream>,
    /// Ranks whose stream has a new head.
    heads: Vec<usize>,
    /// Channels whose next transfer waits for its link: (ready, channel), earliest first.
    contended: BinaryHeap<std::cmp::Reverse<(i64, u32)>>,
}

impl<'a> Engine<'a, false> {
    /// Runs for progress alone.
    pub(crate) fn progress(program: &'a Program<'a>, semantics: Semantics) -> Self {
        let mut engine = Self::new(program, semantics, None, false);
        engine.run();
        engine
    }
}

impl<'a> Engine<'a, true> {
    /// Runs with times.
    pub(crate) fn timed(
        program: &'a Program<'a>,
        semantics: Semantics,
        ticks: &'a Ticks,
        link_contention: bool,
    ) -> Self {
        let mut engine = Self::new(program, semantics, Some(ticks), link_contention);
        engine.run();
        if semantics == Semantics::Buffered && program.lowered {
            engine.fill_in_transfers();
        }
        engine
    }

    /// Under `buffered` transfers take no turn of their own: their times are their messages'.
    fn fill_in_transfers(&mut self) {
        for (rank, ops) in self.program.ranks.iter().enumerate() {
            for (at, &op) in ops.ops.iter().enumerate() {
                if op.kind.is_compute() || !self.program.in_range(op) {
                    continue;
                }
                let end = self.messages[self.slot(op)].max(0);
                let time = self.channel_time(self.program.channel(op));
                self.times.set(rank, at, (end - time).max(0), end);
            }
        }
    }
}

impl<'a, const TIMED: bool> Engine<'a, TIMED> {
    fn new(
        program: &'a Program<'a>,
        semantics: Semantics,
        ticks: Option<&'a Ticks>,
        link_contention: bool,
    ) -> Self {
        let (cells, pp) = (program.num_cells(), program.ranks.len());
        let mut messages = vec![NOT_YET; 2 * cells];
        for (stage, links) in program.stages.iter().enumerate() {
            let row = stage * program.stride..(stage + 1) * program.stride;
            // The data loader and the loss are always there.
            if links.previous == NONE {
                messages[row.clone()].fill(0);
            }
            if links.next == NONE {
                messages[cells + row.start..cells + row.end].fill(0);
            }
        }
        Self {
            program,
            semantics,
            ticks,
            channel_times: ticks.map_or_else(Vec::new, |ticks| program.channel_times(ticks)),
            link_contention,
            messages,
            done: vec![0; cells],
            at: vec![0; pp],
            now: vec![0; pp],
            waits_for: vec![NO_SLOT; pp],
            work: Vec::with_capacity(pp),
            queued: vec![false; pp],
            link_free: vec![0; program.channels.len()],
            busy: vec![0; pp],
            times: if TIMED {
                Times::new(program)
            } else {
                Times::default()
            },
            lanes: vec![Lane::default(); program.channels.len()],
            streams: vec![Stream::default(); pp],
            heads: Vec::new(),
            contended: BinaryHeap::new(),
        }
    }

    fn run(&mut self) {
        for rank in (0..self.at.len()).rev() {
            self.queue(rank);
        }
        loop {
            while let Some(rank) = self.work.pop() {
                self.queued[rank as usize] = false;
                self.advance(rank as usize);
            }
            if self.settle_contended() {
                continue;
            }
            // Garbage plans may run an op on a rank that nobody thinks of waking.
            let before: usize = self.at.iter().sum();
            (0..self.at.len()).for_each(|rank| self.advance(rank));
            if self.at.iter().sum::<usize>() == before && self.work.is_empty() {
                return;
            }
        }
    }

    /// Whether every op had its turn and every stream has drained.
    pub(crate) fn finished(&self) -> bool {
        let ops = self.program.ranks.iter().zip(&self.at);
        ops.into_iter().all(|(rank, &at)| at == rank.ops.len())
            && self.lanes.iter().all(Lane::is_empty)
            && self.streams.iter().all(Stream::is_empty)
    }

    fn queue(&mut self, rank: usize) {
        if !self.queued[rank] {
            self.queued[rank] = true;
            #[allow(clippy::cast_possible_truncation)] // ranks are u32
            self.work.push(rank as u32);
        }
    }

    /// Runs a rank until it has to wait.
    fn advance(&mut self, rank: usize) {
        let program = self.program;
        let ops = &program.ranks[rank].ops;
        self.waits_for[rank] = NO_SLOT;
        while self.streams[rank].open == 0 {
            let at = self.at[rank];
            let Some(&op) = ops.get(at) else { return };
            if !program.in_range(op) {
                self.at[rank] += 1;
            } else if !op.kind.is_compute() {
                self.transfer(rank, op);
            } else {
                let second = pair_second(ops, at).filter(|&op| program.in_range(op));
                let result = match second {
                    None => self.compute(rank, op),
                    Some(second) => self.compute_pair(rank, op, second),
                };
                if let Err(slot) = result {
                    self.waits_for[rank] = slot;
                    return;
                }
            }
        }
    }

    /// Runs one compute op, or an overlapped pair, if what it reads is there.
    #[inline]
    fn compute(&mut self, rank: usize, op: Op, second: Option<Op>) -> Result<(), usize> {
        let mut start = self.ready(op)?.max(self.now[rank]);
        if let Some(second) = second {
            start = start.max(self.ready(second)?);
        }
        let at = self.at[rank];
        let duration = self
            .ticks
            .map_or(0, |ticks| duration(&ticks.stages, op, second));
        let end = start + duration;
        if TIMED {
            self.now[rank] = end;
            self.busy[rank] += duration;
            let times = &mut self.times[rank];
            for at in at..=at + usize::from(second.is_some()) {
                times.start[at] = start;
                times.end[at] = end;
            }
        }
        self.at[rank] = at + 1 + usize::from(second.is_some());
        self.finish(op, end);
        if let Some(second) = second {
            self.finish(second, end);
        }
        Ok(())
    }

    /// When the op's messages can be used, or the slot it waits for.
    #[inline]
    fn ready(&self, op: Op) -> Result<i64, usize> {
        let cell = self.program.cell(op);
        let pieces = self.program.shape.num_seq_pieces();
        let piece = |unit: u32| if pieces == 1 { 0 } else { unit % pieces };
        let (slot, mine) = match op.kind {
            OpKind::Forward => {
                let first = piece(op.unit.0) == 0;
                (cell, first || self.done[cell - 1] & FORWARD_DONE != 0)
            }
            OpKind::Backward | OpKind::BackwardInput => {
                let last = piece(op.unit.0) == pieces - 1;
                let later = last || self.done[cell + 1] & BACKWARD_DONE != 0;
                let slot = cell + self.done.len();
                (slot, later && self.done[cell] & FORWARD_DONE != 0)
            }
            OpKind::BackwardWeight => {
                let mine = self.done[cell] & BACKWARD_DONE != 0;
                return if mine { Ok(0) } else { Err(NO_SLOT) };
            }
            OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => return Ok(0),
        };
        let ready = self.messages[slot];
        match (ready >= 0, mine) {
            (true, true) => Ok(ready),
            (false, _) => Err(slot),
            (true, false) => Err(NO_SLOT),
        }
    }

    /// Marks an op as done and makes the message that it owes a neighbour.
    #[inline]
    fn finish(&mut self, op: Op, end: i64) {
        let cell = self.program.cell(op);
        let links = self.program.stages[op.stage.index()];
        let (mark, reader, slot, send) = match op.kind {
            OpKind::Forward => {
                let slot = cell + self.program.num_units;
                (FORWARD_DONE, links.next, slot, OpKind::SendForward)
            }
            OpKind::Backward | OpKind::BackwardInput => {
                let slot = (cell + self.done.len()).wrapping_sub(self.program.num_units);
                (BACKWARD_DONE, links.previous, slot, OpKind::SendBackward)
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
        let channel = self.program.channel(Op { kind: send, ..op });
        if channel == NONE {
            self.messages[slot] = end;
            return;
        }
        if self.semantics != Semantics::Buffered {
            return;
        }
        let usable = self.usable(channel, end);
        if self.program.lowered {
            self.messages[slot] = !usable;
        } else {
            self.deliver(self.program.stages[reader as usize].rank, slot, usable);
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

    /// Puts a message into its slot and wakes its reader.
    #[inline]
    fn deliver(&mut self, rank: u32, slot: usize, usable: i64) {
        self.messages[slot] = usable;
        let rank = rank as usize;
        if self.waits_for[rank] == slot {
            self.waits_for[rank] = NO_SLOT;
            self.queue(rank);
        }
    }

    /// Time of a transfer on a channel.
    #[inline]
    fn channel_time(&self, channel: u32) -> i64 {
        self.channel_times
            .get(channel as usize)
            .copied()
            .unwrap_or(0)
    }

    /// The slot of the message that a transfer carries.
    fn slot(&self, op: Op) -> usize {
        let (cell, cells, units) = (
            self.program.cell(op),
            self.done.len(),
            self.program.num_units,
        );
        let (cell, cells, row) = (self.program.cell(op), self.done.len(), self.program.stride);
        match op.kind {
            OpKind::SendForward => (cell + row).min(2 * cells - 1),
            OpKind::RecvBackward => cell + cells,
            OpKind::SendBackward => (cell + cells).saturating_sub(row),
            OpKind::RecvForward
            | OpKind::Forward
            | OpKind::Backward
            | OpKind::BackwardInput
            | OpKind::BackwardWeight => cell,
        }
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

impl<const TIMED: bool> Engine<'_, TIMED> {
    /// Whether the op's inputs are there.
    pub(crate) fn is_ready(&self, op: Op) -> bool {
        self.ready(op).is_ok()
    }

    /// Whether a rank has run its last op.
    pub(crate) fn is_at_end(&self, rank: Rank) -> bool {
        self.at[rank.index()] >= self.program.ranks[rank.index()].ops.len()
    }
}
