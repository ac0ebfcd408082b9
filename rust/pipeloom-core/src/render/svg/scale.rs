//! The time axis and the legend.

use std::fmt::Write as _;

use super::{GAP, MARGIN, PX, Picture, Px, SvgOptions, escaped};
use crate::op::OpKind;
use crate::render::{COMPUTE_KINDS, View, kind_name, palette};

impl Picture<'_> {
    pub(super) fn axis(&mut self) {
        let view = self.view;
        let y = self.frame.height - MARGIN - LINE * self.frame.legend.lines - 26 * PX;
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

    /// Draws the legend, wrapped to the picture's width.
    pub(super) fn legend(&mut self) {
        let top = self.frame.height - MARGIN - LINE * self.frame.legend.lines + 8 * PX;
        for (entry, x, line) in std::mem::take(&mut self.frame.legend.entries) {
            let (mut x, y) = (self.frame.left + x, top + line * LINE);
            for fill in &entry.swatches {
                self.swatch(&fill.to_string(), &palette::RULE.to_string(), ".5", (x, y));
                x += SWATCH;
            }
            if entry.outline {
                self.swatch("none", &palette::CRITICAL.to_string(), "2", (x, y));
                x += SWATCH;
            }
            let _ = writeln!(
                self.text,
                "<text class=\"s\" x=\"{}\" y=\"{}\">{}</text>",
                Px(x + 4 * PX),
                Px(y + 9 * PX),
                escaped(&entry.text)
            );
        }
    }

    fn swatch(&mut self, fill: &str, stroke: &str, width: &str, (x, y): (i64, i64)) {
        let _ = writeln!(
            self.text,
            "<rect x=\"{}\" y=\"{}\" width=\"11\" height=\"11\" fill=\"{fill}\" \
             stroke=\"{stroke}\" stroke-width=\"{width}\"/>",
            Px(x),
            Px(y),
        );
    }
}

/// Height of a line of the legend.
pub(super) const LINE: i64 = 16 * PX;
const SWATCH: i64 = 12 * PX;

/// One entry of a legend.
pub(super) struct Entry {
    swatches: Vec<palette::Color>,
    outline: bool,
    text: String,
}

impl Entry {
    fn new(swatches: Vec<palette::Color>, text: impl Into<String>) -> Self {
        let (outline, text) = (false, text.into());
        Self {
            swatches,
            outline,
            text,
        }
    }

    fn width(&self) -> i64 {
        let swatches = self.swatches.len() + usize::from(self.outline);
        let sizes = [swatches, self.text.len()].map(|n| i64::try_from(n).unwrap_or(0));
        sizes[0] * SWATCH + sizes[1] * 11 * PX / 2 + 18 * PX
    }
}

/// The entries of a legend, each with its place: x from the left edge, and line.
#[derive(Default)]
pub(super) struct Legend {
    entries: Vec<(Entry, i64, i64)>,
    pub(super) lines: i64,
}

impl Legend {
    /// What the colours of a view mean, in lines no wider than `room`.
    pub(super) fn new(view: View<'_>, comm: bool, options: &SvgOptions, room: i64) -> Self {
        let mut legend = Self::default();
        let (mut x, mut line) = (0, 0);
        for entry in entries(view, comm, options) {
            let width = entry.width();
            if x > 0 && x + width > room {
                (x, line) = (0, line + 1);
            }
            legend.entries.push((entry, x, line));
            x += width;
        }
        legend.lines = line + 1;
        legend
    }
}

fn entries(view: View<'_>, comm: bool, options: &SvgOptions) -> Vec<Entry> {
    let chunks = view.drawing.shape.chunks_per_rank();
    let seen = |kind| {
        let mut blocks = view.ranks().flat_map(|rank| view.blocks(rank));
        blocks.any(|found| found.1.op.kind == kind)
    };
    let mut entries = Vec::new();
    for kind in COMPUTE_KINDS.into_iter().filter(|&kind| seen(kind)) {
        let fills = (0..chunks.min(8)).map(|chunk| palette::fill(kind, chunk, chunks));
        let name = kind_name(kind);
        let text = if chunks > 1 {
            format!("{name}, chunks 0 to {}", chunks - 1)
        } else {
            name.to_owned()
        };
        entries.push(Entry::new(fills.collect(), text));
    }
    entries.push(Entry::new(vec![palette::BUBBLE], "idle"));
    if comm {
        let fill = |kind| palette::fill(kind, 0, 1);
        let fills = vec![fill(OpKind::SendForward), fill(OpKind::SendBackward)];
        entries.push(Entry::new(fills, "transfers of activations, gradients"));
    }
    if options.memory {
        entries.push(Entry::new(vec![palette::MEMORY_FILL], "memory"));
    }
    if options.critical_path {
        entries.push(Entry {
            outline: true,
            ..Entry::new(Vec::new(), "critical path")
        });
    }
    entries
}
