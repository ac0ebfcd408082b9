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

/// Whether stages of at most `cap` suffice.
fn fits(problem: &Problem, cap: u64) -> bool {
    // reached[i]: whether the stages so far can hold i blocks. Not each as many as it can: the
    // next one's rank may have no room for the block that it would have to begin with.
    let mut reached = vec![false; problem.num_blocks() + 1];
    reached[0] = true;
    for stage in 0..problem.num_stages() {
        let most = problem.most(stage);
        let mut next = vec![false; reached.len()];
        // The farthest end grows with the start: what earlier starts reached is not tried again.
        let mut untried = 0;
        for start in (0..reached.len()).filter(|&start| reached[start]) {
            let mut end = untried.max(start + problem.fewest);
            while end <= most && problem.holds(stage, &(start..end), cap) {
                next[end] = true;
                end += 1;
            }
            untried = end;
        }
        reached = next;
    }
    reached[problem.num_blocks()]
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
