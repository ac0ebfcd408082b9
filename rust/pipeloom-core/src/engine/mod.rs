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
use compute::{Row, rows};
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
    rows: Vec<Row>,
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
            rows: rows(program, ticks),
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
            self.compute_run(rank, ops);
            let at = self.at[rank];
            let Some(&op) = ops.get(at).filter(|_| self.waits_for[rank] == NO_SLOT) else {
                return;
            };
            if !program.in_range(op) {
                self.at[rank] += 1;
            } else if !op.kind.is_compute() {
                self.transfer(rank, op);
            } else if let Err(slot) = self.compute_block(rank, op, pair_second(ops, at)) {
                self.waits_for[rank] = slot;
                return;
            }
        }
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
