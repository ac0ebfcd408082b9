//! Times of lowering: interleaved pp 128, vp 4, m 1024 has 1.05 M compute ops and 2.09 M
//! transfers. `cargo bench --bench lower`.

use divan::counter::ItemsCount;
use pipeloom_core::plan::Plan;
use pipeloom_core::semantics::Style;
use pipeloom_core::{lower, schedules};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

fn plan(schedule: &str, pp: u32, vp: u32, m: u32) -> Plan {
    let request = schedules::Request::new(schedule, pp, Some(vp), m);
    schedules::plan(&request).expect("a legal configuration")
}

const STYLES: [Style; 4] = Style::ALL;

#[divan::bench(args = STYLES, sample_count = 15)]
fn interleaved_128x4x1024(bencher: divan::Bencher<'_, '_>, style: Style) {
    let compute = plan("interleaved_1f1b", 128, 4, 1024);
    let lowered = lower::lower(&compute, style, 1).expect("it progresses");
    assert_eq!(lowered.total_len(), 3_141_632);
    bencher
        .counter(ItemsCount::new(lowered.total_len()))
        .bench_local(|| lower::lower(&compute, style, 1));
}

#[divan::bench(sample_count = 15)]
fn materialize_128x4x1024(bencher: divan::Bencher<'_, '_>) {
    let compute = plan("interleaved_1f1b", 128, 4, 1024);
    bencher
        .counter(ItemsCount::new(compute.total_len()))
        .bench_local(|| compute.materialize());
}
