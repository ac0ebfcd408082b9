//! The time axis and the legend.

use std::fmt::Write as _;

use super::{GAP, MARGIN, PX, Picture, Px, SMALL, SvgOptions, Waits, escaped};
use crate::op::OpKind;
use crate::render::facts::RECOMPUTED;
use crate::render::waits::Awaited;
use crate::render::{View, boxes, palette};

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
            Px(self.frame.left - 2 * GAP),
            Px(y + 15 * PX)
        );
    }

    /// Draws the legend, wrapped to the picture's width.
    pub(super) fn legend(&mut self) {
        let top = self.frame.height - MARGIN - LINE * self.frame.legend.lines + 8 * PX;
        for (entry, x, line) in std::mem::take(&mut self.frame.legend.entries) {
            let (mut x, y) = (self.frame.left + x, top + line * LINE);
            match &entry.mark {
                Mark::Fills(fills) => {
                    for fill in fills {
                        let rule = palette::RULE.to_string();
                        self.swatch(&fill.to_string(), &rule, ".5", (x, y));
                        x += SWATCH;
                    }
                }
                Mark::Outline => {
                    self.swatch("none", &palette::CRITICAL.to_string(), "2", (x, y));
                    x += SWATCH;
                }
                Mark::Dashes => {
                    let _ = writeln!(
                        self.text,
                        "<path class=\"re\" stroke=\"{}\" d=\"M{} {}h11\"/>",
                        palette::TEXT,
                        Px(x),
                        Px(y + SWATCH / 2)
                    );
                    x += SWATCH;
                }
                Mark::Line { dashed } => {
                    let _ = writeln!(
                        self.text,
                        "<path class=\"limit{}\" d=\"M{} {}v12\"/>",
                        if *dashed { " dashed" } else { "" },
                        Px(x + SWATCH / 2),
                        Px(y)
                    );
                    x += SWATCH;
                }
            }
            let _ = writeln!(
                self.text,
                "<text class=\"s\" x=\"{}\" y=\"{}\">{}</text>",
                Px(x + if entry.bare() { 0 } else { 4 * PX }),
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

/// What stands before an entry's text.
enum Mark {
    /// Colours.
    Fills(Vec<palette::Color>),
    /// The frame of the critical path.
    Outline,
    /// The dashes of a recomputed op.
    Dashes,
    /// A line across the rows.
    Line { dashed: bool },
}

/// One entry of a legend.
pub(super) struct Entry {
    mark: Mark,
    text: String,
}

impl Entry {
    fn new(mark: Mark, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { mark, text }
    }

    /// Whether nothing stands before the text.
    fn bare(&self) -> bool {
        matches!(&self.mark, Mark::Fills(fills) if fills.is_empty())
    }

    fn width(&self) -> i64 {
        let swatches = match &self.mark {
            Mark::Fills(fills) => fills.len(),
            Mark::Outline | Mark::Dashes | Mark::Line { .. } => 1,
        };
        let sizes = [swatches, self.text.len()].map(|n| i64::try_from(n).unwrap_or(0));
        sizes[0] * SWATCH + sizes[1] * SMALL + 18 * PX
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
    let kinds = boxes::kinds(view).into_iter();
    let mut entries: Vec<Entry> = kinds
        .map(|(text, fills)| Entry::new(Mark::Fills(fills), text))
        .collect();
    if view.drawing.recomputes() {
        entries.push(Entry::new(Mark::Dashes, RECOMPUTED));
    }
    entries.push(Entry::new(Mark::Fills(Vec::new()), view.drawing.numbers()));
    entries.push(Entry::new(
        Mark::Fills(vec![palette::BUBBLE]),
        idle_text(view),
    ));
    if comm {
        let fill = |kind| palette::fill(kind, 0, 1);
        let fills = vec![fill(OpKind::SendForward), fill(OpKind::SendBackward)];
        let text = "transfers of activations, gradients";
        entries.push(Entry::new(Mark::Fills(fills), text));
    }
    if options.memory {
        let text = view.drawing.memory_meaning();
        entries.push(Entry::new(Mark::Fills(vec![palette::MEMORY_FILL]), text));
    }
    if options.critical_path {
        entries.push(Entry::new(Mark::Outline, "critical path"));
    }
    for limit in view.limits() {
        let dashed = limit.of_work;
        entries.push(Entry::new(Mark::Line { dashed }, limit.meaning()));
    }
    entries
}

/// What grey means, by the example of the first gap that has a reason.
fn idle_text(view: View<'_>) -> String {
    let waits = Waits::new(view.drawing);
    let mut all = view.ranks().flat_map(|rank| waits.seen(view, rank));
    let example = all.find_map(|wait| match wait.awaited {
        Awaited::Op { rank, op } => Some((rank, op, wait.reason())),
        Awaited::Done | Awaited::Unknown => None,
    });
    match example {
        Some((rank, op, reason)) => {
            format!("idle; {}{} r{rank}: {reason}", op.kind, op.unit)
        }
        None => "idle".to_owned(),
    }
}
