//! The plan as Chrome trace JSON, for Perfetto or `chrome://tracing`: a process a rank, a thread
//! for computation and as many as needed for transfers, flow arrows from send to receive, a
//! counter of memory.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Block, Drawing, View, Window, kind_name};
use crate::error::{Error, Result};
use crate::ids::{Rank, Stage};
use crate::op::{Flags, Op, OpKind};
use crate::shape::Shape;

/// Most ops of a trace.
pub const MAX_OPS: usize = 1_000_000;

/// How to write a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// What part of the drawing.
    pub window: Window,
    /// Microseconds in one unit of the caller's time: 1000 if that is milliseconds.
    pub microseconds_per_unit: u32,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self {
            window: Window::default(),
            microseconds_per_unit: 1000,
        }
    }
}

/// Writes the trace; one event a line.
///
/// # Errors
/// If the window shows nothing or too much, or the time unit is zero.
pub fn trace(drawing: &Drawing, options: &TraceOptions) -> Result<String> {
    if options.microseconds_per_unit == 0 {
        return Err(Error::config(
            "microseconds_per_unit is 0, but must be at least 1",
            "give 1 if times are in microseconds, 1000 if in milliseconds",
        ));
    }
    let view = drawing.slice(&options.window)?;
    view.limit("a trace", MAX_OPS)?;
    let mut writer = Writer {
        text: String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"),
        clock: Clock {
            per_unit: i128::from(options.microseconds_per_unit) * 1000,
            ticks: i128::from(drawing.ticks_per_unit),
        },
        view,
        first: true,
    };
    let threads: Vec<Vec<u32>> = view.ranks().map(|rank| writer.rank(rank)).collect();
    writer.flows(&threads);
    writer.text.push_str("\n]}\n");
    Ok(writer.text)
}

/// Ticks as nanoseconds.
#[derive(Clone, Copy)]
struct Clock {
    per_unit: i128,
    ticks: i128,
}

impl Clock {
    /// Rounded half up, so that ops that touch still touch and none overlap.
    fn nanoseconds(self, ticks: i64) -> i128 {
        (2 * i128::from(ticks) * self.per_unit + self.ticks).div_euclid(2 * self.ticks)
    }
}

/// Nanoseconds as the format's microseconds.
fn microseconds(nanoseconds: i128) -> String {
    super::decimal(nanoseconds, 1000, 3)
}

struct Writer<'a> {
    text: String,
    clock: Clock,
    view: View<'a>,
    first: bool,
}

impl Writer<'_> {
    fn event(&mut self, fields: std::fmt::Arguments<'_>) {
        self.text.push_str(if self.first { "{" } else { ",\n{" });
        self.first = false;
        let _ = self.text.write_fmt(fields);
        self.text.push('}');
    }

    /// The slices of a rank; gives the thread of each of its blocks.
    fn rank(&mut self, rank: Rank) -> Vec<u32> {
        let (view, lane) = (self.view, self.view.lane(rank));
        let threads = threads(&lane.blocks);
        self.event(format_args!(
            "\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{rank},\"tid\":0,\"args\":{{\"name\":\"rank {rank}\"}}"
        ));
        let most = view
            .blocks(rank)
            .map(|(at, _)| threads[at])
            .max()
            .unwrap_or(0);
        for thread in 0..=most {
            let name = match thread {
                0 => "compute".to_owned(),
                1 => "comm".to_owned(),
                n => format!("comm {n}"),
            };
            self.event(format_args!(
                "\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{rank},\"tid\":{thread},\"args\":{{\"name\":\"{name}\"}}"
            ));
        }
        for (at, block) in view.blocks(rank) {
            self.slice(rank, threads[at], block);
        }
        for (at, block) in view.blocks(rank) {
            if let Some(&memory) = lane.memory.get(at) {
                let memory = view.drawing.memory_text(memory);
                let at = microseconds(self.clock.nanoseconds(block.end));
                self.event(format_args!(
                    "\"ph\":\"C\",\"name\":\"memory\",\"pid\":{rank},\"tid\":0,\"ts\":{at},\"args\":{{\"memory\":{memory}}}"
                ));
            }
        }
        threads
    }

    fn slice(&mut self, rank: Rank, thread: u32, block: &Block) {
        let op = block.op;
        let shape = &self.view.drawing.shape;
        let (chunk, (microbatch, piece)) = (shape.chunk_of(op.stage), shape.split_unit(op.unit));
        let start = self.clock.nanoseconds(block.start);
        let length = self.clock.nanoseconds(block.end) - start;
        let recomputed = if op.flags.has(Flags::RECOMPUTE) {
            ",\"recompute\":true"
        } else {
            ""
        };
        self.event(format_args!(
            "\"ph\":\"X\",\"name\":\"{op}\",\"cat\":\"{}\",\"pid\":{rank},\"tid\":{thread},\"ts\":{},\"dur\":{},\
             \"args\":{{\"stage\":{},\"chunk\":{chunk},\"microbatch\":{microbatch},\"piece\":{piece}{recomputed}}}",
            kind_name(op.kind),
            microseconds(start),
            microseconds(length),
            op.stage,
        ));
    }

    /// An arrow for each message whose two ends are both seen.
    fn flows(&mut self, threads: &[Vec<u32>]) {
        let view = self.view;
        let lowered = view.ranks().any(|rank| {
            view.lane(rank)
                .blocks
                .iter()
                .any(|block| !block.op.kind.is_compute())
        });
        let mut sources: BTreeMap<Message, End> = BTreeMap::new();
        for (rank, threads) in view.ranks().zip(threads) {
            for (at, block) in view.blocks(rank) {
                if let Some(message) = sent(&view.drawing.shape, block.op, lowered) {
                    sources.insert(message, (rank, threads[at], *block));
                }
            }
        }
        let mut id = 0_u64;
        for (rank, threads) in view.ranks().zip(threads) {
            for (at, block) in view.blocks(rank) {
                let message = received(&view.drawing.shape, block.op, lowered);
                let Some(source) = message.and_then(|message| sources.remove(&message)) else {
                    continue;
                };
                self.flow(id, source, (rank, threads[at], *block));
                id += 1;
            }
        }
    }

    fn flow(&mut self, id: u64, from: End, to: End) {
        let name = if is_forward(from.2.op.kind) {
            "activation"
        } else {
            "gradient"
        };
        let start = self.clock.nanoseconds(from.2.start);
        // Inside the slice: an event at its very end would bind to the next one.
        let leaves = (self.clock.nanoseconds(from.2.end) - 1).max(start);
        let arrives = self.clock.nanoseconds(to.2.start).max(leaves);
        let (leaves, arrives) = (microseconds(leaves), microseconds(arrives));
        let (rank, thread) = (from.0, from.1);
        self.event(format_args!(
            "\"ph\":\"s\",\"name\":\"{name}\",\"cat\":\"p2p\",\"id\":{id},\"pid\":{rank},\"tid\":{thread},\"ts\":{leaves}"
        ));
        let (rank, thread) = (to.0, to.1);
        self.event(format_args!(
            "\"ph\":\"f\",\"bp\":\"e\",\"name\":\"{name}\",\"cat\":\"p2p\",\"id\":{id},\"pid\":{rank},\"tid\":{thread},\"ts\":{arrives}"
        ));
    }
}

/// A message by its receiving stage, unit and direction (forward or not).
type Message = (Stage, u32, bool);
/// One end of an arrow: rank, thread, slice.
type End = (Rank, u32, Block);

fn is_forward(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::Forward | OpKind::SendForward | OpKind::RecvForward
    )
}

/// The message that an op sends to another rank. In plans without transfers the producer does.
fn sent(shape: &Shape, op: Op, lowered: bool) -> Option<Message> {
    let forward = is_forward(op.kind);
    let sends = if lowered {
        op.kind.is_send()
    } else {
        op.kind == OpKind::Forward || op.kind.gives_input_gradient()
    };
    let to = if forward {
        shape.next(op.stage)
    } else {
        shape.previous(op.stage)
    }?;
    let crosses = shape.peer(op.stage, forward).is_some();
    (sends && crosses).then_some((to, op.unit.0, forward))
}

/// The message that an op receives from another rank. In plans without transfers the consumer does.
fn received(shape: &Shape, op: Op, lowered: bool) -> Option<Message> {
    let forward = is_forward(op.kind);
    let receives = if lowered {
        op.kind.is_recv()
    } else {
        op.kind == OpKind::Forward || op.kind.gives_input_gradient()
    };
    let crosses = shape.peer(op.stage, !forward).is_some();
    (receives && crosses).then_some((op.stage, op.unit.0, forward))
}

/// A thread for each block: 0 for computation; for transfers the first of 1, 2, ... that is free,
/// so that no two slices of a thread overlap.
fn threads(blocks: &[Block]) -> Vec<u32> {
    let mut threads = vec![0; blocks.len()];
    let mut transfers: Vec<usize> = (0..blocks.len())
        .filter(|&at| !blocks[at].op.kind.is_compute())
        .collect();
    transfers.sort_by_key(|&at| (blocks[at].start, blocks[at].end));
    let mut free: Vec<i64> = Vec::new();
    for at in transfers {
        let block = blocks[at];
        let thread = free
            .iter()
            .position(|&end| end <= block.start)
            .unwrap_or(free.len());
        if thread == free.len() {
            free.push(block.end);
        } else {
            free[thread] = block.end;
        }
        threads[at] = u32::try_from(thread + 1).unwrap_or(u32::MAX);
    }
    threads
}
