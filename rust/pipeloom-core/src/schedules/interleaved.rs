//! Schedules over a loop placement with several chunks a rank: interleaved 1F1B, looped BFS,
//! forward-only. All of them run the schedule table of [`Table`].

use super::one_chunk::{capped, one_f_one_b_warmup, warm_steady_cool};
use super::{Argument, BackwardKind, Chunks, Family, Params, Rule};
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::order::{Reversal, Sequence, Table};
use crate::shape::{Placement, Shape};

/// Interleaved 1F1B with groups of N microbatches.
pub(super) static INTERLEAVED: Family = Family {
    name: "interleaved_1f1b",
    summary: "1F1B over vp chunks a rank: 1/vp of its bubble for vp times its transfers",
    source: "Megatron-LM, arXiv 2104.04473; group size N: Megatron-core, Llama 3",
    constraints: "a group size N that makes progress (N >= pp and m mod N = 0 or >= pp always does)",
    chunks: Chunks::Any,
    placement: Placement::Loop,
    arguments: &[
        Argument::GroupSize,
        Argument::ExtraWarmup,
        Argument::ForwardOnly,
        Argument::PartialCheckpoints,
    ],
    backward: BackwardKind::Full,
    validate: |shape, request, params| {
        params.group = match request.microbatch_group_size {
            Some(group) => given_group(shape, group)?,
            None => default_group(shape.pp(), shape.num_units()),
        };
        if params.forward_only {
            return Ok(());
        }
        let round_trip = 2 * (shape.pp() - 1);
        let default = default_group(shape.pp(), shape.num_units());
        refuse_deadlock(shape, params.group, default, |group| {
            group_progresses(shape, round_trip, group, request.extra_warmup)
        })
    },
    rule: Rule::Closed(|shape, params, rank| {
        let table = Table::forward(shape.num_units(), shape.vp(), params.group);
        let warmup = interleaved_warmup(shape, params, rank);
        let (f, b) = (Sequence::Table(table), Sequence::Table(table.mirror()));
        warm_steady_cool(shape, params, rank, warmup, f, b)
    }),
    warmup: Some(|shape, params, rank| {
        capped(shape, params, interleaved_warmup(shape, params, rank))
    }),
};

/// Breadth-first: all microbatches of a chunk before the next chunk.
pub(super) static LOOPED_BFS: Family = Family {
    name: "looped_bfs",
    summary: "all microbatches of a chunk before the next: one weight gather a chunk under FSDP",
    source: "breadth-first pipeline parallelism, arXiv 2211.05953; torch ScheduleLoopedBFS",
    constraints: "none",
    chunks: Chunks::Any,
    placement: Placement::Loop,
    arguments: &[
        Argument::ReverseBackward,
        Argument::ForwardOnly,
        Argument::PartialCheckpoints,
    ],
    backward: BackwardKind::Full,
    validate: |shape, request, params| {
        params.group = shape.num_units();
        params.reverse_backward = request.reverse_backward.unwrap_or(true);
        Ok(())
    },
    rule: Rule::Closed(|shape, params, rank| {
        let forwards = Table::forward(shape.num_units(), shape.vp(), params.group);
        let reversed = if params.reverse_backward {
            Reversal::Group
        } else {
            Reversal::None
        };
        let backwards = forwards.mirror().reverse(reversed);
        let all = forwards.units * forwards.chunks;
        warm_steady_cool(
            shape,
            params,
            rank,
            all,
            Sequence::Table(forwards),
            Sequence::Table(backwards),
        )
    }),
    warmup: Some(|shape, params, _| capped(shape, params, shape.num_units() * shape.vp())),
};

/// Forwards only, in table order: evaluation and inference.
pub(super) static FORWARD_ONLY: Family = Family {
    name: "forward_only",
    summary: "forwards in table order, no backward: evaluation and inference",
    source: "Megatron-core forward_only, torch _ScheduleForwardOnly",
    constraints: "none",
    chunks: Chunks::Any,
    placement: Placement::Loop,
    arguments: &[Argument::GroupSize, Argument::ForwardOnly],
    backward: BackwardKind::Full,
    validate: |shape, request, params| {
        params.forward_only = true;
        params.group = match request.microbatch_group_size {
            Some(group) => given_group(shape, group)?,
            None => shape.pp().min(shape.num_units()),
        };
        Ok(())
    },
    rule: Rule::Closed(|shape, params, rank| {
        let table = Table::forward(shape.num_units(), shape.vp(), params.group);
        let all = Sequence::Table(table);
        warm_steady_cool(shape, params, rank, 0, all, all)
    }),
    warmup: Some(|shape, params, _| capped(shape, params, 0)),
};

/// Warm-up before capping. One chunk is plain 1F1B; with more, a rank waits for the round trip
/// to the end and back (2 a rank) plus the chunks before the last.
fn interleaved_warmup(shape: &Shape, params: &Params, rank: Rank) -> u32 {
    let to_the_end = one_f_one_b_warmup(shape, rank);
    if shape.vp() == 1 {
        return to_the_end + params.extra_warmup;
    }
    2 * to_the_end + (shape.vp() - 1) * params.group + params.extra_warmup
}

/// The group size if none is given: the smallest that Megatron's rule allows, which has the
/// smallest makespan in every configuration tried.
pub(super) fn default_group(pp: u32, units: u32) -> u32 {
    // Sizes with the same number of whole groups side by side: the first of them leaves the
    // largest rest, the last the smallest.
    let mut group = pp;
    while group < units {
        let whole = units / group;
        if units % group >= pp {
            return group;
        }
        if units.is_multiple_of(whole) {
            return units / whole;
        }
        group = units / whole + 1;
    }
    units
}

pub(super) fn given_group(shape: &Shape, group: u32) -> Result<u32> {
    let units = shape.num_units();
    if (1..=units).contains(&group) {
        return Ok(group);
    }
    Err(Error::config(
        format!("microbatch_group_size={group} is out of range for num_microbatches={units}"),
        format!("give 1..={units}, or leave it out"),
    ))
}

/// Refuses a group size whose order waits for itself.
pub(super) fn refuse_deadlock(
    shape: &Shape,
    group: u32,
    default: u32,
    progresses: impl Fn(u32) -> bool,
) -> Result<()> {
    if progresses(group) {
        return Ok(());
    }
    let (pp, vp, units) = (shape.pp(), shape.vp(), shape.num_units());
    let works: Vec<String> = (1..=units.min(4096))
        .filter(|&n| progresses(n))
        .take(8)
        .map(|n| n.to_string())
        .collect();
    let others = match works.len() {
        0 => String::new(),
        8 => format!(", or use one that progresses: {}, ...", works.join(", ")),
        _ => format!(", or use one that progresses: {}", works.join(", ")),
    };
    Err(Error::config(
        format!(
            "microbatch_group_size={group} would deadlock: with pp={pp}, vp={vp}, \
             num_microbatches={units}, a rank would wait for a forward that stands behind its \
             own backward"
        ),
        format!("leave it out (then it is {default}){others}"),
    ))
}

/// Whether groups of this size make progress.
///
/// A rank runs chunk c of the next group only after the whole group has passed its other chunks,
/// so two neighbouring groups must together cover the round trip that the warm-up allows for.
/// A group is slight if its other chunks, `(vp - 1)` times its size, are at most the one forward
/// that precedes a steady backward, or two with one more warm-up: this forward then covers one
/// step more, and the last group gets by, since nothing follows it. Derived by, and tested
/// against, exhaustive simulation.
pub(super) fn group_progresses(shape: &Shape, round_trip: u32, group: u32, extra: u32) -> bool {
    let (vp, units) = (shape.vp(), shape.num_units());
    if vp == 1 {
        return true;
    }
    let (full, rest) = (units / group, units % group);
    let pair = |a: u32, b: u32, last: bool| {
        let slight = u64::from(b) * u64::from(vp - 1) <= u64::from(1 + extra);
        let covered = u64::from(a) + u64::from(b) + u64::from(slight);
        covered >= u64::from(round_trip) || (last && slight)
    };
    let between_full = match full {
        0 | 1 => true,
        2 => pair(group, group, rest == 0),
        _ => pair(group, group, false),
    };
    between_full && (rest == 0 || full == 0 || pair(group, rest, true))
}

#[cfg(test)]
mod tests {
    use super::default_group;

    #[test]
    fn default_group_is_the_smallest_that_keeps_the_pipeline_full() {
        for pp in 1..40 {
            for units in 1..400_u32 {
                let full = |&n: &u32| units.is_multiple_of(n) || units % n >= pp;
                let wanted = (pp..units).find(full).unwrap_or(units);
                assert_eq!(default_group(pp, units), wanted, "pp={pp} units={units}");
            }
        }
    }
}
