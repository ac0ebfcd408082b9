//! Rules about what each stage has of each of its microbatches, once all ops were seen.

use super::structure::{GRADIENT, RECOMPUTED_BACKWARD, RECOMPUTED_FORWARD, Structure, bit};
use crate::engine::NONE;
use crate::ids::{Rank, Stage, Unit};
use crate::op::{Op, OpKind};

const BACKWARDS: u16 = GRADIENT | bit(OpKind::BackwardWeight);

impl Structure<'_> {
    /// What each stage has of each of its microbatches, now that all was seen.
    pub(super) fn cells(&mut self) {
        let program = self.program;
        let plain = bit(OpKind::Forward)
            | if program.forward_only {
                0
            } else {
                bit(OpKind::Backward)
            };
        let split = bit(OpKind::Forward) | bit(OpKind::BackwardInput) | bit(OpKind::BackwardWeight);
        let recomputed = RECOMPUTED_FORWARD | RECOMPUTED_BACKWARD;
        for stage in (0..program.shape.num_stages()).map(Stage) {
            let transfers = self.transfers_of(stage);
            for unit in program.shape.units_of(stage).map(Unit) {
                let op = Op::new(stage, OpKind::Forward, unit);
                let marks = self.marks[program.cell(op)];
                let kinds = marks & !recomputed;
                let even = matches!(marks & recomputed, 0) || marks & recomputed == recomputed;
                let whole = kinds == plain | transfers
                    || (kinds == split | transfers && !program.forward_only);
                if !whole || !even {
                    self.cell(op, marks, transfers);
                }
            }
        }
    }

    /// The transfers that a stage has of each microbatch.
    fn transfers_of(&self, stage: Stage) -> u16 {
        let program = self.program;
        let needed = |&kind: &OpKind| {
            let backward = matches!(kind, OpKind::SendBackward | OpKind::RecvBackward);
            !kind.is_compute()
                && program.lowered
                && !(backward && program.forward_only)
                && program.channel(Op::new(stage, kind, Unit(0))) != NONE
        };
        OpKind::ALL
            .into_iter()
            .filter(needed)
            .map(bit)
            .fold(0, |all, bit| all | bit)
    }

    #[cold]
    fn cell(&mut self, forward: Op, marks: u16, transfers: u16) {
        let rank = self.program.shape.rank_of(forward.stage);
        let place = (rank, self.program.ranks[rank.index()].ops.len());
        let of = |kind| Op { kind, ..forward };
        let where_ = format!("rank {rank}");
        if marks & bit(OpKind::Forward) == 0 {
            let message = format!("{where_} never runs {forward}");
            let hint = "each stage runs the forward of each of its microbatches once";
            self.report("exactly_once", place, forward, message, hint);
        }
        self.backwards(place, of(OpKind::Backward), marks);
        for kind in OpKind::ALL.into_iter().filter(|kind| !kind.is_compute()) {
            let (has, needs) = (marks & bit(kind) != 0, transfers & bit(kind) != 0);
            let op = of(kind);
            if needs && !has {
                let message = format!("{where_} has no {op}, but the tensor changes ranks");
                let hint = "plan.lower() puts in every send and receive";
                self.report("missing_transfer", place, op, message, hint);
            } else if has && !needs {
                let at = self.position(rank, op).unwrap_or(place.1);
                let message = format!("{op} moves a tensor that does not change ranks");
                let hint = "leave it out; there is nobody at its other end";
                self.report("unneeded_transfer", (rank, at), op, message, hint);
            }
        }
        let unread = [
            (OpKind::RecvForward, bit(OpKind::Forward)),
            (OpKind::RecvBackward, GRADIENT),
        ];
        for (kind, readers) in unread {
            if marks & bit(kind) != 0 && marks & readers == 0 {
                let op = of(kind);
                let at = self.position(rank, op).unwrap_or(place.1);
                let message = format!("{op} fills a buffer that no op reads, so it is never free");
                self.report(
                    "buffers",
                    (rank, at),
                    op,
                    message,
                    "add the op that reads it",
                );
            }
        }
    }

    /// Of a forward-only plan: nothing but plain forwards.
    fn no_backwards(&mut self, place: (Rank, usize), backward: Op, marks: u16) {
        let at = |structure: &Self, kind| {
            let op = Op { kind, ..backward };
            let found = structure.position(place.0, op);
            (op, (place.0, found.unwrap_or(place.1)))
        };
        for kind in OpKind::ALL
            .into_iter()
            .filter(|&kind| marks & BACKWARDS & bit(kind) != 0)
        {
            let (op, place) = at(self, kind);
            let message = format!("{op} is a backward in a forward-only plan");
            self.report("exactly_once", place, op, message, "leave it out");
        }
        if marks & RECOMPUTED_FORWARD != 0 {
            let (op, place) = at(self, OpKind::Forward);
            let message = format!("{op} is marked as recomputed, but has no backward");
            self.report(
                "recompute",
                place,
                op,
                message,
                "forwards alone keep nothing",
            );
        }
    }

    fn backwards(&mut self, place: (Rank, usize), backward: Op, marks: u16) {
        let has = |kind| marks & bit(kind) != 0;
        let (full, input, weight) = (
            has(OpKind::Backward),
            has(OpKind::BackwardInput),
            has(OpKind::BackwardWeight),
        );
        let at = |structure: &Self, kind| {
            let op = Op { kind, ..backward };
            let found = structure.position(place.0, op);
            (op, (place.0, found.unwrap_or(place.1)))
        };
        let rank = place.0;
        if self.program.forward_only {
            self.no_backwards(place, backward, marks);
            return;
        }
        let hint = "a backward is one B, or one I and one W";
        match (full, input, weight) {
            (false, false, false) => {
                let message = format!("rank {rank} never runs {backward}");
                self.report("exactly_once", place, backward, message, hint);
            }
            (true, false, false) | (false, true, true) => {}
            (true, _, _) => {
                let half = if input {
                    OpKind::BackwardInput
                } else {
                    OpKind::BackwardWeight
                };
                let (op, place) = at(self, half);
                let message = format!("{op} repeats what {backward} does");
                self.report("split_backward", place, op, message, hint);
            }
            (false, _, _) => {
                let (have, lack) = if input {
                    (OpKind::BackwardInput, OpKind::BackwardWeight)
                } else {
                    (OpKind::BackwardWeight, OpKind::BackwardInput)
                };
                let (op, place) = at(self, have);
                let message = format!("{op} has no {}", Op { kind: lack, ..op });
                self.report("split_backward", place, op, message, hint);
            }
        }
        let again = (
            marks & RECOMPUTED_FORWARD != 0,
            marks & RECOMPUTED_BACKWARD != 0,
        );
        let gradient = if full {
            OpKind::Backward
        } else {
            OpKind::BackwardInput
        };
        if again.0 != again.1 && (full || input) {
            let (op, place) = at(self, if again.0 { gradient } else { OpKind::Forward });
            let other = Op {
                kind: if again.0 { OpKind::Forward } else { gradient },
                ..op
            };
            let message = format!("{other} is marked as recomputed, but {op} is not");
            let hint = "a recomputed forward and the backward that runs it again are both marked";
            self.report("recompute", place, op, message, hint);
        }
    }

    fn position(&self, rank: Rank, op: Op) -> Option<usize> {
        let ops = &self.program.ranks[rank.index()].ops;
        ops.iter().position(|other| other.same(op))
    }
}
