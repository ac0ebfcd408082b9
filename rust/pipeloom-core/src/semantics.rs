//! [`Semantics`]: what a send and a receive may do to the program, from kindest to strictest.

use std::fmt;

use crate::error::{Error, Result};

/// How transfers behave. A plan's progress and times are always under one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Semantics {
    /// A send never waits; its message can be used at the producer's end plus the transfer time.
    Buffered = 0,
    /// Transfers go on one FIFO for each end of a channel and the program goes on.
    Streams = 1,
    /// Transfers go on the rank's one FIFO and the program goes on; a head completes when its
    /// match heads the peer's FIFO; a compute op waits for its own receive.
    SingleStream = 2,
    /// A group's members are posted together and matched singly; the program goes on when all
    /// are done.
    Batched = 3,
    /// A transfer blocks the program until both ranks stand at it; members of a group go one by
    /// one.
    Rendezvous = 4,
}

impl Semantics {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Self; 5] = [
        Self::Buffered,
        Self::Streams,
        Self::SingleStream,
        Self::Batched,
        Self::Rendezvous,
    ];

    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Buffered => "buffered",
            Self::Streams => "streams",
            Self::SingleStream => "single_stream",
            Self::Batched => "batched",
            Self::Rendezvous => "rendezvous",
        }
    }

    /// Reads a name.
    ///
    /// # Errors
    /// If the name is unknown.
    pub fn from_name(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name).ok_or_else(|| {
            Error::config(
                format!("semantics {name:?} is unknown"),
                "one of \"buffered\", \"streams\", \"single_stream\", \"batched\", \"rendezvous\"",
            )
        })
    }
}

impl fmt::Display for Semantics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a plan's transfers were placed; a plan without transfers has no style.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Style {
    /// Synchronous calls, even ranks sending first.
    EvenOdd,
    /// The `Fifo` order with consecutive transfers posted together.
    Batched,
    /// One ordered stream a rank.
    Fifo,
    /// One stream a channel, receives posted early.
    Streams,
    /// Read from a text: promises what it was found to keep.
    Text,
}

impl Style {
    /// The styles that [`crate::lower`] makes.
    pub const ALL: [Self; 4] = [Self::EvenOdd, Self::Batched, Self::Fifo, Self::Streams];

    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::EvenOdd => "even_odd",
            Self::Batched => "batched",
            Self::Fifo => "fifo",
            Self::Streams => "streams",
            Self::Text => "text",
        }
    }

    /// Under which semantics its plans promise to progress.
    pub fn promises(self) -> &'static [Semantics] {
        match self {
            Self::Fifo => &Semantics::ALL,
            Self::Batched | Self::EvenOdd => {
                &[Semantics::Buffered, Semantics::Streams, Semantics::Batched]
            }
            Self::Streams => &[Semantics::Buffered, Semantics::Streams],
            Self::Text => &[Semantics::Buffered],
        }
    }
}
