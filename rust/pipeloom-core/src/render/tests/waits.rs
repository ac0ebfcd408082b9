//! Where ranks wait, and for what.

use super::*;
use crate::render::waits::{Awaited, Wait, longest, waits};

/// Each wait of a rank as "start-end reason".
fn told(drawing: &Drawing, window: &Window, rank: u32) -> Vec<String> {
    let text = |wait: Wait| format!("{}-{} {}", wait.start, wait.end, wait.reason());
    let all = waits(drawing, window).unwrap().into_iter();
    all.filter(|found| found.0 == Rank(rank))
        .map(|found| text(found.1))
        .collect()
}

#[test]
fn ranks_of_1f1b_wait_for_their_neighbours() {
    let drawing = drawn("1f1b", 2, None, 2);
    let whole = Window::default();
    assert_eq!(
        told(&drawing, &whole, 0),
        ["2-4 waits for B0 of rank 1", "6-7 waits for B1 of rank 1"]
    );
    assert_eq!(
        told(&drawing, &whole, 1),
        ["0-1 waits for F0 of rank 0", "7-9 done"]
    );
    let late = Window {
        from: Some(3),
        to: Some(8),
        ranks: Some((0, 1)),
    };
    assert_eq!(
        told(&drawing, &late, 0),
        ["3-4 waits for B0 of rank 1", "6-7 waits for B1 of rank 1"]
    );
    assert_eq!(told(&drawing, &late, 1), [""; 0]);
}

#[test]
fn waits_and_work_fill_the_makespan() {
    for (name, pp, vp, m) in [
        ("interleaved_1f1b", 4, Some(2), 8),
        ("zb_v", 3, None, 7),
        ("dualpipe_v", 4, None, 8),
        ("chimera", 4, None, 8),
    ] {
        let costs = Costs {
            latency: crate::cost::Links::All(crate::cost::Number::Int(1)),
            ..Costs::default()
        };
        let drawing = drawn_at(&costs, name, pp, vp, m);
        let all = waits(&drawing, &Window::default()).unwrap();
        for rank in drawing.shape.ranks() {
            let own = || {
                all.iter()
                    .filter(|found| found.0 == rank)
                    .map(|found| found.1)
            };
            let idle: i64 = own().map(|wait| wait.end - wait.start).sum();
            let work = drawing.lanes[rank.index()].work();
            assert_eq!(idle + work, drawing.makespan(), "{name} {rank}");
            // A rank of a simulated plan idles only for a neighbour, or because it is done.
            assert!(
                own().all(|wait| wait.awaited != Awaited::Unknown),
                "{name} {rank}"
            );
        }
    }
}

#[test]
fn a_pair_waits_for_the_later_of_its_inputs() {
    let drawing = drawn("dualpipe_v", 4, None, 10);
    let mut pairs = 0;
    for rank in drawing.shape.ranks() {
        let lane = &drawing.lanes[rank.index()];
        for (_, wait) in waits(&drawing, &Window::default())
            .unwrap()
            .into_iter()
            .filter(|found| found.0 == rank)
        {
            let next = lane.compute().find(|found| found.1.start == wait.end);
            let paired = next.is_some_and(|found| found.1.op.flags.has(Flags::PAIR_FIRST));
            let Awaited::Op { rank: other, op } = wait.awaited else {
                continue;
            };
            // Without latency the wait ends when what was waited for ends.
            let mut blocks = drawing.lanes[other.index()].blocks.iter();
            let awaited = blocks.find(|block| {
                block.op.stage == op.stage && block.op.kind == op.kind && block.op.unit == op.unit
            });
            assert_eq!(
                awaited.unwrap().end,
                wait.end,
                "rank {rank}: {}",
                wait.reason()
            );
            pairs += usize::from(paired);
        }
    }
    assert!(pairs > 5);
}

#[test]
fn a_measured_gap_without_a_late_result_has_no_reason() {
    let plan = plan("1f1b", 2, None, 1);
    // Rank 1 has its input at 1, but starts at 5; rank 0 waits for it until 8.
    let (starts, ends) = ([vec![0, 8], vec![5, 6]], [vec![1, 9], vec![6, 8]]);
    let drawing = Drawing::new(&plan, &starts, &ends, 1).unwrap();
    let whole = Window::default();
    assert_eq!(told(&drawing, &whole, 0), ["1-8 waits for B0 of rank 1"]);
    assert_eq!(
        told(&drawing, &whole, 1),
        ["0-5 waits for F0 of rank 0", "8-9 done"]
    );
    let late = [vec![0, 9], vec![0, 6]];
    let drawing = Drawing::new(&plan, &late, &[vec![1, 10], vec![5, 7]], 1).unwrap();
    assert_eq!(
        told(&drawing, &whole, 1),
        [
            "5-6 waits for no op: a transfer, or the program itself",
            "7-10 done"
        ]
    );
}

#[test]
fn the_longest_wait_of_each_rank_is_found() {
    let drawing = drawn("1f1b", 4, None, 8);
    let found: Vec<_> = longest(&drawing, &Window::default())
        .unwrap()
        .into_iter()
        .map(|(_, wait)| wait.map(|wait| (wait.start, wait.end)))
        .collect();
    assert_eq!(
        found,
        [Some((4, 10)), Some((4, 8)), Some((0, 2)), Some((0, 3))]
    );
    let alone = drawn("no_pipelining", 1, None, 3);
    assert_eq!(
        longest(&alone, &Window::default()).unwrap(),
        [(Rank(0), None)]
    );
}
