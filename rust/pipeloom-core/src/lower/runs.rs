//! `streams` straight from closed forms: a run of compute ops becomes a run with each op's receive
//! before it and its send behind it, and the compute order is never written down.
//!
//! This is right where every channel is read in the order in which it is written, and that is told
//! from the runs as well: both ends, as sequences of stretches, must be equal.

use super::links::{Links, NONE};
use crate::op::{Op, OpKind};
use crate::order::{MAX_PATTERN, Run, Slot};
use crate::plan::{Plan, RankOps};

/// The programs of all ranks, each receive directly before its consumer. None if the plan has no
/// closed form, has marks (which do not move on by runs), or some channel is read in another order
/// than it is written: then receives have to move ahead.
pub(super) fn lower(plan: &Plan, links: &Links) -> Option<Vec<RankOps>> {
    let mut channels = Channels::new(links);
    let mut ranks = Vec::with_capacity(plan.shape().pp() as usize);
    for rank in plan.shape().ranks() {
        let order = plan.closed_form(rank)?;
        if order.has_pairs() || plan.mask(rank).is_some() {
            return None;
        }
        let mut len = 0;
        order.for_each_run(|run| len += width(links, run) * run.rounds as usize);
        let mut ops = Vec::with_capacity(len);
        order.for_each_run(|run| {
            let template = Template::new(links, run);
            channels.add(run, &template);
            template.write(&mut ops);
        });
        ranks.push(RankOps { ops });
    }
    channels.agree().then_some(ranks)
}

/// Most ops of a round: a slot has a receive, an op, a send.
const MAX_WIDTH: usize = 3 * MAX_PATTERN;

/// Ops of a round of a run with its transfers.
fn width(links: &Links, run: &Run) -> usize {
    let transfers = |slot: &Slot| {
        usize::from(links.receive(slot.op).is_some()) + usize::from(links.send(slot.op).is_some())
    };
    run.slots().iter().map(|slot| 1 + transfers(slot)).sum()
}

/// A round of a run with its transfers, and how often it is run.
struct Template {
    /// Each op with the change of its unit from round to round.
    ops: [(Op, i32); MAX_WIDTH],
    width: usize,
    rounds: u32,
    /// By slot: the channel that it reads and the one that it writes, or [`NONE`].
    channels: [(u32, u32); MAX_PATTERN],
}

impl Template {
    fn new(links: &Links, run: &Run) -> Self {
        let mut template = Self {
            ops: [(run.slots()[0].op, 0); MAX_WIDTH],
            width: 0,
            rounds: run.rounds,
            channels: [(NONE, NONE); MAX_PATTERN],
        };
        for (slot, channels) in run.slots().iter().zip(&mut template.channels) {
            let (receive, send) = (links.receive(slot.op), links.send(slot.op));
            for op in [receive, Some(slot.op), send].into_iter().flatten() {
                template.ops[template.width] = (op, slot.step);
                template.width += 1;
            }
            let written = send.and_then(|_| links.target(slot.op));
            let writes = written.map_or(NONE, |target| target.channel);
            *channels = (links.source_of(slot.op), writes);
        }
        template
    }

    /// Appends all rounds.
    ///
    /// The usual widths are spelled out: the length of an iterator over arrays is known, so ops
    /// are written straight to their place.
    fn write(&self, ops: &mut Vec<Op>) {
        match self.width {
            1 => self.write_rounds::<1>(ops),
            2 => self.write_rounds::<2>(ops),
            3 => self.write_rounds::<3>(ops),
            4 => self.write_rounds::<4>(ops),
            5 => self.write_rounds::<5>(ops),
            6 => self.write_rounds::<6>(ops),
            7 => self.write_rounds::<7>(ops),
            8 => self.write_rounds::<8>(ops),
            9 => self.write_rounds::<9>(ops),
            _ => {
                let round = &self.ops[..self.width];
                ops.extend((0..self.rounds).flat_map(|n| round.iter().map(move |op| at(op, n))));
            }
        }
    }

    fn write_rounds<const WIDTH: usize>(&self, ops: &mut Vec<Op>) {
        let mut round = [self.ops[0]; WIDTH];
        round.copy_from_slice(&self.ops[..WIDTH]);
        ops.extend((0..self.rounds).flat_map(|n| round.each_ref().map(|op| at(op, n))));
    }
}

/// An op of a template in round `n`.
#[inline]
fn at((op, step): &(Op, i32), n: u32) -> Op {
    let moved = step.cast_unsigned().wrapping_mul(n);
    let unit = crate::ids::Unit(op.unit.0.wrapping_add(moved));
    Op { unit, ..*op }
}

/// Units of one stage that a channel carries one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stretch {
    /// The stage at the channel's reading end.
    stage: u32,
    first: u32,
    /// Change from one unit to the next; 0 for a single one.
    step: i32,
    len: u32,
}

/// A sequence of messages as the longest stretches, from the front on: equal sequences have equal
/// stretches, however they were put together.
#[derive(Default)]
struct Sequence(Vec<Stretch>);

impl Sequence {
    fn push(&mut self, stage: u32, first: u32, step: i32, len: u32) {
        if let Some(last) = self.0.last_mut().filter(|last| last.stage == stage) {
            let end = last
                .first
                .wrapping_add_signed(last.step * last.len.cast_signed());
            let joins = match last.len {
                1 => first.abs_diff(last.first) == 1,
                _ => first == end,
            };
            if joins {
                if last.len == 1 {
                    last.step = first.wrapping_sub(last.first).cast_signed();
                }
                if len == 1 || step == last.step {
                    last.len += len;
                    return;
                }
                // Turns back: only the first unit goes on.
                last.len += 1;
                return self.start(stage, first.wrapping_add_signed(step), step, len - 1);
            }
        }
        self.start(stage, first, step, len);
    }

    fn start(&mut self, stage: u32, first: u32, step: i32, len: u32) {
        let step = if len == 1 { 0 } else { step };
        self.0.push(Stretch {
            stage,
            first,
            step,
            len,
        });
    }
}

/// What every channel carries, as written and as read.
struct Channels<'a> {
    links: &'a Links,
    written: Vec<Sequence>,
    read: Vec<Sequence>,
}

impl<'a> Channels<'a> {
    fn new(links: &'a Links) -> Self {
        let none = || {
            (0..links.num_channels())
                .map(|_| Sequence::default())
                .collect()
        };
        Self {
            links,
            written: none(),
            read: none(),
        }
    }

    fn add(&mut self, run: &Run, template: &Template) {
        let ends = &template.channels[..run.slots().len()];
        if run.rounds == 1 || !shared(ends) {
            self.add_rounds(run.slots(), ends, 0, run.rounds);
        } else {
            // Slots take turns on a channel.
            for round in 0..run.rounds {
                self.add_rounds(run.slots(), ends, round, 1);
            }
        }
    }

    fn add_rounds(&mut self, slots: &[Slot], ends: &[(u32, u32)], from: u32, rounds: u32) {
        for (slot, &(reads, writes)) in slots.iter().zip(ends) {
            let (
                Op {
                    stage, unit, kind, ..
                },
                step,
            ) = (at(&(slot.op, slot.step), from), slot.step);
            if let Some(read) = self.read.get_mut(reads as usize) {
                read.push(stage.0, unit.0, step, rounds);
            }
            if let Some(written) = self.written.get_mut(writes as usize) {
                let neighbours = self.links.of(stage);
                let target = if kind == OpKind::Forward {
                    neighbours.next
                } else {
                    neighbours.previous
                };
                written.push(target.stage, unit.0, step, rounds);
            }
        }
    }

    fn agree(&self) -> bool {
        let ends = self.written.iter().zip(&self.read);
        ends.into_iter().all(|(written, read)| written.0 == read.0)
    }
}

/// Whether two slots read or write one channel.
fn shared(ends: &[(u32, u32)]) -> bool {
    let twice = |end: fn(&(u32, u32)) -> u32| {
        (1..ends.len())
            .any(|at| end(&ends[at]) != NONE && ends[..at].iter().any(|e| end(e) == end(&ends[at])))
    };
    twice(|end| end.0) || twice(|end| end.1)
}
