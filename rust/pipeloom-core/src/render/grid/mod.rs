//! The plan as text: one row a rank, time to the right.
//!
//! At full scale each box holds its op: kind, unit, and the chunk's letter if a rank has several.
//! In less room boxes shrink, first to their kind's letter; then a character stands for what
//! takes most of its time.

mod memory;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::{Block, COMPUTE_KINDS, Drawing, Lane, View, Window};
use super::{chunk_letter, decimal, is_pair_second, kind_name, palette};
use crate::cost::Costs;
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Flags, Op};
use crate::plan::Plan;
use crate::semantics::Semantics;
use crate::simulate::simulate;

/// Most characters of a row without a width.
const MAX_WIDTH: usize = 20_000;
/// Narrowest width of a grid.
const MIN_WIDTH: usize = 24;

/// How to draw a grid.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GridOptions {
    /// What part of the drawing.
    pub window: Window,
    /// Most characters of a row; none: as many as full scale needs.
    pub width: Option<usize>,
    /// Whether to colour with ANSI sequences (24-bit colour).
    pub color: bool,
    /// Whether to draw each rank's memory below its row.
    pub memory: bool,
    /// Whether to mark the ops of the critical path.
    pub critical_path: bool,
}

/// Draws the grid; each line ends in a line feed.
///
/// # Errors
/// If the window shows nothing or the width is too small.
pub fn grid(drawing: &Drawing, options: &GridOptions) -> Result<String> {
    let view = drawing.slice(&options.window)?;
    if options.memory {
        drawing.require_memory()?;
    }
    let margin = margin(drawing, options);
    let room = match options.width {
        Some(width) if width < MIN_WIDTH.max(margin + 8) => {
            return Err(Error::config(
                format!("width={width} is too small for a grid"),
                format!("give at least {}", MIN_WIDTH.max(margin + 8)),
            ));
        }
        Some(width) => width - margin,
        None => MAX_WIDTH,
    };
    let critical: BTreeSet<(Rank, usize)> = if options.critical_path {
        drawing.require_critical_path()?;
        drawing.critical_path.iter().copied().collect()
    } else {
        BTreeSet::new()
    };
    let spans: Vec<Vec<Span>> = view
        .ranks()
        .map(|rank| spans(view, rank, &critical))
        .collect();
    let columns = columns(view, &spans, room);
    let mut text = drawing.headline();
    text.push('\n');
    let _ = writeln!(text, "{:>margin$}{}", "time |", ruler(view, columns));
    for (rank, spans) in view.ranks().zip(&spans) {
        let name = format!("rank {rank} |");
        let _ = write!(text, "{name:>margin$}");
        let cells = raster(view, spans, columns);
        write_row(&mut text, drawing, &cells, options.color);
        if options.memory {
            let name = memory::name(drawing, rank);
            let _ = write!(text, "{name:>margin$}");
            memory::write_row(&mut text, view, rank, columns, options.color);
        }
    }
    write_legend(&mut text, drawing, &spans, options.color);
    if options.memory {
        memory::write_legend(&mut text, drawing, options.color);
    }
    write_scale(&mut text, view, &spans, columns);
    Ok(text)
}

/// Characters before a row.
fn margin(drawing: &Drawing, options: &GridOptions) -> usize {
    let rank = format!("rank {} |", drawing.shape.pp() - 1).len();
    let ranks = drawing.shape.ranks().filter(|_| options.memory);
    let peaks = ranks.map(|rank| memory::name(drawing, rank).len());
    peaks.max().map_or(rank, |peak| peak.max(rank))
}

/// Most ops of a plan that prints as a grid.
const MAX_PRINTED: u64 = 100_000;

/// The grid of a plan at unit costs (`F`, `I`, `W` take 1, `B` takes 2); the plan's one line if it
/// has too many ops to be read, or can't run.
pub fn of_plan(plan: &Plan) -> String {
    if plan.total_len() > MAX_PRINTED {
        return plan.describe();
    }
    simulate(plan, &Costs::default(), Semantics::Buffered, false)
        .and_then(|timeline| grid(&Drawing::predicted(&timeline)?, &GridOptions::default()))
        .map_or_else(|_| plan.describe(), |text| text.trim_end().to_owned())
}

/// A stretch of a row that shows one op. Times are half ticks since the window's begin, so that
/// halves of a pair are whole numbers; they may lie outside the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    op: Op,
    start: i128,
    end: i128,
    /// Whether it is marked as part of the critical path.
    critical: bool,
}

/// The window's length in half ticks, at least 1.
fn length(view: View<'_>) -> i128 {
    (2 * (i128::from(view.to) - i128::from(view.from))).max(1)
}

/// What a row shows of a rank. The ops of an overlapped pair take half of their time each.
fn spans(view: View<'_>, rank: Rank, critical: &BTreeSet<(Rank, usize)>) -> Vec<Span> {
    let lane = view.lane(rank);
    let since = |ticks: i64| 2 * (i128::from(ticks) - i128::from(view.from));
    let span = |(at, block): (usize, &Block)| {
        let (mut start, mut end) = (since(block.start), since(block.end));
        if let Some(pair) = pair_time(lane, at) {
            (start, end) = (since(pair.0), since(pair.1));
            let middle = i128::midpoint(start, end);
            if is_pair_second(block.op) {
                start = middle;
            } else {
                end = middle;
            }
        }
        Span {
            op: block.op,
            start,
            end,
            critical: critical.contains(&(rank, at)),
        }
    };
    let seen = |span: &Span| span.start < span.end && span.start < length(view) && span.end > 0;
    let computes = |found: &(usize, &Block)| found.1.op.kind.is_compute();
    view.blocks(rank)
        .filter(computes)
        .map(span)
        .filter(seen)
        .collect()
}

/// Start and end of the overlapped pair that the block at `at` belongs to.
fn pair_time(lane: &Lane, at: usize) -> Option<(i64, i64)> {
    let op = lane.blocks[at].op;
    let first = if is_pair_second(op) {
        at.checked_sub(1)?
    } else if op.flags.has(Flags::PAIR_FIRST) {
        at
    } else {
        return None;
    };
    let (a, b) = (lane.blocks.get(first)?, lane.blocks.get(first + 1)?);
    Some((a.start.min(b.start), a.end.max(b.end)))
}

/// The label of an op at full scale: `F0`; `F0b` on the second of several chunks; `F0*` recomputed;
/// `F0!` on the critical path.
fn label(drawing: &Drawing, span: &Span) -> String {
    let op = span.op;
    let mut text = format!("{}{}", op.kind, op.unit);
    if drawing.shape.chunks_per_rank() > 1 {
        text.push_str(&chunk_letter(drawing.shape.chunk_of(op.stage).0));
    }
    if op.flags.has(Flags::RECOMPUTE) {
        text.push('*');
    }
    if span.critical {
        text.push('!');
    }
    text
}

/// Characters of a row: as many as give the shortest op room for the longest label, but at most
/// `room`. Columns of equal width if all times are multiples of one step.
fn columns(view: View<'_>, spans: &[Vec<Span>], room: usize) -> usize {
    let all = || spans.iter().flatten();
    let length = length(view);
    let longest = all()
        .map(|span| label(view.drawing, span).len())
        .max()
        .unwrap_or(1);
    let shortest = all()
        .map(|span| span.end - span.start)
        .min()
        .unwrap_or(length);
    let step = all().fold(length, |step, span| {
        gcd(gcd(step, span.start.max(0)), span.end.min(length))
    });
    let cell = longest as i128 + 1;
    let natural = length * cell / shortest;
    let even = length / step * (cell * step + shortest - 1).div_euclid(shortest);
    let wanted = usize::try_from(if even <= 2 * natural { even } else { natural });
    if let Some(fitting) = wanted.ok().filter(|&wanted| wanted <= room) {
        return fitting.max(1);
    }
    // Scaled down, a whole number of characters a step keeps equal ops equally long.
    let steps = usize::try_from(length / step).unwrap_or(usize::MAX);
    if steps <= room {
        room / steps * steps
    } else {
        room
    }
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// One character of a row: the span that it belongs to, if it is busy for half of its time.
type Cell = Option<Span>;

/// Shares the row's characters out: each goes to the op that has most of its time, or to nobody
/// if the rank idles for more than half of it.
fn raster(view: View<'_>, spans: &[Span], columns: usize) -> Vec<Cell> {
    let (length, width) = (length(view), columns as i128);
    let mut cells: Vec<Cell> = vec![None; columns];
    let mut most = vec![0_i128; columns];
    let mut busy = vec![0_i128; columns];
    for span in spans {
        // In units of 1/columns half tick, so that cell `c` is [c * length, (c + 1) * length).
        let (start, end) = (span.start.max(0) * width, span.end.min(length) * width);
        let (Ok(first), Ok(last)) = (
            usize::try_from(start / length),
            usize::try_from((end - 1) / length),
        ) else {
            continue;
        };
        for cell in first..=last.min(columns - 1) {
            let (left, right) = (cell as i128 * length, (cell as i128 + 1) * length);
            let share = end.min(right) - start.max(left);
            busy[cell] += share;
            if share > most[cell] {
                most[cell] = share;
                cells[cell] = Some(*span);
            }
        }
    }
    for (cell, busy) in cells.iter_mut().zip(busy) {
        if 2 * busy < length {
            *cell = None;
        }
    }
    cells
}

/// Writes a row: runs of cells that belong to one op are labelled, if the label fits. Idle cells
/// get a dot each, or one in so many where boxes are wide.
fn write_row(text: &mut String, drawing: &Drawing, cells: &[Cell], color: bool) {
    let runs = || cells.chunk_by(|a, b| a == b);
    let boxes = runs().filter(|run| run[0].is_some()).map(<[Cell]>::len);
    let dot_every = boxes.min().unwrap_or(1);
    let mut row = String::new();
    let mut at = 0;
    for run in runs() {
        if let Some(span) = run[0] {
            let (shown, gap) = boxed(drawing, &span, run.len(), color);
            paint(&mut row, drawing, &span, &shown, color);
            row.push_str(&" ".repeat(gap));
        } else {
            let dot = |i: usize| {
                if i.is_multiple_of(dot_every) {
                    '.'
                } else {
                    ' '
                }
            };
            row.extend((at..at + run.len()).map(dot));
        }
        at += run.len();
    }
    text.push_str(row.trim_end());
    text.push('\n');
}

/// What a box of `run` characters shows, and the gap behind it.
fn boxed(drawing: &Drawing, span: &Span, run: usize, color: bool) -> (String, usize) {
    let op = span.op;
    // Dashes show that a longer op goes on; on coloured paper that is seen.
    let filler = if color { " " } else { "-" };
    let fill = |label: &str, width: usize| format!("{label}{}", filler.repeat(width - label.len()));
    let full = label(drawing, span);
    let unit = op.unit.to_string();
    if run > full.len() {
        (fill(&full, run - 1), 1)
    } else if run == full.len() {
        (full, 0)
    } else if color && run >= unit.len() {
        // The colour tells kind and chunk.
        (fill(&unit, run), 0)
    } else {
        (fill(op.kind.text(), run), 0)
    }
}

/// Appends `shown` in the op's colours. Both ink and paper are set, so it reads on any terminal.
/// Neighbouring microbatches differ in shade, so that boxes end where they end; the critical path
/// is bold and underlined.
fn paint(row: &mut String, drawing: &Drawing, span: &Span, shown: &str, color: bool) {
    if !color {
        row.push_str(shown);
        return;
    }
    let shade = 2 * drawing.shape.chunk_of(span.op.stage).0 + span.op.unit.0 % 2;
    let paper = palette::fill(span.op.kind, shade, 2 * drawing.shape.chunks_per_rank());
    let ink = paper.ink();
    let mark = if span.critical { "1;4;" } else { "" };
    let _ = write!(
        row,
        "\x1b[{mark}38;2;{};{};{};48;2;{};{};{}m{shown}\x1b[0m",
        ink.r, ink.g, ink.b, paper.r, paper.g, paper.b
    );
}

/// Times along the top, each above the start of its tick.
fn ruler(view: View<'_>, columns: usize) -> String {
    let length = (view.to - view.from).max(1);
    let mut row = String::new();
    let mut marks = view.marks(columns / 8 + 1);
    if marks.first().is_none_or(|first| first.0 > view.from) {
        marks.insert(0, (view.from, view.drawing.time_text(view.from, 3)));
    }
    for (ticks, name) in marks {
        let at = i128::from(ticks - view.from) * columns as i128 / i128::from(length);
        let at = usize::try_from(at).unwrap_or(0);
        // A mark needs a blank before it and its whole name inside the row.
        if (row.is_empty() && at == 0) || at > row.len() {
            if at + name.len() > columns.max(name.len()) {
                break;
            }
            row.push_str(&" ".repeat(at - row.len()));
            row.push_str(&name);
        }
    }
    row
}

fn write_legend(text: &mut String, drawing: &Drawing, spans: &[Vec<Span>], color: bool) {
    let all = || spans.iter().flatten();
    for kind in COMPUTE_KINDS {
        if let Some(span) = all().find(|span| span.op.kind == kind) {
            let plain = Span {
                critical: false,
                ..*span
            };
            paint(text, drawing, &plain, kind.text(), color);
            let _ = write!(text, " {}   ", kind_name(kind));
        }
    }
    text.push_str(if color {
        ". idle"
    } else {
        ". idle   - goes on"
    });
    if all().any(|span| span.op.flags.has(Flags::RECOMPUTE)) {
        text.push_str("   * recomputed");
    }
    if all().any(|span| span.critical) {
        text.push_str(if color {
            "   \x1b[1;4m! critical path\x1b[0m"
        } else {
            "   ! critical path"
        });
    }
    if let Some(shades) = drawing.shades() {
        let last = chunk_letter(drawing.shape.chunks_per_rank() - 1);
        let between = if last == "b" { ", " } else { ".." };
        let _ = write!(text, "   a{between}{last}: {shades}");
    }
    if drawing.shape.num_seq_pieces() > 1 {
        let _ = write!(text, "   {}", drawing.numbers());
    }
    text.push('\n');
}

/// Says so if a character is more than a step of the plan.
fn write_scale(text: &mut String, view: View<'_>, spans: &[Vec<Span>], columns: usize) {
    let shortest = spans
        .iter()
        .flatten()
        .map(|span| span.end - span.start)
        .min();
    let (length, columns) = (length(view), columns as i128);
    if shortest.is_some_and(|shortest| length > shortest * columns) {
        let unit = i128::from(view.drawing.ticks_per_unit);
        let each = decimal(length, 2 * columns * unit, 3);
        let _ = writeln!(
            text,
            "scaled: one character is {each} time units and shows what takes most of it; \
             slice with --from and --to to see each op"
        );
    }
}
