//! [`Costs`]: what ops take in time and memory, as given, and [`Ticks`], the same in integers.
//!
//! Numbers stay as the caller gave them until a shape is known. Then times become integer ticks of
//! `2^-bits` of the caller's unit: whole numbers stay exact with `bits = 0`, fractions get the
//! fewest bits that hold them, at most [`MAX_BITS`], beyond which they are rounded. Memory has a
//! scale of its own.

mod ticks;

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::Rank;

pub use ticks::{StageTicks, Ticks};

/// Most binary digits kept of a fraction.
pub const MAX_BITS: u32 = 20;
/// Largest number of ticks, so that sums of two never overflow.
pub const MAX_TICKS: i64 = 1 << 62;

/// A number as given. One written as a whole number and one written as a fraction are equal if they
/// are the same number.
#[derive(Clone, Copy, Debug)]
pub enum Number {
    /// A whole number.
    Int(i64),
    /// A fraction, or a whole number written as one.
    Float(f64),
}

/// One number for all, or one for each stage (or rank).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Values {
    /// The same for all.
    All(Number),
    /// One each.
    Each(Arc<[Number]>),
}

/// One number for all transfers, or one for each (source rank, destination rank).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Links {
    /// The same for all.
    All(Number),
    /// `pp` rows of `pp` numbers.
    Each(Arc<[Arc<[Number]>]>),
}

/// What ops and transfers cost, in any one unit of time and any one unit of memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Costs {
    /// Time of `F`.
    pub forward: Values,
    /// Time of `I`.
    pub backward_input: Values,
    /// Time of `W`.
    pub backward_weight: Values,
    /// Time of `B`; none: `I + W`.
    pub backward: Option<Values>,
    /// Time of an overlapped pair, by the forward's stage; none: the sum of both.
    pub overlapped: Option<Values>,
    /// Extra time of a backward that runs its forward again; none: `F`.
    pub recompute: Option<Values>,
    /// Time of a transfer before its bytes.
    pub latency: Links,
    /// Bytes a unit of time; none: bytes take no time.
    pub bandwidth: Option<Links>,
    /// Bytes of a transfer.
    pub boundary_bytes: Links,
    /// Memory that `F` adds.
    pub memory_forward: Values,
    /// Memory that `I` adds (`B` adds this and [`Costs::memory_backward_weight`]).
    pub memory_backward_input: Values,
    /// Memory that `W` adds.
    pub memory_backward_weight: Values,
    /// Memory that a recomputed `F` adds; its backward first adds the rest.
    pub memory_recompute: Values,
    /// Memory of parameters and optimizer, one for each rank.
    pub static_memory: Values,
}

impl Default for Costs {
    fn default() -> Self {
        let all = |value| Values::All(Number::Int(value));
        Self {
            forward: all(1),
            backward_input: all(1),
            backward_weight: all(1),
            backward: None,
            overlapped: None,
            recompute: None,
            latency: Links::All(Number::Int(0)),
            bandwidth: None,
            boundary_bytes: Links::All(Number::Int(0)),
            memory_forward: all(1),
            memory_backward_input: all(0),
            memory_backward_weight: all(-1),
            memory_recompute: all(0),
            static_memory: all(0),
        }
    }
}

impl Number {
    /// Whether it is whole, and its bits: the same for equal numbers.
    #[allow(clippy::cast_possible_truncation)] // whole and in range
    fn key(self) -> (bool, u64) {
        match self {
            Self::Int(value) => (true, value.cast_unsigned()),
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 9.2e18 => {
                (true, (value as i64).cast_unsigned())
            }
            Self::Float(value) => (false, value.to_bits()),
        }
    }

    fn as_f64(self) -> f64 {
        match self {
            #[allow(clippy::cast_precision_loss)] // only its sign and its text matter
            Self::Int(value) => value as f64,
            Self::Float(value) => value,
        }
    }

    /// Fewest binary digits after the point that hold it, at most [`MAX_BITS`].
    fn bits(self) -> u32 {
        let Self::Float(value) = self else { return 0 };
        let holds = |bits: &u32| (value * f64::from(1_u32 << bits)).fract() == 0.0;
        (0..MAX_BITS).find(holds).unwrap_or(MAX_BITS)
    }

    /// The number of the caller's units that ticks of `2^-bits` come to: whole if `bits` is 0.
    #[allow(clippy::cast_precision_loss)] // fractions are rounded beyond 2^-20 already
    pub fn of_ticks(ticks: i64, bits: u32) -> Self {
        if bits == 0 {
            Self::Int(ticks)
        } else {
            Self::Float(ticks as f64 / f64::from(1_u32 << bits))
        }
    }

    /// In units of `2^-bits`, if that is in range.
    fn scaled(self, bits: u32) -> Option<i64> {
        let ticks = match self {
            Self::Int(value) => value.checked_mul(1 << bits)?,
            Self::Float(value) => {
                let ticks = (value * f64::from(1_u32 << bits)).round();
                #[allow(clippy::cast_possible_truncation)] // the range is checked first
                let whole = (ticks.abs() < 4.0e18).then_some(ticks as i64);
                whole?
            }
        };
        (ticks.abs() <= MAX_TICKS).then_some(ticks)
    }
}

impl PartialEq for Number {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Number {}

impl Hash for Number {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Int(value) => value.fmt(f),
            Self::Float(value) => write!(f, "{value:?}"),
        }
    }
}

impl Values {
    fn numbers(&self) -> &[Number] {
        match self {
            Self::All(number) => std::slice::from_ref(number),
            Self::Each(numbers) => numbers,
        }
    }

    fn at(&self, index: usize) -> Number {
        match self {
            Self::All(number) => *number,
            // The second replica has the first one's layers, so a list may stop after those.
            Self::Each(numbers) => numbers[index % numbers.len()],
        }
    }

    fn ticks(&self, name: &str, index: usize, bits: u32) -> Result<i64> {
        let number = self.at(index);
        number.scaled(bits).ok_or_else(|| too_large(name, number))
    }
}

impl Links {
    fn numbers(&self) -> Vec<Number> {
        match self {
            Self::All(number) => vec![*number],
            Self::Each(rows) => rows.iter().flat_map(|row| row.iter().copied()).collect(),
        }
    }

    fn at(&self, source: Rank, destination: Rank) -> Number {
        match self {
            Self::All(number) => *number,
            Self::Each(rows) => rows[source.index()][destination.index()],
        }
    }

    fn require_fit(&self, name: &str, pp: usize) -> Result<()> {
        let Self::Each(rows) = self else {
            return Ok(());
        };
        let bad_row = rows.iter().position(|row| row.len() != pp);
        let message = match bad_row {
            _ if rows.len() != pp => format!("{name} has {} rows, but pp={pp}", rows.len()),
            Some(at) => format!("{name}[{at}] has {} numbers, but pp={pp}", rows[at].len()),
            None => return Ok(()),
        };
        Err(Error::config(
            message,
            format!("give one number, or {pp} rows (sources) of {pp} (destinations)"),
        ))
    }
}

fn too_large(name: &str, number: Number) -> Error {
    Error::config(
        format!("{name}={number} is too large: times and memory are held in 62 bits"),
        "use a larger unit",
    )
}

impl Costs {
    fn times(&self) -> [(&'static str, Option<&Values>); 6] {
        [
            ("forward", Some(&self.forward)),
            ("backward_input", Some(&self.backward_input)),
            ("backward_weight", Some(&self.backward_weight)),
            ("backward", self.backward.as_ref()),
            ("overlapped", self.overlapped.as_ref()),
            ("recompute", self.recompute.as_ref()),
        ]
    }

    fn links(&self) -> [(&'static str, Option<&Links>); 3] {
        [
            ("latency", Some(&self.latency)),
            ("bandwidth", self.bandwidth.as_ref()),
            ("boundary_bytes", Some(&self.boundary_bytes)),
        ]
    }

    fn memories(&self) -> [(&'static str, &Values); 5] {
        [
            ("memory_forward", &self.memory_forward),
            ("memory_backward_input", &self.memory_backward_input),
            ("memory_backward_weight", &self.memory_backward_weight),
            ("memory_recompute", &self.memory_recompute),
            ("static_memory", &self.static_memory),
        ]
    }

    /// Refuses what no shape can make sense of.
    ///
    /// # Errors
    /// If a number is not finite, or a time, size or bandwidth is negative, or a bandwidth 0.
    pub fn validate(&self) -> Result<()> {
        for (name, values) in self.times() {
            for &number in values.map_or(&[][..], Values::numbers) {
                require_not_negative(name, number)?;
            }
        }
        for (name, values) in self.links() {
            for number in values.map_or_else(Vec::new, Links::numbers) {
                require_not_negative(name, number)?;
                if name == "bandwidth" && number.as_f64() * f64::from(1 << MAX_BITS) < 1.0 {
                    return Err(Error::config(
                        format!("bandwidth={number} is too small: it must be at least 2^-20"),
                        "give bytes a unit of time, or None if bytes take no time",
                    ));
                }
            }
        }
        for (name, values) in self.memories() {
            for &number in values.numbers() {
                require_finite(name, number)?;
            }
        }
        Ok(())
    }
}

fn require_finite(name: &str, number: Number) -> Result<()> {
    if number.as_f64().is_finite() {
        return Ok(());
    }
    Err(Error::config(
        format!("{name}={number} is not a finite number"),
        format!("give {name} a finite number"),
    ))
}

fn require_not_negative(name: &str, number: Number) -> Result<()> {
    require_finite(name, number)?;
    if number.as_f64() >= 0.0 {
        return Ok(());
    }
    Err(Error::config(
        format!("{name}={number} is negative"),
        format!("give {name} a number of at least 0"),
    ))
}
