//! The plan as an SVG picture: boxes on white paper, a time axis, a legend, a memory curve.
//!
//! Coordinates are integers in hundredths of a pixel until they are written, so that the bytes
//! are the same everywhere.

mod rows;
mod scale;
mod stack;
mod waiting;

pub use stack::stack;

use std::fmt::Write as _;

use scale::{LINE, Legend};

use super::palette;
use super::waits::Waits;
use super::{Block, Drawing, View, Window};
use crate::cost::Costs;
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Op, OpKind};
use crate::plan::Plan;
use crate::semantics::Semantics;
use crate::simulate::simulate;

/// Most ops of a picture: more would make viewers crawl.
pub const MAX_OPS: usize = 200_000;
/// Most ops of a picture whose boxes tell about themselves under the mouse.
const MAX_TITLES: usize = 5_000;
/// Narrowest picture, in pixels.
const MIN_WIDTH: u32 = 200;
/// Widest picture, in pixels.
const MAX_WIDTH: u32 = 20_000;

/// One pixel, in the units of coordinates.
const PX: i64 = 100;
const MARGIN: i64 = 12 * PX;
const ROW: i64 = 24 * PX;
const GAP: i64 = 6 * PX;
const COMM_STRIP: i64 = 5 * PX;
const MEMORY_STRIP: i64 = 22 * PX;
/// Boxes below this width are merged.
const THIN: i64 = 2 * PX;
/// Width of a digit of a label, generously.
const DIGIT: i64 = 7 * PX;
/// Width of a character of small text.
const SMALL: i64 = 11 * PX / 2;
/// Room right of the rows, for each rank's idle share.
const RIGHT: i64 = MARGIN + 54 * PX;

/// How to draw a picture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SvgOptions {
    /// What part of the drawing.
    pub window: Window,
    /// Width in pixels; none: as wide as labels need, within reason.
    pub width: Option<u32>,
    /// Whether to draw each rank's memory below its row.
    pub memory: bool,
    /// Whether to outline the critical path.
    pub critical_path: bool,
}

/// Draws the picture.
///
/// # Errors
/// If the window shows nothing or too much, the width is out of range, or the memory or the
/// critical path is asked for but unknown.
pub fn svg(drawing: &Drawing, options: &SvgOptions) -> Result<String> {
    let view = drawing.slice(&options.window)?;
    view.limit("an SVG picture", MAX_OPS)?;
    if options.memory {
        drawing.require_memory()?;
    }
    if options.critical_path {
        drawing.require_critical_path()?;
    }
    let mut picture = Picture {
        text: String::new(),
        frame: Frame::new(view, options)?,
        view,
        prefix: String::new(),
    };
    picture.open(options);
    picture.content(options);
    picture.text.push_str("</svg>\n");
    Ok(picture.text)
}
/// Most ops of a plan that shows itself as a picture.
const MAX_SHOWN: u64 = 100_000;

/// The picture of a plan at unit costs (`F`, `I`, `W` take 1, `B` takes 2); none if it has too many
/// ops to be read, or can't run.
pub fn of_plan(plan: &Plan) -> Option<String> {
    if plan.total_len() > MAX_SHOWN {
        return None;
    }
    simulate(plan, &Costs::default(), Semantics::Buffered, false)
        .and_then(|timeline| svg(&Drawing::predicted(&timeline)?, &SvgOptions::default()))
        .ok()
}

/// Where things are.
struct Frame {
    width: i64,
    height: i64,
    /// Left edge of the boxes.
    left: i64,
    /// Top edge of the first row.
    top: i64,
    /// Width of the boxes' area.
    plot: i64,
    /// From one row to the next.
    pitch: i64,
    comm: bool,
    /// The most memory of all ranks, for the curves' common scale.
    most_memory: i64,
    titles: bool,
    /// Lines of the headline.
    head: Vec<String>,
    legend: Legend,
}

impl Frame {
    fn new(view: View<'_>, options: &SvgOptions) -> Result<Self> {
        let drawing = view.drawing;
        let digits = i64::try_from((drawing.shape.pp() - 1).to_string().len()).unwrap_or(1);
        let label = if options.memory {
            widest_peak(drawing).max(5 + digits)
        } else {
            5 + digits
        };
        let left = MARGIN + label * DIGIT + GAP;
        let width = match options.width {
            Some(width) if (MIN_WIDTH..=MAX_WIDTH).contains(&width) => i64::from(width) * PX,
            Some(width) => {
                return Err(Error::config(
                    format!("width={width} is out of range for an SVG picture"),
                    format!("give {MIN_WIDTH} to {MAX_WIDTH} pixels, or leave it out"),
                ));
            }
            None => left + RIGHT + natural_plot(view),
        };
        let comm = view.ranks().any(|rank| {
            let moves = |block: &Block| !block.op.kind.is_compute() && block.end > block.start;
            view.blocks(rank).any(|found| moves(found.1))
        });
        let strips = if comm { COMM_STRIP } else { 0 }
            + if options.memory {
                MEMORY_STRIP + GAP / 2
            } else {
                0
            };
        let pitch = ROW + GAP + strips;
        let ops: usize = view.ranks().map(|rank| view.blocks(rank).count()).sum();
        let mut frame = Self {
            width,
            height: 0,
            left,
            top: 0,
            plot: width - left - RIGHT,
            pitch,
            comm,
            most_memory: drawing
                .lanes
                .iter()
                .filter_map(|lane| lane.peak_memory)
                .max()
                .unwrap_or(0),
            titles: ops <= MAX_TITLES,
            head: Vec::new(),
            legend: Legend::default(),
        };
        frame.set_texts(view, options);
        Ok(frame)
    }

    /// Wraps headline and legend to the width, and sets what is below each.
    fn set_texts(&mut self, view: View<'_>, options: &SvgOptions) {
        let count = |n: usize| i64::try_from(n).unwrap_or(1);
        self.head = wrapped(&view.drawing.headline(), self.width - 2 * MARGIN);
        self.legend = Legend::new(view, self.comm, options, self.width - self.left - MARGIN);
        self.top = MARGIN + 34 * PX + (count(self.head.len()) - 1) * LINE;
        let rows = count(view.ranks().count()) * self.pitch;
        self.height = self.top + rows + 34 * PX + self.legend.lines * LINE + MARGIN;
    }

    fn y(&self, view: View<'_>, rank: Rank) -> i64 {
        let row = view.ranks().position(|other| other == rank).unwrap_or(0);
        self.top + i64::try_from(row).unwrap_or(0) * self.pitch
    }

    fn x(&self, view: View<'_>, ticks: i64) -> i64 {
        let length = i128::from((view.to - view.from).max(1));
        let ticks = i128::from(ticks.clamp(view.from, view.to) - view.from);
        self.left + i64::try_from(i128::from(self.plot) * ticks / length).unwrap_or(0)
    }
}

/// Characters of the longest `peak N`.
fn widest_peak(drawing: &Drawing) -> i64 {
    let peaks = drawing.lanes.iter().filter_map(|lane| lane.peak_memory);
    let longest = peaks
        .map(|peak| drawing.memory_text(peak).len())
        .max()
        .unwrap_or(0);
    5 + i64::try_from(longest).unwrap_or(0)
}

/// Room for a two-digit label in the shortest op, between 600 and 1600 pixels in all.
fn natural_plot(view: View<'_>) -> i64 {
    let lengths = view
        .ranks()
        .flat_map(|rank| view.blocks(rank).map(|found| found.1));
    let computes = lengths.filter(|block| block.op.kind.is_compute() && block.end > block.start);
    let shortest = computes
        .map(|block| block.end - block.start)
        .min()
        .unwrap_or(1);
    let wanted = i128::from(view.to - view.from) * i128::from(2 * DIGIT + 4 * PX);
    i64::try_from(wanted / i128::from(shortest))
        .unwrap_or(i64::MAX)
        .clamp(600 * PX, 1600 * PX)
}

/// A coordinate in pixels.
struct Px(i64);

impl std::fmt::Display for Px {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (whole, rest) = (self.0 / PX, (self.0 % PX).abs());
        let sign = if self.0 < 0 && whole == 0 { "-" } else { "" };
        match rest {
            0 => write!(f, "{sign}{whole}"),
            _ if rest % 10 == 0 => write!(f, "{sign}{whole}.{}", rest / 10),
            _ => write!(f, "{sign}{whole}.{rest:02}"),
        }
    }
}

/// Text for use inside an element or attribute.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            // XML 1.0 has no way to write other control characters.
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// A headline in lines of at most `room`, broken between its parts.
fn wrapped(head: &str, room: i64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for part in head.split("   ") {
        let fits = |line: &String| {
            i64::try_from(line.len() + 3 + part.len()).unwrap_or(i64::MAX) * DIGIT <= room
        };
        match lines.last_mut().filter(|line| fits(line)) {
            Some(line) => {
                line.push_str("   ");
                line.push_str(part);
            }
            None => lines.push(part.to_owned()),
        }
    }
    lines
}

struct Picture<'a> {
    text: String,
    frame: Frame,
    view: View<'a>,
    /// Of the style classes: pictures in one file must not share them.
    prefix: String,
}

impl Picture<'_> {
    /// The style class of an op: kind and chunk.
    fn class(&self, op: Op) -> String {
        let chunk = self.view.drawing.shape.chunk_of(op.stage);
        format!("{}{}{chunk}", self.prefix, op.kind)
    }

    fn open(&mut self, options: &SvgOptions) {
        let title = self.view.drawing.headline();
        open(
            &mut self.text,
            (self.frame.width, self.frame.height),
            &title,
        );
        self.text.push_str("<style>\n");
        common_styles(&mut self.text, options.memory);
        self.styles();
        self.text.push_str("</style>\n");
        paper(&mut self.text);
    }

    /// All but what surrounds a picture.
    fn content(&mut self, options: &SvgOptions) {
        for (line, head) in self.frame.head.iter().enumerate() {
            let y = MARGIN + 12 * PX + i64::try_from(line).unwrap_or(0) * LINE;
            let _ = writeln!(
                self.text,
                "<text class=\"head\" x=\"{}\" y=\"{}\" xml:space=\"preserve\">{}</text>",
                Px(MARGIN),
                Px(y),
                escaped(head)
            );
        }
        let view = self.view;
        let waits = Waits::new(view.drawing);
        for rank in view.ranks() {
            self.row(rank, &waits, options);
        }
        self.limits();
        if options.critical_path {
            self.critical_path();
        }
        self.axis();
        self.legend();
    }

    /// One class for each kind and chunk that is seen, with its ink.
    fn styles(&mut self) {
        let shape = &self.view.drawing.shape;
        let mut seen: Vec<(OpKind, u32)> = self
            .view
            .ranks()
            .flat_map(|rank| self.view.blocks(rank))
            .map(|(_, block)| (block.op.kind, shape.chunk_of(block.op.stage).0))
            .collect();
        seen.sort_unstable();
        seen.dedup();
        let prefix = &self.prefix;
        for (kind, chunk) in seen {
            let fill = palette::fill(kind, chunk, shape.chunks_per_rank());
            let ink = fill.ink();
            let _ = writeln!(
                self.text,
                ".{prefix}{kind}{chunk}{{fill:{fill}}} .t{prefix}{kind}{chunk}{{fill:{ink};stroke:none}}"
            );
        }
    }
}

/// The start of a file that holds a picture.
fn open(text: &mut String, (width, height): (i64, i64), title: &str) {
    let (width, height) = (Px(width), Px(height));
    let _ = writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" font-family=\"Helvetica, Arial, \
         sans-serif\" font-size=\"12\">\n<title>{}</title>",
        escaped(title)
    );
}

fn paper(text: &mut String) {
    let fill = palette::WHITE;
    let _ = writeln!(
        text,
        "<rect width=\"100%\" height=\"100%\" fill=\"{fill}\"/>"
    );
}

/// Styles of all but the ops.
fn common_styles(text: &mut String, memory: bool) {
    let _ = writeln!(
        text,
        "text{{fill:{}}} .head{{font-weight:bold}} .n{{text-anchor:middle}} \
         .r{{text-anchor:end}} .s{{font-size:10px}}\n.idle{{fill:{};stroke:{};stroke-width:.5}} \
         .b{{stroke:{};stroke-width:.5}} .re{{fill:none;stroke-width:2;stroke-dasharray:3 2}} \
         .thin{{shape-rendering:crispEdges}} .w{{fill:none;pointer-events:all}} \
         .limit{{fill:none;stroke:{};stroke-width:1}} .dashed{{stroke-dasharray:4 3}}",
        palette::TEXT,
        palette::BUBBLE,
        palette::RULE,
        palette::WHITE,
        palette::TEXT,
    );
    if memory {
        let _ = writeln!(
            text,
            ".mem{{fill:{};stroke:{};stroke-width:1}}",
            palette::MEMORY_FILL,
            palette::MEMORY
        );
    }
}
