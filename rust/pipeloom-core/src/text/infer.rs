//! The shape of a plan that is known by its ops alone.

use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank, Stage};
use crate::op::{Op, OpKind};
use crate::plan::RankOps;
use crate::schedules::Params;
use crate::shape::{Placement, Shape};
use crate::violation::Violation;

/// The shape and the parameters that follow from all ranks' ops.
///
/// # Errors
/// If a stage or microbatch is missing or out of proportion, or a stage is on two ranks.
pub(super) fn shape(ranks: &[RankOps]) -> Result<(Shape, Params)> {
    let seen = Seen::collect(ranks)?;
    let table = seen.table(ranks)?;
    let pp = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    let (vp, placement) = recognise(pp, &table, &seen);
    let shape = Shape::new(pp, vp, seen.units, 1, placement)?;
    let params = Params {
        forward_only: seen.forward_only,
        ..Params::default()
    };
    Ok((shape, params))
}

/// What the ops name, in numbers.
struct Seen {
    stages: usize,
    units: u32,
    forward_only: bool,
    /// By stage: forwards, and the range of their units.
    forwards: Vec<(u32, u32, u32)>,
}

impl Seen {
    fn collect(ranks: &[RankOps]) -> Result<Self> {
        let total: usize = ranks.iter().map(|rank| rank.ops.len()).sum();
        let (mut stages, mut units, mut forward_only) = (0, 0, true);
        for (rank, at, op) in located(ranks) {
            // A stage has a forward and a microbatch has one too: both are fewer than the ops.
            if op.stage.index() >= total || op.unit.index() >= total {
                return Err(refused(
                    "placement",
                    (rank, at, op),
                    format!(
                        "{} is out of proportion: the plan has {total} ops in all",
                        if op.stage.index() >= total {
                            format!("stage {}", op.stage)
                        } else {
                            format!("microbatch {}", op.unit)
                        }
                    ),
                    "stages and microbatches are numbered from 0 without gaps",
                ));
            }
            stages = stages.max(op.stage.index() + 1);
            units = units.max(op.unit.0 + 1);
            forward_only &= matches!(
                op.kind,
                OpKind::Forward | OpKind::SendForward | OpKind::RecvForward
            );
        }
        if total == 0 {
            return Err(Error::parse(
                "the text has no ops",
                "each row has the ops of one rank, as in \"0F0,0B0\"",
            ));
        }
        let mut forwards = vec![(0, u32::MAX, 0); stages];
        for (_, _, op) in located(ranks) {
            if op.kind == OpKind::Forward {
                let (count, first, last) = &mut forwards[op.stage.index()];
                *count += 1;
                *first = op.unit.0.min(*first);
                *last = op.unit.0.max(*last);
            }
        }
        Ok(Self {
            stages,
            units,
            forward_only,
            forwards,
        })
    }

    /// The rank and chunk of each stage.
    fn table(&self, ranks: &[RankOps]) -> Result<Vec<(Rank, Chunk)>> {
        let mut home: Vec<Option<Rank>> = vec![None; self.stages];
        for (rank, at, op) in located(ranks) {
            let known = *home[op.stage.index()].get_or_insert(rank);
            if known != rank {
                return Err(refused(
                    "placement",
                    (rank, at, op),
                    format!("stage {} is on rank {known} already", op.stage),
                    "all ops of a stage, transfers too, stand on the rank that holds it",
                ));
            }
        }
        let mut chunks = vec![0; ranks.len()];
        let place = |(stage, home): (usize, Option<Rank>)| {
            let Some(rank) = home.filter(|_| self.forwards[stage].0 > 0) else {
                return Err(Error::check(
                    format!(
                        "no rank runs a forward of stage {stage}, but stage {} is named",
                        self.stages - 1
                    ),
                    "stages are numbered from 0 without gaps",
                    Vec::new(),
                ));
            };
            let chunk = Chunk(chunks[rank.index()]);
            chunks[rank.index()] += 1;
            Ok((rank, chunk))
        };
        let table: Vec<(Rank, Chunk)> = home
            .into_iter()
            .enumerate()
            .map(place)
            .collect::<Result<_>>()?;
        if let Some(idle) = chunks.iter().position(|&chunks| chunks == 0) {
            return Err(Error::check(
                format!("row {idle} has no ops: rank {idle} holds no stage"),
                "each row has the ops of one rank; leave out ranks without stages",
                Vec::new(),
            ));
        }
        Ok(table)
    }

    /// Whether the two halves of the stages run the two halves of the microbatches.
    fn two_replicas(&self) -> bool {
        let half = self.units / 2;
        let (first, second) = self.forwards.split_at(self.stages / 2);
        self.stages.is_multiple_of(2)
            && self.units.is_multiple_of(2)
            && first.iter().all(|&(_, _, last)| last < half)
            && second.iter().all(|&(_, first, _)| first >= half)
    }
}

/// Chunks a rank and the placement: one with a name if it fits.
fn recognise(pp: u32, table: &[(Rank, Chunk)], seen: &Seen) -> (u32, Placement) {
    let vp = table
        .iter()
        .map(|(_, chunk)| chunk.0 + 1)
        .max()
        .unwrap_or(1);
    let two = seen.two_replicas() && vp.is_multiple_of(2);
    let named = [
        (two, vp / 2, Placement::Bidirectional),
        (!two, vp, Placement::Loop),
        (!two, vp, Placement::V),
    ];
    for (possible, vp, placement) in named {
        let fits = |shape: Shape| {
            shape.num_stages() as usize == table.len()
                && (0u32..)
                    .map(Stage)
                    .zip(table)
                    .all(|(stage, &(rank, _))| shape.rank_of(stage) == rank)
        };
        if possible && Shape::new(pp, vp.max(1), seen.units, 1, placement.clone()).is_ok_and(fits) {
            return (vp, placement);
        }
    }
    (vp, Placement::Table(table.into()))
}

/// All ops with their rank and position.
fn located(ranks: &[RankOps]) -> impl Iterator<Item = (Rank, u64, Op)> {
    (0u32..)
        .map(Rank)
        .zip(ranks)
        .flat_map(|(rank, held)| (0u64..).zip(&held.ops).map(move |(at, &op)| (rank, at, op)))
}

fn refused(
    rule: &'static str,
    (rank, position, op): (Rank, u64, Op),
    message: String,
    hint: &str,
) -> Error {
    let text = format!("rank {rank}, position {position}, `{op}`: {message}");
    let violation = Violation {
        rule,
        rank,
        position,
        op: op.to_string(),
        message,
        hint: hint.to_owned(),
    };
    Error::check(text, hint, vec![violation])
}
