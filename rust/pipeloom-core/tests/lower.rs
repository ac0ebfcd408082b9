//! Lowering: pairing, progress, Megatron's calls, prefetch, buffers. The simulator in `sim` is
//! written from the definition of the semantics and shares nothing with the code under test.

#![allow(clippy::cast_possible_truncation)] // ranks and stages of tests are small

mod sim;

use std::fmt::Write;

use pipeloom_core::ids::{Rank, Stage, Unit};
use pipeloom_core::lower::{self, Channel, Direction};
use pipeloom_core::op::{Flags, Op, OpKind};
use pipeloom_core::p2p_order::p2p_order;
use pipeloom_core::plan::{NO_GROUP, Plan};
use pipeloom_core::schedules::{self, FAMILIES, Request};
use pipeloom_core::semantics::{Semantics, Style};
use pipeloom_core::text::csv;
use proptest::prelude::*;
use sim::Sim;

fn lowered(plan: &Plan, style: Style) -> Plan {
    lower::lower(plan, style, 1).expect("a plan that progresses")
}

fn unit_cost(op: Op) -> u64 {
    if op.kind == OpKind::Backward { 2 } else { 1 }
}

/// Costs by hash, a third of them zero.
fn ragged_cost(op: Op) -> u64 {
    let mixed = (u64::from(op.stage.0) * 31 + u64::from(op.unit.0) * 17 + op.kind as u64 * 7) % 9;
    mixed.saturating_sub(2)
}

/// Every family at every small shape.
fn small_plans() -> impl Iterator<Item = Plan> {
    let shapes = (1..=4u32)
        .flat_map(|pp| (1..=3u32).flat_map(move |vp| (1..=6u32).map(move |m| (pp, vp, m))));
    let names = FAMILIES.iter().map(|family| family.name);
    names.flat_map(move |name| {
        shapes.clone().flat_map(move |(pp, vp, m)| {
            let whole = Request::new(name, pp, Some(vp), m);
            let forward_only = Request {
                forward_only: true,
                ..whole.clone()
            };
            [whole, forward_only]
                .into_iter()
                .filter_map(|request| schedules::plan(&request).ok())
        })
    })
}

/// The compute order stays, transfers pair up, the promised semantics progress, and the fifo
/// order delays nothing under `single_stream`.
fn keeps_its_promises(plan: &Plan) {
    for style in Style::ALL {
        let with_transfers = lowered(plan, style);
        for rank in plan.shape().ranks() {
            let ops = with_transfers.rank_ops(rank).ops;
            let kept: Vec<Op> = ops.into_iter().filter(|op| op.kind.is_compute()).collect();
            assert_eq!(
                kept,
                plan.rank_ops(rank).ops,
                "{style:?} {}",
                plan.describe()
            );
        }
        let sim = Sim::new(&with_transfers);
        let buffered = sim.run(Semantics::Buffered, unit_cost);
        for &semantics in style.promises() {
            for cost in [unit_cost, ragged_cost, |_| 0] {
                let ends = sim.run(semantics, cost);
                assert!(
                    ends.is_some(),
                    "{style:?} {semantics:?} {}",
                    plan.describe()
                );
            }
        }
        if style == Style::Fifo {
            let single = sim.run(Semantics::SingleStream, unit_cost);
            assert_eq!(single, buffered, "{}", plan.describe());
        }
    }
}

#[test]
fn every_family_keeps_its_promises_in_every_style() {
    let mut plans = 0;
    for plan in small_plans() {
        keeps_its_promises(&plan);
        plans += 1;
    }
    assert!(plans > 500, "only {plans} plans");
}

/// A CSV of a random legal plan: ops in random order of their dependencies on random ranks.
fn random_csv(pp: usize, stages: usize, units: u32, split: bool, seed: u64) -> String {
    let mut state = seed | 1;
    let mut pick = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % n
    };
    // Each rank holds a stage; the others fall anywhere.
    let home: Vec<usize> = (0..stages)
        .map(|s| if s < pp { s } else { pick(pp) })
        .collect();
    let mut done: Vec<String> = Vec::new();
    let mut rows = vec![String::new(); pp];
    let name = |s: usize, kind: &str, u: u32| format!("{s}{kind}{u}");
    loop {
        let mut ready = Vec::new();
        for (s, u) in (0..stages).flat_map(|s| (0..units).map(move |u| (s, u))) {
            let has = |s: usize, kind: &str| done.contains(&name(s, kind, u));
            let gradient = |s: usize| has(s, "B") || has(s, "I");
            if !has(s, "F") && (s == 0 || has(s - 1, "F")) {
                ready.push((s, "F", u));
            }
            if has(s, "F") && !gradient(s) && (s + 1 == stages || gradient(s + 1)) {
                ready.push((
                    s,
                    if split && (s + u as usize).is_multiple_of(2) {
                        "I"
                    } else {
                        "B"
                    },
                    u,
                ));
            }
            if has(s, "I") && !has(s, "W") {
                ready.push((s, "W", u));
            }
        }
        if ready.is_empty() {
            break;
        }
        let (s, kind, u) = ready[pick(ready.len())];
        write!(rows[home[s]], "{},", name(s, kind, u)).expect("a string");
        done.push(name(s, kind, u));
    }
    rows.join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_plan_keeps_its_promises(
        pp in 1usize..4, more in 0usize..4, units in 1u32..4, split: bool,
        seed: u64,
    ) {
        let csv = random_csv(pp, pp + more, units, split, seed);
        let plan = csv::from_csv(&csv).expect("a legal plan");
        keeps_its_promises(&plan);
    }

    #[test]
    fn receives_stand_where_prefetch_says(
        pp in 2usize..4, more in 0usize..3, units in 1u32..4, prefetch in 1u32..6,
        seed: u64,
    ) {
        let csv = random_csv(pp, pp + more, units, true, seed);
        let plan = csv::from_csv(&csv).expect("a legal plan");
        let with_transfers = lower::lower(&plan, Style::Streams, prefetch).expect("progresses");
        let sim = Sim::new(&with_transfers);
        prop_assert!(sim.run(Semantics::Streams, unit_cost).is_some());
        for rank in plan.shape().ranks() {
            let ops = with_transfers.rank_ops(rank).ops;
            for (at, op) in ops.iter().enumerate().filter(|(_, op)| op.kind.is_recv()) {
                let reads = |other: &&Op| other.stage == op.stage && other.unit == op.unit
                    && match op.kind {
                        OpKind::RecvForward => other.kind == OpKind::Forward,
                        _ => other.kind.gives_input_gradient(),
                    };
                let consumer = ops.iter().position(|other| reads(&other)).expect("it is read");
                let between = ops[at..consumer].iter().filter(|op| op.kind.is_compute()).count();
                // Earlier only where the channel's order asks for it, or where the order begins.
                let begins = !ops[..at].iter().any(|op| op.kind.is_compute());
                let wanted = prefetch as usize - 1;
                prop_assert!(between >= wanted || begins);
                prop_assert!(between <= wanted || in_send_order(&with_transfers, rank, at));
            }
        }
    }
}

/// Whether a later receive of the same channel stands right there, so that this one had to move.
fn in_send_order(plan: &Plan, rank: Rank, at: usize) -> bool {
    let ops = plan.rank_ops(rank).ops;
    let mine = Channel::of(plan, rank, ops[at]);
    let transfers = ops[at + 1..].iter().take_while(|op| !op.kind.is_compute());
    transfers
        .into_iter()
        .any(|&op| Channel::of(plan, rank, op) == mine)
}

#[test]
fn megatron_calls_are_reproduced() {
    let golden = include_str!("../../../tests/golden/megatron_calls.txt");
    let mut cases = 0;
    for line in golden.lines().filter(|line| !line.starts_with('#')) {
        let mut columns = line.split(" | ");
        let head: Vec<u32> = columns
            .next()
            .expect("a head")
            .split(' ')
            .map(|number| number.parse().expect("a number"))
            .collect();
        let &[pp, vp, m, group, forward_only] = head.as_slice() else {
            panic!("{line}");
        };
        let interleaved = vp > 1;
        let request = Request {
            forward_only: forward_only == 1,
            microbatch_group_size: interleaved.then_some(group),
            ..Request::new(
                if interleaved {
                    "interleaved_1f1b"
                } else {
                    "1f1b"
                },
                pp,
                Some(vp),
                m,
            )
        };
        let plan = schedules::plan(&request).expect("Megatron accepts it");
        let with_transfers = lowered(&plan, Style::EvenOdd);
        for (rank, expected) in (0..pp).map(Rank).zip(columns) {
            assert_eq!(
                calls(&with_transfers, rank),
                expected,
                "{} rank {rank}",
                plan.describe()
            );
        }
        Sim::new(&with_transfers);
        cases += 1;
    }
    assert!(cases > 100, "only {cases} cases");
}

/// A rank's program in the words of the golden file.
fn calls(plan: &Plan, rank: Rank) -> String {
    let held = plan.rank_ops(rank);
    let groups = held.groups();
    let chunk = |op: &Op| format!("{}.{}", plan.shape().chunk_of(op.stage), op.unit);
    let mut words: Vec<String> = Vec::new();
    let mut at = 0;
    while at < held.ops.len() {
        let group = groups[at];
        let len = if group == NO_GROUP {
            words.push(format!("{}{}", held.ops[at].kind, chunk(&held.ops[at])));
            1
        } else {
            let same = |&&other: &&u32| other == group;
            let members = &held.ops[at..at + groups[at..].iter().take_while(same).count()];
            let mut parts = Vec::new();
            for (kind, name) in [
                (OpKind::SendForward, "sn"),
                (OpKind::SendBackward, "sp"),
                (OpKind::RecvForward, "rp"),
                (OpKind::RecvBackward, "rn"),
            ] {
                for op in members.iter().filter(|op| op.kind == kind) {
                    let tensor = if kind.is_send() {
                        chunk(op)
                    } else {
                        String::new()
                    };
                    parts.push(format!("{name}{tensor}"));
                }
            }
            words.push(parts.join("+"));
            members.len()
        };
        at += len;
    }
    words.join(" ")
}

#[test]
fn groups_of_even_odd_are_in_the_order_of_p2p_order() {
    let name = |op: &Op| match op.kind {
        OpKind::SendForward => "send_next",
        OpKind::RecvForward => "recv_prev",
        OpKind::SendBackward => "send_prev",
        _ => "recv_next",
    };
    let mut full = 0;
    for plan in small_plans() {
        let with_transfers = lowered(&plan, Style::EvenOdd);
        for rank in plan.shape().ranks() {
            let held = with_transfers.rank_ops(rank);
            let groups = held.groups();
            let last = groups.iter().copied().filter(|&group| group != NO_GROUP);
            for group in 0..last.max().map_or(0, |last| last + 1) {
                let members = held.ops.iter().zip(&groups).filter(|(_, g)| **g == group);
                let mut names: Vec<&str> = members.map(|(op, _)| name(op)).collect();
                names.dedup();
                assert_eq!(names, p2p_order(rank, &names).expect("known names"));
                full += usize::from(names.len() == 4);
            }
        }
    }
    assert!(full > 50, "only {full} groups had all four");
}

#[test]
fn p2p_order_is_megatrons() {
    let golden = include_str!("../../../tests/golden/megatron_p2p_order.txt");
    let cases = golden.lines().filter(|line| !line.starts_with('#'));
    let mut checked = 0;
    for case in cases {
        let columns: Vec<&str> = case.split(" | ").collect();
        let have: Vec<&str> = columns[1].split_whitespace().collect();
        let rank = Rank(columns[0].parse().expect("a rank"));
        assert_eq!(
            p2p_order(rank, &have).expect("known names").join(" "),
            columns[2]
        );
        checked += 1;
    }
    assert_eq!(checked, 54);
    assert!(p2p_order(Rank(0), &["send"]).is_err());
    assert!(p2p_order(Rank(0), &["send_next", "send_next"]).is_err());
    assert!(p2p_order(Rank(7), &[]).expect("nothing").is_empty());
}

fn from_csv(text: &str) -> Plan {
    csv::from_csv(text).expect("a plan")
}

fn texts(plan: &Plan, rank: u32) -> String {
    plan.actions(Rank(rank)).join(" ")
}

#[test]
fn styles_of_a_tiny_plan() {
    let plan = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1");
    let expected = [
        (
            Style::Streams,
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        ),
        (
            Style::Fifo,
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        ),
        (
            Style::Batched,
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        ),
    ];
    for (style, ops) in expected {
        assert_eq!(texts(&lowered(&plan, style), 0), ops, "{style:?}");
    }
    let ahead = lower::lower(&plan, Style::Streams, 2).expect("progresses");
    assert_eq!(
        texts(&ahead, 0),
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1"
    );
    assert_eq!(
        texts(&ahead, 1),
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    );
}

#[test]
fn a_receive_moves_to_the_order_of_its_channel() {
    // Rank 0 makes 0F0 before 0F1; rank 1 uses them the other way round.
    let plan = from_csv("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0");
    let streams = lowered(&plan, Style::Streams);
    assert_eq!(
        texts(&streams, 1),
        "1RECV_F0 1RECV_F1 1F1 1B1 1SEND_B1 1F0 1B0 1SEND_B0"
    );
}

/// `DualPipeV` for 2 ranks and 4 microbatches, as PyTorch writes it.
const PAIRS: &str = "\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3";

#[test]
fn nothing_stands_inside_a_pair() {
    let plan = from_csv(PAIRS);
    keeps_its_promises(&plan);
    for style in Style::ALL {
        for prefetch in 1..4 {
            let with_transfers = lower::lower(&plan, style, prefetch).expect("progresses");
            Sim::new(&with_transfers);
            for rank in plan.shape().ranks() {
                let ops = with_transfers.rank_ops(rank).ops;
                for (first, second) in ops.iter().zip(&ops[1..]) {
                    assert_eq!(
                        first.flags.has(Flags::PAIR_FIRST),
                        second.flags.has(Flags::PAIR_SECOND),
                        "{style:?}: {first} {second}"
                    );
                }
            }
        }
    }
    let streams = texts(&lowered(&plan, Style::Streams), 0);
    assert!(
        streams.contains("0RECV_B0 3RECV_F2 (3F2;0B0)OVERLAP_F_B 3B2"),
        "{streams}"
    );
    assert!(
        streams.contains("(0F3;3B1)OVERLAP_F_B 0SEND_F3 3SEND_B1"),
        "{streams}"
    );
}

#[test]
fn lowering_again_changes_the_style_only() {
    let plan = schedules::plan(&Request::new("interleaved_1f1b", 2, Some(2), 4)).expect("legal");
    for first in Style::ALL {
        for second in Style::ALL {
            let twice = lowered(&lowered(&plan, first), second);
            assert_eq!(twice.materialize(), lowered(&plan, second).materialize());
        }
    }
}

#[test]
fn bad_requests_are_refused() {
    let plan = schedules::plan(&Request::new("1f1b", 2, None, 4)).expect("legal");
    for error in [
        lower::lower(&plan, Style::Streams, 0).expect_err("prefetch"),
        lower::lower(&plan, Style::Text, 1).expect_err("style"),
        lower::style_from_name("nccl", None).expect_err("name"),
    ] {
        assert!(error.to_string().contains("\nhint: "), "{error}");
    }
    assert_eq!(
        lower::style_from_name("auto", Some("nccl")),
        Ok(Style::Streams)
    );
    assert_eq!(lower::style_from_name("auto", Some("mpi")), Ok(Style::Fifo));
    assert_eq!(lower::style_from_name("even_odd", None), Ok(Style::EvenOdd));
}

#[test]
fn buffers_are_those_in_use_at_once() {
    let channel = |source, destination, direction| Channel {
        source: Rank(source),
        destination: Rank(destination),
        direction,
    };
    let plan = schedules::plan(&Request::new("1f1b", 4, None, 8)).expect("legal");
    let streams = lowered(&plan, Style::Streams);
    for rank in 1..4 {
        // As many activations are held as the rank has microbatches in flight.
        let held = lower::buffers(
            &streams,
            Rank(rank),
            channel(rank - 1, rank, Direction::Forward),
        );
        assert_eq!(held, Ok(4 - rank));
    }
    let gradients = channel(1, 0, Direction::Backward);
    assert_eq!(lower::buffers(&streams, Rank(0), gradients), Ok(1));
    let gpipe = schedules::plan(&Request::new("gpipe", 2, None, 5)).expect("legal");
    let forward = channel(0, 1, Direction::Forward);
    assert_eq!(
        lower::buffers(&lowered(&gpipe, Style::Streams), Rank(1), forward),
        Ok(5)
    );
    let evaluation = Request {
        forward_only: true,
        ..Request::new("1f1b", 2, None, 5)
    };
    let evaluation = lowered(
        &schedules::plan(&evaluation).expect("legal"),
        Style::Streams,
    );
    assert_eq!(lower::buffers(&evaluation, Rank(1), forward), Ok(1));
    // Nothing flows that way.
    assert_eq!(
        lower::buffers(&streams, Rank(2), channel(0, 2, Direction::Forward)),
        Ok(0)
    );
    assert!(lower::buffers(&streams, Rank(0), forward).is_err());
    assert!(lower::buffers(&plan, Rank(1), forward).is_err());
    assert_eq!(
        lower::sources(&streams, Rank(1), Direction::Forward),
        [Rank(0)]
    );
    assert_eq!(
        lower::sources(&streams, Rank(1), Direction::Backward),
        [Rank(2)]
    );
}

#[test]
fn split_backwards_free_at_the_weight_half() {
    let plan = from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1");
    let forward = Channel {
        source: Rank(0),
        destination: Rank(1),
        direction: Direction::Forward,
    };
    let held = lower::buffers(&lowered(&plan, Style::Streams), Rank(1), forward);
    assert_eq!(held, Ok(2));
    let op = Op::new(Stage(1), OpKind::RecvForward, Unit(0));
    assert_eq!(Channel::of(&plan, Rank(1), op), Some(forward));
}
