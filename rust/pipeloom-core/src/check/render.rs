//! A report as text: each violation with the ops around it and an arrow at the one it names.

use std::fmt;
use std::fmt::Write as _;

use super::Report;
use super::progress::hidden;
use crate::ids::Rank;
use crate::plan::Plan;
use crate::violation::Violation;

/// Violations that are shown before the rest is counted.
const SHOWN: usize = 5;
/// Ranks and positions to each side of a violation.
const AROUND: u64 = 2;

/// The first few violations, with their surroundings.
pub(super) fn violations(plan: &Plan, violations: &[Violation]) -> String {
    let mut text = match violations {
        [_] => "the plan breaks a rule".to_owned(),
        many => format!("the plan breaks rules: {} violations", many.len()),
    };
    for violation in violations.iter().take(SHOWN) {
        let Violation {
            rule,
            rank,
            position,
            message,
            hint,
            ..
        } = violation;
        let _ = write!(
            text,
            "\n\nrank {rank}, position {position}: {message} [{rule}]"
        );
        text.push_str(&match &*violation.cycle {
            [] => grid(plan, violation),
            cycle => cycle_grid(plan, cycle),
        });
        // The first one's ends the message.
        if *hint != violations[0].hint {
            let _ = write!(text, "\n  hint: {hint}");
        }
    }
    if violations.len() > SHOWN {
        let _ = write!(text, "\n\n... and {} more", violations.len() - SHOWN);
    }
    text
}

/// The ops around a violation: a row a position, a column a rank.
fn grid(plan: &Plan, violation: &Violation) -> String {
    let (rank, position) = (violation.rank.0, violation.position);
    let last = plan.shape().pp().saturating_sub(1);
    let ranks: Vec<u32> = (rank.saturating_sub(1)..=last.min(rank.saturating_add(1))).collect();
    let rows = position.saturating_sub(AROUND)..=position.saturating_add(AROUND);
    let cell = |rank: u32, at: u64| match plan.op(Rank(rank), at) {
        Ok(op) => op.to_string(),
        // What is missing is told one past the end.
        Err(_) if (rank, at) == (violation.rank.0, position) => format!("no {}", violation.op),
        Err(_) => String::new(),
    };
    let table: Vec<(u64, Vec<String>)> = rows
        .map(|at| {
            (
                at,
                ranks.iter().map(|&rank| cell(rank, at)).collect::<Vec<_>>(),
            )
        })
        .filter(|(at, cells)| *at == position || cells.iter().any(|cell| !cell.is_empty()))
        .collect();
    let longest = table
        .iter()
        .flat_map(|(_, cells)| cells)
        .map(String::len)
        .max();
    let width = longest.unwrap_or(0).max(8) + 5;
    let mut text = format!("\n  {:>8}", "position");
    for rank in &ranks {
        let _ = write!(text, "  {:width$}", format!("rank {rank}"));
    }
    text.truncate(text.trim_end().len());
    for (at, cells) in table {
        let _ = write!(text, "\n  {at:>8}");
        for (&column, cell) in ranks.iter().zip(&cells) {
            let arrow = if (column, at) == (rank, position) {
                " <--"
            } else {
                ""
            };
            let _ = write!(text, "  {:width$}", format!("{cell}{arrow}"));
        }
        text.truncate(text.trim_end().len());
    }
    text
}

/// The ops around each place of a deadlock: a column a place, its own positions beside its ops.
fn cycle_grid(plan: &Plan, cycle: &[(Rank, u64)]) -> String {
    let hidden = hidden(cycle.len());
    let column = |&(rank, position): &(Rank, u64)| {
        let mut column = vec![format!("rank {rank}")];
        let (position, around) = (i128::from(position), i128::from(AROUND));
        for at in position - around..=position + around {
            let op = u64::try_from(at).ok().and_then(|at| plan.op(rank, at).ok());
            let arrow = if at == position { " <--" } else { "" };
            column.push(op.map_or_else(String::new, |op| format!("{at} {op}{arrow}")));
        }
        column
    };
    let mut columns: Vec<Vec<String>> = Vec::new();
    for (at, place) in cycle.iter().enumerate() {
        if at == hidden.start && !hidden.is_empty() {
            columns.push(vec!["...".to_owned()]);
        }
        if !hidden.contains(&at) {
            columns.push(column(place));
        }
    }
    let rows = columns.iter().map(Vec::len).max().unwrap_or(0);
    let mut text = String::new();
    for row in 0..rows {
        let cells = columns.iter().map(|column| {
            let width = column.iter().map(String::len).max().unwrap_or(0);
            let cell = column.get(row).map_or("", String::as_str);
            format!("  {cell:width$}")
        });
        let line: String = cells.collect();
        if !line.trim().is_empty() {
            let _ = write!(text, "\n{}", line.trim_end());
        }
    }
    text
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.ok() {
            let ops = self.plan().total_len();
            write!(
                f,
                "{}: no rule is broken by its {ops} ops",
                self.plan().describe()
            )?;
        } else {
            f.write_str(&violations(self.plan(), &self.violations))?;
        }
        for progress in &self.progress {
            let verdict = match progress.progresses {
                Some(true) => "progresses",
                Some(false) => "gets stuck",
                None => "not applicable: the plan has no transfers",
            };
            let promised = if progress.promised { " (promised)" } else { "" };
            write!(
                f,
                "\n{:>13}: {verdict}{promised}",
                progress.semantics.name()
            )?;
        }
        for violation in &self.unpromised {
            write!(f, "\n{}", violation.message)?;
        }
        Ok(())
    }
}
