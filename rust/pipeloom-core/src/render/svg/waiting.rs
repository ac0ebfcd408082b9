//! What a picture says about waiting: in the gaps of a row, right of it, and as lines that no
//! schedule passes.

use std::fmt::Write as _;

use super::{GAP, PX, Picture, Px, ROW, SMALL, Waits};
use crate::ids::Rank;
use crate::render::waits::{Awaited, Wait};

impl Picture<'_> {
    /// In each gap what ends it, as far as there is room; right of the row the idle share.
    pub(super) fn waiting(&mut self, rank: Rank, waits: &Waits<'_>, y: i64) {
        let view = self.view;
        for wait in waits.seen(view, rank) {
            let (x, end) = (self.frame.x(view, wait.start), self.frame.x(view, wait.end));
            if self.frame.titles && end - x >= PX {
                self.hidden_title(rank, &wait, (x, end, y));
            }
            let lines = label(&wait, end - x);
            let middle = Px(i64::midpoint(x, end));
            match lines.as_slice() {
                [] => {}
                [line] => self.small(line, &middle, y + ROW / 2 + 350),
                [first, second, ..] => {
                    self.small(first, &middle, y + ROW / 2 - PX);
                    self.small(second, &middle, y + ROW / 2 + 9 * PX);
                }
            }
        }
        let _ = writeln!(
            self.text,
            "<text class=\"s\" x=\"{}\" y=\"{}\">{}% idle</text>",
            Px(self.frame.left + self.frame.plot + GAP),
            Px(y + ROW / 2 + 350),
            view.drawing.idle_percent(rank)
        );
    }

    fn small(&mut self, line: &str, x: &Px, y: i64) {
        let _ = writeln!(
            self.text,
            "<text class=\"n s\" x=\"{x}\" y=\"{}\">{line}</text>",
            Px(y)
        );
    }

    /// The whole story, under the mouse.
    fn hidden_title(&mut self, rank: Rank, wait: &Wait, (x, end, y): (i64, i64, i64)) {
        let drawing = self.view.drawing;
        let time = |ticks| drawing.time_text(ticks, 6);
        let _ = writeln!(
            self.text,
            "<path class=\"w\" d=\"M{} {}H{}V{}H{}Z\"><title>rank {rank} idle, {} to {}: {}</title></path>",
            Px(x),
            Px(y),
            Px(end),
            Px(y + ROW),
            Px(x),
            time(wait.start),
            time(wait.end),
            wait.reason()
        );
    }

    /// The two times that the makespan can't go below: as long as the busiest rank works, and what
    /// no order of these ops can beat.
    pub(super) fn limits(&mut self) {
        let view = self.view;
        let rows = i64::try_from(view.ranks().count()).unwrap_or(1) * self.frame.pitch;
        for limit in view.limits() {
            let x = self.frame.x(view, limit.ticks);
            let dashed = if limit.of_work { " dashed" } else { "" };
            let (anchor, beside) = if limit.of_work {
                ("r s", x - 2 * PX)
            } else {
                ("s", x + 2 * PX)
            };
            let top = self.frame.top;
            let _ = writeln!(
                self.text,
                "<path class=\"limit{dashed}\" d=\"M{} {}V{}\"/>\n\
                 <text class=\"{anchor}\" x=\"{}\" y=\"{}\">{}</text>",
                Px(x),
                Px(top - 12 * PX),
                Px(top + rows - GAP / 2),
                Px(beside),
                Px(top - 4 * PX),
                limit.text
            );
        }
    }
}

/// What a gap of some width says: all of it, or op and rank below each other.
fn label(wait: &Wait, width: i64) -> Vec<String> {
    let room = usize::try_from((width - 4 * PX) / SMALL).unwrap_or(0);
    let reason = wait.reason();
    if wait.awaited == Awaited::Unknown {
        return Vec::new();
    }
    if reason.len() <= room {
        return vec![reason];
    }
    let Awaited::Op { rank, op } = wait.awaited else {
        return Vec::new();
    };
    let name = format!("{}{}", op.kind, op.unit);
    let ranks = [format!("rank {rank}"), format!("r{rank}")];
    // Two characters need less than their share of the usual margin.
    let fits = |line: &str| i64::try_from(line.len()).unwrap_or(i64::MAX) * SMALL <= width - 3 * PX;
    match ranks.into_iter().find(|line| fits(line)) {
        Some(line) if fits(&name) => vec![name, line],
        _ => Vec::new(),
    }
}
