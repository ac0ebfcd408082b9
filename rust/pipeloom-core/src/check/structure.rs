//! Rules about single ops and about the order on one rank: where an op stands, marked how, before
//! what.

use std::fmt::Display;

use crate::engine::{NONE, Program};
use crate::ids::{Rank, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::plan::RankOps;
use crate::violation::Violation;

pub(super) const RECOMPUTED_FORWARD: u16 = 1 << 8;
pub(super) const RECOMPUTED_BACKWARD: u16 = 1 << 9;

/// The mark of a kind in a cell.
pub(super) const fn bit(kind: OpKind) -> u16 {
    1 << kind as u16
}

pub(super) const GRADIENT: u16 = bit(OpKind::Backward) | bit(OpKind::BackwardInput);

/// An op that stands before one that it needs, if that one comes at all.
struct TooEarly {
    rank: Rank,
    position: usize,
    op: Op,
    needs: Op,
    /// Kinds that would do.
    any_of: u16,
}

/// The check, in one pass over the ops and one over the (stage, unit) cells.
pub(super) struct Structure<'a> {
    pub(super) program: &'a Program<'a>,
    /// For each cell, which kinds have been seen.
    pub(super) marks: Vec<u16>,
    too_early: Vec<TooEarly>,
    violations: Vec<Violation>,
}

/// All violations of the structure of a plan.
pub(super) fn check(program: &Program<'_>) -> Vec<Violation> {
    let mut structure = Structure {
        program,
        marks: vec![0; program.num_cells()],
        too_early: Vec::new(),
        violations: Vec::new(),
    };
    for (rank, ops) in (0..).map(Rank).zip(&program.ranks) {
        structure.rank(rank, ops);
    }
    structure.order();
    structure.cells();
    structure.violations
}

impl Structure<'_> {
    pub(super) fn report(
        &mut self,
        rule: &'static str,
        (rank, position): (Rank, usize),
        op: Op,
        message: impl Display,
        hint: impl Display,
    ) {
        self.violations.push(Violation {
            rule,
            rank,
            position: position as u64,
            op: op.to_string(),
            message: message.to_string(),
            hint: hint.to_string(),
            cycle: Vec::new(),
        });
    }

    fn rank(&mut self, rank: Rank, ops: &RankOps) {
        for (at, &op) in ops.ops.iter().enumerate() {
            if !self.program.in_range(op) {
                self.out_of_range((rank, at), op);
                continue;
            }
            if self.program.stages[op.stage.index()].rank != rank.0
                || !self.program.shape.units_of(op.stage).contains(&op.unit.0)
            {
                self.misplaced((rank, at), op);
            }
            let cell = self.program.cell(op);
            let mark = bit(op.kind);
            if self.marks[cell] & mark != 0 {
                let message = format!("{op} stands here a second time");
                let hint = "each op of a stage and microbatch is run exactly once";
                self.report("exactly_once", (rank, at), op, message, hint);
            }
            if op.flags != Flags::NONE {
                self.flags((rank, at), op, ops);
            }
            self.needs((rank, at), op, cell);
            self.marks[cell] |= mark;
        }
    }

    fn out_of_range(&mut self, place: (Rank, usize), op: Op) {
        let stages = self.program.stages.len();
        let (message, hint) = if op.stage.index() >= stages {
            (
                format!(
                    "{op} is of stage {}, but the plan has {stages} stages",
                    op.stage
                ),
                format!("stages are 0..{stages}"),
            )
        } else {
            let units = self.program.num_units;
            (
                format!(
                    "{op} is of microbatch {}, but the plan has {units}",
                    op.unit
                ),
                format!("microbatches (times pieces) are 0..{units}"),
            )
        };
        self.report("placement", place, op, message, hint);
    }

    fn misplaced(&mut self, place: (Rank, usize), op: Op) {
        let home = self.program.shape.rank_of(op.stage);
        if home == place.0 {
            let units = self.program.shape.units_of(op.stage);
            let message = format!("{op} is of a microbatch that the other replica runs");
            let hint = format!("stage {} runs microbatches {units:?}", op.stage);
            self.report("placement", place, op, message, hint);
        } else {
            let message = format!(
                "{op} stands on rank {}, but its stage is on rank {home}",
                place.0
            );
            let hint = format!(
                "move it to rank {home}, or place stage {} elsewhere",
                op.stage
            );
            self.report("placement", place, op, message, hint);
        }
    }

    /// Notes what the op needs and has not seen on this rank.
    #[inline]
    fn needs(&mut self, place: (Rank, usize), op: Op, cell: usize) {
        let here = self.marks[cell];
        let lowered = self.program.lowered;
        let recv = |kind| lowered && self.program.channel(Op { kind, ..op }) != NONE;
        let pieces = self.program.shape.num_seq_pieces();
        match op.kind {
            OpKind::Forward => {
                if recv(OpKind::RecvForward) && here & bit(OpKind::RecvForward) == 0 {
                    self.early(place, op, OpKind::RecvForward, 0);
                }
                if pieces > 1 && !op.unit.0.is_multiple_of(pieces) {
                    self.needs_piece(place, op, Unit(op.unit.0 - 1), bit(OpKind::Forward));
                }
                self.needs_neighbour(place, op, bit(OpKind::Forward));
            }
            OpKind::Backward | OpKind::BackwardInput => {
                if here & bit(OpKind::Forward) == 0 {
                    self.early(place, op, OpKind::Forward, 0);
                }
                if recv(OpKind::RecvBackward) && here & bit(OpKind::RecvBackward) == 0 {
                    self.early(place, op, OpKind::RecvBackward, 0);
                }
                if pieces > 1 && !(op.unit.0 + 1).is_multiple_of(pieces) {
                    self.needs_piece(place, op, Unit(op.unit.0 + 1), GRADIENT);
                }
                self.needs_neighbour(place, op, GRADIENT);
            }
            OpKind::BackwardWeight => {
                if here & GRADIENT == 0 {
                    self.early(place, op, OpKind::BackwardInput, GRADIENT);
                }
            }
            OpKind::SendForward if here & bit(OpKind::Forward) == 0 => {
                self.early(place, op, OpKind::Forward, 0);
            }
            OpKind::SendBackward if here & GRADIENT == 0 => {
                self.early(place, op, OpKind::BackwardInput, GRADIENT);
            }
            OpKind::SendForward
            | OpKind::SendBackward
            | OpKind::RecvForward
            | OpKind::RecvBackward => {}
        }
    }

    #[cold]
    fn early(&mut self, (rank, position): (Rank, usize), op: Op, kind: OpKind, any_of: u16) {
        self.too_early.push(TooEarly {
            rank,
            position,
            op,
            needs: Op {
                flags: Flags::NONE,
                kind,
                ..op
            },
            any_of: any_of | bit(kind),
        });
    }

    /// A piece of a sequence needs its neighbour piece on the same stage.
    fn needs_piece(&mut self, (rank, position): (Rank, usize), op: Op, unit: Unit, any_of: u16) {
        let needs = Op {
            unit,
            flags: Flags::NONE,
            ..op
        };
        if self.marks[self.program.cell(needs)] & any_of == 0 {
            self.too_early.push(TooEarly {
                rank,
                position,
                op,
                needs,
                any_of,
            });
        }
    }

    /// The stage that an op reads from, if it is on the same rank, stands before it.
    #[inline]
    fn needs_neighbour(&mut self, (rank, position): (Rank, usize), op: Op, any_of: u16) {
        let links = self.program.stages[op.stage.index()];
        let from = if op.kind == OpKind::Forward {
            links.previous
        } else {
            links.next
        };
        if from == NONE || self.program.stages[from as usize].rank != links.rank {
            return;
        }
        let needs = Op {
            stage: Stage(from),
            flags: Flags::NONE,
            ..op
        };
        if self.marks[self.program.cell(needs)] & any_of == 0 {
            self.too_early.push(TooEarly {
                rank,
                position,
                op,
                needs,
                any_of,
            });
        }
    }

    /// Turns what came too early into violations, now that it is known what came at all; what did
    /// not is missing, which other rules say.
    fn order(&mut self) {
        for early in std::mem::take(&mut self.too_early) {
            let TooEarly {
                rank,
                position,
                op,
                needs,
                any_of,
            } = early;
            let found = self.marks[self.program.cell(needs)] & any_of;
            let Some(kind) = OpKind::ALL.into_iter().find(|&kind| found & bit(kind) != 0) else {
                continue;
            };
            let needs = Op { kind, ..needs };
            let message = format!("{op} stands before {needs}, which it needs");
            let hint = match kind {
                OpKind::RecvForward | OpKind::RecvBackward => {
                    "a tensor is received before the op that reads it"
                }
                _ if op.kind.is_send() => "a tensor is sent after the op that makes it",
                OpKind::Forward if op.kind != OpKind::Forward => {
                    "a microbatch's backward needs its forward on the same stage"
                }
                _ if op.kind == OpKind::BackwardWeight => {
                    "a weight half comes after the input half of the same stage and microbatch"
                }
                OpKind::Forward
                | OpKind::Backward
                | OpKind::BackwardInput
                | OpKind::BackwardWeight
                | OpKind::SendForward
                | OpKind::SendBackward => "move it behind what it reads",
            };
            self.report("data_flow", (rank, position), op, message, hint);
        }
    }

    fn flags(&mut self, place: (Rank, usize), op: Op, ops: &RankOps) {
        if op.flags.has(Flags::RECOMPUTE) {
            let mark = match op.kind {
                OpKind::Forward => RECOMPUTED_FORWARD,
                OpKind::Backward | OpKind::BackwardInput => RECOMPUTED_BACKWARD,
                OpKind::BackwardWeight
                | OpKind::SendForward
                | OpKind::RecvForward
                | OpKind::SendBackward
                | OpKind::RecvBackward => {
                    let message = format!("{op} is marked as recomputed");
                    let hint = "only forwards and the backwards (B, I) that read them can be";
                    self.report("recompute", place, op, message, hint);
                    0
                }
            };
            let cell = self.program.cell(op);
            self.marks[cell] |= mark;
        }
        if op.flags.has(Flags::JOINED) {
            self.group(place, op, &ops.ops);
        }
        self.pair(place, op, &ops.ops);
    }

    fn pair(&mut self, (rank, at): (Rank, usize), op: Op, ops: &[Op]) {
        let before = at.checked_sub(1).and_then(|at| ops.get(at));
        let first = op.flags.has(Flags::PAIR_FIRST);
        let second = op.flags.has(Flags::PAIR_SECOND);
        let message = match (first, second) {
            (false, false) => return,
            (true, true) => "is marked as both halves of an overlapped pair",
            (true, false) => match ops.get(at + 1) {
                Some(next) if !next.flags.has(Flags::PAIR_SECOND) => {
                    "starts an overlapped pair that the next op does not end"
                }
                None => "starts an overlapped pair, but is the rank's last op",
                Some(next) if !overlaps(op, *next) => "can't overlap with the op behind it",
                Some(_) => return,
            },
            (false, true) if before.is_some_and(|op| op.flags.has(Flags::PAIR_FIRST)) => return,
            (false, true) => "ends an overlapped pair that the op before it does not start",
        };
        let hint = "a pair is one forward and one backward (B or I) of different stages or \
                    microbatches, side by side";
        self.report("pair", (rank, at), op, format!("{op} {message}"), hint);
    }

    /// Members of a group are transfers and stand side by side.
    fn group(&mut self, (rank, at): (Rank, usize), op: Op, ops: &[Op]) {
        let before = at.checked_sub(1).and_then(|at| ops.get(at));
        let message = if op.kind.is_compute() {
            "computes, but is marked as a member of a group of transfers"
        } else if before.is_none_or(|before| before.kind.is_compute()) {
            "is marked as of the group of the transfer before it, but there is none"
        } else {
            return;
        };
        let hint = "members of a group are transfers that stand side by side";
        self.report("group", (rank, at), op, format!("{op} {message}"), hint);
    }
}

/// Whether two ops may run as one overlapped pair.
fn overlaps(one: Op, other: Op) -> bool {
    let forwards = [one, other]
        .iter()
        .filter(|op| op.kind == OpKind::Forward)
        .count();
    let gradients = [one, other]
        .iter()
        .filter(|op| op.kind.gives_input_gradient())
        .count();
    forwards == 1 && gradients == 1 && (one.stage, one.unit) != (other.stage, other.unit)
}
