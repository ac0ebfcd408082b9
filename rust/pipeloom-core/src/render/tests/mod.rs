//! Drawings for the tests of the renderers, and tests of what they share.

mod grid;
mod svg;
mod trace;
mod waits;

use super::*;
use crate::cost::Costs;
use crate::schedules::{self, Request};
use crate::semantics::Semantics;
use crate::simulate::simulate;

pub(crate) fn plan(schedule: &str, pp: u32, vp: Option<u32>, m: u32) -> Plan {
    schedules::plan(&Request::new(schedule, pp, vp, m)).unwrap()
}

/// Simulated: F, I and W take 1, B takes 2; memory counts activations.
pub(crate) fn drawn(schedule: &str, pp: u32, vp: Option<u32>, m: u32) -> Drawing {
    drawn_at(&Costs::default(), schedule, pp, vp, m)
}

pub(crate) fn drawn_at(costs: &Costs, schedule: &str, pp: u32, vp: Option<u32>, m: u32) -> Drawing {
    let plan = plan(schedule, pp, vp, m);
    let timeline = simulate(&plan, costs, Semantics::Buffered, false).unwrap();
    Drawing::predicted(&timeline)
        .unwrap()
        .with_critical_path(&timeline)
}

#[test]
fn numbers_of_1f1b_are_the_textbook_ones() {
    let drawing = drawn("1f1b", 4, None, 8);
    assert_eq!(drawing.makespan(), (8 + 3) * 3);
    // (pp - 1) / (m + pp - 1)
    assert_eq!(drawing.bubble_thousandths(), 273);
    let peaks: Vec<_> = drawing
        .lanes
        .iter()
        .map(|lane| lane.peak_memory.unwrap())
        .collect();
    assert_eq!(peaks, [4, 3, 2, 1]);
}

#[test]
fn times_must_fit_the_plan() {
    let plan = plan("1f1b", 2, None, 1);
    let text = |starts: &[Vec<i64>], ends: &[Vec<i64>]| {
        Drawing::new(&plan, starts, ends, 1)
            .unwrap_err()
            .to_string()
    };
    let good = vec![vec![0, 3], vec![1, 2]];
    assert!(text(&[], &good).contains("pp=2"));
    assert!(text(&good, &[vec![1], vec![2, 3]]).contains("rank 0 has 2 ops"));
    assert!(text(&good, &[vec![1, 2], vec![2, 3]]).contains("op 0B0 ends at 2, before"));
}

#[test]
fn windows_outside_are_refused() {
    let drawing = drawn("gpipe", 2, None, 2);
    let past = Window {
        from: Some(100),
        ..Window::default()
    };
    assert!(
        drawing
            .slice(&past)
            .unwrap_err()
            .message
            .contains("shows nothing")
    );
    let ranks = Window {
        ranks: Some((1, 3)),
        ..Window::default()
    };
    assert!(
        drawing
            .slice(&ranks)
            .unwrap_err()
            .message
            .contains("out of range for pp=2")
    );
}

#[test]
fn decimals_are_rounded_and_short() {
    assert_eq!(decimal(1, 3, 3), "0.333");
    assert_eq!(decimal(2, 3, 1), "0.7");
    assert_eq!(decimal(-1, 4, 2), "-0.25");
    assert_eq!(decimal(1999, 1000, 2), "2");
    assert_eq!(decimal(5, 1, 0), "5");
}

#[test]
fn chunk_letters_go_on_after_z() {
    let letters = [0, 1, 25, 26, 27, 701, 702].map(chunk_letter);
    assert_eq!(letters, ["a", "b", "z", "aa", "ab", "zz", "aaa"]);
}

#[test]
fn marks_are_round_and_inside() {
    let mut drawing = drawn("1f1b", 2, None, 8);
    let names = |drawing: &Drawing, count| -> Vec<String> {
        let view = drawing.slice(&Window::default()).unwrap();
        view.marks(count).into_iter().map(|mark| mark.1).collect()
    };
    assert_eq!(names(&drawing, 6), ["0", "5", "10", "15", "20", "25"]);
    drawing.ticks_per_unit = 1000;
    assert_eq!(names(&drawing, 3), ["0", "0.01", "0.02"]);
}
