//! Splits where ranks hold several stages, which they run one after the other: the busiest rank is
//! made as idle as can be, then the slowest stage as fast.
//!
//! No fast exact way is known. From the best split by stages layers are moved as long as that
//! helps; then a search with a limited number of steps looks for a less busy busiest rank. If it
//! comes to its end, or the busiest rank is as idle as the sum of all costs allows, that is proved
//! to be the best.

use std::collections::BTreeSet;

use super::problem::Problem;

/// Steps after which the search gives up.
const MAX_STEPS: usize = 1 << 17;
/// Stages that the moves look at, one way or the other, before they give up.
const MAX_LOOKS: usize = 1 << 25;

/// A split and whether no other has a less busy busiest rank.
pub(super) struct Found {
    pub(super) cuts: Vec<usize>,
    pub(super) proved: bool,
}

/// What is made small, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    /// Memory above the limits.
    over: u64,
    busiest: u64,
    slowest: u64,
    rank_squares: u128,
    stage_squares: u128,
}

fn score(problem: &Problem, cuts: &[usize]) -> Score {
    let pp = problem.limits.len();
    let (mut loads, mut memory) = (vec![0_u64; pp], vec![0_u64; pp]);
    let (mut slowest, mut stage_squares) = (0, 0);
    let square = |cost: u64| u128::from(cost) * u128::from(cost);
    for (stage, cut) in cuts.windows(2).enumerate() {
        let blocks = cut[0]..cut[1];
        let (cost, held) = (problem.cost(stage, &blocks), problem.memory(stage, &blocks));
        slowest = cost.max(slowest);
        stage_squares += square(cost);
        for &rank in &problem.owners[stage] {
            loads[rank] += cost;
            memory[rank] += held;
        }
    }
    let over = memory.iter().zip(&problem.limits);
    Score {
        over: over.map(|(held, limit)| held.saturating_sub(*limit)).sum(),
        busiest: loads.iter().copied().max().unwrap_or(0),
        slowest,
        rank_squares: loads.iter().copied().map(square).sum(),
        stage_squares,
    }
}

/// The least that the busiest rank can have: an equal share of all, in whole units.
pub(super) fn least(problem: &Problem) -> u64 {
    let copies: u64 = problem
        .owners
        .first()
        .map_or(1, |owners| owners.len() as u64);
    let share = (problem.total() * copies).div_ceil(problem.limits.len() as u64);
    share.next_multiple_of(problem.unit())
}

/// The best split that is found from `start` on; none: none fits the memory, or none was found.
pub(super) fn improve(problem: &Problem, start: Vec<usize>) -> Result<Found, bool> {
    let mut cuts = descend(problem, start);
    let least = least(problem);
    loop {
        let now = score(problem, &cuts);
        if now.over == 0 && now.busiest <= least {
            return Ok(Found { cuts, proved: true });
        }
        let cap = if now.over > 0 {
            u64::MAX
        } else {
            now.busiest - 1
        };
        let mut search = Search::new(problem, cap);
        let found = search.from(0, 0);
        if found {
            cuts = descend(problem, search.cuts);
        } else {
            let proved = search.steps < MAX_STEPS;
            return if now.over > 0 {
                Err(proved)
            } else {
                Ok(Found { cuts, proved })
            };
        }
    }
}

/// Moves one block from one stage to another, and those between along, as long as that helps.
fn descend(problem: &Problem, mut cuts: Vec<usize>) -> Vec<usize> {
    let stages = problem.num_stages();
    let mut best = score(problem, &cuts);
    let mut looks = 0;
    loop {
        let mut better = None;
        for (from, to) in (1..stages).flat_map(|from| (from..stages).map(move |to| (from, to))) {
            for up in [false, true] {
                looks += stages;
                let mut moved = cuts.clone();
                for cut in &mut moved[from..=to] {
                    *cut = if up { *cut + 1 } else { cut.wrapping_sub(1) };
                }
                if !allowed(problem, &moved) {
                    continue;
                }
                let score = score(problem, &moved);
                if score < best {
                    best = score;
                    better = Some(moved);
                }
            }
            if looks > MAX_LOOKS {
                return better.unwrap_or(cuts);
            }
        }
        match better {
            Some(moved) => cuts = moved,
            None => return cuts,
        }
    }
}

fn allowed(problem: &Problem, cuts: &[usize]) -> bool {
    let stages = cuts.windows(2).enumerate();
    stages.into_iter().all(|(stage, cut)| {
        cut[0].saturating_add(problem.fewest) <= cut[1] && cut[1] <= problem.most(stage)
    })
}

/// A search for a split whose ranks all have at most `cap`.
struct Search<'a> {
    problem: &'a Problem,
    cap: u64,
    /// Last stage of each rank.
    last: Vec<usize>,
    loads: Vec<u64>,
    memory: Vec<u64>,
    cuts: Vec<usize>,
    /// (stage, start, loads, memory) from which there is no way on.
    dead: BTreeSet<(usize, usize, Vec<u64>, Vec<u64>)>,
    steps: usize,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, cap: u64) -> Self {
        let pp = problem.limits.len();
        let mut last = vec![0; pp];
        for (stage, owners) in problem.owners.iter().enumerate() {
            for &rank in owners {
                last[rank] = stage;
            }
        }
        Self {
            problem,
            cap,
            last,
            loads: vec![0; pp],
            memory: vec![0; pp],
            cuts: vec![0],
            dead: BTreeSet::new(),
            steps: 0,
        }
    }

    /// Whether stages `stage..` can hold the blocks from `start` on.
    fn from(&mut self, stage: usize, start: usize) -> bool {
        let problem = self.problem;
        if stage == problem.num_stages() {
            return start == problem.num_blocks();
        }
        self.steps += 1;
        if self.steps >= MAX_STEPS || self.wasted(stage) {
            return false;
        }
        let state = (stage, start, self.loads.clone(), self.memory.clone());
        if self.dead.contains(&state) {
            return false;
        }
        let last = stage + 1 == problem.num_stages();
        let lowest = if last {
            problem.num_blocks()
        } else {
            start + problem.fewest
        };
        // An average stage first.
        let average = problem.total() / problem.num_stages() as u64;
        let mut ends: Vec<usize> = (lowest..=problem.most(stage)).collect();
        ends.sort_by_key(|&end| problem.cost(stage, &(start..end)).abs_diff(average));
        for end in ends {
            if self.put(stage, start..end) {
                self.cuts.push(end);
                if self.from(stage + 1, end) {
                    return true;
                }
                self.cuts.pop();
            }
            self.loads.clone_from(&state.2);
            self.memory.clone_from(&state.3);
        }
        self.dead.insert(state);
        false
    }

    fn put(&mut self, stage: usize, blocks: std::ops::Range<usize>) -> bool {
        let problem = self.problem;
        let (cost, held) = (problem.cost(stage, &blocks), problem.memory(stage, &blocks));
        problem.owners[stage].iter().all(|&rank| {
            self.loads[rank] += cost;
            self.memory[rank] += held;
            self.loads[rank] <= self.cap && self.memory[rank] <= problem.limits[rank]
        })
    }

    /// Whether the ranks that have all their stages left too much room to the others.
    fn wasted(&self, stage: usize) -> bool {
        if self.cap == u64::MAX {
            return false;
        }
        let copies: u64 = self
            .problem
            .owners
            .first()
            .map_or(1, |owners| owners.len() as u64);
        let left = self.problem.total() * copies - self.loads.iter().sum::<u64>();
        let open = self
            .loads
            .iter()
            .zip(&self.last)
            .filter(|(_, last)| **last >= stage);
        open.map(|(load, _)| self.cap - load).sum::<u64>() < left
    }
}
