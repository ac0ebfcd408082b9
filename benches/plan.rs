//! Times of the core alone: `cargo bench`.
//!
//! The names are the rows of benches/README.md; the shapes are DESIGN's.

use divan::Bencher;
use divan::counter::ItemsCount;
use pipeloom_core::ids::Rank;
use pipeloom_core::plan::Plan;
use pipeloom_core::schedules::{Request, plan};

fn main() {
    divan::main();
}

fn make(schedule: &str, pp: u32, vp: Option<u32>, num_microbatches: u32) -> Plan {
    plan(&Request::new(schedule, pp, vp, num_microbatches)).expect("the shape is legal")
}

/// One rank's columns, with the plan made anew.
#[divan::bench(args = [("interleaved_1f1b", 8, 4, 64), ("interleaved_1f1b", 64, 8, 4096)])]
fn one_rank(bencher: Bencher<'_, '_>, (schedule, pp, vp, m): (&str, u32, u32, u32)) {
    let rank = Rank(pp / 2);
    let len = make(schedule, pp, Some(vp), m).len(rank);
    bencher
        .counter(ItemsCount::new(len))
        .bench(|| make(schedule, pp, Some(vp), m).columns(rank));
}

/// The columns of all ranks, one after the other.
#[divan::bench(args = ["interleaved_1f1b", "interleaved_zb", "zb_v", "dualpipe_v"])]
fn all_ranks(bencher: Bencher<'_, '_>, schedule: &str) {
    let vp = schedule.starts_with("interleaved").then_some(4);
    let plan = make(schedule, 64, vp, 512);
    bencher
        .counter(ItemsCount::new(plan.total_len()))
        .bench(|| {
            for rank in plan.shape().ranks() {
                divan::black_box(plan.columns(rank));
            }
        });
}

/// The runs of one rank, without writing them anywhere.
#[divan::bench]
fn runs(bencher: Bencher<'_, '_>) {
    let plan = make("interleaved_1f1b", 64, Some(8), 4096);
    let order = plan.closed_form(Rank(32)).expect("a closed form");
    bencher.counter(ItemsCount::new(order.len())).bench(|| {
        let mut rounds = 0;
        order.for_each_run(|run| rounds += run.rounds);
        rounds
    });
}

/// Held ops of one rank, as the passes read them.
#[divan::bench]
fn rank_ops(bencher: Bencher<'_, '_>) {
    let plan = make("interleaved_1f1b", 64, Some(8), 4096);
    let len = plan.len(Rank(32));
    bencher
        .counter(ItemsCount::new(len))
        .bench(|| plan.rank_ops(Rank(32)));
}

/// Random access, both ways.
#[divan::bench]
fn position_of_op(bencher: Bencher<'_, '_>) {
    let plan = make("interleaved_1f1b", 64, Some(8), 4096);
    let op = plan.op(Rank(32), 12_345).expect("in range");
    bencher.bench(|| plan.position(Rank(32), divan::black_box(op)));
}
