//! The time axis and the legend.

use std::fmt::Write as _;

use super::{GAP, MARGIN, PX, Picture, Px, SvgOptions, escaped};
use crate::render::{COMPUTE_KINDS, kind_name, palette};

impl Picture<'_> {
    pub(super) fn axis(&mut self) {
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

    pub(super) fn legend(&mut self, options: &SvgOptions) {
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
        x = self.legend_text("idle", x + 12 * PX, y);
        if options.critical_path {
            let _ = writeln!(
                self.text,
                "<rect x=\"{}\" y=\"{}\" width=\"11\" height=\"11\" fill=\"none\" stroke=\"{}\" \
                 stroke-width=\"2\"/>",
                Px(x),
                Px(y),
                palette::CRITICAL
            );
            self.legend_text("critical path", x + 12 * PX, y);
        }
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
