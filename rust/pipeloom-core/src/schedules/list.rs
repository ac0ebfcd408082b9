//! Scheduling in time steps: each rank that is free takes the op that a rule picks among those
//! that can start. A forward, and either half of a backward, takes one step; a full backward two.

use crate::ids::{Rank, Stage, Unit};
use crate::op::{Op, OpKind};
use crate::shape::Shape;

/// An op's length in steps.
pub(super) fn duration(kind: OpKind) -> u32 {
    if kind == OpKind::Backward { 2 } else { 1 }
}

/// When forwards and input gradients end, as far as they have been scheduled.
#[derive(Clone, Debug)]
pub(super) struct Ends<'a> {
    shape: &'a Shape,
    forward: Vec<u32>,
    backward: Vec<u32>,
}

const UNSCHEDULED: u32 = u32::MAX;

impl<'a> Ends<'a> {
    /// Nothing is scheduled yet.
    pub(super) fn new(shape: &'a Shape) -> Self {
        let cells = shape.num_stages() as usize * shape.num_units() as usize;
        Self {
            shape,
            forward: vec![UNSCHEDULED; cells],
            backward: vec![UNSCHEDULED; cells],
        }
    }

    fn cell(&self, stage: Stage, unit: Unit) -> usize {
        stage.index() * self.shape.num_units() as usize + unit.index()
    }

    /// The step from which an op can run; none while something it needs is not scheduled.
    pub(super) fn ready(&self, op: Op) -> Option<u32> {
        let own = self.cell(op.stage, op.unit);
        let ready = match op.kind {
            OpKind::Forward => match self.shape.previous(op.stage) {
                None => 0,
                Some(previous) => self.forward[self.cell(previous, op.unit)],
            },
            OpKind::BackwardWeight => self.backward[own],
            _ => match self.shape.next(op.stage) {
                None => self.forward[own],
                Some(next) => self.forward[own].max(self.backward[self.cell(next, op.unit)]),
            },
        };
        (ready != UNSCHEDULED).then_some(ready)
    }

    /// Schedules an op.
    pub(super) fn set(&mut self, op: Op, end: u32) {
        let own = self.cell(op.stage, op.unit);
        match op.kind {
            OpKind::Forward => self.forward[own] = end,
            OpKind::Backward | OpKind::BackwardInput => self.backward[own] = end,
            _ => {}
        }
    }
}

/// Each rank's order, and the step in which the last op ends.
#[derive(Clone, Debug)]
pub(super) struct Timetable {
    pub(super) orders: Vec<Vec<Op>>,
    pub(super) makespan: u32,
}

/// Runs time forward until `num_ops` ops are scheduled; `pick` chooses a free rank's next op
/// among those that are [ready](Ends::ready) by now. None if all ranks come to wait.
pub(super) fn schedule(
    shape: &Shape,
    num_ops: u64,
    mut pick: impl FnMut(Rank, u32, &Ends<'_>) -> Option<Op>,
) -> Option<Timetable> {
    let mut ends = Ends::new(shape);
    let mut free = vec![0; shape.pp() as usize];
    let mut orders: Vec<Vec<Op>> = vec![Vec::new(); shape.pp() as usize];
    let (mut left, mut makespan, mut now) = (num_ops, 0, 0);
    while left > 0 {
        if now > makespan {
            return None;
        }
        for rank in shape.ranks() {
            if free[rank.index()] > now {
                continue;
            }
            if let Some(op) = pick(rank, now, &ends) {
                let end = now + duration(op.kind);
                free[rank.index()] = end;
                makespan = makespan.max(end);
                ends.set(op, end);
                orders[rank.index()].push(op);
                left -= 1;
            }
        }
        now += 1;
    }
    Some(Timetable { orders, makespan })
}
