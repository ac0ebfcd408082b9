//! What a rank's row shows: boxes, transfers, memory, the critical path.

use std::fmt::Write as _;

use super::{COMM_STRIP, DIGIT, GAP, MEMORY_STRIP, PX, Picture, Px, ROW, SvgOptions, THIN, Waits};
use crate::ids::Rank;
use crate::op::Flags;
use crate::render::facts::unit_name;
use crate::render::{Block, Half, half_of_pair, kind_name, palette};

impl Picture<'_> {
    pub(super) fn row(&mut self, rank: Rank, waits: &Waits<'_>, options: &SvgOptions) {
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
        self.waiting(rank, waits, y);
        self.boxes(rank, y);
        let mut below = y + ROW;
        if self.frame.comm {
            self.transfers(rank, below);
            below += COMM_STRIP;
        }
        if options.memory && self.view.lane(rank).peak_memory.is_some() {
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
            let class = self.class(block.op);
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
                "><title>{op}: {} of {} on stage {}, {} to {}</title></rect>",
                kind_name(op.kind),
                unit_name(&drawing.shape, op.unit),
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
            let class = self.class(block.op);
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

    pub(super) fn critical_path(&mut self) {
        let view = self.view;
        for &(rank, at) in &view.drawing.critical_path {
            let Some(block) = view.lane(rank).blocks.get(at) else {
                continue;
            };
            let inside = view.ranks().any(|other| other == rank) && view.shows(block);
            let computes = block.op.kind.is_compute();
            if !inside || (!computes && block.start == block.end) {
                continue;
            }
            // Transfers lie in the strip below: sends above receives.
            let (top, height, stroke) = match block.op.kind {
                _ if computes => (0, ROW, 2),
                kind if kind.is_send() => (ROW, COMM_STRIP / 2, 1),
                _ => (ROW + COMM_STRIP / 2, COMM_STRIP / 2, 1),
            };
            let (x, end) = (
                self.frame.x(view, block.start),
                self.frame.x(view, block.end),
            );
            let _ = writeln!(
                self.text,
                "<rect fill=\"none\" stroke=\"{}\" stroke-width=\"{stroke}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
                palette::CRITICAL,
                Px(x),
                Px(self.frame.y(view, rank) + top),
                Px(end - x),
                Px(height)
            );
        }
    }
}
