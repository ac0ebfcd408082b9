//! A plan as text: single ops in PyTorch's action text (here), PyTorch's CSV ([`csv`]), and our
//! own files ([`saved`]).
//!
//! ```
//! use pipeloom_core::op::{Op, OpKind};
//!
//! let op: Op = "1SEND_B3".parse()?;
//! assert_eq!((op.stage.0, op.kind, op.unit.0), (1, OpKind::SendBackward, 3));
//! assert!("2F0garbage".parse::<Op>().is_err());
//! # Ok::<(), pipeloom_core::error::Error>(())
//! ```

pub mod csv;
mod infer;
pub mod saved;

use std::str::FromStr;

use crate::error::{Error, Result};
use crate::ids::{Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::rank_ops::{RankOps, join};

/// What a word of a plan's text stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// One op.
    One(Op),
    /// Two ops that run overlapped: a forward and a backward.
    Pair(Op, Op),
    /// An action of PyTorch that a plan has no use for: `UNSHARD`, `RESHARD`, `REDUCE_GRAD`.
    Sharding,
}

const PAIR_END: &str = ")OVERLAP_F_B";
const SHARDING: [&str; 3] = ["UNSHARD", "RESHARD", "REDUCE_GRAD"];

impl Action {
    /// Reads an action. The whole text must match: `2F0garbage` is wrong, not `2F0`.
    ///
    /// # Errors
    /// If it is no action.
    pub fn parse(text: &str) -> Result<Self> {
        read_action(text).map_err(|hint| not_an_action(text, hint))
    }
}

impl FromStr for Op {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match read_action(text) {
            Ok(Action::One(op)) => Ok(op),
            Ok(Action::Pair(..)) => Err(not_an_action(text, "a pair is two ops; give one of them")),
            Ok(Action::Sharding) => Err(not_an_action(text, "a plan has no sharding actions")),
            Err(hint) => Err(not_an_action(text, hint)),
        }
    }
}

fn not_an_action(text: &str, hint: &str) -> Error {
    Error::parse(format!("{} is not an op", shown(text)), hint)
}

/// A text as an error shows it: quoted, escaped, not too long.
pub(crate) fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(40).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

/// The action, or a hint.
fn read_action(text: &str) -> std::result::Result<Action, &'static str> {
    if let Some(inner) = text.strip_prefix('(') {
        let pair = inner.strip_suffix(PAIR_END);
        let Some((first, second)) = pair.and_then(|pair| pair.split_once(';')) else {
            return Err("a pair is written as in \"(0F3;7B1)OVERLAP_F_B\"");
        };
        return match (read_action(first)?, read_action(second)?) {
            (Action::One(first), Action::One(second))
                if first.kind == OpKind::Forward && second.kind.gives_input_gradient() =>
            {
                Ok(paired(first, second))
            }
            _ => Err("a pair is a forward, then a backward, as in \"(0F3;7B1)OVERLAP_F_B\""),
        };
    }
    let (stage, rest) = split_number(text).ok_or("an op begins with its stage, as in \"2F0\"")?;
    let letters = rest.bytes().take_while(|b| !b.is_ascii_digit()).count();
    let (name, number) = rest
        .split_at_checked(letters)
        .ok_or("an op is stage, kind, microbatch, as in \"2F0\"")?;
    if SHARDING.contains(&name) && number.is_empty() {
        return Ok(Action::Sharding);
    }
    let kind = OpKind::ALL.into_iter().find(|kind| kind.text() == name);
    let kind = kind.ok_or("kinds are F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B")?;
    match split_number(number) {
        Some((unit, "")) => Ok(Action::One(Op::new(Stage(stage), kind, Unit(unit)))),
        _ => Err("an op ends with its microbatch, as in \"2F0\""),
    }
}

/// Two ops as an overlapped pair.
fn paired(first: Op, second: Op) -> Action {
    let flagged = |op: Op, flag| Op {
        flags: op.flags.with(flag),
        ..op
    };
    Action::Pair(
        flagged(first, Flags::PAIR_FIRST),
        flagged(second, Flags::PAIR_SECOND),
    )
}

/// A leading number that fits `u32`, and the rest.
fn split_number(text: &str) -> Option<(u32, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, rest) = text.split_at(digits);
    number.parse().ok().map(|number| (number, rest))
}

/// Appends an op's text.
pub(crate) fn push_op(text: &mut String, op: Op) {
    push_number(text, op.stage.0);
    text.push_str(op.kind.text());
    push_number(text, op.unit.0);
}

fn push_number(text: &mut String, mut number: u32) {
    let mut digits = [0; 10];
    let mut from = digits.len();
    loop {
        from -= 1;
        digits[from] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    text.extend(digits[from..].iter().copied().map(char::from));
}

/// Ops of one rank as they are read, transfers grouped as told.
#[derive(Default)]
struct Reader {
    ranks: RankOps,
}

impl Reader {
    fn compute(&mut self, op: Op) {
        self.ranks.ops.push(op);
    }

    fn group(&mut self, transfers: &[Op]) {
        let first = self.ranks.ops.len();
        self.ranks.ops.extend_from_slice(transfers);
        join(&mut self.ranks.ops[first..]);
    }

    fn push(&mut self, op: Op) {
        if op.kind.is_compute() {
            self.compute(op);
        } else {
            self.group(&[op]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn wrong(text: &str) {
        let error = text.parse::<Op>().unwrap_err();
        assert_eq!(error.kind, crate::error::ErrorKind::Parse);
        assert!(!error.hint.is_empty());
    }

    #[test]
    fn every_kind_round_trips() {
        for kind in OpKind::ALL {
            for (stage, unit) in [(0, 0), (3, 17), (u32::MAX, u32::MAX)] {
                let op = Op::new(Stage(stage), kind, Unit(unit));
                let text = op.to_string();
                assert_eq!(text.parse::<Op>().unwrap(), op);
                let mut pushed = String::new();
                push_op(&mut pushed, op);
                assert_eq!(pushed, text);
            }
        }
    }

    #[test]
    fn only_a_whole_match_is_an_op() {
        for text in [
            "",
            "F",
            "2F",
            "F0",
            "2F0garbage",
            "0F-1",
            "0F1,2",
            " 2F0",
            "2F0 ",
            "2f0",
            "2X0",
            "2FF0",
            "2SEND_F",
            "2SEND0",
            "-1F0",
            "+1F0",
            "4294967296F0",
            "0F4294967296",
            "٣F0",
            "2F٣",
            "é",
            "0UNSHARD",
            "(0F0;1B0)OVERLAP_F_B",
            "2\u{0}F0",
        ] {
            wrong(text);
        }
    }

    #[test]
    fn pairs_are_a_forward_and_a_backward() {
        let Action::Pair(first, second) = Action::parse("(0F3;7B1)OVERLAP_F_B").unwrap() else {
            panic!("a pair");
        };
        assert!(first.flags.has(Flags::PAIR_FIRST) && second.flags.has(Flags::PAIR_SECOND));
        assert_eq!((first.stage.0, second.unit.0), (0, 1));
        for text in [
            "(0F3;7B1)",
            "(0F3)OVERLAP_F_B",
            "(7B1;0F3)OVERLAP_F_B",
            "(0F3;7W1)OVERLAP_F_B",
            "(0F3;7B1)OVERLAP_F_B ",
            "((0F3;7B1)OVERLAP_F_B;7B1)OVERLAP_F_B",
            "(0F3;7B1;)OVERLAP_F_B",
            "(;)OVERLAP_F_B",
            "(",
            ")OVERLAP_F_B",
            "(0UNSHARD;7B1)OVERLAP_F_B",
        ] {
            assert!(Action::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sharding_actions_are_known() {
        for text in ["0UNSHARD", "3RESHARD", "12REDUCE_GRAD"] {
            assert_eq!(Action::parse(text).unwrap(), Action::Sharding);
        }
        assert!(Action::parse("0UNSHARD1").is_err());
    }
}
