//! [`Op`]: one entry of a rank's order.

use std::fmt;

use crate::ids::{Stage, Unit};

/// What an op does. The discriminants are public: they are the `kind` column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum OpKind {
    /// `F`: forward of one stage on one unit.
    Forward = 0,
    /// `B`: full backward: gradients of the input and of the weights.
    Backward = 1,
    /// `I`: the input-gradient half of a split backward (papers often call it B).
    BackwardInput = 2,
    /// `W`: the weight-gradient half of a split backward.
    BackwardWeight = 3,
    /// `SEND_F`: sends the output of the op's own stage to the next stage's rank.
    SendForward = 4,
    /// `RECV_F`: receives the input of the op's own stage from the previous stage's rank.
    RecvForward = 5,
    /// `SEND_B`: sends the input gradient of the op's own stage to the previous stage's rank.
    SendBackward = 6,
    /// `RECV_B`: receives the output gradient of the op's own stage from the next stage's rank.
    RecvBackward = 7,
}

impl OpKind {
    /// All kinds, in the order of their discriminants.
    pub const ALL: [Self; 8] = [
        Self::Forward,
        Self::Backward,
        Self::BackwardInput,
        Self::BackwardWeight,
        Self::SendForward,
        Self::RecvForward,
        Self::SendBackward,
        Self::RecvBackward,
    ];

    /// The letters of PyTorch's action text.
    pub fn text(self) -> &'static str {
        match self {
            Self::Forward => "F",
            Self::Backward => "B",
            Self::BackwardInput => "I",
            Self::BackwardWeight => "W",
            Self::SendForward => "SEND_F",
            Self::RecvForward => "RECV_F",
            Self::SendBackward => "SEND_B",
            Self::RecvBackward => "RECV_B",
        }
    }

    /// Whether the op computes, as opposed to moving a tensor.
    #[inline]
    pub fn is_compute(self) -> bool {
        (self as u8) < Self::SendForward as u8
    }

    /// Whether the op is a send.
    #[inline]
    pub fn is_send(self) -> bool {
        matches!(self, Self::SendForward | Self::SendBackward)
    }

    /// Whether the op is a receive.
    #[inline]
    pub fn is_recv(self) -> bool {
        matches!(self, Self::RecvForward | Self::RecvBackward)
    }

    /// Whether the op produces the gradient that the previous stage waits for: `B` or `I`.
    #[inline]
    pub fn gives_input_gradient(self) -> bool {
        matches!(self, Self::Backward | Self::BackwardInput)
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Marks on an op beside its identity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flags(u8);

impl Flags {
    /// No mark.
    pub const NONE: Self = Self(0);
    /// A forward that keeps only its input, or a backward that first runs the forward again.
    pub const RECOMPUTE: Self = Self(1);
    /// First op of an overlapped pair; the second stands right behind it.
    pub const PAIR_FIRST: Self = Self(2);
    /// Second op of an overlapped pair.
    pub const PAIR_SECOND: Self = Self(4);
    /// A transfer that is posted and completed together with the transfer before it: both are of
    /// one group.
    pub const JOINED: Self = Self(8);

    /// Whether all marks of `other` are set.
    #[inline]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These marks and those of `other`.
    #[inline]
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These marks without those of `other`.
    #[inline]
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// One entry of a rank's order: 12 bytes. Its text is PyTorch's: `2F0`, `1SEND_B3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Op {
    /// The stage that computes, or that owns the tensor's end of a transfer.
    pub stage: Stage,
    /// The microbatch (or piece of one) it works on.
    pub unit: Unit,
    /// What it does.
    pub kind: OpKind,
    /// Marks: recompute, membership of an overlapped pair.
    pub flags: Flags,
}

impl Op {
    /// An op without marks.
    #[inline]
    pub fn new(stage: Stage, kind: OpKind, unit: Unit) -> Self {
        Self {
            stage,
            unit,
            kind,
            flags: Flags::NONE,
        }
    }

    /// Whether both are the same op, marks apart.
    #[inline]
    pub fn same(self, other: Self) -> bool {
        self.kind == other.kind && self.stage == other.stage && self.unit == other.unit
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind, self.unit)
    }
}
