//! A rank's memory as a row of characters below its ops.

use std::fmt::Write as _;

use crate::ids::Rank;
use crate::render::{Drawing, Lane, View};

/// What stands for no memory up to the most, on a coloured terminal.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// The same in plain text.
const DIGITS: [char; 10] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'];

/// What stands before the row.
pub(super) fn name(drawing: &Drawing, rank: Rank) -> String {
    let peak = drawing.lanes[rank.index()].peak_memory.unwrap_or(0);
    format!("peak {} |", drawing.memory_text(peak))
}

fn most(drawing: &Drawing) -> i64 {
    let peaks = drawing.lanes.iter().filter_map(|lane| lane.peak_memory);
    peaks.max().unwrap_or(0).max(1)
}

/// What the highest character stands for: digits are the memory itself where that is a digit.
fn full(drawing: &Drawing, bars: bool) -> i64 {
    let (unit, most) = (drawing.memory_ticks_per_unit, most(drawing));
    let whole = |lane: &Lane| {
        let levels = lane.memory.iter().chain([&lane.base_memory]);
        levels.into_iter().all(|level| level % unit == 0)
    };
    if !bars && most <= 9 * unit && drawing.lanes.iter().all(whole) {
        9 * unit
    } else {
        most
    }
}

/// Writes one character for each column: the most memory that the rank holds in its time.
pub(super) fn write_row(text: &mut String, view: View<'_>, rank: Rank, columns: usize, bars: bool) {
    let marks: &[char] = if bars { &BARS } else { &DIGITS };
    let (lane, full) = (view.lane(rank), i128::from(full(view.drawing, bars)));
    let length = i128::from((view.to - view.from).max(1));
    let mut steps = lane.memory_steps().peekable();
    let mut level = lane.base_memory;
    let mut row = String::new();
    for column in 0..columns {
        // What holds at the column's start counts as well as what is reached inside it.
        let begins = view.from + ticks(length * column as i128 / columns as i128);
        let ends = view.from + ticks(length * (column as i128 + 1) / columns as i128);
        while let Some(step) = steps.next_if(|step| step.0 <= begins) {
            level = step.1;
        }
        let mut highest = level;
        while let Some(step) = steps.next_if(|step| step.0 < ends) {
            level = step.1;
            highest = highest.max(level);
        }
        let last = marks.len() as i128 - 1;
        // Rounded up: only nothing is shown as nothing.
        let at = (i128::from(highest.max(0)) * last + full - 1) / full;
        row.push(marks[usize::try_from(at.min(last)).unwrap_or(0)]);
    }
    let _ = writeln!(text, "{}", row.trim_end());
}

fn ticks(value: i128) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Says what the characters mean.
pub(super) fn write_legend(text: &mut String, drawing: &Drawing, bars: bool) {
    let meaning = drawing.memory_meaning();
    let full = full(drawing, bars);
    let each = drawing.memory_text(full);
    let scale = if bars {
        format!("a full bar is {each}")
    } else if full == 9 * drawing.memory_ticks_per_unit {
        "digits are memory".to_owned()
    } else {
        format!("9 is {each}")
    };
    let _ = writeln!(text, "{meaning}; {scale}");
}
