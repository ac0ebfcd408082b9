//! Times of checking and simulating 3.1 M ops (interleaved pp 128, vp 4, m 1024, lowered) and
//! their 1.05 M compute ops. `cargo bench --bench simulate`.

use divan::counter::ItemsCount;
use pipeloom_core::cost::Costs;
use pipeloom_core::plan::Plan;
use pipeloom_core::semantics::{Semantics, Style};
use pipeloom_core::{check, lower, schedules, simulate};

fn main() {
    divan::main();
}

fn compute() -> Plan {
    let request = schedules::Request::new("interleaved_1f1b", 128, Some(4), 1024);
    schedules::plan(&request).expect("a legal configuration")
}

fn lowered(style: Style) -> Plan {
    lower::lower(&compute(), style, 1).expect("it progresses")
}

#[divan::bench(sample_count = 10)]
fn simulate_buffered(bencher: divan::Bencher<'_, '_>) {
    let plan = compute();
    bencher
        .counter(ItemsCount::new(plan.total_len()))
        .bench_local(|| {
            let costs = Costs::default();
            let timeline = simulate::simulate(&plan, &costs, Semantics::Buffered, false);
            timeline.expect("it runs").makespan()
        });
}

#[divan::bench(args = Semantics::ALL, sample_count = 10)]
fn simulate_fifo(bencher: divan::Bencher<'_, '_>, semantics: Semantics) {
    let plan = lowered(Style::Fifo);
    bencher
        .counter(ItemsCount::new(plan.total_len()))
        .bench_local(|| {
            let timeline = simulate::simulate(&plan, &Costs::default(), semantics, false);
            timeline.expect("it runs").makespan()
        });
}

#[divan::bench(args = Style::ALL, sample_count = 10)]
fn check_all_semantics(bencher: divan::Bencher<'_, '_>, style: Style) {
    let plan = lowered(style);
    bencher
        .counter(ItemsCount::new(plan.total_len()))
        .bench_local(|| {
            let report = check::check(&plan, Some(&Semantics::ALL));
            assert!(report.ok());
            report
        });
}

#[divan::bench(sample_count = 10)]
fn check_compute_order(bencher: divan::Bencher<'_, '_>) {
    let plan = compute();
    bencher
        .counter(ItemsCount::new(plan.total_len()))
        .bench_local(|| check::check(&plan, None));
}
