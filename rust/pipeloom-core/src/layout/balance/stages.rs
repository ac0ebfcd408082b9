//! The best split where each rank holds one stage, exactly; and a good start for the others.

use super::problem::Problem;

/// Where to cut so that the slowest stage is as fast as can be, and of all such splits the sum of
/// squares least; none: no split fits the memory.
pub(super) fn cuts(problem: &Problem) -> Option<Vec<usize>> {
    let (mut low, mut high) = (0, problem.total());
    if !fits(problem, high) {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(problem, middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(most_even(problem, high))
}

/// Whether stages of at most `cap` suffice, each filled as far as it goes: a stage that starts
/// later is never worse off.
fn fits(problem: &Problem, cap: u64) -> bool {
    let mut start = 0;
    for stage in 0..problem.num_stages() {
        let most = problem.most(stage);
        let mut end = start + problem.fewest;
        while end < most && problem.holds(stage, &(start..end + 1), cap) {
            end += 1;
        }
        if end > most.max(start) || !problem.holds(stage, &(start..end), cap) {
            return false;
        }
        start = end;
    }
    start == problem.num_blocks()
}

/// Where to cut, so that no stage costs more than `cap` and the sum of squares is least.
fn most_even(problem: &Problem, cap: u64) -> Vec<usize> {
    let (blocks, fewest) = (problem.num_blocks(), problem.fewest);
    // best[i]: the least sums of squares (of costs, then of lengths, for layers that cost
    // nothing) of the stages so far, if they hold i blocks.
    let mut best: Vec<Option<(u128, u64)>> = vec![None; blocks + 1];
    best[0] = Some((0, 0));
    let mut starts = Vec::with_capacity(problem.num_stages());
    for stage in 0..problem.num_stages() {
        let mut next = vec![None; blocks + 1];
        let mut from = vec![0_usize; blocks + 1];
        for end in fewest..=problem.most(stage) {
            for start in (0..=end - fewest).rev() {
                if !problem.holds(stage, &(start..end), cap) {
                    break;
                }
                let Some(before) = best[start] else { continue };
                let cost = u128::from(problem.cost(stage, &(start..end)));
                let length = (end - start) as u64;
                let squares = (before.0 + cost * cost, before.1 + length * length);
                if next[end].is_none_or(|least| squares < least) {
                    next[end] = Some(squares);
                    from[end] = start;
                }
            }
        }
        best = next;
        starts.push(from);
    }
    let mut cuts = vec![blocks];
    for from in starts.iter().rev() {
        cuts.push(from[cuts[cuts.len() - 1]]);
    }
    cuts.reverse();
    cuts
}
