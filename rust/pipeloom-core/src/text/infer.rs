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
/// If a stage is missing, a number is out of proportion, or a rank holds no stage.
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
        let mut strange = Vec::new();
        for (rank, at, op) in located(ranks) {
            // A stage has a forward and a microbatch has one too: both are fewer than the ops.
            if op.stage.index() >= total || op.unit.index() >= total {
                let what = if op.stage.index() >= total {
                    format!("stage {}", op.stage)
                } else {
                    format!("microbatch {}", op.unit)
                };
                strange.push(Violation {
                    rule: "placement",
                    rank,
                    position: at,
                    op: op.to_string(),
                    message: format!(
                        "{what} is out of proportion: the plan has {total} ops in all"
                    ),
                    hint: WITHOUT_GAPS.to_owned(),
                    cycle: Vec::new(),
                });
                continue;
            }
            stages = stages.max(op.stage.index() + 1);
            units = units.max(op.unit.0 + 1);
            forward_only &= matches!(
                op.kind,
                OpKind::Forward | OpKind::SendForward | OpKind::RecvForward
            );
        }
        if !strange.is_empty() {
            return Err(refused(strange));
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
        let home = self.homes(ranks);
        let mut chunks = vec![0; ranks.len()];
        let mut table = Vec::with_capacity(home.len());
        for rank in home.iter().flatten() {
            let next = &mut chunks[rank.index()];
            table.push((*rank, Chunk(*next)));
            *next += 1;
        }
        // With a home for each stage and a stage for each rank, the check tells what is misplaced.
        if table.len() == home.len() && chunks.iter().all(|&chunks| chunks > 0) {
            return Ok(table);
        }
        Err(refused(homeless(ranks, &home, &chunks)))
    }

    /// The rank that has most of a stage's ops, so that a stray one does not move the stage.
    fn homes(&self, ranks: &[RankOps]) -> Vec<Option<Rank>> {
        let mut homes: Vec<(u32, Option<Rank>)> = vec![(0, None); self.stages];
        let mut here = vec![0; self.stages];
        for (rank, held) in (0u32..).map(Rank).zip(ranks) {
            for op in &held.ops {
                here[op.stage.index()] += 1;
            }
            for op in &held.ops {
                let count = std::mem::take(&mut here[op.stage.index()]);
                let home = &mut homes[op.stage.index()];
                if count > home.0 {
                    *home = (count, Some(rank));
                }
            }
        }
        homes.into_iter().map(|(_, rank)| rank).collect()
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

/// Stages without a rank, and ranks without a stage: one violation each, or one for each op that
/// such a rank has of another one's stage.
fn homeless(ranks: &[RankOps], home: &[Option<Rank>], chunks: &[u32]) -> Vec<Violation> {
    let most = home.len().saturating_sub(1);
    let stages = (0u32..).map(Stage).zip(home);
    let missing = stages.filter(|(_, home)| home.is_none());
    let missing = missing.map(|(stage, _)| Violation {
        rule: "exactly_once",
        rank: Rank(0),
        position: ranks[0].ops.len() as u64,
        op: format!("{stage}F0"),
        message: format!("no rank has an op of stage {stage}, but stage {most} is named"),
        hint: WITHOUT_GAPS.to_owned(),
        cycle: Vec::new(),
    });
    let idle = |rank: Rank| chunks[rank.index()] == 0;
    let empty = (0u32..).map(Rank).zip(ranks);
    let empty = empty.filter(|(_, held)| held.ops.is_empty());
    let empty = empty.map(|(rank, _)| Violation {
        rule: "placement",
        rank,
        position: 0,
        op: String::new(),
        message: format!("row {rank} has no ops: rank {rank} holds no stage"),
        hint: "each row has the ops of one rank; leave out ranks without stages".to_owned(),
        cycle: Vec::new(),
    });
    let strays = located(ranks).filter(|&(rank, _, _)| idle(rank));
    let strays = strays.map(|(rank, position, op)| Violation {
        rule: "placement",
        rank,
        position,
        op: op.to_string(),
        message: match home[op.stage.index()] {
            Some(known) => format!("stage {} is on rank {known} already", op.stage),
            None => format!("stage {} is on no rank", op.stage),
        },
        hint: "all ops of a stage, transfers too, stand on the rank that holds it".to_owned(),
        cycle: Vec::new(),
    });
    missing.chain(empty).chain(strays).collect()
}

const WITHOUT_GAPS: &str = "stages and microbatches are numbered from 0 without gaps";

/// The error of violations that leave a plan without a shape.
fn refused(violations: Vec<Violation>) -> Error {
    let Some(first) = violations.first() else {
        return Error::check("the plan has no shape", WITHOUT_GAPS, violations);
    };
    let op = match &*first.op {
        "" => String::new(),
        op => format!(", `{op}`"),
    };
    let more = match violations.len() {
        1 => String::new(),
        many => format!(" (and {} more)", many - 1),
    };
    let text = format!(
        "rank {}, position {}{op}: {}{more}",
        first.rank, first.position, first.message
    );
    let hint = first.hint.clone();
    Error::check(text, hint, violations)
}
