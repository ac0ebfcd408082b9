//! Plans as text: CSV and saved files, round trips and refusals.

use pipeloom_core::error::{Error, ErrorKind};
use pipeloom_core::ids::Rank;
use pipeloom_core::lower;
use pipeloom_core::plan::Plan;
use pipeloom_core::schedules::{self, FAMILIES, Request};
use pipeloom_core::semantics::Style;
use pipeloom_core::shape::Placement;
use pipeloom_core::text::csv::{self, Form};
use pipeloom_core::text::saved;
use proptest::prelude::*;

fn plan(name: &str, pp: u32, vp: u32, m: u32) -> Plan {
    schedules::plan(&Request::new(name, pp, Some(vp), m)).expect("legal")
}

fn small_plans() -> impl Iterator<Item = Plan> {
    let names = FAMILIES.iter().map(|family| family.name);
    names.flat_map(|name| {
        let shapes = (1..=3u32).flat_map(|pp| (1..=2u32).map(move |vp| (pp, vp)));
        shapes
            .flat_map(move |(pp, vp)| (1..=4u32).map(move |m| (pp, vp, m)))
            .flat_map(move |(pp, vp, m)| {
                let plain = Request::new(name, pp, Some(vp), m);
                let requests = [
                    plain.clone(),
                    Request {
                        forward_only: true,
                        ..plain.clone()
                    },
                    Request {
                        partial_checkpoints: Some(1),
                        ..plain.clone()
                    },
                    Request {
                        num_seq_pieces: 2,
                        ..plain.clone()
                    },
                    Request {
                        reverse_backward: Some(false),
                        extra_warmup: 0,
                        ..plain
                    },
                ];
                requests
                    .into_iter()
                    .filter_map(|request| schedules::plan(&request).ok())
            })
    })
}

#[test]
fn saved_plans_come_back_exactly() {
    let mut plans = 0;
    for plan in small_plans() {
        let lowered = Style::ALL.map(|style| lower::lower(&plan, style, 2).expect("progresses"));
        for plan in lowered.iter().chain([&plan]) {
            let text = saved::to_saved(plan);
            let back = saved::from_saved(&text).expect("our own text");
            assert_eq!(&back, plan);
            assert_eq!(back.schedule(), plan.schedule());
            assert_eq!(back.params(), plan.params());
            assert_eq!(back.style(), plan.style());
            assert_eq!(back.promises(), plan.promises());
            assert_eq!(back.materialize(), plan.materialize());
            assert_eq!(back.num_warmup(Rank(0)), plan.num_warmup(Rank(0)));
            assert_eq!(saved::to_saved(&back), text);
            plans += 1;
        }
    }
    assert!(plans > 500, "only {plans} plans");
}

#[test]
fn a_closed_form_plan_is_saved_by_its_rule() {
    let text = saved::to_saved(&plan("interleaved_1f1b", 64, 8, 4096));
    assert!(text.len() < 400, "{text}");
}

#[test]
fn compute_orders_survive_a_csv() {
    for plan in small_plans() {
        let text = csv::to_csv(&plan, Form::Compute).expect("any plan");
        let back = csv::from_csv(&text).expect("our own text");
        assert!(back.dropped().is_empty());
        assert_eq!(csv::to_csv(&back, Form::Compute).expect("any plan"), text);
        assert_eq!(back.shape().pp(), plan.shape().pp());
        assert_eq!(back.shape().num_stages(), plan.shape().num_stages());
        assert_eq!(back.shape().num_microbatches(), plan.shape().num_units());
        assert_eq!(back.forward_only(), plan.forward_only());
        for stage in (0..plan.shape().num_stages()).map(pipeloom_core::ids::Stage) {
            assert_eq!(back.shape().rank_of(stage), plan.shape().rank_of(stage));
            assert_eq!(back.shape().chunk_of(stage), plan.shape().chunk_of(stage));
        }
    }
}

#[test]
fn transfers_survive_a_csv() {
    for plan in small_plans() {
        let crosses = plan.shape().pp() > 1;
        for style in [Style::Streams, Style::Fifo] {
            let lowered = lower::lower(&plan, style, 1).expect("progresses");
            let text = csv::to_csv(&lowered, Form::ComputeAndTransfers).expect("it is lowered");
            let back = csv::from_csv(&text).expect("our own text");
            assert_eq!(back.style(), crosses.then_some(Style::Text));
            assert_eq!(
                csv::to_csv(&lowered, Form::Compute),
                csv::to_csv(&back, Form::Compute)
            );
            if crosses {
                assert_eq!(csv::to_csv(&back, Form::ComputeAndTransfers), Ok(text));
                let saved = saved::to_saved(&back);
                assert_eq!(saved::from_saved(&saved), Ok(back));
            }
        }
    }
    let error = csv::to_csv(&plan("1f1b", 2, 1, 2), Form::ComputeAndTransfers);
    assert_eq!(error.expect_err("not lowered").kind, ErrorKind::Config);
}

#[test]
fn placements_are_recognised() {
    for (name, vp) in [("interleaved_1f1b", 3), ("1f1b", 1)] {
        let back = csv::from_csv(&rows(&plan(name, 3, vp, 4))).expect("a plan");
        assert_eq!(
            (back.shape().placement(), back.shape().vp()),
            (&Placement::Loop, vp)
        );
    }
    let v = csv::from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0").expect("a plan");
    assert_eq!((v.shape().placement(), v.shape().vp()), (&Placement::V, 2));
    // Two replicas: stages 2 and 3 are the mirror image of 0 and 1, for microbatch 1.
    let two = csv::from_csv("0F0,3F1,3B1,0B0\n2F1,1F0,1B0,2B1").expect("a plan");
    assert_eq!(
        (two.shape().placement(), two.shape().vp()),
        (&Placement::Bidirectional, 1)
    );
    assert_eq!(two.shape().num_replicas(), 2);
    let other = csv::from_csv(
        "1F0,1B0,2F0,2B0\n0F0,0B0"
            .replace("1F0,1B0,2F0,2B0", "1F0,2F0,2B0,1B0")
            .as_str(),
    )
    .expect("a plan");
    assert_eq!(other.shape().placement().name(), "table");
    assert_eq!(other.shape().vp(), 2);
}

fn rows(plan: &Plan) -> String {
    csv::to_csv(plan, Form::Compute).expect("any plan")
}

#[test]
fn pytorchs_csv_is_read_as_it_writes_it() {
    let text = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\r\n\
                1UNSHARD,,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\r\n";
    let plan = csv::from_csv(text).expect("a plan");
    assert_eq!(
        plan.actions(Rank(0)),
        ["0F0", "0SEND_F0", "0RECV_B0", "0B0"]
    );
    let dropped: Vec<String> = plan
        .dropped()
        .iter()
        .map(|d| format!("{}:{}:{}", d.rank, d.column, d.action))
        .collect();
    assert_eq!(
        dropped,
        [
            "0:0:0UNSHARD",
            "0:6:0REDUCE_GRAD",
            "0:7:0RESHARD",
            "1:0:1UNSHARD",
            "1:6:1REDUCE_GRAD",
            "1:7:1RESHARD"
        ]
    );
}

#[track_caller]
fn refused(text: &str, kind: ErrorKind, parts: &[&str]) -> Error {
    let error = csv::from_csv(text).expect_err(text);
    assert_eq!(error.kind, kind, "{error}");
    let shown = error.to_string();
    for part in parts.iter().chain(&["\nhint: "]) {
        assert!(shown.contains(part), "{part:?} is not in {shown:?}");
    }
    error
}

#[test]
fn wrong_text_is_named_by_row_and_column() {
    refused(
        "0F0,0B0\n1F0,1B0garbage",
        ErrorKind::Parse,
        &["row 1, column 1", "1B0garbage"],
    );
    refused("0F-1,0B0", ErrorKind::Parse, &["row 0, column 0", "0F-1"]);
    refused("0F0;0B0", ErrorKind::Parse, &["row 0, column 0"]);
    refused("", ErrorKind::Parse, &["empty"]);
    refused(",,\n,", ErrorKind::Parse, &["no ops"]);
    refused("0UNSHARD", ErrorKind::Parse, &["no ops"]);
    refused(&"x".repeat(10_000), ErrorKind::Parse, &["column 0"]);
}

#[test]
fn broken_plans_are_refused_with_every_violation() {
    let check = ErrorKind::Check;
    refused("0F0,0B0\n\n1F0,1B0", check, &["row 1 has no ops"]);
    refused("0F0,0B0,0F1", check, &["never runs 0B1"]);
    refused("0F1,0F2,0B1,0B2", check, &["never runs 0F0"]);
    refused(
        "0F0,0F0,0B0",
        check,
        &[
            "row 0, column 1",
            "position 1",
            "0F0 stands here a second time",
        ],
    );
    refused(
        "0F0,0B0,0I0,0W0",
        check,
        &["row 0, column 2", "0I0 repeats what 0B0 does"],
    );
    refused("0F0,0I0", check, &["0I0 has no 0W0"]);
    refused(
        ",0UNSHARD,0B0,0F0",
        check,
        &["row 0, column 2", "0B0 stands before 0F0"],
    );
    refused("0F0,0W0,0I0", check, &["0W0 stands before 0I0"]);
    refused("0F0,1F0,0B0,1B0", check, &["0B0 stands before 1B0"]);
    refused("0F0,0B0\n0F1,0B1", check, &["stage 0 is on rank 0 already"]);
    refused("0F0,0B0\n2F0,2B0", check, &["no rank has an op of stage 1"]);
    refused("0F0,0B0,7F4294967295", check, &["out of proportion"]);
    refused("0F4294967295,0B0", check, &["out of proportion"]);
    // Ranks wait for each other: 1F1 stands behind 1B0, 0B0 behind nothing it can get.
    refused(
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0",
        check,
        &["deadlock", "1F1 waits for 0F1"],
    );
    let error = refused("0F0,0B1\n1F0,1B1", check, &[]);
    assert_eq!(error.violations.len(), 4, "{error}");
}

/// Rule, rank, position and op of each violation.
fn told(text: &str) -> Vec<(&'static str, u32, u64, String)> {
    let error = refused(text, ErrorKind::Check, &[]);
    let told = error.violations.into_iter();
    told.map(|v| (v.rule, v.rank.0, v.position, v.op)).collect()
}

#[test]
fn all_that_leaves_a_plan_without_a_shape_is_a_violation() {
    let at = |rule, rank, position, op: &str| (rule, rank, position, op.to_owned());
    assert_eq!(
        told("0F0,0B0\n3F0,3B0"),
        [
            at("exactly_once", 0, 2, "1F0"),
            at("exactly_once", 0, 2, "2F0")
        ]
    );
    assert_eq!(
        told("0F0,0B0\n\n1F0,1B0\n0F1"),
        [at("placement", 1, 0, ""), at("placement", 3, 0, "0F1")]
    );
    assert_eq!(
        told("0F9,0B0,9B0"),
        [at("placement", 0, 0, "0F9"), at("placement", 0, 2, "9B0")]
    );
}

#[test]
fn a_stray_op_does_not_move_its_stage() {
    // 1F0 stands on rank 0: that alone is wrong, and what follows from it.
    let misplaced = told("0F0,1F0,0B0,0F1,0B1\n1B0,1F1,1B1");
    let first = ("placement", 0, 1, "1F0".to_owned());
    assert_eq!(misplaced.first(), Some(&first), "{misplaced:?}");
    assert!(misplaced.iter().all(|(rule, ..)| *rule != "exactly_once"));
}

#[test]
fn broken_transfers_are_refused() {
    let check = ErrorKind::Check;
    let rank1 = "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1";
    let swapped = "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1";
    refused(
        &format!("{swapped}\n{rank1}"),
        check,
        &[
            "row 1, column 0",
            "0SEND_F1 at position 2 there, but 1RECV_F0 here",
        ],
    );
    let right = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1";
    assert!(csv::from_csv(&format!("{right}\n{rank1}")).is_ok());
    refused(
        &format!("{}\n{rank1}", right.replace("0SEND_F1,", "")),
        check,
        &["rank 0 has no 0SEND_F1"],
    );
    refused(
        &format!("{}\n{rank1}", right.replace("0RECV_B0,0B0", "0B0,0RECV_B0")),
        check,
        &["row 0, column 4", "0B0 stands before 0RECV_B0"],
    );
    refused(
        &format!("{right},0SEND_B0\n{rank1}"),
        check,
        &[
            "row 0, column 8",
            "0SEND_B0 moves a tensor that does not change ranks",
        ],
    );
}

#[track_caller]
fn says(text: &str, part: &str) {
    let error = saved::from_saved(text).expect_err(part);
    assert_eq!(error.kind, ErrorKind::Parse);
    assert!(error.to_string().contains(part), "{error}");
}

#[test]
fn damaged_and_foreign_files_are_told_apart() {
    let text =
        saved::to_saved(&lower::lower(&plan("1f1b", 2, 1, 3), Style::Fifo, 1).expect("progresses"));
    says(
        &text.replace("pipeloom-plan 1", "pipeloom-plan 2"),
        "format 2",
    );
    says("0F0,0B0", "no saved plan");
    says("", "no saved plan");
    says(&text[..text.len() / 2], "damaged");
    says(&text.replace("0F1", "0F2"), "checksum");
    says(&text.replacen("checksum ", "checksum 1", 1), "checksum");
    assert!(saved::from_saved(&(text.clone() + "\n")).is_ok());
}

/// A text with the checksum that belongs to it, so that the rest is tested too.
fn resealed(body: &str) -> String {
    let sum = body.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{body}checksum {sum:016x}\n")
}

#[test]
fn a_saved_plan_with_a_true_checksum_is_checked_too() {
    let text = saved::to_saved(
        &lower::lower(&plan("1f1b", 2, 1, 2), Style::Streams, 1).expect("progresses"),
    );
    let body = &text[..text.rfind("checksum ").expect("it has one")];
    assert_eq!(resealed(body), text);
    for (from, to) in [
        ("0F1", "0F0"),
        ("schedule 1f1b", "schedule gpipe"),
        ("schedule 1f1b", "schedule none_such"),
        ("pp=2", "pp=0"),
        ("num_microbatches=2", "num_microbatches=4000000000"),
        ("vp=1", "vp=x"),
        ("placement=loop", "placement=table:0.0,9.9"),
        ("orders lowered", "orders raised"),
        ("style streams", "style silk"),
        ("promises buffered", "promises rain"),
        ("kept_activations=none", "kept_activations=0"),
        ("shape ", "shade "),
        ("rank ", "bank "),
        ("1RECV_F0", "1RECV_F7"),
    ] {
        let wrong = body.replacen(from, to, 1);
        assert_ne!(wrong, body, "{from}");
        assert!(
            saved::from_saved(&resealed(&wrong)).is_err(),
            "{from} -> {to}"
        );
    }
}

proptest! {
    #[test]
    fn no_text_makes_the_readers_panic(text in "\\PC{0,60}") {
        let _ = csv::from_csv(&text);
        let _ = saved::from_saved(&text);
    }

    #[test]
    fn mutated_csv_is_read_or_refused(
        seed in 0usize..4, at in 0usize..400, with in "[0-9FBIW,;()\n A-Z_]{0,6}", cut in 0usize..6,
    ) {
        let base = [
            rows(&plan("1f1b", 2, 1, 3)),
            rows(&plan("interleaved_1f1b", 2, 2, 2)),
            "0F0,(0F1;1B0)OVERLAP_F_B,1B1".to_owned(),
            csv::to_csv(&lower::lower(&plan("1f1b", 2, 1, 2), Style::Fifo, 1).expect("progresses"), Form::ComputeAndTransfers).expect("lowered"),
        ];
        let mut text = base[seed].clone();
        let at = at % (text.len() + 1);
        text.replace_range(at..(at + cut).min(text.len()), &with);
        if let Ok(plan) = csv::from_csv(&text) {
            // Whatever is let in can be lowered in every style.
            for style in Style::ALL {
                prop_assert!(lower::lower(&plan, style, 1).is_ok());
            }
        }
    }

    #[test]
    fn mutated_saved_plans_are_read_or_refused(
        lowered: bool, at in 0usize..2000, with in "\\PC{0,3}", cut in 0usize..4,
    ) {
        let mut base = plan("interleaved_1f1b", 2, 2, 2);
        if lowered {
            base = lower::lower(&base, Style::Batched, 1).expect("progresses");
        }
        let text = saved::to_saved(&base);
        let mut body = text[..text.rfind("checksum ").expect("it has one")].to_owned();
        let at = at % (body.len() + 1);
        body.replace_range(at..(at + cut).min(body.len()), &with);
        if let Ok(plan) = saved::from_saved(&resealed(&body)) {
            prop_assert!(lower::lower(&plan, Style::Fifo, 1).is_ok());
        }
    }
}
