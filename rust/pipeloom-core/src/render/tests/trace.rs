//! Traces: events by line; tests in Python read the JSON.

use super::*;
use crate::render::trace::{TraceOptions, trace};

#[test]
fn the_smallest_trace() {
    let text = trace(&drawn("1f1b", 2, None, 1), &TraceOptions::default()).unwrap();
    let expected = r#"{"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"rank 0"}},
{"ph":"M","name":"thread_name","pid":0,"tid":0,"args":{"name":"compute"}},
{"ph":"X","name":"0F0","cat":"forward","pid":0,"tid":0,"ts":0,"dur":1000,"args":{"stage":0,"chunk":0,"microbatch":0,"piece":0}},
{"ph":"X","name":"0B0","cat":"backward","pid":0,"tid":0,"ts":4000,"dur":2000,"args":{"stage":0,"chunk":0,"microbatch":0,"piece":0}},
{"ph":"C","name":"memory","pid":0,"tid":0,"ts":1000,"args":{"memory":1}},
{"ph":"C","name":"memory","pid":0,"tid":0,"ts":6000,"args":{"memory":0}},
{"ph":"M","name":"process_name","pid":1,"tid":0,"args":{"name":"rank 1"}},
{"ph":"M","name":"thread_name","pid":1,"tid":0,"args":{"name":"compute"}},
{"ph":"X","name":"1F0","cat":"forward","pid":1,"tid":0,"ts":1000,"dur":1000,"args":{"stage":1,"chunk":0,"microbatch":0,"piece":0}},
{"ph":"X","name":"1B0","cat":"backward","pid":1,"tid":0,"ts":2000,"dur":2000,"args":{"stage":1,"chunk":0,"microbatch":0,"piece":0}},
{"ph":"C","name":"memory","pid":1,"tid":0,"ts":2000,"args":{"memory":1}},
{"ph":"C","name":"memory","pid":1,"tid":0,"ts":4000,"args":{"memory":0}},
{"ph":"s","name":"gradient","cat":"p2p","id":0,"pid":1,"tid":0,"ts":3999.999},
{"ph":"f","bp":"e","name":"gradient","cat":"p2p","id":0,"pid":0,"tid":0,"ts":4000},
{"ph":"s","name":"activation","cat":"p2p","id":1,"pid":0,"tid":0,"ts":999.999},
{"ph":"f","bp":"e","name":"activation","cat":"p2p","id":1,"pid":1,"tid":0,"ts":1000}
]}
"#;
    assert_eq!(text, expected);
}

#[test]
fn every_message_has_one_arrow() {
    for (schedule, pp, vp, m) in [("1f1b", 4, None, 6), ("interleaved_1f1b", 4, Some(3), 8)] {
        let text = trace(&drawn(schedule, pp, vp, m), &TraceOptions::default()).unwrap();
        let boundaries = (pp * vp.unwrap_or(1) - 1) as usize;
        let count = |ph: &str| text.matches(&format!("\"ph\":\"{ph}\"")).count();
        assert_eq!(count("s"), 2 * boundaries * m as usize);
        assert_eq!(count("f"), count("s"));
    }
}

#[test]
fn transfers_that_overlap_take_threads_of_their_own() {
    let base = plan("1f1b", 2, None, 2);
    let mut ops: Vec<_> = base
        .shape()
        .ranks()
        .map(|rank| base.rank_ops(rank))
        .collect();
    let transfer =
        |stage, kind, unit| Op::new(crate::ids::Stage(stage), kind, crate::ids::Unit(unit));
    ops[0].ops.splice(
        2..2,
        [0, 1].map(|unit| transfer(0, OpKind::SendForward, unit)),
    );
    ops[1].ops.splice(
        0..0,
        [0, 1].map(|unit| transfer(1, OpKind::RecvForward, unit)),
    );
    let plan = base.with_transfers(crate::semantics::Style::Streams, ops);
    let starts = vec![vec![0, 1, 1, 2, 9, 12], vec![1, 2, 6, 7, 9, 10]];
    let ends = vec![vec![1, 2, 6, 7, 11, 14], vec![6, 7, 7, 9, 10, 12]];
    let drawing = Drawing::new(&plan, &starts, &ends, 1).unwrap();
    let text = trace(&drawing, &TraceOptions::default()).unwrap();
    assert!(text.contains(
        r#""name":"0SEND_F0","cat":"send activation","pid":0,"tid":1,"ts":1000,"dur":5000"#
    ));
    assert!(text.contains(
        r#""name":"0SEND_F1","cat":"send activation","pid":0,"tid":2,"ts":2000,"dur":5000"#
    ));
    assert!(text.contains(r#""args":{"name":"comm 2"}"#));
    assert_eq!(
        text.matches("\"ph\":\"s\"").count(),
        2,
        "transfers only, not their producers"
    );
    assert_eq!(text.matches("\"ph\":\"f\"").count(), 2);
}

#[test]
fn a_time_unit_of_nothing_is_refused() {
    let options = TraceOptions {
        microseconds_per_unit: 0,
        ..TraceOptions::default()
    };
    assert!(trace(&drawn("1f1b", 2, None, 1), &options).is_err());
}
