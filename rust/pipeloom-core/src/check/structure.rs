//! Rules about single ops and about the order on one rank: what is there, where, how often, marked
//! how, and before what.

use std::fmt::Display;

use super::Violation;
use crate::engine::{NONE, Program};
use crate::ids::{Rank, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::plan::{NO_GROUP, RankOps};

const RECOMPUTED_FORWARD: u16 = 1 << 8;
const RECOMPUTED_BACKWARD: u16 = 1 << 9;

/// The mark of a kind in a cell.
const fn bit(kind: OpKind) -> u16 {
    1 << kind as u16
}

const GRADIENT: u16 = bit(OpKind::Backward) | bit(OpKind::BackwardInput);
const BACKWARDS: u16 = GRADIENT | bit(OpKind::BackwardWeight);

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
    program: &'a Program<'a>,
    /// For each cell, which kinds have been seen.
    marks: Vec<u16>,
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
    fn report(
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
        if !ops.groups.is_empty() {
            self.groups(rank, ops);
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
    fn groups(&mut self, rank: Rank, ops: &RankOps) {
        let mut highest = None;
        for (at, &op) in ops.ops.iter().enumerate() {
            let group = ops.group(at);
            if group == NO_GROUP {
                continue;
            }
            let continues = at > 0 && ops.group(at - 1) == group;
            let hint = "members of a group are transfers that stand side by side, and groups are \
                        numbered in order";
            if op.kind.is_compute() {
                let message = format!("{op} computes, but is in group {group} of transfers");
                self.report("group", (rank, at), op, message, hint);
            } else if !continues && highest.is_some_and(|highest| group <= highest) {
                let message = format!("{op} is in group {group}, which ended before");
                self.report("group", (rank, at), op, message, hint);
            }
            highest = highest.max(Some(group));
        }
    }

    /// What each stage has of each of its microbatches, now that all was seen.
    fn cells(&mut self) {
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
            for kind in OpKind::ALL
                .into_iter()
                .filter(|&kind| marks & BACKWARDS & bit(kind) != 0)
            {
                let (op, place) = at(self, kind);
                let message = format!("{op} is a backward in a forward-only plan");
                self.report("exactly_once", place, op, message, "leave it out");
            }
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

/// The n-th send and the n-th receive of each channel must name the same tensor.
pub(super) fn channel_pairing(program: &Program<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (channel, [sends, recvs]) in program.channels.iter().zip(program.channel_ends()) {
        let (source, destination) = (channel.source, channel.destination);
        let op = |rank: Rank, at: usize| program.ranks[rank.index()].ops[at];
        let matches = |send: Op, recv: Op| {
            let links = program.stages[send.stage.index()];
            let reader = if channel.backward {
                links.previous
            } else {
                links.next
            };
            reader == recv.stage.0 && send.unit == recv.unit
        };
        let pairs = || {
            sends
                .iter()
                .zip(&recvs)
                .map(|(&s, &r)| (s, op(source, s), r, op(destination, r)))
        };
        let wrong = pairs()
            .filter(|&(_, send, _, recv)| !matches(send, recv))
            .count();
        let first = pairs()
            .enumerate()
            .find(|&(_, (_, send, _, recv))| !matches(send, recv));
        if let Some((n, (send_at, send, recv_at, recv))) = first {
            let more = if wrong > 1 {
                format!(" (and {} more pairs differ)", wrong - 1)
            } else {
                String::new()
            };
            violations.push(Violation {
                rule: "channel_pairing",
                rank: destination,
                position: recv_at as u64,
                op: recv.to_string(),
                message: format!(
                    "transfer {n} from rank {source} to rank {destination} is {send} at position \
                     {send_at} there, but {recv} here{more}"
                ),
                hint: "both ranks name a channel's tensors in the same order".to_owned(),
            });
        }
    }
    violations
}
