//! Simulation against recorded schedules: every makespan, span and peak to the tick.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;
use crate::cost::{Links, Number, Values};
use crate::engine::samples::{self, Rng};
use crate::ids::{Chunk, Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::plan::RankOps;
use crate::shape::{Placement, Shape};

/// One row of the recording, whose first lines say what it holds.
struct Golden<'a>(Vec<&'a str>);

impl Golden<'_> {
    fn number(&self, column: usize) -> u32 {
        self.0[column].parse().unwrap()
    }

    fn list(&self, column: usize) -> Vec<i64> {
        self.0[column]
            .split(',')
            .map(|number| number.parse().unwrap())
            .collect()
    }

    fn values(&self, column: usize) -> Values {
        match self.list(column)[..] {
            [one] => Values::All(Number::Int(one)),
            ref each => Values::Each(each.iter().map(|&number| Number::Int(number)).collect()),
        }
    }

    fn shape(&self) -> Shape {
        let (pp, replicas) = (self.number(1), self.number(4));
        let mut chunks = vec![0; pp as usize];
        let table: Vec<(Rank, Chunk)> = self
            .list(5)
            .into_iter()
            .map(|rank| {
                let rank = Rank(u32::try_from(rank).unwrap());
                chunks[rank.index()] += 1;
                (rank, Chunk(chunks[rank.index()] - 1))
            })
            .collect();
        let vp = chunks[0] / replicas;
        let placement = if replicas == 2 {
            Placement::Bidirectional
        } else {
            Placement::Table(table.into())
        };
        Shape::new(pp, vp, self.number(2), self.number(3), placement).unwrap()
    }

    fn costs(&self) -> Costs {
        Costs {
            forward: self.values(6),
            backward_input: self.values(7),
            backward_weight: self.values(8),
            latency: Links::All(Number::Int(self.list(9)[0])),
            memory_forward: self.values(10),
            memory_backward_input: self.values(11),
            memory_backward_weight: self.values(12),
            ..Costs::default()
        }
    }

    fn plan(&self) -> Plan {
        let shape = self.shape();
        let ops = self.0[16].split('|').map(|order| {
            let mut ops = Vec::new();
            for word in order.split(' ') {
                if let Some(pair) = word.strip_prefix("FB(") {
                    let (f, b) = pair.strip_suffix(')').unwrap().split_once(',').unwrap();
                    for (kind, at, flags) in [
                        (OpKind::Forward, f, Flags::PAIR_FIRST),
                        (OpKind::Backward, b, Flags::PAIR_SECOND),
                    ] {
                        ops.push(Op {
                            flags,
                            ..op(&shape, kind, at)
                        });
                    }
                } else {
                    let at = word.find(|c: char| c.is_ascii_digit()).unwrap();
                    let kind = match &word[..at] {
                        "F" => OpKind::Forward,
                        "B" => OpKind::BackwardInput,
                        "W" => OpKind::BackwardWeight,
                        "BW" => OpKind::Backward,
                        other => panic!("kind {other}"),
                    };
                    ops.push(op(&shape, kind, &word[at..]));
                }
            }
            RankOps { ops }
        });
        let ops = ops.collect();
        Plan::held("golden", shape, ops)
    }
}

/// `stage.microbatch` or `stage.microbatch.piece`; each replica counts its own microbatches.
fn op(shape: &Shape, kind: OpKind, at: &str) -> Op {
    let numbers: Vec<u32> = at
        .split('.')
        .map(|number| number.parse().unwrap())
        .collect();
    let stage = Stage(numbers[0]);
    let piece = numbers.get(2).copied().unwrap_or(0);
    let unit = shape.units_of(stage).start + numbers[1] * shape.num_seq_pieces() + piece;
    Op::new(stage, kind, Unit(unit))
}

#[test]
fn recorded_schedules_take_the_recorded_time_and_memory() {
    let small = include_str!("../../../../tests/golden/zero_bubble.tsv");
    // The whole recording is not in the repository; whoever has it can run it.
    let path = std::env::var("PIPELOOM_GOLDEN_ZERO_BUBBLE");
    let text = path.map_or_else(
        |_| small.to_owned(),
        |path| std::fs::read_to_string(path).unwrap(),
    );
    let (mut rows, mut wrong) = (0, String::new());
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let golden = Golden(line.split('\t').collect());
        let plan = golden.plan();
        let timeline = simulate(&plan, &golden.costs(), Semantics::Buffered, false).unwrap();
        let peaks: Vec<String> = timeline.peak_memory().iter().map(i64::to_string).collect();
        let ours = [
            timeline.makespan().to_string(),
            timeline.span().to_string(),
            peaks.join(","),
        ];
        for (ours, &theirs) in ours.iter().zip(&golden.0[13..16]) {
            if theirs != "-" && ours != theirs {
                writeln!(
                    wrong,
                    "{}: {ours}, recorded {theirs}",
                    golden.0[..13].join(" ")
                )
                .unwrap();
            }
        }
        let bound = timeline.bounds().binding();
        if bound.ticks > timeline.makespan() {
            writeln!(wrong, "{:?}: bound {bound:?}", &golden.0[..13]).unwrap();
        }
        rows += 1;
    }
    assert!(rows > 80, "{rows} rows");
    assert!(wrong.is_empty(), "{wrong}");
}

/// A plan with something of everything, its costs, and a semantics under which it runs.
fn sample(seed: u64) -> Option<(Timeline, bool)> {
    let mut rng = Rng(seed);
    let lowered = rng.below(3) > 0;
    let plan = if lowered {
        samples::lowered(&mut rng)
    } else {
        samples::plan(&mut rng)
    };
    let costs = samples::costs(&mut rng, plan.shape());
    let semantics = if lowered {
        Semantics::ALL[rng.below(5)]
    } else {
        Semantics::Buffered
    };
    let contention = rng.below(2) == 0;
    let timeline = simulate(&plan, &costs, semantics, contention).ok()?;
    Some((timeline, contention))
}

proptest! {
    /// From the first start to the last end, each op starts when the one before it lets it.
    #[test]
    fn the_critical_path_has_no_hole(seed: u64) {
        let Some((timeline, contention)) = sample(seed) else { return Ok(()) };
        let path = timeline.critical_path();
        let at = |&(rank, at): &(Rank, u64)| {
            let at = usize::try_from(at).unwrap();
            (timeline.start(rank).unwrap()[at], timeline.end(rank).unwrap()[at])
        };
        let (first, last) = timeline.whole_extent();
        prop_assert_eq!(at(&path[0]).0, first, "{} {}", timeline.semantics(), contention);
        prop_assert_eq!(at(path.last().unwrap()).1, last);
        for pair in path.windows(2) {
            let ((_, end), (start, _)) = (at(&pair[0]), at(&pair[1]));
            let far = pair[0].0 != pair[1].0 && timeline.semantics() == Semantics::Buffered;
            prop_assert!(end == start || (far && end < start), "{pair:?}: {end} to {start}");
        }
    }

    #[test]
    fn idle_time_is_told_in_full(seed: u64) {
        let Some((timeline, _)) = sample(seed) else { return Ok(()) };
        for rank in (0..timeline.plan().shape().pp()).map(Rank) {
            let bubbles = timeline.bubbles(rank).unwrap();
            let Bubbles { warmup, steady, cooldown, transfer } = bubbles;
            prop_assert!(warmup.min(steady).min(cooldown).min(transfer) >= 0, "{bubbles:?}");
            let idle = timeline.makespan() - timeline.work()[rank.index()];
            prop_assert_eq!(bubbles.total(), idle, "{:?}", bubbles);
        }
    }
}

#[test]
fn bubbles_of_1f1b_are_where_the_textbook_has_them() {
    let parts = |pp, m, latency| {
        let request = crate::schedules::Request::new("1f1b", pp, None, m);
        let plan = crate::schedules::plan(&request).unwrap();
        let costs = Costs {
            latency: Links::All(Number::Int(latency)),
            ..Costs::default()
        };
        let timeline = simulate(&plan, &costs, Semantics::Buffered, false).unwrap();
        let bubbles = |rank| timeline.bubbles(Rank(rank)).unwrap();
        let parts = |b: Bubbles| (b.warmup, b.steady, b.cooldown, b.transfer);
        (0..pp).map(|rank| parts(bubbles(rank))).collect::<Vec<_>>()
    };
    // F 0..1 on rank 0, F 4..5 and B 5..7 on rank 1, B 10..12 on rank 0.
    assert_eq!(parts(2, 1, 3), [(6, 0, 0, 3), (1, 0, 5, 3)]);
    assert_eq!(
        parts(4, 8, 0),
        [(6, 0, 3, 0), (5, 0, 4, 0), (4, 0, 5, 0), (3, 0, 6, 0)]
    );
}

/// Three messages share a link that takes one at a time: the path goes back to the first of them.
#[test]
fn an_op_that_waited_for_a_busy_link_follows_the_op_that_found_it_free() {
    let plan =
        crate::schedules::plan(&crate::schedules::Request::new("gpipe", 2, None, 3)).unwrap();
    let costs = Costs {
        latency: Links::All(Number::Int(5)),
        ..Costs::default()
    };
    let timeline = simulate(&plan, &costs, Semantics::Buffered, true).unwrap();
    let path = timeline.critical_path();
    // F0 on rank 0, three transfers, F2 on rank 1, then B0, and three transfers back to B2.
    let first: Vec<(u32, u64)> = path.iter().map(|&(rank, at)| (rank.0, at)).collect();
    assert_eq!(first[..2], [(0, 0), (1, 2)]);
    assert_eq!(timeline.start(Rank(1)).unwrap()[2], 1 + 3 * 5);
}
