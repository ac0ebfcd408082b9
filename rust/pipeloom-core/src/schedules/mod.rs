//! The schedules: the rules that make plans, one file a family, listed by name in [`FAMILIES`].

mod building_block;
mod compact;
mod dualpipe;
mod interleaved;
mod list;
mod one_chunk;
mod sequence;
mod unit;
mod v;
mod zero_bubble;

use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::layout::Layout;
use crate::op::Op;
use crate::order::RankOrder;
use crate::plan::Plan;
use crate::shape::{Placement, Shape};

/// What a family is told beyond the shape.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Params {
    /// Consecutive units a chunk runs before the next chunk (table families).
    pub group: u32,
    /// One more forward of warm-up on each rank.
    pub extra_warmup: u32,
    /// Whether backwards run units from last to first.
    pub reverse_backward: bool,
    /// Whether there are forwards only.
    pub forward_only: bool,
    /// Of each window of forward steps, how many keep their activations; none: all do.
    pub kept_activations: Option<u32>,
}

/// An argument of `plan` that only some families use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// `microbatch_group_size`
    GroupSize,
    /// `extra_warmup`
    ExtraWarmup,
    /// `reverse_backward`
    ReverseBackward,
    /// `forward_only`
    ForwardOnly,
    /// `num_microbatches_with_partial_activation_checkpoints`
    PartialCheckpoints,
    /// `num_seq_pieces`
    SeqPieces,
    /// `costs`
    Costs,
    /// `memory_limit`
    MemoryLimit,
}

impl Argument {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::GroupSize => "microbatch_group_size",
            Self::ExtraWarmup => "extra_warmup",
            Self::ReverseBackward => "reverse_backward",
            Self::ForwardOnly => "forward_only",
            Self::PartialCheckpoints => "num_microbatches_with_partial_activation_checkpoints",
            Self::SeqPieces => "num_seq_pieces",
            Self::Costs => "costs",
            Self::MemoryLimit => "memory_limit",
        }
    }
}

/// How many chunks a rank may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// Any number; one if not given.
    Any,
    /// This number only.
    Exactly(u32),
    /// Any even number; two if not given.
    Even,
}

/// What the backward of a stage and unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackwardKind {
    /// One `B`.
    Full,
    /// An `I` and a `W`.
    Split,
    /// Either, by its place in the order.
    Mixed,
}

/// Computes a rank's closed-form order.
pub type OrderRule = fn(&Shape, &Params, Rank) -> RankOrder;
/// Computes all ranks' orders at once.
pub type WholeRule = fn(&Shape, &Params) -> Result<Vec<Vec<Op>>>;
/// How a family makes its orders.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// Each rank by itself, in a few phases: the plan is lazy.
    Closed(OrderRule),
    /// All ranks together, since their ops wait for each other: the plan holds its ops.
    Whole(WholeRule),
}
/// Computes a rank's warm-up.
pub type WarmupRule = fn(&Shape, &Params, Rank) -> u32;

/// A schedule: its name, what it needs, and its rule.
#[derive(Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// One line: what it is good for.
    pub summary: &'static str,
    /// The paper or system it comes from.
    pub source: &'static str,
    /// What it asks of the shape, for people.
    pub constraints: &'static str,
    /// Chunks a rank.
    pub chunks: Chunks,
    /// Its placement if none is asked for.
    pub placement: Placement,
    /// The optional arguments that it uses.
    pub arguments: &'static [Argument],
    /// Its backwards.
    pub backward: BackwardKind,
    /// Refuses what the rule can't do and fills in what was not given.
    pub validate: fn(&Shape, &Request, &mut Params) -> Result<()>,
    /// The rule.
    pub rule: Rule,
    /// Warm-up by formula, where the family has one.
    pub warmup: Option<WarmupRule>,
}

impl Family {
    /// Number of ops of all ranks, if it follows from the shape.
    pub(crate) fn num_ops(&self, shape: &Shape, params: &Params) -> Option<u64> {
        let ops = match self.backward {
            _ if params.forward_only => 1,
            BackwardKind::Full => 2,
            BackwardKind::Split => 3,
            BackwardKind::Mixed => return None,
        };
        // Each unit runs through one replica.
        Some(u64::from(shape.stages_per_replica()) * u64::from(shape.num_units()) * ops)
    }
}

/// The families, in the order of the documentation.
pub static FAMILIES: &[&Family] = &[
    &one_chunk::NO_PIPELINING,
    &one_chunk::GPIPE,
    &one_chunk::ONE_F_ONE_B,
    &one_chunk::EAGER_ONE_F_ONE_B,
    &interleaved::INTERLEAVED,
    &interleaved::LOOPED_BFS,
    &zero_bubble::ZB_H1,
    &zero_bubble::ZB_H2,
    &zero_bubble::INTERLEAVED_ZB,
    &zero_bubble::GROUP_INTERLEAVED,
    &v::ZB_V,
    &building_block::V_HALF,
    &building_block::V_MIN,
    &building_block::V_1F1B,
    &dualpipe::DUALPIPE_V,
    &dualpipe::DUALPIPE,
    &unit::CHIMERA,
    &unit::HANAYO,
    &sequence::SEQ_1F1B,
    &interleaved::FORWARD_ONLY,
];

/// The arguments of `plan`, as given.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of the schedule.
    pub schedule: String,
    /// Number of ranks.
    pub pp: u32,
    /// Chunks a rank; none: the family's own.
    pub vp: Option<u32>,
    /// Number of microbatches.
    pub num_microbatches: u32,
    /// Group size N of table families.
    pub microbatch_group_size: Option<u32>,
    /// Placement; none: the family's own.
    pub placement: Option<Placement>,
    /// Pieces of a sequence.
    pub num_seq_pieces: u32,
    /// Order of backward microbatches.
    pub reverse_backward: Option<bool>,
    /// Forwards only.
    pub forward_only: bool,
    /// One more forward of warm-up.
    pub extra_warmup: u32,
    /// Forward steps of a window that keep their activations.
    pub partial_checkpoints: Option<u32>,
    /// The layout that the plan is for: must fit its shape.
    pub layout: Option<Layout>,
    /// Arguments of searched schedules that were given; closed rules use none of them.
    pub for_searches: Vec<Argument>,
}

impl Request {
    /// A request with nothing optional.
    pub fn new(schedule: &str, pp: u32, vp: Option<u32>, num_microbatches: u32) -> Self {
        Self {
            schedule: schedule.to_owned(),
            pp,
            vp,
            num_microbatches,
            microbatch_group_size: None,
            placement: None,
            num_seq_pieces: 1,
            reverse_backward: None,
            forward_only: false,
            extra_warmup: 0,
            partial_checkpoints: None,
            layout: None,
            for_searches: Vec::new(),
        }
    }

    fn given(&self) -> impl Iterator<Item = Argument> {
        [
            (self.microbatch_group_size.is_some(), Argument::GroupSize),
            (self.extra_warmup != 0, Argument::ExtraWarmup),
            (self.reverse_backward.is_some(), Argument::ReverseBackward),
            (self.forward_only, Argument::ForwardOnly),
            (
                self.partial_checkpoints.is_some(),
                Argument::PartialCheckpoints,
            ),
            (self.num_seq_pieces != 1, Argument::SeqPieces),
        ]
        .into_iter()
        .filter_map(|(given, argument)| given.then_some(argument))
        .chain(self.for_searches.iter().copied())
    }
}

/// The family of that name.
///
/// # Errors
/// If there is none; the error lists the names.
pub fn family(name: &str) -> Result<&'static Family> {
    FAMILIES
        .iter()
        .find(|family| family.name == name)
        .copied()
        .ok_or_else(|| {
            let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            Error::config(
                format!("schedule {name:?} is unknown"),
                format!("one of {}", names.join(", ")),
            )
        })
}

/// Plans a step.
///
/// # Errors
/// If an argument is out of range, unknown to the family, or contradicts another.
pub fn plan(request: &Request) -> Result<Plan> {
    let (family, shape, params) = admit(request)?;
    let plan = Plan::closed(family, shape, params);
    match family.rule {
        Rule::Closed(_) => Ok(plan),
        Rule::Whole(orders) => {
            refuse_too_large(family, plan.shape())?;
            let orders = orders(plan.shape(), plan.params())?;
            Ok(plan.with_orders(orders))
        }
    }
}

/// Limits of the families that compute all ranks together, step by step: seconds and some
/// hundred megabytes.
const MOST_STAGES: u64 = 1 << 12;
const MOST_FORWARDS: u64 = 1 << 23;

fn refuse_too_large(family: &Family, shape: &Shape) -> Result<()> {
    let (pp, m) = (shape.pp(), shape.num_microbatches());
    let vp = shape.vp();
    let stages = u64::from(pp) * u64::from(vp);
    let (what, limit) = if stages > MOST_STAGES {
        (format!("pp={pp} times vp={vp}"), MOST_STAGES)
    } else if stages * u64::from(shape.num_units()) > MOST_FORWARDS {
        (format!("num_microbatches={m}"), MOST_FORWARDS / stages)
    } else {
        return Ok(());
    };
    Err(Error::config(
        format!(
            "{what} is too large for {}, which computes all ranks together: at most {limit}",
            family.name
        ),
        "lower it, or use a schedule in closed form, such as \"zb_v\"",
    ))
}

/// Beyond so many ranks, or microbatches a group, [`legal_num_microbatches`] does not search.
const LONGEST_PERIOD: u32 = 1 << 13;

/// The smallest number of microbatches, from the request's own on, that [`plan`] accepts.
///
/// # Errors
/// If no number is accepted, or the request is too large to search (its ranks, or its group size):
/// says so, and why the request's own number, `at_least`, is not.
pub fn legal_num_microbatches(request: &Request) -> Result<u32> {
    let Err(refusal) = admit(request) else {
        return Ok(request.num_microbatches);
    };
    // Constraints repeat with the ranks, the two directions or the group size.
    let group = request.microbatch_group_size.unwrap_or(0);
    let period = request.pp.max(group);
    let at_least = request.num_microbatches;
    let because = |what: String, refusal: Error| {
        // An unknown schedule, say, is refused whatever the number.
        if !refusal.message.contains("num_microbatches") {
            return refusal;
        }
        Error::config(format!("{what}: {}", refusal.message), refusal.hint)
    };
    if period > LONGEST_PERIOD {
        let what = format!(
            "at_least={at_least} is not legal, and with pp={} and a group size of {group} there is \
             too much to search (either may be {LONGEST_PERIOD})",
            request.pp
        );
        return Err(because(what, refusal));
    }
    let least = request.num_microbatches.max(group);
    let most = least.saturating_add(2 * period);
    let accepts = |&m: &u32| {
        admit(&Request {
            num_microbatches: m,
            ..request.clone()
        })
        .is_ok()
    };
    let found = (least..=most).find(accepts);
    found.ok_or_else(|| {
        because(
            format!("no number of microbatches from at_least={at_least} on is legal"),
            refusal,
        )
    })
}

/// The family of a request, and its shape and parameters, if the family takes them.
fn admit(request: &Request) -> Result<(&'static Family, Shape, Params)> {
    let family = family(&request.schedule)?;
    refuse_unused(family, request)?;
    let vp = request.vp.or(request.layout.as_ref().map(Layout::vp));
    let vp = chunks(family, vp)?;
    let placement = request
        .placement
        .clone()
        .unwrap_or_else(|| family.placement.clone());
    // With one chunk, a loop and a V are the same.
    let replicated = [&placement, &family.placement].contains(&&Placement::Bidirectional);
    if placement != family.placement && (vp > 1 || replicated) {
        return Err(Error::config(
            format!(
                "{} has placement {}, but got {placement}",
                family.name, family.placement
            ),
            format!("leave placement out or give {:?}", family.placement.name()),
        ));
    }
    let shape = Shape::new(
        request.pp,
        vp,
        request.num_microbatches,
        request.num_seq_pieces,
        family.placement.clone(),
    )?;
    if let Some(layout) = &request.layout {
        layout.matches(&shape)?;
    }
    if request.extra_warmup > 1 {
        return Err(Error::config(
            format!("extra_warmup={} is out of range", request.extra_warmup),
            "give 0 or 1",
        ));
    }
    let mut params = Params {
        group: 0,
        extra_warmup: request.extra_warmup,
        reverse_backward: false,
        forward_only: request.forward_only,
        kept_activations: request.partial_checkpoints,
    };
    (family.validate)(&shape, request, &mut params)?;
    Ok((family, shape, params))
}

fn refuse_unused(family: &Family, request: &Request) -> Result<()> {
    let used = |given: &Argument| family.arguments.contains(given);
    let Some(unused) = request.given().find(|given| !used(given)) else {
        return Ok(());
    };
    let names: Vec<&str> = family.arguments.iter().map(|a| a.name()).collect();
    let names = if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    };
    Err(Error::config(
        format!(
            "{} does not use the argument {}",
            family.name,
            unused.name()
        ),
        format!(
            "leave it out; optional arguments of {}: {names}",
            family.name
        ),
    ))
}

/// The number of chunks a rank, given or the family's own.
fn chunks(family: &Family, given: Option<u32>) -> Result<u32> {
    let name = family.name;
    match (family.chunks, given) {
        (Chunks::Any, given) => Ok(given.unwrap_or(1)),
        (Chunks::Exactly(own), None) => Ok(own),
        (Chunks::Exactly(own), Some(vp)) if vp == own => Ok(own),
        (Chunks::Exactly(own), Some(vp)) => Err(Error::config(
            format!("{name} needs vp={own}, but got vp={vp}"),
            format!("leave vp out or give vp={own}"),
        )),
        (Chunks::Even, None) => Ok(2),
        (Chunks::Even, Some(vp)) if vp.is_multiple_of(2) => Ok(vp),
        (Chunks::Even, Some(vp)) => Err(Error::config(
            format!("{name} needs an even vp, but got vp={vp}"),
            format!(
                "give vp={}, or leave it out (then it is 2)",
                vp.saturating_add(1)
            ),
        )),
    }
}
