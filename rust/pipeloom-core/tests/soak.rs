//! Many small random cases; `docs/log.md` has the last long run.
//!
//! `PIPELOOM_CASES=10000000 cargo test --release -p pipeloom-core --test soak -- --nocapture`

#![allow(clippy::cast_possible_truncation, clippy::print_stdout)]

mod cases;

use cases::Source;

#[test]
fn cases_hold() {
    let number = |name, default| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a whole number"))
    };
    let (first, count) = (number("PIPELOOM_SEED", 0), number("PIPELOOM_CASES", 6000));
    let judges = [cases::checking, cases::lowering, cases::simulating];
    for seed in first..first + count {
        let judged = std::panic::catch_unwind(|| {
            judges[(seed % 3) as usize](&mut Source::of_seed(seed));
        });
        assert!(
            judged.is_ok(),
            "replay with PIPELOOM_SEED={seed} PIPELOOM_CASES=1"
        );
    }
    println!("{count} cases from seed {first} hold");
}
