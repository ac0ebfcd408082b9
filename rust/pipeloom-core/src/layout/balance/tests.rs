use proptest::prelude::*;

use super::*;

fn balanced(weights: &Weights, stages: u32) -> Result<Layout> {
    Layout::balanced(weights, stages, 1, Placement::Loop)
}

fn counts(layout: &Layout) -> Vec<u32> {
    layout.stages().iter().map(|s| s.num_layers).collect()
}

fn fault(weights: &Weights, stages: u32) -> String {
    match balanced(weights, stages) {
        Err(error) => error.to_string(),
        Ok(layout) => panic!("{layout} was accepted"),
    }
}

#[test]
fn layers_that_must_not_be_parted_are_not() -> Result<()> {
    let weights = Weights {
        layers: vec![1.0; 6],
        no_cut_after: vec![3, 4],
        ..Weights::default()
    };
    assert_eq!(counts(&balanced(&weights, 2)?), [2, 4]);
    assert_eq!(counts(&balanced(&weights, 4)?), [1, 1, 3, 1]);
    let beyond = Weights {
        no_cut_after: vec![6],
        ..weights
    };
    assert!(fault(&beyond, 2).contains("no_cut_after has layer 6"));
    Ok(())
}

#[test]
fn costs_of_any_size_are_balanced() -> Result<()> {
    for unit in [f64::MAX, 5e-324, 1.0, 0.1, 0.0] {
        let weights = Weights {
            layers: vec![unit; 4],
            ..Weights::default()
        };
        assert_eq!(counts(&balanced(&weights, 2)?), [2, 2], "{unit:e}");
    }
    for bad in [-1.0, f64::NAN, f64::INFINITY] {
        let weights = Weights {
            layers: vec![1.0],
            loss: bad,
            ..Weights::default()
        };
        assert!(fault(&weights, 1).contains("finite"));
    }
    Ok(())
}

/// All ways to share `layers` layers among `stages` stages.
fn splits(layers: u32, stages: usize) -> Vec<Vec<u32>> {
    if stages == 1 {
        return vec![vec![layers]];
    }
    (0..=layers)
        .flat_map(|first| {
            splits(layers - first, stages - 1)
                .into_iter()
                .map(move |mut rest| {
                    rest.insert(0, first);
                    rest
                })
        })
        .collect()
}

/// The heaviest stage, then the sum of squares.
fn burden(counts: &[u32], costs: &[u32], embedding: u32, loss: u32) -> (u32, u32) {
    let mut rest = costs;
    let mut stages: Vec<u32> = Vec::new();
    for &count in counts {
        let (stage, after) = rest.split_at(count as usize);
        stages.push(stage.iter().sum());
        rest = after;
    }
    stages[0] += embedding;
    stages[counts.len() - 1] += loss;
    let heaviest = stages.iter().copied().max().unwrap_or(0);
    (heaviest, stages.iter().map(|cost| cost * cost).sum())
}

proptest! {
    #[test]
    fn no_split_is_more_balanced(
        costs in proptest::collection::vec(0_u32..9, 1..8),
        stages in 1_u32..5, embedding in 0_u32..12, loss in 0_u32..12,
    ) {
        let weights = Weights {
            layers: costs.iter().copied().map(f64::from).collect(),
            embedding: f64::from(embedding),
            loss: f64::from(loss),
            no_cut_after: Vec::new(),
        };
        let ours = counts(&balanced(&weights, stages).expect("in range"));
        let enough = costs.len() >= stages as usize;
        let best = splits(size(costs.len()), stages as usize)
            .into_iter()
            .filter(|counts| !enough || counts.iter().all(|&count| count > 0))
            .map(|counts| burden(&counts, &costs, embedding, loss))
            .min();
        prop_assert_eq!(Some(burden(&ours, &costs, embedding, loss)), best, "{:?}", ours);
    }

    #[test]
    fn balanced_is_even_for_equal_layers(layers in 1_usize..40, pp in 1_u32..7, vp in 1_u32..4) {
        let weights = Weights { layers: vec![0.3; layers], ..Weights::default() };
        let ours = Layout::balanced(&weights, pp, vp, Placement::V);
        prop_assert_eq!(ours, Layout::even(size(layers), pp, vp, Placement::V));
    }
}
