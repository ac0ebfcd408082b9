//! A slow second machine, written from the rules alone: every op and transfer is looked at again
//! and again until nothing more can happen.

use crate::cost::Ticks;
use crate::op::{Flags, Op, OpKind};
use crate::plan::Plan;
use crate::semantics::Semantics;

/// (start, end) of each op of each rank; none: it never ran.
pub(crate) type Found = Vec<Vec<Option<(i64, i64)>>>;

struct Naive<'a> {
    plan: &'a Plan,
    ticks: &'a Ticks,
    semantics: Semantics,
    ranks: Vec<Vec<Op>>,
    found: Found,
    /// When each transfer was posted.
    posted: Vec<Vec<Option<i64>>>,
    at: Vec<usize>,
    now: Vec<i64>,
}

pub(crate) fn run(plan: &Plan, ticks: &Ticks, semantics: Semantics) -> Found {
    let held = plan.materialize();
    let ranks: Vec<Vec<Op>> = held.iter().map(|ops| ops.ops.clone()).collect();
    let mut naive = Naive {
        plan,
        ticks,
        semantics,
        found: ranks.iter().map(|ops| vec![None; ops.len()]).collect(),
        posted: ranks.iter().map(|ops| vec![None; ops.len()]).collect(),
        at: vec![0; ranks.len()],
        now: vec![0; ranks.len()],
        ranks,
    };
    while naive.step() {}
    naive.found
}

impl Naive<'_> {
    fn step(&mut self) -> bool {
        let programs = (0..self.ranks.len()).any(|rank| self.program(rank));
        programs || self.transfers()
    }

    fn blocks(&self) -> bool {
        matches!(self.semantics, Semantics::Batched | Semantics::Rendezvous)
    }

    /// The positions that go together with `at`: a group, or a pair.
    fn together(&self, rank: usize, at: usize) -> std::ops::Range<usize> {
        let ops = &self.ranks[rank];
        let mut end = at + 1;
        if ops[at].kind.is_compute() {
            let paired = ops[at].flags.has(Flags::PAIR_FIRST)
                && ops
                    .get(end)
                    .is_some_and(|op| op.flags.has(Flags::PAIR_SECOND));
            return at..end + usize::from(paired);
        }
        let joined = |op: &Op| op.flags.has(Flags::JOINED) && !op.kind.is_compute();
        while self.semantics == Semantics::Batched && ops.get(end).is_some_and(joined) {
            end += 1;
        }
        at..end
    }

    fn program(&mut self, rank: usize) -> bool {
        let at = self.at[rank];
        let Some(&op) = self.ranks[rank].get(at) else {
            return false;
        };
        let range = self.together(rank, at);
        if !op.kind.is_compute() {
            if self.posted[rank][at].is_none() {
                for at in range {
                    self.posted[rank][at] = Some(self.now[rank]);
                }
                return true;
            }
            if self.blocks() {
                let ends: Option<Vec<i64>> = range
                    .clone()
                    .map(|at| self.found[rank][at].map(|(_, end)| end))
                    .collect();
                let Some(ends) = ends else { return false };
                self.now[rank] = ends.into_iter().max().unwrap();
            }
            self.at[rank] = range.end;
            return true;
        }
        let mut start = self.now[rank];
        for at in range.clone() {
            let Some(ready) = self.inputs(rank, self.ranks[rank][at]) else {
                return false;
            };
            start = start.max(ready);
        }
        let ops: Vec<Op> = self.ranks[rank][range.clone()].to_vec();
        let end = start + self.duration(&ops);
        for at in range.clone() {
            self.found[rank][at] = Some((start, end));
        }
        self.now[rank] = end;
        self.at[rank] = range.end;
        true
    }

    fn duration(&self, ops: &[Op]) -> i64 {
        let cost = |op: &Op| self.ticks.stages[op.stage.index()];
        let again = |op: &Op| {
            let again = op.flags.has(Flags::RECOMPUTE) && op.kind != OpKind::Forward;
            if again { cost(op).recompute } else { 0 }
        };
        let alone = |op: &Op| match op.kind {
            OpKind::Forward => cost(op).forward,
            OpKind::Backward => cost(op).backward,
            OpKind::BackwardInput => cost(op).backward_input,
            _ => cost(op).backward_weight,
        };
        let forward = ops.iter().find(|op| op.kind == OpKind::Forward);
        let pair = forward
            .and_then(|op| cost(op).overlapped)
            .filter(|_| ops.len() == 2);
        pair.unwrap_or_else(|| ops.iter().map(alone).sum()) + ops.iter().map(again).sum::<i64>()
    }

    fn end_of(&self, wanted: impl Fn(&Op) -> bool) -> Option<i64> {
        let (rank, at) = self.find(wanted)?;
        self.found[rank][at].map(|(_, end)| end)
    }

    fn find(&self, wanted: impl Fn(&Op) -> bool) -> Option<(usize, usize)> {
        let position = |ops: &Vec<Op>| ops.iter().position(&wanted);
        self.ranks
            .iter()
            .enumerate()
            .find_map(|(rank, ops)| Some((rank, position(ops)?)))
    }

    /// When all that an op reads is there.
    fn inputs(&self, rank: usize, op: Op) -> Option<i64> {
        let shape = self.plan.shape();
        let forward = |stage, unit| {
            self.end_of(|o| (o.stage, o.unit.0, o.kind) == (stage, unit, OpKind::Forward))
        };
        let gradient = |stage, unit| {
            self.end_of(|o| (o.stage, o.unit.0) == (stage, unit) && o.kind.gives_input_gradient())
        };
        let (k, u) = (shape.num_seq_pieces(), op.unit.0);
        match op.kind {
            OpKind::Forward => {
                let piece = if u % k == 0 {
                    0
                } else {
                    forward(op.stage, u - 1)?
                };
                let Some(from) = shape.previous(op.stage) else {
                    return Some(piece);
                };
                Some(
                    self.crossing(rank, op, OpKind::RecvForward, from, forward(from, u))?
                        .max(piece),
                )
            }
            OpKind::Backward | OpKind::BackwardInput => {
                let mine = forward(op.stage, u)?;
                let piece = if u % k == k - 1 {
                    0
                } else {
                    gradient(op.stage, u + 1)?
                };
                let mine = mine.max(piece);
                let Some(from) = shape.next(op.stage) else {
                    return Some(mine);
                };
                Some(
                    self.crossing(rank, op, OpKind::RecvBackward, from, gradient(from, u))?
                        .max(mine),
                )
            }
            _ => gradient(op.stage, u),
        }
    }

    /// When a message of another stage is there.
    fn crossing(
        &self,
        rank: usize,
        op: Op,
        recv: OpKind,
        from: crate::ids::Stage,
        made: Option<i64>,
    ) -> Option<i64> {
        let shape = self.plan.shape();
        if shape.rank_of(from) == shape.rank_of(op.stage) {
            return made;
        }
        let recv = Op::new(op.stage, recv, op.unit);
        if self.semantics != Semantics::Buffered {
            let at = self.ranks[rank].iter().position(|other| other.same(recv))?;
            return self.found[rank][at].map(|(_, end)| end);
        }
        if self.plan.style().is_some() {
            let kind = if recv.kind == OpKind::RecvForward {
                OpKind::SendForward
            } else {
                OpKind::SendBackward
            };
            let (rank, at) = self.find(|o| o.same(Op::new(from, kind, op.unit)))?;
            self.posted[rank][at]?;
        }
        let costs = self.ticks.stages[from.index()];
        let time = if recv.kind == OpKind::RecvForward {
            costs.to_next
        } else {
            costs.to_previous
        };
        Some(made? + time)
    }

    /// Completes the transfers that can be, earliest position first.
    fn transfers(&mut self) -> bool {
        if self.semantics == Semantics::Buffered {
            return false;
        }
        let shape = self.plan.shape().clone();
        let channel = |op: Op| {
            let forward = matches!(op.kind, OpKind::SendForward | OpKind::RecvForward);
            let (here, there) = if forward == op.kind.is_send() {
                (Some(op.stage), shape.next(op.stage))
            } else {
                (Some(op.stage), shape.previous(op.stage))
            };
            let (here, there) = (shape.rank_of(here?), shape.rank_of(there?));
            let ends = if op.kind.is_send() {
                (here, there)
            } else {
                (there, here)
            };
            (here != there).then_some((ends, forward))
        };
        for source in 0..self.ranks.len() {
            for at in 0..self.ranks[source].len() {
                let op = self.ranks[source][at];
                if !op.kind.is_send() || self.found[source][at].is_some() {
                    continue;
                }
                let Some(((_, destination), _)) = channel(op) else {
                    continue;
                };
                let same = |other: &Op, send: bool| {
                    !other.kind.is_compute()
                        && other.kind.is_send() == send
                        && channel(*other) == channel(op)
                };
                let nth = self.ranks[source][..at]
                    .iter()
                    .filter(|o| same(o, true))
                    .count();
                let theirs = &self.ranks[destination.index()];
                let recv = (0..theirs.len())
                    .filter(|&at| same(&theirs[at], false))
                    .nth(nth);
                let Some(recv) = recv else { continue };
                let (a, b) = ((source, at), (destination.index(), recv));
                let (Some(one), Some(two)) = (self.posted[a.0][a.1], self.posted[b.0][b.1]) else {
                    continue;
                };
                let free = |(rank, at): (usize, usize)| {
                    let in_fifo = |other: usize| {
                        let op = self.ranks[rank][other];
                        !op.kind.is_compute()
                            && (self.semantics == Semantics::SingleStream
                                || channel(op) == channel(self.ranks[rank][at]))
                    };
                    let before = (0..at).rev().find(|&other| in_fifo(other));
                    before.map_or(Some(0), |other| self.found[rank][other].map(|(_, end)| end))
                };
                let (Some(free_a), Some(free_b)) = (free(a), free(b)) else {
                    continue;
                };
                let start = one.max(two).max(free_a).max(free_b);
                let costs = self.ticks.stages[op.stage.index()];
                let time = if op.kind == OpKind::SendForward {
                    costs.to_next
                } else {
                    costs.to_previous
                };
                self.found[a.0][a.1] = Some((start, start + time));
                self.found[b.0][b.1] = Some((start, start + time));
                return true;
            }
        }
        false
    }
}
