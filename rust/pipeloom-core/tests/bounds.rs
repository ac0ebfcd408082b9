//! Lower bounds against what they bound: the plan itself, and other orders of the same ops. And
//! what costs more takes no less.

use std::sync::Arc;

use pipeloom_core::cost::{Costs, Links, Number, Values};
use pipeloom_core::lower;
use pipeloom_core::plan::Plan;
use pipeloom_core::schedules::{self, FAMILIES, Request};
use pipeloom_core::semantics::Style;
use pipeloom_core::simulate::{Timeline, simulate};
use proptest::prelude::*;

/// Numbers for the costs of any plan with at most this many stages or ranks.
const MOST: usize = 40;

/// Costs before a plan is known: lists are cut to its stages and ranks.
#[derive(Clone, Debug)]
struct Drawn {
    /// Of F, I, W, B, a pair, a recompute: one each stage.
    times: Vec<Vec<i64>>,
    /// Whether B, a pair and a recompute have times of their own.
    own: [bool; 3],
    /// Of a transfer, by source and destination.
    latency: Vec<Vec<i64>>,
    /// What F adds, what I adds, what a recomputed F adds: one each stage.
    memory: Vec<Vec<i64>>,
    /// Of parameters: one each rank.
    fixed: Vec<i64>,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let row = |low: i64, high: i64| prop::collection::vec(low..=high, MOST);
    let times = prop::collection::vec(prop_oneof![row(0, 6), row(1, 1), row(3, 3)], 6);
    let latency = prop::collection::vec(prop_oneof![row(0, 0), row(1, 1), row(0, 5)], MOST);
    // Also memory that grows at I, and that is given back early.
    let memory = (row(0, 5), row(-3, 3), row(0, 2));
    let memory = memory.prop_map(|(f, i, again)| vec![f, i, again]);
    (times, any::<[bool; 3]>(), latency, memory, row(0, 9)).prop_map(
        |(times, own, latency, memory, fixed)| Drawn {
            times,
            own,
            latency,
            memory,
            fixed,
        },
    )
}

fn each(numbers: &[i64], len: usize) -> Values {
    Values::Each(numbers[..len].iter().map(|&n| Number::Int(n)).collect())
}

impl Drawn {
    fn costs(&self, plan: &Plan) -> Costs {
        let (stages, ranks) = (plan.shape().num_stages(), plan.shape().pp());
        let (stages, ranks) = (stages as usize, ranks as usize);
        let time = |at: usize| each(&self.times[at], stages);
        let own = |at: usize| self.own[at].then(|| time(3 + at));
        let latency: Vec<Arc<[Number]>> = self.latency[..ranks]
            .iter()
            .map(|row| row[..ranks].iter().map(|&n| Number::Int(n)).collect())
            .collect();
        // A microbatch leaves nothing behind.
        let freed = self.memory[0].iter().zip(&self.memory[1]);
        let freed: Vec<i64> = freed.map(|(forward, input)| -forward - input).collect();
        Costs {
            forward: time(0),
            backward_input: time(1),
            backward_weight: time(2),
            backward: own(0),
            overlapped: own(1),
            recompute: own(2),
            latency: Links::Each(latency.into()),
            memory_forward: each(&self.memory[0], stages),
            memory_backward_input: each(&self.memory[1], stages),
            memory_backward_weight: each(&freed, stages),
            memory_recompute: each(&self.memory[2], stages),
            static_memory: each(&self.fixed, ranks),
            ..Costs::default()
        }
    }
}

fn plan() -> impl Strategy<Value = Plan> {
    let request = (
        0..FAMILIES.len(),
        1_u32..=5,
        prop::option::of(1_u32..=3),
        1_u32..=9,
        prop::option::of(0_u32..=3),
        any::<bool>(),
        1_u32..=2,
    );
    request.prop_filter_map("no such plan", |(family, pp, vp, m, kept, only, pieces)| {
        let mut request = Request::new(FAMILIES[family].name, pp, vp, m);
        let plain = schedules::plan(&request);
        request.partial_checkpoints = kept;
        request.forward_only = only && m % 3 == 0;
        request.num_seq_pieces = pieces;
        schedules::plan(&request).or(plain).ok()
    })
}

fn timed(plan: &Plan, costs: &Costs) -> Timeline {
    let promised = plan.promises();
    simulate(plan, costs, promised[0], false).expect("it progresses")
}

/// Plans that run the same ops in different orders, for [`same_ops`] to say which do.
fn orders(pp: u32, m: u32) -> Vec<Vec<Plan>> {
    let groups: [&[(&str, Option<u32>)]; 5] = [
        &[("gpipe", None), ("1f1b", None), ("eager_1f1b", None)],
        &[("zb_h1", None), ("zb_h2", None)],
        &[("interleaved_1f1b", Some(2)), ("looped_bfs", Some(2))],
        &[("zb_v", None), ("v_half", None), ("v_min", None)],
        &[("v_1f1b", None), ("hanayo", Some(2))],
    ];
    let plan =
        |&(name, vp): &(&str, Option<u32>)| schedules::plan(&Request::new(name, pp, vp, m)).ok();
    groups
        .iter()
        .map(|group| group.iter().filter_map(plan).collect())
        .collect()
}

/// Whether two plans have one shape and run the same ops on each rank.
fn same_ops(one: &Plan, other: &Plan) -> bool {
    let sorted = |plan: &Plan, rank| {
        let mut ops: Vec<String> = plan
            .rank_ops(rank)
            .ops
            .iter()
            .map(ToString::to_string)
            .collect();
        ops.sort_unstable();
        ops
    };
    let mut ranks = one.shape().ranks();
    one.shape() == other.shape() && ranks.all(|rank| sorted(one, rank) == sorted(other, rank))
}

proptest! {
    /// Under whichever semantics, and each bound by itself, not only the one that binds.
    #[test]
    fn no_bound_is_above_the_makespan(plan in plan(), drawn in drawn(), style in 0_usize..5, contention: bool) {
        let costs = drawn.costs(&plan);
        let plan = match Style::ALL.get(style) {
            Some(&style) => lower::lower(&plan, style, 1).expect("it progresses"),
            None => plan,
        };
        for &semantics in plan.promises() {
            let timeline = simulate(&plan, &costs, semantics, contention).expect("it progresses");
            for bound in timeline.bounds().all {
                let makespan = timeline.makespan();
                prop_assert!(bound.ticks <= makespan, "{bound:?} of {makespan}: {}", plan.describe());
            }
        }
    }

    /// A bound speaks of every order that needs no more memory, not only of the plan's own.
    #[test]
    fn no_bound_is_above_what_another_order_takes(pp in 1_u32..=5, m in 1_u32..=9, drawn in drawn()) {
        for group in orders(pp, m) {
            let timed: Vec<Timeline> = group.iter().map(|plan| timed(plan, &drawn.costs(plan))).collect();
            for (one, other) in timed.iter().flat_map(|one| timed.iter().map(move |other| (one, other))) {
                let mut peaks = one.peak_memory().iter().zip(other.peak_memory());
                if same_ops(one.plan(), other.plan()) && peaks.all(|(room, needed)| needed <= room) {
                    for bound in one.bounds().all {
                        let (fast, name) = (other.makespan(), other.plan().describe());
                        prop_assert!(bound.ticks <= fast, "{bound:?}, but {name} takes {fast}");
                    }
                }
            }
        }
    }

    /// One op or transfer that takes longer never makes a step shorter, under any semantics.
    #[test]
    fn time_is_monotone_in_costs(
        plan in plan(), drawn in drawn(), style in 0_usize..5, kind in 0_usize..7, at in 0_usize..MOST, more in 1_i64..9,
    ) {
        let plan = match Style::ALL.get(style) {
            Some(&style) => lower::lower(&plan, style, 1).expect("it progresses"),
            None => plan,
        };
        let mut dearer = drawn.clone();
        match dearer.times.get_mut(kind) {
            Some(row) => row[at] += more,
            None => dearer.latency[at].iter_mut().for_each(|time| *time += more),
        }
        let (costs, dearer) = (drawn.costs(&plan), dearer.costs(&plan));
        for &semantics in plan.promises() {
            let before = simulate(&plan, &costs, semantics, false).expect("it progresses");
            let after = simulate(&plan, &dearer, semantics, false).expect("it progresses");
            prop_assert!(before.makespan() <= after.makespan());
            for rank in plan.shape().ranks() {
                let ends = before.end(rank).unwrap().into_iter().zip(after.end(rank).unwrap());
                prop_assert!(ends.clone().all(|(early, late)| early <= late), "{:?}", ends);
            }
        }
    }
}
