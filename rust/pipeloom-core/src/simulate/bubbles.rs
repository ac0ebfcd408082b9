//! Where a rank's idle time goes: every tick in which it computes nothing, by what it waits for.
//!
//! | part | the rank is idle |
//! |---|---|
//! | `warmup` | before its first backward, while what it needs has not been computed |
//! | `steady` | between its first backward and its last forward, likewise |
//! | `cooldown` | behind its last forward (and first backward), until the last rank ends, likewise |
//! | `transfer` | although what it needs has been computed: it is on its way, or a send blocks |
//!
//! The four add up to the makespan without the rank's work.

use super::critical_path::{NOWHERE, positions, table};
use crate::engine::{Program, Times, pair_second};
use crate::op::{Op, OpKind};

/// A rank's idle time in ticks, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bubbles {
    /// Before the first backward: nothing to do yet.
    pub warmup: i64,
    /// Between the first backward and the last forward.
    pub steady: i64,
    /// Behind both, until the last rank ends.
    pub cooldown: i64,
    /// What is needed has been computed but is not there yet, or a transfer blocks the program.
    pub transfer: i64,
}

impl Bubbles {
    /// All idle time.
    pub fn total(self) -> i64 {
        self.warmup + self.steady + self.cooldown + self.transfer
    }
}

/// The idle time of each rank between `first` and `last`, the ends of the makespan.
pub(super) fn bubbles(
    program: &Program<'_>,
    times: &Times,
    extents: &[Option<(i64, i64)>],
    (first, last): (i64, i64),
) -> Vec<Bubbles> {
    let positions = positions(program);
    let made = |op: Op| {
        let producer = program.producer(op)?;
        let at = positions[table(op.kind)?][program.cell(producer)];
        let rank = program.stages[producer.stage.index()].rank as usize;
        (at != NOWHERE).then(|| times.end(rank, at))
    };
    let rank = |(rank, extent): (usize, &Option<(i64, i64)>)| {
        let own_end = extent.map_or(first, |(_, end)| end);
        of_rank(program, times, rank, (first, own_end, last), &made)
    };
    extents.iter().enumerate().map(rank).collect()
}

fn of_rank(
    program: &Program<'_>,
    times: &Times,
    rank: usize,
    (first, own_end, last): (i64, i64, i64),
    made: &impl Fn(Op) -> Option<i64>,
) -> Bubbles {
    let ops = &program.ranks[rank].ops;
    let mut left = ops.iter().filter(|op| op.kind == OpKind::Forward).count();
    let (mut bubbles, mut free, mut backward_seen, mut at) = (Bubbles::default(), first, false, 0);
    while let Some(&op) = ops.get(at) {
        if !op.kind.is_compute() {
            at += 1;
            continue;
        }
        let block = [Some(op), pair_second(ops, at)];
        let start = times.start(rank, at);
        // Without an input from afar that is late, nothing but a transfer can hold the rank up.
        let inputs = block.iter().flatten().filter_map(|&op| made(op));
        let computed = inputs.max().unwrap_or(free).clamp(free, start.max(free));
        bubbles.transfer += start - computed;
        let idle = computed - free;
        if !backward_seen {
            bubbles.warmup += idle;
        } else if left > 0 {
            bubbles.steady += idle;
        } else {
            bubbles.cooldown += idle;
        }
        for op in block.into_iter().flatten() {
            left -= usize::from(op.kind == OpKind::Forward);
            backward_seen |= op.kind.gives_input_gradient();
            at += 1;
        }
        free = times.end(rank, at - 1);
    }
    bubbles.transfer += own_end.max(free) - free;
    bubbles.cooldown += last - own_end.max(free);
    bubbles
}
