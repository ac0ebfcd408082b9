//! One smallest plan that breaks each rule, and agreement with the slow machine on mutants.

use proptest::prelude::*;

use super::*;
use crate::cost::Costs;
use crate::engine::naive as machine;
use crate::engine::samples::{self, Rng};
use crate::ids::{Stage, Unit};
use crate::op::{Flags, Op, OpKind};
use crate::plan::RankOps;
use crate::semantics::Style;
use crate::shape::{Placement, Shape};

fn op(text: &str) -> Op {
    let (text, flags) = match text.chars().last() {
        Some('r') => (&text[..text.len() - 1], Flags::RECOMPUTE),
        Some('<') => (&text[..text.len() - 1], Flags::PAIR_FIRST),
        Some('>') => (&text[..text.len() - 1], Flags::PAIR_SECOND),
        _ => (text, Flags::NONE),
    };
    let from = text.find(char::is_alphabetic).unwrap();
    let to = text.rfind(|c: char| !c.is_ascii_digit()).unwrap() + 1;
    let kind = OpKind::ALL
        .into_iter()
        .find(|kind| kind.text() == &text[from..to])
        .unwrap();
    let (stage, unit) = (text[..from].parse().unwrap(), text[to..].parse().unwrap());
    Op {
        flags,
        ..Op::new(Stage(stage), kind, Unit(unit))
    }
}

fn ranks(orders: &[&str]) -> Vec<RankOps> {
    let rank = |order: &&str| RankOps {
        ops: order.split_whitespace().map(op).collect(),
    };
    orders.iter().map(rank).collect()
}

/// A plan on a loop of as many ranks as there are orders (`r`: recomputed; `<`, `>`: a pair).
fn plan(vp: u32, m: u32, orders: &[&str]) -> Plan {
    let pp = u32::try_from(orders.len()).unwrap();
    let shape = Shape::new(pp, vp, m, 1, Placement::Loop).unwrap();
    Plan::held("test", shape, ranks(orders))
}

fn shaped(pp: u32, m: u32, pieces: u32, placement: &Placement, orders: &[&str]) -> Plan {
    let shape = Shape::new(pp, 1, m, pieces, placement.clone()).unwrap();
    Plan::held("test", shape, ranks(orders))
}

/// Right but for one forward: stages 0 and 1 run microbatch 0, stages 2 and 3 microbatch 1.
const TWO_REPLICAS: &[&str] = &["0F0 3F1 3B1 0B0 0F1", "2F1 1F0 1B0 2B1"];

fn lowered(vp: u32, m: u32, orders: &[&str]) -> Plan {
    plan(vp, m, orders).with_transfers(Style::Streams, ranks(orders))
}

fn rules(plan: &Plan) -> Vec<&'static str> {
    check(plan, None)
        .violations
        .iter()
        .map(|violation| violation.rule)
        .collect()
}

#[test]
fn right_plans_break_no_rule() {
    assert!(rules(&plan(1, 1, &["0F0 0B0", "1F0 1I0 1W0"])).is_empty());
    assert!(rules(&plan(1, 2, &["0F0 0F1< 0B0> 0B1"])).is_empty());
    assert!(rules(&plan(1, 2, &["0F0r 0F1 0B0r 0B1"])).is_empty());
    assert!(
        rules(&plan(1, 1, &["0F0", "1F0"])).is_empty(),
        "forwards only"
    );
    let transfers = ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"];
    let report = check(&lowered(1, 1, &transfers), Some(&Semantics::ALL));
    assert!(report.ok(), "{report}");
    assert!(
        report
            .progress
            .iter()
            .all(|progress| progress.progresses == Some(true))
    );
}

/// The error has, for each violation, its rule, the grid around it with an arrow at the op, and a
/// hint; the last line is a hint.
fn is_told_with_its_place(plan: &Plan) {
    let error = check(plan, None).into_result().unwrap_err();
    let text = error.to_string();
    assert!(text.lines().last().unwrap().starts_with("hint: "), "{text}");
    assert!(text.lines().all(|line| line.len() < 160), "{text}");
    assert!(error.violations.len() <= 5, "{text}");
    let parts: Vec<&str> = text.split("\n\nrank ").skip(1).collect();
    assert_eq!(parts.len(), error.violations.len(), "{text}");
    for (part, violation) in parts.iter().zip(&error.violations) {
        let mut arrows = part
            .lines()
            .filter(|line| line.ends_with(" <--") || line.contains(" <-- "));
        let arrow = arrows.next().unwrap();
        assert_eq!(arrows.next(), None, "{text}");
        let row = match violation.cycle.len() {
            0 => format!("{:>10}", violation.position),
            _ => format!("  {} ", violation.position),
        };
        assert!(arrow.starts_with(&row), "{text}");
        assert!(arrow.contains(&format!("{} <--", violation.op)), "{text}");
        assert!(part.contains(&format!("[{}]", violation.rule)), "{text}");
        assert!(
            text.contains(&format!("hint: {}", violation.hint)),
            "{text}"
        );
    }
}

#[test]
fn each_rule_has_a_smallest_plan_that_breaks_it_alone() {
    for (rule, plan) in [
        ("placement", plan(1, 1, &["0F0 0B0 7F0"])),
        ("placement", plan(1, 1, &["0F0 0B0 0F5"])),
        ("placement", plan(1, 1, &["0F0 0B0 1F0", "1B0"])),
        ("exactly_once", plan(1, 1, &["0F0 0F0 0B0"])),
        ("exactly_once", plan(1, 2, &["0F0 0F1 0B0"])),
        ("split_backward", plan(1, 1, &["0F0 0I0"])),
        ("split_backward", plan(1, 1, &["0F0 0W0"])),
        ("split_backward", plan(1, 1, &["0F0 0B0 0W0"])),
        ("data_flow", plan(1, 1, &["0B0 0F0"])),
        ("data_flow", plan(1, 1, &["0F0 0W0 0I0"])),
        ("data_flow", plan(2, 1, &["1F0 0F0 1B0 0B0"])),
        ("recompute", plan(1, 1, &["0F0r 0B0"])),
        ("recompute", plan(1, 1, &["0F0r"])),
        ("recompute", plan(1, 1, &["0F0 0I0r 0W0"])),
        ("recompute", plan(1, 1, &["0F0 0I0 0W0r"])),
        ("pair", plan(1, 1, &["0F0< 0B0"])),
        ("pair", plan(1, 2, &["0F0< 0F1> 0B0 0B1"])),
        ("pair", plan(1, 1, &["0F0 0B0>"])),
        // Rules of replicas and of pieces: the other replica's microbatch; a piece before the
        // one that it reads.
        (
            "placement",
            shaped(2, 2, 1, &Placement::Bidirectional, TWO_REPLICAS),
        ),
        (
            "data_flow",
            shaped(1, 1, 2, &Placement::Loop, &["0F1 0F0 0B1 0B0"]),
        ),
        (
            "data_flow",
            shaped(1, 1, 2, &Placement::Loop, &["0F0 0F1 0B0 0B1"]),
        ),
        (
            "progress",
            plan(2, 1, &["0F0 2F0 0B0 2B0", "1F0 3F0 3B0 1B0"]),
        ),
    ] {
        is_told_with_its_place(&plan);
        let found = rules(&plan);
        assert!(
            found.iter().all(|&found| found == rule) && !found.is_empty(),
            "{rule}: {found:?}"
        );
    }
}

#[test]
fn each_rule_of_transfers_has_a_smallest_plan_too() {
    let sound = "1RECV_F0 1F0 1B0 1SEND_B0";
    for (rule, orders) in [
        (
            "missing_transfer",
            ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"],
        ),
        (
            "unneeded_transfer",
            ["0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", sound],
        ),
        ("data_flow", ["0SEND_F0 0F0 0RECV_B0 0B0", sound]),
        ("data_flow", ["0F0 0SEND_F0 0B0 0RECV_B0", sound]),
    ] {
        let report = check(&lowered(1, 1, &orders), Some(&[]));
        let found: Vec<_> = report
            .violations
            .iter()
            .map(|violation| violation.rule)
            .collect();
        assert_eq!(found, [rule], "{report}");
        is_told_with_its_place(&lowered(1, 1, &orders));
    }
    let swapped = [
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ];
    assert_eq!(rules(&lowered(1, 2, &swapped)), ["channel_pairing"]);
    is_told_with_its_place(&lowered(1, 2, &swapped));
    let unread = lowered(1, 1, &["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0"]);
    assert!(rules(&unread).contains(&"buffers"));
}

#[test]
fn a_channel_holds_at_most_as_many_buffers_as_it_may() {
    // Rank 1 receives both microbatches before it is done with the first.
    let orders = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ];
    let plan = lowered(1, 2, &orders);
    let within = |most| check(&plan, None).within_buffers(most).unwrap();
    assert!(within(2).ok());
    let report = within(1);
    let [told] = &report.violations[..] else {
        panic!("{report}")
    };
    assert_eq!(
        (told.rule, told.rank, told.position, told.op.as_str()),
        ("buffers", Rank(1), 2, "1RECV_F1")
    );
    assert_eq!(
        told.message,
        "1RECV_F1 needs buffer 2 of channel 0 -> 1 forward, which needs 2 in all, but max_buffers=1"
    );
    assert_eq!(within(0).violations.len(), 2, "each channel is told once");
    let unlowered = self::plan(1, 1, &["0F0 0B0", "1F0 1B0"]);
    assert!(check(&unlowered, None).within_buffers(1).is_err());
}

/// The most receives of a channel that stand in a rank's program with a reader still to come, seen
/// op by op.
fn most_in_use(plan: &Plan) -> u32 {
    let mut most = 0;
    for rank in plan.shape().ranks() {
        let ops = plan.rank_ops(rank).ops;
        for at in 0..ops.len() {
            let mut held: Vec<_> = (0..=at)
                .filter(|&posted| ops[posted].kind.is_recv())
                .filter(|&posted| {
                    let read = |op: &Op| {
                        op.kind.is_compute()
                            && (op.stage, op.unit) == (ops[posted].stage, ops[posted].unit)
                    };
                    ops[at..].iter().any(read)
                })
                .filter_map(|posted| crate::lower::Channel::of(plan, rank, ops[posted]))
                .collect();
            held.sort_unstable();
            let runs = held.chunk_by(|one, other| one == other).map(<[_]>::len);
            most = most.max(runs.max().unwrap_or(0));
        }
    }
    u32::try_from(most).unwrap()
}

#[test]
fn members_of_a_group_stand_side_by_side() {
    let orders = ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"];
    let mut held = ranks(&orders);
    for (rank, at) in [(0, 2), (1, 3)] {
        held[rank].ops[at].flags = Flags::JOINED;
    }
    let plan = plan(1, 1, &orders).with_transfers(Style::Batched, held);
    assert!(rules(&plan).contains(&"group"));
}

#[test]
fn a_deadlock_is_told_as_its_cycle() {
    // Both ranks send first, and nobody receives:
    //   rank 0: SEND_F1 -> RECV_B0      rank 1: SEND_B0 -> RECV_F1
    let orders = [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    ];
    let plan = lowered(1, 2, &orders);
    let report = check(&plan, Some(&Semantics::ALL));
    assert!(report.ok(), "{report}");
    let stuck: Vec<Semantics> = report
        .progress
        .iter()
        .filter(|progress| progress.progresses == Some(false))
        .map(|progress| progress.semantics)
        .collect();
    assert_eq!(
        stuck,
        [
            Semantics::SingleStream,
            Semantics::Batched,
            Semantics::Rendezvous
        ]
    );
    assert_eq!(report.unpromised.len(), 3);
    let told = &report.unpromised[0];
    assert_eq!(
        (told.rank, told.position, told.op.as_str()),
        (Rank(0), 3, "0SEND_F1")
    );
    assert_eq!(
        told.message,
        "deadlock under rendezvous: 2 ranks wait for each other\n  \
         rank 0, position 3: 0SEND_F1 waits for 1RECV_F1 at position 4 of rank 1\n  \
         rank 1, position 3: 1SEND_B0 waits for 0RECV_B0 at position 4 of rank 0"
    );
    let error = check_strictly(&plan, &[Semantics::Rendezvous])
        .and_then(Report::into_result)
        .unwrap_err();
    assert_eq!(error.violations, report.unpromised[..1]);
}

#[test]
fn a_long_cycle_is_abbreviated() {
    // Rank 0 starts with its second chunk, which needs all other ranks, which need rank 0's first.
    let mut orders: Vec<String> = (0..1000).map(|r| format!("{r}F0 {}F0", r + 1000)).collect();
    orders[0] = "1000F0 0F0".to_owned();
    let orders: Vec<&str> = orders.iter().map(String::as_str).collect();
    let report = check(&plan(2, 1, &orders), None);
    let [told] = &report.violations[..] else {
        panic!("{report}")
    };
    assert!(
        told.message
            .starts_with("deadlock under buffered: 1000 ranks wait for each other")
    );
    assert_eq!(told.message.lines().count(), 7, "{}", told.message);
    assert!(
        told.message.contains("... 995 more ..."),
        "{}",
        told.message
    );
}

#[test]
fn a_deadlock_is_shown_at_each_rank_of_its_cycle() {
    // Ranks 0 and 2 are no neighbours in number, but stage 3 stands behind stage 2.
    let ranks = [
        "0F0 0F1 3F0 3F1 3B0 0B0 3B1 0B1",
        "1F0 1F1 4F0 4B0 1B0 4F1 4B1 1B1",
        "2F0 5F0 5B0 2B0 2F1 5F1 5B1 2B1",
    ];
    let error = check(&plan(2, 2, &ranks), None).into_result().unwrap_err();
    let shown: Vec<&str> = error.message.lines().skip(2).collect();
    assert_eq!(
        shown,
        [
            "rank 0, position 3: deadlock under buffered: 2 ranks wait for each other",
            "  rank 0, position 3: 3F1 waits for 2F1 at position 4 of rank 2",
            "  rank 2, position 3: 2B0 waits for 3B0 at position 4 of rank 0 [progress]",
            "  rank 0     rank 2",
            "  1 0F1      1 5F0",
            "  2 3F0      2 5B0",
            "  3 3F1 <--  3 2B0 <--",
            "  4 3B0      4 2F1",
            "  5 0B0      5 5F1",
        ],
        "{}",
        error.message
    );
}

#[test]
fn a_report_shows_the_ops_around_a_violation() {
    let error = check(&plan(1, 1, &["0B0 0F0", "1F0 1B0"]), None)
        .into_result()
        .unwrap_err();
    assert!(error.message.contains("0B0 <--"), "{}", error.message);
    assert!(error.message.contains("[data_flow]"), "{}", error.message);
    assert_eq!(error.violations.len(), 1);
}

#[test]
fn a_plan_without_ops_for_its_huge_shape_is_refused_at_once() {
    let shape = Shape::new(8, 1, 1 << 28, 1, Placement::Loop).unwrap();
    let huge = Plan::held("huge", shape, Vec::new());
    assert_eq!(rules(&huge), ["size"]);
    assert!(!check(&huge, None).within_buffers(1).unwrap().ok());
}

proptest! {
    #[test]
    fn right_plans_pass(seed: u64) {
        let report = check(&samples::plan(&mut Rng(seed)), None);
        prop_assert!(report.ok(), "{}", report);
    }

    #[test]
    fn the_bound_on_buffers_is_what_a_walk_over_the_ops_finds(seed: u64) {
        let plan = samples::lowered(&mut Rng(seed));
        let most = most_in_use(&plan);
        let found = buffers::check(&plan, most).unwrap();
        prop_assert!(found.is_empty(), "{:?}", found);
        let fewer = most.checked_sub(1).map(|fewer| buffers::check(&plan, fewer).unwrap());
        prop_assert!(fewer.is_none_or(|found| !found.is_empty()), "{}", most);
    }

    #[test]
    fn mutants_are_judged_like_the_slow_checkers_do(seed: u64) {
        judge(seed);
    }
}

/// The same for a million plans (or `PIPELOOM_CASES`), for `make test-deep`.
#[test]
#[ignore = "takes minutes"]
#[allow(clippy::print_stdout)] // what the run came to, for docs/log.md
fn a_million_mutants_are_judged_like_the_slow_checkers_do() {
    let count = std::env::var("PIPELOOM_CASES").map_or(1_000_000, |text| text.parse().unwrap());
    let mut judged = [0_u64; 3];
    for seed in 0..count {
        judged[usize::from(judge(seed))] += 1;
    }
    let [broken, stuck, right] = judged;
    println!("{count} cases: {broken} broken, {stuck} stuck, {right} right");
    assert!(judged.iter().all(|&kind| kind > count / 50), "{judged:?}");
}

/// Whatever is done to a plan: no panic, the rules that the slow checker finds broken, and
/// progress where the slow machine runs all of it, under one semantics. Tells 0 if a rule is broken,
/// 1 if it gets stuck, else 2.
fn judge(seed: u64) -> u8 {
    let mut rng = Rng(seed);
    let original = if rng.below(2) == 0 {
        samples::plan(&mut rng)
    } else {
        samples::lowered(&mut rng)
    };
    let plan = if rng.below(8) == 0 {
        original
    } else {
        samples::mutate(&mut rng, &original)
    };
    let report = check(&plan, Some(&Semantics::ALL));
    assert!(!report.to_string().is_empty());
    let broken = report
        .violations
        .iter()
        .any(|violation| violation.rule != "progress");
    assert_eq!(broken, !naive::is_sound(&plan), "seed {seed}: {report}");
    if broken {
        return 0;
    }
    let ticks = Costs::default().ticks(plan.shape()).unwrap();
    let told = report
        .progress
        .iter()
        .filter(|progress| progress.progresses.is_some());
    let told: Vec<_> = told.collect();
    let progress = told[rng.below(told.len())];
    let slow = machine::run(&plan, &ticks, progress.semantics);
    let buffered = progress.semantics == Semantics::Buffered;
    let ran = slow.iter().zip(plan.materialize()).all(|(times, ops)| {
        let mut rows = times.iter().zip(&ops.ops);
        rows.all(|(time, op)| time.is_some() || (buffered && !op.kind.is_compute()))
    });
    assert_eq!(
        progress.progresses,
        Some(ran),
        "seed {seed}: {}",
        progress.semantics
    );
    let mut told = report.violations.iter().chain(&report.unpromised);
    let name = format!("deadlock under {}", progress.semantics);
    assert!(
        ran || told.any(|v| v.message.starts_with(&name)),
        "seed {seed}"
    );
    1 + u8::from(ran)
}
