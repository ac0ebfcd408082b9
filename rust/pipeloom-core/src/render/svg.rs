//! The plan as an SVG picture: boxes on white paper, a time axis, a legend, a memory curve.
//!
//! Coordinates are integers in hundredths of a pixel until they are written, so that the bytes
//! are the same everywhere.

use std::fmt::Write as _;

use super::{Block, COMPUTE_KINDS, Drawing, Lane, View, Window};
use super::{grid, is_pair_second, kind_name, palette};
use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};

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
    if options.memory && drawing.lanes.iter().any(|lane| lane.peak_memory.is_none()) {
        return Err(Error::config(
            "memory=True, but this drawing knows no memory",
            "draw a simulated plan, or leave memory out",
        ));
    }
    if options.critical_path && drawing.critical_path.is_empty() {
        return Err(Error::config(
            "critical_path=True, but this drawing knows no critical path",
            "draw a simulated plan, or leave critical_path out",
        ));
    }
    let frame = Frame::new(view, options)?;
    let mut picture = Picture {
        text: String::new(),
        frame,
        view,
    };
    picture.open(options);
    for rank in view.ranks() {
        picture.row(rank, options);
    }
    if options.critical_path {
        picture.critical_path();
    }
    picture.axis();
    picture.legend();
    picture.text.push_str("</svg>\n");
    Ok(picture.text)
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
            None => left + MARGIN + natural_plot(view),
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
        let ranks = i64::try_from(view.ranks().count()).unwrap_or(1);
        let top = MARGIN + 30 * PX;
        let ops: usize = view.ranks().map(|rank| view.blocks(rank).count()).sum();
        Ok(Self {
            width,
            height: top + ranks * pitch + 28 * PX + 22 * PX + MARGIN,
            left,
            top,
            plot: width - left - MARGIN,
            pitch,
            comm,
            most_memory: drawing
                .lanes
                .iter()
                .filter_map(|lane| lane.peak_memory)
                .max()
                .unwrap_or(0),
            titles: ops <= MAX_TITLES,
        })
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

/// The style class of an op: kind and chunk.
fn class(drawing: &Drawing, op: Op) -> String {
    format!("{}{}", op.kind, drawing.shape.chunk_of(op.stage))
}

struct Picture<'a> {
    text: String,
    frame: Frame,
    view: View<'a>,
}

impl Picture<'_> {
    fn open(&mut self, options: &SvgOptions) {
        let (width, height) = (Px(self.frame.width), Px(self.frame.height));
        let head = grid::header(self.view.drawing);
        let head = escaped(head.trim_end());
        let _ = writeln!(
            self.text,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\" font-family=\"Helvetica, Arial, \
             sans-serif\" font-size=\"12\">\n<title>{head}</title>"
        );
        self.styles(options);
        let _ = writeln!(
            self.text,
            "<rect width=\"100%\" height=\"100%\" fill=\"{}\"/>\n\
             <text class=\"head\" x=\"{}\" y=\"{}\" xml:space=\"preserve\">{head}</text>",
            palette::WHITE,
            Px(MARGIN),
            Px(MARGIN + 12 * PX),
        );
    }

    /// One class for each kind and chunk that is seen, with its ink.
    fn styles(&mut self, options: &SvgOptions) {
        let shape = &self.view.drawing.shape;
        let mut seen: Vec<(OpKind, u32)> = self
            .view
            .ranks()
            .flat_map(|rank| self.view.blocks(rank))
            .map(|(_, block)| (block.op.kind, shape.chunk_of(block.op.stage).0))
            .collect();
        seen.sort_unstable();
        seen.dedup();
        let _ = writeln!(
            self.text,
            "<style>\ntext{{fill:{}}} .head{{font-weight:bold}} .n{{text-anchor:middle}} \
             .r{{text-anchor:end}} .s{{font-size:10px}}\n.idle{{fill:{};stroke:{};stroke-width:.5}} \
             .b{{stroke:{};stroke-width:.5}} .re{{fill:none;stroke-width:2;stroke-dasharray:3 2}} .thin{{shape-rendering:crispEdges}}",
            palette::TEXT,
            palette::BUBBLE,
            palette::RULE,
            palette::WHITE,
        );
        if options.memory {
            let _ = writeln!(
                self.text,
                ".mem{{fill:{0};fill-opacity:.25;stroke:{0};stroke-width:1}}",
                palette::MEMORY
            );
        }
        for (kind, chunk) in seen {
            let fill = palette::fill(kind, chunk, shape.chunks_per_rank());
            let ink = fill.ink();
            let _ = writeln!(
                self.text,
                ".{kind}{chunk}{{fill:{fill}}} .t{kind}{chunk}{{fill:{ink};stroke:none}}"
            );
        }
        self.text.push_str("</style>\n");
    }

    fn row(&mut self, rank: Rank, options: &SvgOptions) {
        let y = self.frame.y(self.view, rank);
        let (left, plot) = (self.frame.left, self.frame.plot);
        let _ = writeln!(
            self.text,
            "<text class=\"r\" x=\"{}\" y=\"{}\">rank {rank}</text>\n\
             <rect class=\"idle\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
            Px(left - GAP),
            Px(y + ROW / 2 + 4 * PX),
            Px(left),
            Px(y),
            Px(plot),
            Px(ROW)
        );
        self.boxes(rank, y);
        let mut below = y + ROW;
        if self.frame.comm {
            self.transfers(rank, below);
            below += COMM_STRIP;
        }
        if options.memory {
            self.memory(rank, below + GAP / 2);
        }
    }

    /// The boxes of a rank. Neighbours of one class that are too thin to see are merged.
    fn boxes(&mut self, rank: Rank, y: i64) {
        let (view, lane) = (self.view, self.view.lane(rank));
        let mut thin: Option<(String, i64, i64)> = None;
        for (at, block) in view
            .blocks(rank)
            .filter(|found| found.1.op.kind.is_compute())
        {
            let (x, end) = (
                self.frame.x(view, block.start),
                self.frame.x(view, block.end),
            );
            let class = class(view.drawing, block.op);
            if end - x < THIN {
                match &mut thin {
                    Some((same, _, until)) if *same == class && x - *until < PX / 4 => *until = end,
                    _ => {
                        self.flush(&mut thin, y);
                        thin = Some((class, x, end));
                    }
                }
                continue;
            }
            self.flush(&mut thin, y);
            // An overlapped pair shares its time: first half above, second below.
            let (top, height) = match half_of_pair(lane, at) {
                None => (y, ROW),
                Some(Half::Upper) => (y, ROW / 2),
                Some(Half::Lower) => (y + ROW / 2, ROW / 2),
            };
            self.block(block, &class, (x, top), (end - x, height));
        }
        self.flush(&mut thin, y);
    }

    fn flush(&mut self, thin: &mut Option<(String, i64, i64)>, y: i64) {
        if let Some((class, x, end)) = thin.take() {
            let _ = writeln!(
                self.text,
                "<rect class=\"{class} thin\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
                Px(x),
                Px(y),
                Px((end - x).max(PX / 4)),
                Px(ROW)
            );
        }
    }

    fn block(&mut self, block: &Block, class: &str, at: (i64, i64), size: (i64, i64)) {
        let (x, y, width, height) = (at.0, at.1, size.0, size.1);
        let border = if width >= 4 * PX { " b" } else { " thin" };
        let _ = write!(
            self.text,
            "<rect class=\"{class}{border}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"",
            Px(x),
            Px(y),
            Px(width),
            Px(height)
        );
        if self.frame.titles {
            let (op, drawing) = (block.op, self.view.drawing);
            let _ = write!(
                self.text,
                "><title>{op}: {} of microbatch {} on stage {}, {} to {}</title></rect>",
                kind_name(op.kind),
                op.unit,
                op.stage,
                drawing.time_text(block.start, 6),
                drawing.time_text(block.end, 6)
            );
        } else {
            self.text.push_str("/>");
        }
        let label = block.op.unit.to_string();
        let small = if height < ROW { " s" } else { "" };
        if i64::try_from(label.len()).unwrap_or(i64::MAX) * DIGIT < width {
            let _ = write!(
                self.text,
                "<text class=\"t{class} n{small}\" x=\"{}\" y=\"{}\">{label}</text>",
                Px(x + width / 2),
                Px(y + height / 2 + if height < ROW { 350 } else { 420 })
            );
        }
        if block.op.flags.has(Flags::RECOMPUTE) && width >= 6 * PX {
            let _ = write!(
                self.text,
                "<path class=\"re\" stroke=\"{}\" d=\"M{} {}h{}\"/>",
                palette::fill(
                    block.op.kind,
                    self.view.drawing.shape.chunk_of(block.op.stage).0,
                    self.view.drawing.shape.chunks_per_rank()
                )
                .ink(),
                Px(x + 2 * PX),
                Px(y + height - 3 * PX),
                Px(width - 4 * PX)
            );
        }
        self.text.push('\n');
    }

    fn transfers(&mut self, rank: Rank, y: i64) {
        let view = self.view;
        for (_, block) in view
            .blocks(rank)
            .filter(|found| !found.1.op.kind.is_compute())
        {
            let (x, end) = (
                self.frame.x(view, block.start),
                self.frame.x(view, block.end),
            );
            let class = class(view.drawing, block.op);
            let up = if block.op.kind.is_send() {
                0
            } else {
                COMM_STRIP / 2
            };
            let _ = writeln!(
                self.text,
                "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
                Px(x),
                Px(y + up),
                Px((end - x).max(PX / 4)),
                Px(COMM_STRIP / 2)
            );
        }
    }

    /// Memory as a filled staircase, all ranks to one scale; its peak in figures at the right end.
    fn memory(&mut self, rank: Rank, y: i64) {
        let (view, lane) = (self.view, self.view.lane(rank));
        let most = i128::from(self.frame.most_memory.max(1));
        let bottom = y + MEMORY_STRIP;
        let height = |bytes: i64| {
            let up = i128::from(MEMORY_STRIP) * i128::from(bytes.max(0)) / most;
            bottom - i64::try_from(up).unwrap_or(0)
        };
        let mut level = lane.base_memory;
        let mut path = String::new();
        for (block, &after) in lane.blocks.iter().zip(&lane.memory) {
            if block.end <= view.from {
                level = after;
                continue;
            }
            if block.end > view.to {
                break;
            }
            if path.is_empty() {
                let _ = write!(
                    path,
                    "M{} {}V{}",
                    Px(self.frame.left),
                    Px(bottom),
                    Px(height(level))
                );
            }
            if after != level {
                let _ = write!(
                    path,
                    "H{}V{}",
                    Px(self.frame.x(view, block.end)),
                    Px(height(after))
                );
                level = after;
            }
        }
        if path.is_empty() {
            let _ = write!(
                path,
                "M{} {}V{}",
                Px(self.frame.left),
                Px(bottom),
                Px(height(level))
            );
        }
        let right = self.frame.left + self.frame.plot;
        let _ = writeln!(
            self.text,
            "<path class=\"mem\" d=\"{path}H{}V{}Z\"/>\n\
             <text class=\"r s\" x=\"{}\" y=\"{}\">peak {}</text>",
            Px(right),
            Px(bottom),
            Px(self.frame.left - GAP),
            Px(bottom - 6 * PX),
            view.drawing.memory_text(lane.peak_memory.unwrap_or(0))
        );
    }

    fn critical_path(&mut self) {
        let view = self.view;
        for &(rank, at) in &view.drawing.critical_path {
            let Some(block) = view.lane(rank).blocks.get(at) else {
                continue;
            };
            let inside = view.ranks().any(|other| other == rank) && view.shows(block);
            if !inside || !block.op.kind.is_compute() {
                continue;
            }
            let (x, end) = (
                self.frame.x(view, block.start),
                self.frame.x(view, block.end),
            );
            let _ = writeln!(
                self.text,
                "<rect fill=\"none\" stroke=\"{}\" stroke-width=\"2\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
                palette::CRITICAL,
                Px(x),
                Px(self.frame.y(view, rank)),
                Px(end - x),
                Px(ROW)
            );
        }
    }

    fn axis(&mut self) {
        let view = self.view;
        let y = self.frame.height - MARGIN - 22 * PX - 28 * PX + 2 * PX;
        let right = self.frame.left + self.frame.plot;
        let _ = write!(
            self.text,
            "<path stroke=\"{}\" fill=\"none\" d=\"M{} {}H{}",
            palette::RULE,
            Px(self.frame.left),
            Px(y),
            Px(right)
        );
        let marks = view.marks(usize::try_from(self.frame.plot / (70 * PX)).unwrap_or(0) + 1);
        for (ticks, _) in &marks {
            let _ = write!(self.text, "M{} {}v4", Px(self.frame.x(view, *ticks)), Px(y));
        }
        self.text.push_str("\"/>\n");
        for (ticks, name) in &marks {
            let _ = writeln!(
                self.text,
                "<text class=\"n s\" x=\"{}\" y=\"{}\">{name}</text>",
                Px(self.frame.x(view, *ticks)),
                Px(y + 15 * PX)
            );
        }
        let _ = writeln!(
            self.text,
            "<text class=\"r s\" x=\"{}\" y=\"{}\">time</text>",
            Px(self.frame.left - GAP),
            Px(y + 15 * PX)
        );
    }

    fn legend(&mut self) {
        let drawing = self.view.drawing;
        let chunks = drawing.shape.chunks_per_rank();
        let y = self.frame.height - MARGIN - 14 * PX;
        let mut x = self.frame.left;
        for kind in COMPUTE_KINDS {
            let seen = self
                .view
                .ranks()
                .any(|rank| self.view.blocks(rank).any(|found| found.1.op.kind == kind));
            if !seen {
                continue;
            }
            let swatches = i64::from(chunks.min(8));
            for chunk in 0..chunks.min(8) {
                self.swatch(palette::fill(kind, chunk, chunks), x, y);
                x += 12 * PX;
            }
            let name = kind_name(kind);
            let name = if swatches > 1 {
                format!("{name}, chunks 0 to {}", chunks - 1)
            } else {
                name.to_owned()
            };
            x = self.legend_text(&name, x, y);
        }
        self.swatch(palette::BUBBLE, x, y);
        self.legend_text("idle", x + 12 * PX, y);
    }

    fn swatch(&mut self, fill: palette::Color, x: i64, y: i64) {
        let _ = writeln!(
            self.text,
            "<rect x=\"{}\" y=\"{}\" width=\"11\" height=\"11\" fill=\"{fill}\" stroke=\"{}\" stroke-width=\".5\"/>",
            Px(x),
            Px(y),
            palette::RULE
        );
    }

    /// Writes a legend's text and gives where the next entry starts.
    fn legend_text(&mut self, text: &str, x: i64, y: i64) -> i64 {
        let _ = writeln!(
            self.text,
            "<text class=\"s\" x=\"{}\" y=\"{}\">{}</text>",
            Px(x + 4 * PX),
            Px(y + 9 * PX),
            escaped(text)
        );
        x + 20 * PX + i64::try_from(text.len()).unwrap_or(0) * 11 * PX / 2
    }
}

enum Half {
    Upper,
    Lower,
}

/// Which half of its row the block at `at` takes; none if it isn't one of an overlapped pair.
fn half_of_pair(lane: &Lane, at: usize) -> Option<Half> {
    let op = lane.blocks[at].op;
    if is_pair_second(op) {
        Some(Half::Lower)
    } else if op.flags.has(Flags::PAIR_FIRST) {
        Some(Half::Upper)
    } else {
        None
    }
}
