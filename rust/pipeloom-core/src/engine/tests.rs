//! The machine against the slow one, on random plans.

use proptest::prelude::*;

use super::naive;
use super::samples::{self, Rng};
use super::{Engine, Program};
use crate::check::implied;
use crate::cost::Ticks;
use crate::plan::Plan;
use crate::semantics::Semantics;

fn agree(plan: &Plan, ticks: &Ticks, semantics: Semantics) {
    let program = Program::new(plan);
    let engine = Engine::timed(&program, semantics, ticks, false);
    let slow = naive::run(plan, ticks, semantics);
    let buffered = semantics == Semantics::Buffered;
    let counts =
        |rank: usize, at: usize| !buffered || program.ranks[rank].ops[at].kind.is_compute();
    let ran = slow.iter().enumerate().all(|(rank, times)| {
        times
            .iter()
            .enumerate()
            .all(|(at, time)| !counts(rank, at) || time.is_some())
    });
    assert_eq!(engine.finished(), ran, "{semantics}");
    for (rank, times) in slow.iter().enumerate().filter(|_| ran) {
        for (at, time) in times.iter().enumerate().filter(|&(at, _)| counts(rank, at)) {
            let ours = (engine.times.start(rank, at), engine.times.end(rank, at));
            let op = program.ranks[rank].ops[at];
            assert_eq!(
                Some(ours),
                *time,
                "{semantics} rank {rank} position {at} {op}"
            );
        }
    }
}

proptest! {
    #[test]
    fn runs_like_the_slow_machine(seed: u64) {
        let mut rng = Rng(seed);
        let plan = samples::plan(&mut rng);
        let ticks = samples::costs(&mut rng, plan.shape()).ticks(plan.shape()).unwrap();
        agree(&plan, &ticks, Semantics::Buffered);
        let plan = samples::lowered(&mut rng);
        let ticks = samples::costs(&mut rng, plan.shape()).ticks(plan.shape()).unwrap();
        for semantics in Semantics::ALL {
            agree(&plan, &ticks, semantics);
        }
    }

    #[test]
    fn stricter_semantics_imply_kinder_ones(seed: u64) {
        let plan = samples::lowered(&mut Rng(seed));
        let rules = crate::check::check(&plan, Some(&[]));
        prop_assume!(rules.ok());
        let program = Program::new(&plan);
        let progresses = Semantics::ALL.map(|s| Engine::progress(&program, s).finished());
        for semantics in Semantics::ALL {
            for &kinder in implied(semantics) {
                prop_assert!(!progresses[semantics as usize] || progresses[kinder as usize]);
            }
        }
    }
}
