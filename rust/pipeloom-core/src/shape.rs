//! [`Shape`]: how many ranks, chunks, microbatches, and which rank holds which stage.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank, Stage, Unit};

/// Most stages a plan may have: room for any cluster, and far from overflow.
pub const MAX_STAGES: u64 = 1 << 24;
/// Most units (microbatches times pieces) of one step.
pub const MAX_UNITS: u64 = 1 << 31;

/// Which (rank, chunk) holds a stage.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Stage `s` is chunk `s / pp` of rank `s % pp`.
    Loop,
    /// Zig-zag: odd chunks run backwards over the ranks (`v`; with more than two chunks, `wave`).
    V,
    /// Two replicas in opposite directions: replica 0 placed as `Loop`, replica 1 mirrored.
    Bidirectional,
    /// Anything else, read from a plan's text: the rank and chunk of each stage.
    Table(Arc<[(Rank, Chunk)]>),
}

impl Placement {
    /// Reads a placement's name.
    ///
    /// # Errors
    /// If the name is unknown.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "loop" => Ok(Self::Loop),
            "v" | "wave" => Ok(Self::V),
            "bidirectional" => Ok(Self::Bidirectional),
            _ => Err(Error::config(
                format!("placement {name:?} is unknown"),
                "one of \"loop\", \"v\", \"wave\" (v with more than two chunks), \"bidirectional\"",
            )),
        }
    }

    /// Its name; `table` for one that has none.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::V => "v",
            Self::Bidirectional => "bidirectional",
            Self::Table(_) => "table",
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The shape of a pipeline. Built by [`Shape::new`], so its numbers are in range.
///
/// Equal if their numbers are equal and each stage has the same place, whatever the placement is
/// called: with one rank or one chunk a zig-zag is a loop.
#[derive(Clone, Debug, Eq)]
pub struct Shape {
    pp: u32,
    vp: u32,
    num_microbatches: u32,
    num_seq_pieces: u32,
    placement: Placement,
}

impl PartialEq for Shape {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Hash for Shape {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

impl Shape {
    /// What makes a shape: its numbers, and one name for each way to place stages.
    fn key(&self) -> ([u32; 4], &Placement) {
        let straight = self.pp == 1 || self.vp == 1;
        let placement = match &self.placement {
            Placement::V if straight => &Placement::Loop,
            placement => placement,
        };
        let numbers = [self.pp, self.vp, self.num_microbatches, self.num_seq_pieces];
        (numbers, placement)
    }

    /// A shape of `pp` ranks with `vp` chunks each.
    ///
    /// # Errors
    /// If a number is zero or the products are beyond [`MAX_STAGES`] or [`MAX_UNITS`].
    pub fn new(
        pp: u32,
        vp: u32,
        num_microbatches: u32,
        num_seq_pieces: u32,
        placement: Placement,
    ) -> Result<Self> {
        for (name, value) in [
            ("pp", pp),
            ("vp", vp),
            ("num_microbatches", num_microbatches),
            ("num_seq_pieces", num_seq_pieces),
        ] {
            if value == 0 {
                return Err(Error::config(
                    format!("{name} is 0, but must be at least 1"),
                    format!("give {name} a positive number"),
                ));
            }
        }
        let replicas = if placement == Placement::Bidirectional {
            2
        } else {
            1
        };
        let stages = u64::from(pp) * u64::from(vp) * replicas;
        if stages > MAX_STAGES {
            return Err(Error::config(
                format!("pp={pp} times vp={vp} makes {stages} stages, more than {MAX_STAGES}"),
                "lower pp or vp",
            ));
        }
        let units = u64::from(num_microbatches) * u64::from(num_seq_pieces);
        if units > MAX_UNITS || units * u64::from(vp) > MAX_UNITS {
            return Err(Error::config(
                format!(
                    "num_microbatches={num_microbatches} times num_seq_pieces={num_seq_pieces} \
                     times vp={vp} is more than {MAX_UNITS}"
                ),
                "lower num_microbatches",
            ));
        }
        if let Placement::Table(table) = &placement {
            let fits = table
                .iter()
                .all(|&(rank, chunk)| rank.0 < pp && chunk.0 < vp);
            if !fits || table.is_empty() {
                return Err(Error::config(
                    format!("the placement table does not fit pp={pp}, vp={vp}"),
                    "each stage needs a rank below pp and a chunk below vp",
                ));
            }
        }
        Ok(Self {
            pp,
            vp,
            num_microbatches,
            num_seq_pieces,
            placement,
        })
    }

    /// Number of ranks.
    #[inline]
    pub fn pp(&self) -> u32 {
        self.pp
    }

    /// Number of chunks a rank holds of one replica (the most, if ranks differ).
    #[inline]
    pub fn vp(&self) -> u32 {
        self.vp
    }

    /// Number of microbatches of a step, over all replicas.
    #[inline]
    pub fn num_microbatches(&self) -> u32 {
        self.num_microbatches
    }

    /// Number of pieces each sequence is cut into.
    #[inline]
    pub fn num_seq_pieces(&self) -> u32 {
        self.num_seq_pieces
    }

    /// Number of units: microbatches times pieces.
    #[inline]
    pub fn num_units(&self) -> u32 {
        self.num_microbatches * self.num_seq_pieces
    }

    /// Which rank holds which stage.
    #[inline]
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Number of copies of the model: 2 for bidirectional schedules.
    #[inline]
    pub fn num_replicas(&self) -> u32 {
        if self.placement == Placement::Bidirectional {
            2
        } else {
            1
        }
    }

    /// Number of stages of one replica.
    #[inline]
    pub fn stages_per_replica(&self) -> u32 {
        match &self.placement {
            Placement::Table(table) => u32::try_from(table.len()).unwrap_or(u32::MAX),
            Placement::Loop | Placement::V | Placement::Bidirectional => self.pp * self.vp,
        }
    }

    /// Number of stages, over all replicas.
    #[inline]
    pub fn num_stages(&self) -> u32 {
        self.stages_per_replica() * self.num_replicas()
    }

    /// Number of chunks on each rank, over all replicas.
    #[inline]
    pub fn chunks_per_rank(&self) -> u32 {
        self.vp * self.num_replicas()
    }

    /// The rank that holds `stage`.
    #[inline]
    pub fn rank_of(&self, stage: Stage) -> Rank {
        let (s, pp) = (stage.0, self.pp);
        match &self.placement {
            Placement::Loop => Rank(s % pp),
            Placement::V => Rank(if (s / pp) % 2 == 0 {
                s % pp
            } else {
                pp - 1 - s % pp
            }),
            Placement::Bidirectional => {
                let mirrored = s >= pp * self.vp;
                Rank(if mirrored { pp - 1 - s % pp } else { s % pp })
            }
            Placement::Table(table) => table[stage.index()].0,
        }
    }

    /// The chunk that `stage` is on its rank.
    #[inline]
    pub fn chunk_of(&self, stage: Stage) -> Chunk {
        match &self.placement {
            Placement::Loop | Placement::V | Placement::Bidirectional => Chunk(stage.0 / self.pp),
            Placement::Table(table) => table[stage.index()].1,
        }
    }

    /// The stage that is `chunk` of `rank`, if there is one.
    #[inline]
    pub fn stage_at(&self, rank: Rank, chunk: Chunk) -> Option<Stage> {
        if rank.0 >= self.pp || chunk.0 >= self.chunks_per_rank() {
            return None;
        }
        let (r, c, pp) = (rank.0, chunk.0, self.pp);
        match &self.placement {
            Placement::Loop => Some(Stage(c * pp + r)),
            Placement::V => Some(Stage(c * pp + if c % 2 == 0 { r } else { pp - 1 - r })),
            Placement::Bidirectional => {
                Some(Stage(c * pp + if c < self.vp { r } else { pp - 1 - r }))
            }
            Placement::Table(table) => {
                let at = table.iter().position(|&place| place == (rank, chunk))?;
                u32::try_from(at).ok().map(Stage)
            }
        }
    }

    /// The stage whose output is `stage`'s input; none for the first stage of a replica.
    #[inline]
    pub fn previous(&self, stage: Stage) -> Option<Stage> {
        let first = stage.0.is_multiple_of(self.stages_per_replica());
        if first {
            None
        } else {
            Some(Stage(stage.0 - 1))
        }
    }

    /// The stage that takes `stage`'s output; none for the last stage of a replica.
    #[inline]
    pub fn next(&self, stage: Stage) -> Option<Stage> {
        let last = (stage.0 + 1).is_multiple_of(self.stages_per_replica());
        if last { None } else { Some(Stage(stage.0 + 1)) }
    }

    /// The units that `stage` runs: all, or its replica's half.
    #[inline]
    pub fn units_of(&self, stage: Stage) -> std::ops::Range<u32> {
        let units = self.num_units();
        if self.num_replicas() == 1 {
            return 0..units;
        }
        let half = self.num_microbatches / 2 * self.num_seq_pieces;
        if stage.0 < self.stages_per_replica() {
            0..half
        } else {
            half..units
        }
    }

    /// Number of forwards of a rank: each of its stages runs each of its units once.
    pub fn forwards_of(&self, rank: Rank) -> u32 {
        (0..self.chunks_per_rank())
            .filter_map(|chunk| self.stage_at(rank, Chunk(chunk)))
            .map(|stage| self.units_of(stage))
            .map(|units| units.end - units.start)
            .sum()
    }

    /// The other rank of a transfer that `stage` takes part in, if it crosses ranks: the rank of
    /// the next stage (`forward` send or backward receive) or of the previous one.
    #[inline]
    pub fn peer(&self, stage: Stage, towards_next: bool) -> Option<Rank> {
        let other = if towards_next {
            self.next(stage)
        } else {
            self.previous(stage)
        }?;
        let (mine, theirs) = (self.rank_of(stage), self.rank_of(other));
        (mine != theirs).then_some(theirs)
    }

    /// A unit as (microbatch, piece).
    #[inline]
    pub fn split_unit(&self, unit: Unit) -> (u32, u32) {
        if self.num_seq_pieces == 1 {
            (unit.0, 0)
        } else {
            (unit.0 / self.num_seq_pieces, unit.0 % self.num_seq_pieces)
        }
    }

    /// The ranks, in order.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.pp).map(Rank)
    }
}
