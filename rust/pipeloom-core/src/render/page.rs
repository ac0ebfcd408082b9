//! A drawing as data for the interactive page, which draws it in the browser.

use std::fmt::Write as _;

use super::facts::RECOMPUTED;
use super::{COMPUTE_KINDS, Drawing, Half, Lane, half_of_pair, kind_name, palette};
use crate::error::{Error, Result};
use crate::ids::Stage;
use crate::op::{Flags, OpKind};

/// Most ops of a page.
pub const MAX_OPS: usize = 1_000_000;

/// The drawing as a JSON object: shape, palette, and each rank's ops as columns. Times and memory
/// are ticks; `unit` and `memory_unit` say how many make one of the caller's units.
///
/// # Errors
/// If it has more than a million ops.
pub fn data(drawing: &Drawing) -> Result<String> {
    let ops: usize = drawing.lanes.iter().map(|lane| lane.blocks.len()).sum();
    if ops > MAX_OPS {
        return Err(Error::config(
            format!("a page of {ops} ops is too big: the limit is {MAX_OPS}"),
            "draw a plan with fewer microbatches, or a part of it with --svg, --from and --to",
        ));
    }
    let shape = &drawing.shape;
    let mut text = String::new();
    let _ = write!(
        text,
        "{{\"title\":{},\"schedule\":{},\"replicaStages\":{},\"units\":{},\"pieces\":{},\"numbers\":{},\"shades\":{},\"recomputed\":{},\
         \"unit\":{},\"memoryUnit\":{},\"begin\":{},\"end\":{}",
        quoted(&drawing.headline()),
        quoted(&drawing.schedule),
        shape.stages_per_replica(),
        shape.num_units(),
        shape.num_seq_pieces(),
        quoted(&drawing.numbers()),
        quoted(&drawing.shades().unwrap_or_default()),
        quoted(if drawing.recomputes() { RECOMPUTED } else { "" }),
        drawing.ticks_per_unit,
        drawing.memory_ticks_per_unit,
        drawing.begin(),
        drawing.end(),
    );
    kinds(&mut text, shape.chunks_per_rank());
    let chunks = (0..shape.num_stages()).map(|stage| shape.chunk_of(Stage(stage)).0);
    list(&mut text, "chunkOfStage", chunks);
    text.push_str(",\"critical\":[");
    for (i, (rank, at)) in drawing.critical_path.iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let _ = write!(text, "{comma}[{rank},{at}]");
    }
    text.push_str("],\"ranks\":[");
    for (i, lane) in drawing.lanes.iter().enumerate() {
        text.push_str(if i == 0 { "{" } else { ",{" });
        columns(&mut text, lane);
        text.push('}');
    }
    text.push_str("]}");
    Ok(text)
}

/// Letter, name, and fill and ink by chunk, of each kind.
fn kinds(text: &mut String, chunks: u32) {
    text.push_str(",\"kinds\":[");
    for (i, kind) in OpKind::ALL.into_iter().enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let fills: Vec<_> = (0..chunks)
            .map(|c| palette::fill(kind, c, chunks))
            .collect();
        let all = |each: &dyn Fn(palette::Color) -> palette::Color| {
            let colors: Vec<String> = fills.iter().map(|&c| format!("\"{}\"", each(c))).collect();
            colors.join(",")
        };
        let _ = write!(
            text,
            "{comma}{{\"letter\":\"{kind}\",\"name\":\"{}\",\"computes\":{},\"fill\":[{}],\
             \"ink\":[{}]}}",
            kind_name(kind),
            COMPUTE_KINDS.contains(&kind),
            all(&|fill| fill),
            all(&palette::Color::ink),
        );
    }
    text.push(']');
}

fn columns(text: &mut String, lane: &Lane) {
    let half = |at| match half_of_pair(lane, at) {
        None => 0,
        Some(Half::Upper) => 1,
        Some(Half::Lower) => 2,
    };
    let blocks = || lane.blocks.iter();
    let _ = write!(text, "\"work\":{}", lane.work());
    list(text, "kind", blocks().map(|block| block.op.kind as u8));
    list(text, "stage", blocks().map(|block| block.op.stage));
    list(text, "microbatch", blocks().map(|block| block.op.unit));
    list(text, "start", blocks().map(|block| block.start));
    list(text, "end", blocks().map(|block| block.end));
    list(text, "half", (0..lane.blocks.len()).map(half));
    let recomputed = |block: &super::Block| u8::from(block.op.flags.has(Flags::RECOMPUTE));
    list(text, "recompute", blocks().map(recomputed));
    if let Some(peak) = lane.peak_memory {
        let _ = write!(
            text,
            ",\"baseMemory\":{},\"peakMemory\":{peak}",
            lane.base_memory
        );
        list(text, "memoryAt", lane.memory_steps().map(|step| step.0));
        list(text, "memory", lane.memory_steps().map(|step| step.1));
    }
}

fn list<T: std::fmt::Display>(text: &mut String, name: &str, values: impl Iterator<Item = T>) {
    let _ = write!(text, ",\"{name}\":[");
    for (i, value) in values.enumerate() {
        let comma = if i == 0 { "" } else { "," };
        let _ = write!(text, "{comma}{value}");
    }
    text.push(']');
}

/// A JSON string that is safe inside a script element.
fn quoted(text: &str) -> String {
    let mut safe = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => safe.extend(['\\', c]),
            c if c == '<' || c.is_control() => {
                let _ = write!(safe, "\\u{:04x}", u32::from(c));
            }
            c => safe.push(c),
        }
    }
    safe.push('"');
    safe
}
