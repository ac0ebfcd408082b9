//! [`Costs`]: what ops take in time and memory, as given, and [`Ticks`], the same in integers.
//!
//! Numbers stay as the caller gave them until a shape is known. Then times become integer ticks of
//! `2^-bits` of the caller's unit: whole numbers stay exact with `bits = 0`, fractions get the
//! fewest bits that hold them, at most [`MAX_BITS`], beyond which they are rounded. Memory has a
//! scale of its own.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{Rank, Stage};
use crate::shape::Shape;

/// Most binary digits kept of a fraction.
pub const MAX_BITS: u32 = 20;
/// Largest number of ticks, so that sums of two never overflow.
pub const MAX_TICKS: i64 = 1 << 62;

/// A number as given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A whole number.
    Int(i64),
    /// A fraction, or a whole number written as one.
    Float(f64),
}

/// One number for all, or one for each stage (or rank).
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// The same for all.
    All(Number),
    /// One each.
    Each(Arc<[Number]>),
}

/// One number for all transfers, or one for each (source rank, destination rank).
#[derive(Clone, Debug, PartialEq)]
pub enum Links {
    /// The same for all.
    All(Number),
    /// `pp` rows of `pp` numbers.
    Each(Arc<[Arc<[Number]>]>),
}

/// What ops and transfers cost, in any one unit of time and any one unit of memory.
#[derive(Clone, Debug, PartialEq)]
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

/// Costs of one stage, in ticks and memory ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageTicks {
    /// `F`.
    pub forward: i64,
    /// `B`.
    pub backward: i64,
    /// `I`.
    pub backward_input: i64,
    /// `W`.
    pub backward_weight: i64,
    /// A pair whose forward is this stage's; none: the sum of both.
    pub overlapped: Option<i64>,
    /// Extra of a backward that recomputes.
    pub recompute: i64,
    /// From this stage's rank to the next stage's; 0 on the same rank.
    pub to_next: i64,
    /// From this stage's rank to the previous stage's; 0 on the same rank.
    pub to_previous: i64,
    /// Memory added by `F`.
    pub memory_forward: i64,
    /// Memory added by `I`.
    pub memory_backward_input: i64,
    /// Memory added by `W`.
    pub memory_backward_weight: i64,
    /// Memory added by a recomputed `F`.
    pub memory_recompute: i64,
}

/// Costs of a shape in integers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ticks {
    /// A tick is `2^-time_bits` of the caller's unit of time.
    pub time_bits: u32,
    /// A memory tick is `2^-memory_bits` of the caller's unit of memory.
    pub memory_bits: u32,
    /// One entry a stage.
    pub stages: Vec<StageTicks>,
    /// One entry a rank.
    pub static_memory: Vec<i64>,
}

impl Number {
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

    /// These costs for the stages and ranks of `shape`, in integers.
    ///
    /// # Errors
    /// If they are not valid, a list does not fit the shape, or a number is too large.
    pub fn ticks(&self, shape: &Shape) -> Result<Ticks> {
        self.validate()?;
        self.require_fit(shape)?;
        let time_bits = self.time_bits(shape);
        let memories = self.memories();
        let memory = memories.iter().flat_map(|(_, values)| values.numbers());
        let memory_bits = memory.map(|number| number.bits()).max().unwrap_or(0);
        let stages = (0..shape.num_stages())
            .map(|stage| self.stage_ticks(shape, Stage(stage), time_bits, memory_bits))
            .collect::<Result<_>>()?;
        let static_memory = shape
            .ranks()
            .map(|rank| {
                self.static_memory
                    .ticks("static_memory", rank.index(), memory_bits)
            })
            .collect::<Result<_>>()?;
        Ok(Ticks {
            time_bits,
            memory_bits,
            stages,
            static_memory,
        })
    }

    fn require_fit(&self, shape: &Shape) -> Result<()> {
        let (stages, replica) = (shape.num_stages(), shape.stages_per_replica());
        let per_stage = self
            .times()
            .into_iter()
            .filter_map(|(name, values)| Some((name, values?)))
            .chain(self.memories().into_iter().take(4));
        for (name, values) in per_stage {
            let Values::Each(numbers) = values else {
                continue;
            };
            if numbers.len() != stages as usize && numbers.len() != replica as usize {
                return Err(Error::config(
                    format!(
                        "{name} has {} numbers, but the plan has {stages} stages",
                        numbers.len()
                    ),
                    format!("give one number, or {stages}, one a stage"),
                ));
            }
        }
        let pp = shape.pp() as usize;
        if let Values::Each(numbers) = &self.static_memory
            && numbers.len() != pp
        {
            return Err(Error::config(
                format!("static_memory has {} numbers, but pp={pp}", numbers.len()),
                format!("give one number, or {pp}, one a rank"),
            ));
        }
        for (name, links) in self.links() {
            links.map_or(Ok(()), |links| links.require_fit(name, pp))?;
        }
        Ok(())
    }

    /// Digits that times need. Whole inputs get none, so that their transfers round up to whole
    /// units; otherwise transfers, too, get the digits that hold them.
    fn time_bits(&self, shape: &Shape) -> u32 {
        let times = self.times().into_iter().filter_map(|(_, values)| values);
        let times = times.flat_map(Values::numbers).map(|number| number.bits());
        let links = self.links().into_iter().filter_map(|(_, links)| links);
        let links = links.flat_map(Links::numbers).map(Number::bits);
        if times.clone().chain(links).max().unwrap_or(0) == 0 {
            return 0;
        }
        let latencies = self.latency.numbers().into_iter().map(Number::bits);
        let bytes = (0..shape.num_stages()).flat_map(|stage| {
            [true, false].map(|forward| {
                let peer = shape.peer(Stage(stage), forward);
                peer.map_or(0, |peer| self.byte_bits(shape.rank_of(Stage(stage)), peer))
            })
        });
        times.chain(latencies).chain(bytes).max().unwrap_or(0)
    }

    /// The bytes' time as a ratio of integers, if bytes take time.
    fn byte_ratio(&self, source: Rank, destination: Rank) -> Option<(u128, u128)> {
        let bandwidth = self.bandwidth.as_ref()?.at(source, destination);
        let bytes = self.boundary_bytes.at(source, destination);
        let (up, down) = (bytes.bits(), bandwidth.bits());
        let bytes = u128::try_from(bytes.scaled(up)?).ok()? << down;
        let bandwidth = u128::try_from(bandwidth.scaled(down)?).ok()? << up;
        (bandwidth > 0).then_some((bytes, bandwidth))
    }

    fn byte_bits(&self, source: Rank, destination: Rank) -> u32 {
        let Some((bytes, bandwidth)) = self.byte_ratio(source, destination) else {
            return 0;
        };
        let exact = |bits: &u32| (bytes << bits).is_multiple_of(bandwidth);
        (0..MAX_BITS).find(exact).unwrap_or(MAX_BITS)
    }

    fn transfer(&self, source: Rank, destination: Rank, bits: u32) -> Result<i64> {
        let latency = self.latency.at(source, destination);
        let start = latency
            .scaled(bits)
            .ok_or_else(|| too_large("latency", latency))?;
        let bytes = self.boundary_bytes.at(source, destination);
        if self.bandwidth.is_none() {
            return Ok(start);
        }
        self.byte_ratio(source, destination)
            .and_then(|(bytes, bandwidth)| i64::try_from((bytes << bits).div_ceil(bandwidth)).ok())
            .and_then(|time| start.checked_add(time))
            .filter(|&time| time <= MAX_TICKS)
            .ok_or_else(|| too_large("boundary_bytes", bytes))
    }

    fn stage_ticks(
        &self,
        shape: &Shape,
        stage: Stage,
        bits: u32,
        memory: u32,
    ) -> Result<StageTicks> {
        let at = stage.index();
        let optional = |name, values: &Option<Values>| {
            let ticks = values.as_ref().map(|values| values.ticks(name, at, bits));
            ticks.transpose()
        };
        let transfer = |forward| {
            let peer = shape.peer(stage, forward);
            peer.map_or(Ok(0), |peer| {
                self.transfer(shape.rank_of(stage), peer, bits)
            })
        };
        let forward = self.forward.ticks("forward", at, bits)?;
        let backward_input = self.backward_input.ticks("backward_input", at, bits)?;
        let backward_weight = self.backward_weight.ticks("backward_weight", at, bits)?;
        let both = backward_input + backward_weight;
        Ok(StageTicks {
            forward,
            backward: optional("backward", &self.backward)?.unwrap_or(both),
            backward_input,
            backward_weight,
            overlapped: optional("overlapped", &self.overlapped)?,
            recompute: optional("recompute", &self.recompute)?.unwrap_or(forward),
            to_next: transfer(true)?,
            to_previous: transfer(false)?,
            memory_forward: self.memory_forward.ticks("memory_forward", at, memory)?,
            memory_backward_input: self.memory_backward_input.ticks(
                "memory_backward_input",
                at,
                memory,
            )?,
            memory_backward_weight: self.memory_backward_weight.ticks(
                "memory_backward_weight",
                at,
                memory,
            )?,
            memory_recompute: self
                .memory_recompute
                .ticks("memory_recompute", at, memory)?,
        })
    }
}

impl Ticks {
    /// A time in the caller's unit.
    pub fn time(&self, ticks: i64) -> Number {
        Number::of_ticks(ticks, self.time_bits)
    }

    /// An amount of memory in the caller's unit.
    pub fn memory(&self, ticks: i64) -> Number {
        Number::of_ticks(ticks, self.memory_bits)
    }

    /// Refuses costs whose total over `num_ops` ops could leave 62 bits.
    ///
    /// # Errors
    /// If they could.
    pub fn require_fits(&self, num_ops: u64) -> Result<()> {
        let time = |stage: &StageTicks| {
            [
                stage.forward,
                stage.backward,
                stage.backward_input,
                stage.backward_weight,
                stage.overlapped.unwrap_or(0),
                stage.recompute,
                stage.to_next,
                stage.to_previous,
            ]
            .into_iter()
            .map(i128::from)
            .sum::<i128>()
        };
        let memory = |stage: &StageTicks| {
            [
                stage.memory_forward,
                stage.memory_backward_input,
                stage.memory_backward_weight,
                stage.memory_recompute,
            ]
            .into_iter()
            .map(|ticks| i128::from(ticks).abs())
            .sum::<i128>()
        };
        let largest = |total: &dyn Fn(&StageTicks) -> i128| {
            self.stages.iter().map(total).max().unwrap_or(0) * i128::from(num_ops)
        };
        let fixed = self
            .static_memory
            .iter()
            .map(|&ticks| i128::from(ticks).abs());
        let memory = largest(&memory) + fixed.max().unwrap_or(0);
        for (what, total) in [("time", largest(&time)), ("memory", memory)] {
            if total > i128::from(MAX_TICKS) {
                return Err(Error::config(
                    format!("the {what} of {num_ops} ops at these costs may pass 62 bits"),
                    format!("give costs a larger unit of {what}"),
                ));
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
