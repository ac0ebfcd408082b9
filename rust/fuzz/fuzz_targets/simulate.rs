//! Bytes choose a case of `simulating` in `cases`, which says what must hold.
//!
//! `RUSTC_BOOTSTRAP=1 cargo fuzz run --fuzz-dir rust/fuzz simulate -- -max_total_time=60`

#![no_main]

#[allow(dead_code, clippy::cast_possible_truncation)]
#[path = "../../pipeloom-core/tests/cases/mod.rs"]
mod cases;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    cases::simulating(&mut cases::Source::of_bytes(bytes));
});
