//! List scheduling: what ops wait for, and a scheduler in time steps in which each rank that is
//! free takes the op that a rule picks among those that can start.

use crate::ids::{Rank, Stage, Unit};
use crate::op::{Op, OpKind};
use crate::shape::Shape;

/// An op's length in steps: a forward, and either half of a backward, takes one; a full backward
/// two.
pub(super) fn duration(kind: OpKind) -> u32 {
    if kind == OpKind::Backward { 2 } else { 1 }
}

/// The way in which time runs while ops are scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    /// From the first forward on.
    Forward,
    /// From the last weight gradient back: an op waits for those that need it.
    Backward,
}

/// When ops end, as far as they have been scheduled.
#[derive(Clone, Debug)]
pub(super) struct Ends<'a> {
    shape: &'a Shape,
    time: Time,
    forward: Vec<u32>,
    /// Of input gradients.
    backward: Vec<u32>,
    weight: Vec<u32>,
}

const UNSCHEDULED: u32 = u32::MAX;

impl<'a> Ends<'a> {
    /// Nothing is scheduled yet.
    pub(super) fn new(shape: &'a Shape, time: Time) -> Self {
        let nothing = vec![UNSCHEDULED; shape.num_stages() as usize * shape.num_units() as usize];
        Self {
            shape,
            time,
            forward: nothing.clone(),
            backward: nothing.clone(),
            weight: nothing,
        }
    }

    fn cell(&self, stage: Stage, unit: Unit) -> usize {
        stage.index() * self.shape.num_units() as usize + unit.index()
    }

    /// The step from which an op can run; none while something it waits for is not scheduled.
    pub(super) fn ready(&self, op: Op) -> Option<u32> {
        let own = self.cell(op.stage, op.unit);
        let at = |ends: &[u32], neighbour: Option<Stage>| {
            neighbour.map_or(0, |stage| ends[self.cell(stage, op.unit)])
        };
        let (previous, next) = (self.shape.previous(op.stage), self.shape.next(op.stage));
        let ready = match (self.time, op.kind) {
            (Time::Forward, OpKind::Forward) => at(&self.forward, previous),
            (Time::Forward, OpKind::BackwardWeight) => self.backward[own],
            (Time::Forward, _) => self.forward[own].max(at(&self.backward, next)),
            (Time::Backward, OpKind::Forward) => self.backward[own].max(at(&self.forward, next)),
            (Time::Backward, OpKind::BackwardWeight) => 0,
            (Time::Backward, OpKind::Backward) => at(&self.backward, previous),
            (Time::Backward, _) => self.weight[own].max(at(&self.backward, previous)),
        };
        (ready != UNSCHEDULED).then_some(ready)
    }

    /// Schedules an op.
    pub(super) fn set(&mut self, op: Op, end: u32) {
        let own = self.cell(op.stage, op.unit);
        match op.kind {
            OpKind::Forward => self.forward[own] = end,
            OpKind::BackwardWeight => self.weight[own] = end,
            _ => self.backward[own] = end,
        }
    }
}

/// Each rank's order of `num_ops` ops in all; `pick` chooses a free rank's next op among those
/// that are [ready](Ends::ready) by now. None if all ranks come to wait.
pub(super) fn schedule(
    shape: &Shape,
    num_ops: u64,
    mut pick: impl FnMut(Rank, u32, &Ends<'_>) -> Option<Op>,
) -> Option<Vec<Vec<Op>>> {
    let mut ends = Ends::new(shape, Time::Forward);
    let mut free = vec![0; shape.pp() as usize];
    let mut orders: Vec<Vec<Op>> = vec![Vec::new(); shape.pp() as usize];
    let (mut left, mut last_end, mut now) = (num_ops, 0, 0);
    while left > 0 {
        if now > last_end {
            return None;
        }
        for rank in shape.ranks() {
            if free[rank.index()] > now {
                continue;
            }
            if let Some(op) = pick(rank, now, &ends) {
                let end = now + duration(op.kind);
                free[rank.index()] = end;
                last_end = last_end.max(end);
                ends.set(op, end);
                orders[rank.index()].push(op);
                left -= 1;
            }
        }
        now += 1;
    }
    Some(orders)
}
