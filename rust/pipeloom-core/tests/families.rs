//! Families at every small shape: each op exactly once, nothing before what it needs, progress
//! with sends that never wait; the group sizes refused are those that deadlock.

use pipeloom_core::ids::{Chunk, Rank, Stage, Unit};
use pipeloom_core::op::{Op, OpKind};
use pipeloom_core::order::Table;
use pipeloom_core::plan::Plan;
use pipeloom_core::schedules::{self, FAMILIES, Request};
use pipeloom_core::shape::{Placement, Shape};

/// Which ops have run.
struct Done<'a> {
    shape: &'a Shape,
    ops: Vec<bool>,
}

impl<'a> Done<'a> {
    fn new(shape: &'a Shape) -> Self {
        let cells = shape.num_stages() * shape.num_units() * 3;
        Self {
            shape,
            ops: vec![false; cells as usize],
        }
    }

    /// F, input gradient and weight gradient of a stage and unit.
    fn at(&self, stage: Stage, unit: Unit, part: u32) -> usize {
        ((stage.0 * self.shape.num_units() + unit.0) * 3 + part) as usize
    }

    fn can_run(&self, op: Op) -> bool {
        let done = |stage: Option<Stage>, part| {
            stage.is_none_or(|stage| self.ops[self.at(stage, op.unit, part)])
        };
        match op.kind {
            OpKind::Forward => done(self.shape.previous(op.stage), 0),
            OpKind::BackwardWeight => done(Some(op.stage), 1),
            _ => done(Some(op.stage), 0) && done(self.shape.next(op.stage), 1),
        }
    }

    fn run(&mut self, op: Op) {
        let parts: &[u32] = match op.kind {
            OpKind::Forward => &[0],
            OpKind::Backward => &[1, 2],
            OpKind::BackwardInput => &[1],
            _ => &[2],
        };
        for &part in parts {
            let at = self.at(op.stage, op.unit, part);
            assert!(!self.ops[at], "{op} runs twice");
            self.ops[at] = true;
        }
    }
}

/// Runs the orders; false if all ranks come to wait.
fn progresses(shape: &Shape, orders: &[Vec<Op>]) -> bool {
    let mut done = Done::new(shape);
    let mut next = vec![0; orders.len()];
    loop {
        let mut moved = false;
        for (order, next) in orders.iter().zip(&mut next) {
            while let Some(&op) = order.get(*next).filter(|&&op| done.can_run(op)) {
                done.run(op);
                *next += 1;
                moved = true;
            }
        }
        if !moved {
            return orders
                .iter()
                .zip(next)
                .all(|(order, next)| order.len() == next);
        }
    }
}

fn check(plan: &Plan) {
    let shape = plan.shape();
    let orders: Vec<Vec<Op>> = shape.ranks().map(|rank| plan.rank_ops(rank).ops).collect();
    for (rank, order) in shape.ranks().zip(&orders) {
        assert!(order.iter().all(|op| shape.rank_of(op.stage) == rank));
    }
    assert!(progresses(shape, &orders), "{} deadlocks", plan.describe());
    // Nothing runs twice (`Done::run`), so counting shows that all has run.
    let weight = |op: &Op| if op.kind == OpKind::Backward { 2 } else { 1 };
    let parts: u32 = orders.iter().flatten().map(weight).sum();
    let a_unit = if plan.forward_only() { 1 } else { 3 };
    let stages = shape.stages_per_replica();
    let ops: usize = orders.iter().map(Vec::len).sum();
    assert_eq!(plan.total_len(), ops as u64, "{}", plan.describe());
    assert_eq!(
        parts,
        stages * shape.num_units() * a_unit,
        "{}",
        plan.describe()
    );
}

#[test]
fn every_small_plan_is_whole_and_progresses() {
    let mut planned = vec![0; FAMILIES.len()];
    for (family, planned) in FAMILIES.iter().zip(&mut planned) {
        for pp in 1..=6 {
            for vp in 1..=4 {
                for m in 1..=13 {
                    let request = Request::new(family.name, pp, Some(vp), m);
                    if let Ok(plan) = schedules::plan(&request) {
                        check(&plan);
                        *planned += 1;
                    }
                }
            }
        }
    }
    assert!(planned.iter().all(|&planned| planned > 0), "{planned:?}");
}

#[test]
#[ignore = "run by make test-deep: ten seconds"]
fn every_plan_of_the_grid_is_whole_and_progresses() {
    for family in FAMILIES {
        for (pp, vp) in (1..=16).flat_map(|pp| (1..=6).map(move |vp| (pp, vp))) {
            for m in 1..=64 {
                if let Ok(plan) = schedules::plan(&Request::new(family.name, pp, Some(vp), m)) {
                    check(&plan);
                }
            }
        }
    }
}

#[test]
fn middle_sizes_progress() {
    for (name, vp) in [
        ("v_half", 2),
        ("v_min", 2),
        ("v_1f1b", 2),
        ("chimera", 1),
        ("hanayo", 2),
        ("hanayo", 6),
        ("group_interleaved", 3),
    ] {
        for pp in [7, 8, 12, 16] {
            for m in [1, 6, pp, 2 * pp - 1, 3 * pp + 2] {
                match schedules::plan(&Request::new(name, pp, Some(vp), m)) {
                    Ok(plan) => check(&plan),
                    Err(refusal) => {
                        assert!(
                            name == "chimera" && (pp % 2 == 1 || m % 2 == 1),
                            "{refusal}"
                        );
                    }
                }
            }
        }
    }
}

/// The order of `group_interleaved` by its definition, for any group size.
fn grouped(shape: &Shape, group: u32) -> Vec<Vec<Op>> {
    let (pp, vp) = (shape.pp(), shape.vp());
    let table = Table::forward(shape.num_units(), vp, group);
    let steps = shape.num_units() * vp;
    let op = |rank: Rank, kind, k: u32, chunk: fn(u32, u32) -> u32| {
        let cursor = pipeloom_core::order::Sequence::Table(table).at(k);
        let chunk = Chunk(chunk(cursor.chunk.0, shape.vp()));
        Op::new(
            shape.stage_at(rank, chunk).expect("in range"),
            kind,
            cursor.unit,
        )
    };
    let order = |rank: Rank| {
        let warmup = (pp - 1 - rank.0 + (vp - 1) * group).min(steps);
        let forward = |k| op(rank, OpKind::Forward, k, |chunk, _| chunk);
        let mut order: Vec<Op> = (0..warmup).map(forward).collect();
        for k in 0..steps {
            order.extend((k + warmup < steps).then(|| forward(k + warmup)));
            for kind in [OpKind::BackwardInput, OpKind::BackwardWeight] {
                order.push(op(rank, kind, k, |chunk, vp| vp - 1 - chunk));
            }
        }
        order
    };
    shape.ranks().map(order).collect()
}

#[test]
fn groups_are_refused_iff_they_deadlock() {
    for pp in 1..=8 {
        for vp in 1..=4 {
            for m in 1..=12 {
                let shape = Shape::new(pp, vp, m, 1, Placement::Loop).expect("small");
                for group in 1..=m {
                    let request = Request {
                        microbatch_group_size: Some(group),
                        ..Request::new("group_interleaved", pp, Some(vp), m)
                    };
                    let plan = schedules::plan(&request);
                    let orders = grouped(&shape, group);
                    assert_eq!(plan.is_ok(), progresses(&shape, &orders), "{request:?}");
                    if let Ok(plan) = plan {
                        let ops = |rank| plan.rank_ops(rank).ops;
                        assert_eq!(shape.ranks().map(ops).collect::<Vec<_>>(), orders);
                    }
                }
            }
        }
    }
}

#[test]
fn the_least_legal_number_is_the_first_that_plans() {
    for family in FAMILIES {
        for (pp, group) in [(1, None), (4, None), (5, None), (6, Some(3)), (6, Some(7))] {
            for m in 1..=9 {
                let takes = family.arguments.contains(&schedules::Argument::GroupSize);
                let request = Request {
                    microbatch_group_size: group.filter(|_| takes),
                    ..Request::new(family.name, pp, None, m)
                };
                let works = |&m: &u32| {
                    let at = Request {
                        num_microbatches: m,
                        ..request.clone()
                    };
                    schedules::plan(&at).is_ok()
                };
                let first = (m..m + 60).find(works);
                assert_eq!(schedules::legal_num_microbatches(&request).ok(), first);
            }
        }
    }
}
