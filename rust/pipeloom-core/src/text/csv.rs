//! PyTorch's CSV: one row a rank, no header, one action a field; an empty field is a bubble.
//!
//! Two forms: `compute_only` has compute ops, `compute_comms` also sends and receives.

use super::{Action, Reader, infer, push_op, read_action, shown};
use crate::check;
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::Flags;
use crate::plan::{Plan, RankOps};
use crate::semantics::Style;

/// Which ops a CSV has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Compute ops (`compute_only`).
    Compute,
    /// Compute ops, sends and receives (`compute_comms`).
    ComputeAndTransfers,
}

/// An action that was left out of a plan: PyTorch shards and reduces by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// Its row.
    pub rank: Rank,
    /// Its column, counted from 0.
    pub column: usize,
    /// Its text.
    pub action: String,
}

/// Writes a plan as CSV. Recompute marks and groups have no place in it.
///
/// # Errors
/// If transfers are asked for and the plan has none.
pub fn to_csv(plan: &Plan, form: Form) -> Result<String> {
    if form == Form::ComputeAndTransfers && plan.style().is_none() {
        return Err(Error::config(
            "comms=True needs a plan with sends and receives, and this one has none",
            "lower it first: plan.lower().to_csv(path, comms=True)",
        ));
    }
    let mut text = String::new();
    for rank in plan.shape().ranks() {
        let RankOps { ops, .. } = plan.rank_ops(rank);
        let mut separator = "";
        for op in ops {
            if form == Form::Compute && !op.kind.is_compute() {
                continue;
            }
            if op.flags.has(Flags::PAIR_SECOND) {
                text.push(';');
                push_op(&mut text, op);
                text.push_str(super::PAIR_END);
                continue;
            }
            text.push_str(separator);
            separator = ",";
            if op.flags.has(Flags::PAIR_FIRST) {
                text.push('(');
            }
            push_op(&mut text, op);
        }
        text.push('\n');
    }
    Ok(text)
}

/// Reads either form. Placement, number of chunks and microbatches follow from the ops; transfers
/// keep their order, each a group of its own. [`Plan::dropped`] lists PyTorch's sharding actions.
///
/// # Errors
/// If a field is no action (its row and column are named), or the ops do not make a plan that
/// progresses (every broken rule is listed).
pub fn from_csv(text: &str) -> Result<Plan> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text).trim_end();
    if text.is_empty() {
        return Err(Error::parse(
            "the CSV is empty",
            "it has one row a rank, as in \"0F0,0B0\"",
        ));
    }
    let mut rows = Vec::new();
    let mut dropped = Vec::new();
    for (rank, row) in (0u32..).map(Rank).zip(text.lines()) {
        rows.push(read_row(rank, row, &mut dropped)?);
    }
    let lowered = rows
        .iter()
        .flat_map(|row| &row.ranks.ops)
        .any(|op| !op.kind.is_compute());
    let ops: Vec<RankOps> = rows.into_iter().map(|row| row.ranks).collect();
    let (shape, params) = infer::shape(&ops).map_err(|error| in_text(error, text))?;
    let mut plan = Plan::held("csv", shape, ops.clone()).with_params(params);
    if lowered {
        plan = plan.with_transfers(Style::Text, ops);
    }
    let report = check::check(&plan, None).into_result();
    report.map_err(|error| in_text(error, text))?;
    Ok(plan.with_dropped(dropped))
}

/// The error with the place in the text of its first violation: bubbles and sharding actions have
/// columns, but no positions.
fn in_text(error: Error, text: &str) -> Error {
    let Some(first) = error.violations.first() else {
        return error;
    };
    let row = text.lines().nth(first.rank.index()).unwrap_or_default();
    let has_op = |field: &str| matches!(read_action(field.trim_ascii()), Ok(action) if action != Action::Sharding);
    let (mut position, mut at) = (0, None);
    for (column, field) in row
        .split(',')
        .enumerate()
        .filter(|(_, field)| has_op(field))
    {
        let ops = if field.contains(';') { 2 } else { 1 };
        if (position..position + ops).contains(&first.position) {
            at = Some(column);
        }
        position += ops;
    }
    let column = at.map_or_else(String::new, |at| format!(", column {at}"));
    let message = format!("row {}{column}: {}", first.rank, error.message);
    Error { message, ..error }
}

fn read_row(rank: Rank, row: &str, dropped: &mut Vec<Dropped>) -> Result<Reader> {
    let mut reader = Reader::default();
    for (column, field) in row.split(',').enumerate() {
        let field = field.trim_ascii();
        if field.is_empty() {
            continue;
        }
        match read_action(field) {
            Ok(Action::One(op)) => reader.push(op),
            Ok(Action::Pair(first, second)) => {
                reader.compute(first);
                reader.compute(second);
            }
            Ok(Action::Sharding) => dropped.push(Dropped {
                rank,
                column,
                action: field.to_owned(),
            }),
            Err(hint) => {
                return Err(Error::parse(
                    format!("row {rank}, column {column}: {} is not an op", shown(field)),
                    hint,
                ));
            }
        }
    }
    Ok(reader)
}
