//! [`Plan`]: all ranks' orders, as data.
//!
//! A plan of a closed-form family holds the family's rule and its parameters, and works out what
//! is asked for; any other plan (read, searched, lowered) holds its ops.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::order::{RankOrder, Sequence, Table};
pub use crate::rank_ops::{NO_GROUP, RankOps};
use crate::recompute::Mask;
use crate::schedules::{Argument, Family, Params, Rule};
use crate::semantics::{Semantics, Style};
use crate::shape::{Placement, Shape};
use crate::text::csv::Dropped;

#[derive(Clone, Debug)]
enum Orders {
    Closed,
    Held(Arc<[RankOps]>),
}

/// All ranks' orders of one step.
#[derive(Clone, Debug)]
pub struct Plan {
    schedule: Arc<str>,
    shape: Shape,
    family: Option<&'static Family>,
    params: Params,
    orders: Orders,
    style: Option<Style>,
    promises: Arc<[Semantics]>,
    dropped: Arc<[Dropped]>,
}

impl Plan {
    /// The lazy plan of a closed-form family. Only [`crate::schedules`] calls it, after the
    /// family's constraints.
    pub(crate) fn closed(family: &'static Family, shape: Shape, params: Params) -> Self {
        Self {
            schedule: family.name.into(),
            shape,
            family: Some(family),
            params,
            orders: Orders::Closed,
            style: None,
            promises: [Semantics::Buffered].into(),
            dropped: [].into(),
        }
    }

    /// This plan with the orders that its family's rule makes for all ranks at once. Only
    /// [`crate::schedules`] calls it.
    pub(crate) fn with_orders(self, orders: Vec<Vec<Op>>) -> Self {
        let ranks = orders.into_iter().map(|ops| RankOps { ops }).collect();
        let orders = Orders::Held(ranks);
        let unmarked = Self { orders, ..self };
        if unmarked.params.kept_activations.is_none() {
            return unmarked;
        }
        let marked = |rank| {
            let mut held = unmarked.rank_ops(rank);
            unmarked.mark_recomputed(rank, &mut held.ops);
            held
        };
        let orders = Orders::Held(unmarked.shape.ranks().map(marked).collect());
        Self { orders, ..unmarked }
    }

    /// A plan that holds its ops. The caller vouches for them: read plans are checked by
    /// [`crate::text`], lowered ones are right by construction.
    pub(crate) fn held(schedule: &str, shape: Shape, ops: Vec<RankOps>) -> Self {
        Self {
            schedule: schedule.into(),
            shape,
            family: None,
            params: Params::default(),
            orders: Orders::Held(ops.into()),
            style: None,
            promises: [Semantics::Buffered].into(),
            dropped: [].into(),
        }
    }

    /// This plan with transfers: same schedule and shape, other ops.
    pub(crate) fn with_transfers(&self, style: Style, ops: Vec<RankOps>) -> Self {
        Self {
            orders: Orders::Held(ops.into()),
            style: Some(style),
            promises: style.promises().into(),
            ..self.clone()
        }
    }

    /// This plan without sends and receives: the order of computation that was lowered.
    #[must_use]
    pub fn without_transfers(&self) -> Self {
        if self.style.is_none() {
            return self.clone();
        }
        let computes = |mut held: RankOps| {
            held.ops.retain(|op| op.kind.is_compute());
            held
        };
        Self {
            orders: Orders::Held(self.materialize().into_iter().map(computes).collect()),
            style: None,
            promises: [Semantics::Buffered].into(),
            ..self.clone()
        }
    }

    /// This plan with other promises.
    pub(crate) fn with_promises(self, promises: &[Semantics]) -> Self {
        Self {
            promises: promises.into(),
            ..self
        }
    }

    /// This plan with a note of what its text had beyond it.
    pub(crate) fn with_dropped(self, dropped: Vec<Dropped>) -> Self {
        Self {
            dropped: dropped.into(),
            ..self
        }
    }

    /// Name of the schedule.
    pub fn schedule(&self) -> &str {
        &self.schedule
    }

    /// The pipeline's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The family, unless the plan was read or searched.
    pub fn family(&self) -> Option<&'static Family> {
        self.family
    }

    /// The family's parameters.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// How transfers were placed; none for an unlowered plan.
    pub fn style(&self) -> Option<Style> {
        self.style
    }

    /// Under which semantics the plan promises to progress.
    pub fn promises(&self) -> &[Semantics] {
        &self.promises
    }

    /// The actions of the CSV that the plan was read from which it has no use for.
    pub fn dropped(&self) -> &[Dropped] {
        &self.dropped
    }

    /// Whether the plan has forwards only.
    pub fn forward_only(&self) -> bool {
        self.params.forward_only
    }

    /// Sets what a read plan can't know from its ops.
    pub(crate) fn with_params(self, params: Params) -> Self {
        Self { params, ..self }
    }

    /// The closed form of a rank's order, if the plan has one.
    pub fn closed_form(&self, rank: Rank) -> Option<RankOrder> {
        match (&self.orders, self.family) {
            (Orders::Closed, Some(family)) => match family.rule {
                Rule::Closed(order) => Some(order(&self.shape, &self.params, rank)),
                Rule::Whole(_) => None,
            },
            (Orders::Closed | Orders::Held(_), _) => None,
        }
    }

    /// The held ops of a rank, if the plan holds them.
    pub fn held_ops(&self, rank: Rank) -> Option<&RankOps> {
        match &self.orders {
            Orders::Held(ranks) => ranks.get(rank.index()),
            Orders::Closed => None,
        }
    }

    /// Number of ops of a rank.
    pub fn len(&self, rank: Rank) -> u64 {
        match self.held_ops(rank) {
            Some(held) => held.ops.len() as u64,
            None => self.closed_form(rank).map_or(0, |order| order.len()),
        }
    }

    /// Number of ops of all ranks.
    pub fn total_len(&self) -> u64 {
        let family = self
            .family
            .filter(|_| matches!(self.orders, Orders::Closed));
        family
            .and_then(|family| family.num_ops(&self.shape, &self.params))
            .unwrap_or_else(|| self.shape.ranks().map(|rank| self.len(rank)).sum())
    }

    /// Number of forwards of a rank before its first backward, by the family's formula; counted
    /// where there is none.
    pub fn num_warmup(&self, rank: Rank) -> u32 {
        if let Some(warmup) = self.family.and_then(|family| family.warmup) {
            return warmup(&self.shape, &self.params, rank);
        }
        let before = |ops: &mut dyn Iterator<Item = Op>| {
            let forwards = ops
                .filter(|op| op.kind.is_compute())
                .take_while(|op| op.kind == OpKind::Forward)
                .count();
            u32::try_from(forwards).unwrap_or(u32::MAX)
        };
        if let Some(held) = self.held_ops(rank) {
            return before(&mut held.ops.iter().copied());
        }
        let Some(order) = self.closed_form(rank) else {
            return 0;
        };
        before(
            &mut (0..order.len())
                .map_while(|at| order.get(at))
                .map(|found| found.0),
        )
    }

    /// Which forward steps of a rank are recomputed; none unless asked for, or without backwards.
    pub fn mask(&self, rank: Rank) -> Option<Mask> {
        let kept = self.params.kept_activations?;
        if self.params.forward_only {
            return None;
        }
        Some(Mask::new(self.num_warmup(rank), kept))
    }

    /// The op at a position of a rank's order.
    ///
    /// # Errors
    /// If the rank or position is out of range.
    pub fn op(&self, rank: Rank, position: u64) -> Result<Op> {
        self.require_rank(rank)?;
        let found = if let Some(held) = self.held_ops(rank) {
            usize::try_from(position)
                .ok()
                .and_then(|at| held.ops.get(at).copied())
        } else {
            let marked = |order: RankOrder| {
                let (op, counter) = order.get(position)?;
                Some(self.mark(&order, rank, op, counter))
            };
            self.closed_form(rank).and_then(marked)
        };
        found.ok_or_else(|| {
            let len = self.len(rank);
            Error::config(
                format!("position {position} is out of range: rank {rank} has {len} ops"),
                format!("positions of rank {rank} are 0..{len}"),
            )
        })
    }

    /// Where an op stands in a rank's order (marks of the op are ignored).
    ///
    /// # Errors
    /// If the rank is out of range or does not run the op.
    pub fn position(&self, rank: Rank, op: Op) -> Result<u64> {
        self.require_rank(rank)?;
        let found = if let Some(held) = self.held_ops(rank) {
            held.ops
                .iter()
                .position(|other| other.same(op))
                .map(|at| at as u64)
        } else {
            self.closed_form(rank)
                .and_then(|order| order.find(op))
                .map(|found| found.0)
        };
        found.ok_or_else(|| {
            Error::config(
                format!("rank {rank} has no op {op}"),
                "ops are named stage, kind, microbatch, as in \"2F0\"; see plan.ops(rank)",
            )
        })
    }

    /// The ops of a rank, in order, with their marks.
    pub fn rank_ops(&self, rank: Rank) -> RankOps {
        if let Some(held) = self.held_ops(rank) {
            return held.clone();
        }
        let Some(order) = self.closed_form(rank) else {
            return RankOps::default();
        };
        let mut ops = Vec::with_capacity(usize::try_from(order.len()).unwrap_or(0));
        order.for_each_run(|run| {
            for round in 0..run.rounds {
                for slot in run.slots() {
                    let unit = slot
                        .op
                        .unit
                        .0
                        .wrapping_add_signed(slot.step * round.cast_signed());
                    ops.push(Op {
                        unit: Unit(unit),
                        ..slot.op
                    });
                }
            }
        });
        self.mark_recomputed(rank, &mut ops);
        RankOps { ops }
    }

    fn mark_recomputed(&self, rank: Rank, ops: &mut [Op]) {
        if let Some(mask) = self.mask(rank) {
            mask.mark(ops, self.shape.num_units(), |stage| {
                self.shape.chunk_of(stage).0
            });
        }
    }

    /// The group size N of table families with several chunks.
    pub fn group_size(&self) -> Option<u32> {
        (self.params.group > 0).then_some(self.params.group)
    }

    /// Chunk and unit of virtual microbatch `k` of the schedule table.
    ///
    /// # Errors
    /// If the family has no table or `k` is not below `m * vp`.
    pub fn virtual_microbatch(&self, k: u32, forward: bool) -> Result<(Chunk, Unit)> {
        let Some(group) = self.group_size() else {
            return Err(Error::config(
                format!("{} has no schedule table", self.schedule),
                "chunk_id and microbatch_id are for table families such as \"interleaved_1f1b\"",
            ));
        };
        let table = Table::forward(self.shape.num_units(), self.shape.vp(), group);
        let sequence = Sequence::Table(if forward { table } else { table.mirror() });
        if k >= sequence.len() {
            return Err(Error::config(
                format!(
                    "k={k} is out of range: the table has {} entries",
                    sequence.len()
                ),
                format!("give 0..{} (num_microbatches times vp)", sequence.len()),
            ));
        }
        let cursor = sequence.at(k);
        Ok((cursor.chunk, cursor.unit))
    }

    /// The recompute flag of each forward step of a rank, if recompute was asked for.
    pub fn recompute_mask(&self, rank: Rank) -> Option<Vec<bool>> {
        let mask = self.mask(rank)?;
        let steps = self.shape.forwards_of(rank);
        Some((0..steps).map(|k| mask.recomputes(k)).collect())
    }

    /// One line: what the plan is.
    pub fn describe(&self) -> String {
        let shape = &self.shape;
        let mut parts = vec![
            format!("{:?}", &*self.schedule),
            format!("pp={}", shape.pp()),
            format!("vp={}", shape.vp()),
            format!("num_microbatches={}", shape.num_microbatches()),
        ];
        if let Some(group) = self.group_size() {
            parts.push(format!("microbatch_group_size={group}"));
        }
        if shape.num_seq_pieces() > 1 {
            parts.push(format!("num_seq_pieces={}", shape.num_seq_pieces()));
        }
        if *shape.placement() != Placement::Loop {
            parts.push(format!("placement={:?}", shape.placement().name()));
        }
        let Params {
            group: _, // told above
            extra_warmup,
            reverse_backward,
            forward_only,
            kept_activations,
        } = self.params;
        if extra_warmup > 0 {
            parts.push(format!("extra_warmup={extra_warmup}"));
        }
        let uses = |argument| self.family.is_some_and(|f| f.arguments.contains(&argument));
        if !reverse_backward && uses(Argument::ReverseBackward) {
            parts.push("reverse_backward=False".to_owned());
        }
        if forward_only {
            parts.push("forward_only=True".to_owned());
        }
        if let Some(kept) = kept_activations {
            let name = Argument::PartialCheckpoints.name();
            parts.push(format!("{name}={kept}"));
        }
        if let Some(style) = self.style {
            parts.push(format!("style={:?}", style.name()));
        }
        format!("Plan({})", parts.join(", "))
    }

    /// This plan with its ops held, for passes that read all of them.
    #[must_use]
    pub fn materialize(&self) -> Vec<RankOps> {
        self.shape.ranks().map(|rank| self.rank_ops(rank)).collect()
    }

    /// The closed-form op with its recompute mark.
    fn mark(&self, order: &RankOrder, rank: Rank, op: Op, counter: u32) -> Op {
        let Some(mask) = self.mask(rank) else {
            return op;
        };
        let forward = match op.kind {
            OpKind::Forward => Some(counter),
            OpKind::Backward | OpKind::BackwardInput => {
                let forward = Op::new(op.stage, OpKind::Forward, op.unit);
                order.find(forward).map(|found| found.1)
            }
            OpKind::BackwardWeight
            | OpKind::SendForward
            | OpKind::RecvForward
            | OpKind::SendBackward
            | OpKind::RecvBackward => None,
        };
        let recomputed = forward.is_some_and(|k| mask.recomputes(k));
        if recomputed {
            Op {
                flags: op.flags.with(Flags::RECOMPUTE),
                ..op
            }
        } else {
            op
        }
    }

    /// # Errors
    /// If the rank is out of range.
    pub fn require_rank(&self, rank: Rank) -> Result<()> {
        let pp = self.shape.pp();
        if rank.0 < pp {
            return Ok(());
        }
        Err(Error::config(
            format!("rank {rank} is out of range for pp={pp}"),
            format!("ranks are 0..{pp}"),
        ))
    }

    /// The stage, if the plan has it.
    ///
    /// # Errors
    /// If the stage is out of range.
    pub fn require_stage(&self, stage: Stage) -> Result<()> {
        let stages = self.shape.num_stages();
        if stage.0 < stages {
            return Ok(());
        }
        Err(Error::config(
            format!("stage {stage} is out of range for {stages} stages"),
            format!("stages are 0..{stages}"),
        ))
    }
}

/// Plans are equal if they have the same orders, placement, recompute and transfers; the
/// schedule's name does not count.
impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        let lowered = |plan: &Self| plan.style.is_some();
        if self.shape != other.shape || lowered(self) != lowered(other) {
            return false;
        }
        let same_rule = match (&self.orders, &other.orders) {
            (Orders::Closed, Orders::Closed) => {
                self.family.map(|f| f.name) == other.family.map(|f| f.name)
                    && self.params == other.params
            }
            (Orders::Held(mine), Orders::Held(theirs)) => Arc::ptr_eq(mine, theirs),
            (Orders::Closed, Orders::Held(_)) | (Orders::Held(_), Orders::Closed) => false,
        };
        same_rule
            || self.shape.ranks().all(|rank| {
                self.len(rank) == other.len(rank) && self.rank_ops(rank) == other.rank_ops(rank)
            })
    }
}

impl Eq for Plan {}

/// Hashes the shape and a sample of each rank's ops, so that hashing a huge lazy plan is cheap.
impl Hash for Plan {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.shape.hash(state);
        for rank in self.shape.ranks() {
            let len = self.len(rank);
            len.hash(state);
            for position in [0, len / 3, len / 2, len.saturating_sub(1)] {
                self.op(rank, position).ok().hash(state);
            }
        }
    }
}
