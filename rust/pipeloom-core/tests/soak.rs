//! Many small random cases; `docs/log.md` has the last long run.
//!
//! `PIPELOOM_CASES=10000000 cargo test --release -p pipeloom-core --test soak -- --nocapture`

#![allow(clippy::cast_possible_truncation, clippy::print_stdout)]

mod cases;

use cases::{Outcome, Source};

#[test]
fn cases_hold() {
    let number = |name, default| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a whole number"))
    };
    let (first, count) = (number("PIPELOOM_SEED", 0), number("PIPELOOM_CASES", 6000));
    let judges = [cases::checking, cases::lowering, cases::simulating];
    let mut counts = [[0_u64; 3]; 3];
    for seed in first..first + count {
        let judged =
            std::panic::catch_unwind(|| judges[(seed % 3) as usize](&mut Source::of_seed(seed)));
        let Ok(outcome) = judged else {
            panic!("replay with PIPELOOM_SEED={seed} PIPELOOM_CASES=1");
        };
        counts[(seed % 3) as usize][outcome as usize] += 1;
    }
    println!("{count} cases from seed {first} hold");
    for (name, counts) in ["checking", "lowering", "simulating"].iter().zip(counts) {
        let of = |outcome: Outcome| counts[outcome as usize];
        println!(
            "{name}: {} without a plan, {} mutated texts refused, {} right and run",
            of(Outcome::NoPlan),
            of(Outcome::Refused),
            of(Outcome::Held)
        );
        // A run whose generator gives hardly any plans proves nothing.
        let enough = of(Outcome::NoPlan) < count / 30 && of(Outcome::Held) > count / 60;
        assert!(count < 600 || enough, "{counts:?}");
    }
}
