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
        together: Together {
            no_cut_after: vec![3],
            shared: vec![(5, 4)],
        },
        ..Weights::default()
    };
    assert_eq!(counts(&balanced(&weights, 2)?), [2, 4]);
    assert_eq!(counts(&balanced(&weights, 4)?), [1, 1, 3, 1]);
    let beyond = Weights {
        together: Together {
            no_cut_after: vec![6],
            shared: Vec::new(),
        },
        ..weights
    };
    assert!(fault(&beyond, 2).contains("no_cut_after has layer 6"));
    Ok(())
}

#[test]
fn layers_kept_together_leave_no_stage_empty_unasked() -> Result<()> {
    let mut weights = Weights {
        layers: vec![1.0; 6],
        together: Together {
            no_cut_after: Vec::new(),
            shared: vec![(4, 1)],
        },
        ..Weights::default()
    };
    assert_eq!(counts(&balanced(&weights, 3)?), [4, 1, 1]);
    let told = "shared_layers leaves 3 blocks of the 6 layers, too few to give each of the 4 \
                stages of pp=4, vp=1 one\nhint: ";
    assert!(
        fault(&weights, 4).starts_with(told),
        "{}",
        fault(&weights, 4)
    );
    weights.together.no_cut_after.push(5);
    let both = "shared_layers and no_cut_after leave 2 blocks";
    assert!(fault(&weights, 3).starts_with(both));
    weights.allow_empty = true;
    assert_eq!(counts(&balanced(&weights, 4)?).iter().sum::<u32>(), 6);
    // Fewer layers than stages leave empty ones whatever is kept together.
    weights.allow_empty = false;
    assert_eq!(counts(&balanced(&weights, 7)?).iter().sum::<u32>(), 6);
    let load = balanced(&weights, 7)?.load(&weights)?;
    assert!(load.stages.iter().all(|cost| cost.is_sign_positive()));
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
            ..Weights::default()
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
    fn a_split_is_refused_if_none_fits_the_memory_of_its_ranks(
        layers in proptest::collection::vec((0_u32..9, 0_u32..6), 1..8),
        limits in proptest::collection::vec(0_u32..14, 1..5),
        embedding in 0_u32..6, loss in 0_u32..6, allow_empty: bool,
    ) {
        let (costs, held): (Vec<u32>, Vec<u32>) = layers.into_iter().unzip();
        let memory = Memory {
            layers: floats(&held),
            embedding: f64::from(embedding),
            loss: f64::from(loss),
            limits: floats(&limits),
            ..Memory::default()
        };
        let weights = Weights {
            layers: floats(&costs),
            allow_empty,
            memory: Some(memory),
            ..Weights::default()
        };
        let ours = balanced(&weights, size(limits.len()));
        let enough = costs.len() >= limits.len() && !allow_empty;
        let shape = frame(size(limits.len()), 1, Placement::Loop).expect("in range");
        let fits = |counts: &Vec<u32>| {
            let held = ranks(&shape, counts, &held, [embedding, loss]);
            held.iter().zip(&limits).all(|(held, limit)| held <= limit)
        };
        let best = splits(size(costs.len()), limits.len())
            .into_iter()
            .filter(|counts| !enough || counts.iter().all(|&count| count > 0))
            .filter(fits)
            .map(|counts| burden(&counts, &costs, 0, 0))
            .min();
        let ours = ours.ok().map(|layout| burden(&counts(&layout), &costs, 0, 0));
        prop_assert_eq!(ours, best);
    }

    #[test]
    fn balanced_is_even_for_equal_layers(layers in 1_usize..40, pp in 1_u32..7, vp in 1_u32..4) {
        let weights = Weights { layers: vec![0.3; layers], ..Weights::default() };
        let ours = Layout::balanced(&weights, pp, vp, Placement::V);
        prop_assert_eq!(ours, Layout::even(size(layers), pp, vp, Placement::V));
    }
}

/// Load and memory of each rank, from the counts of decoder layers of each stage.
fn ranks(shape: &Shape, counts: &[u32], parts: &[u32], ends: [u32; 2]) -> Vec<u32> {
    let mut rest = parts;
    let mut loads = vec![0; shape.pp() as usize];
    let last = counts.len() - 1;
    for (stage, &count) in counts.iter().enumerate() {
        let (mine, after) = rest.split_at(count as usize);
        rest = after;
        let first = if stage == 0 { ends[0] } else { 0 };
        let loss = if stage == last { ends[1] } else { 0 };
        let load = mine.iter().sum::<u32>() + first + loss;
        for copy in (stage..shape.num_stages() as usize).step_by(counts.len()) {
            loads[shape.rank_of(crate::ids::Stage(size(copy))).index()] += load;
        }
    }
    loads
}

fn floats(numbers: &[u32]) -> Vec<f64> {
    numbers.iter().copied().map(f64::from).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// All splits of a few layers, against the search over ranks.
    #[test]
    fn no_split_has_a_less_busy_busiest_rank(
        costs in proptest::collection::vec((0_u32..9, 0_u32..5), 1..8),
        pp in 1_u32..4, vp in 1_u32..4, embedding in 0_u32..9, loss in 0_u32..9,
        placement in 0_usize..3, limit in 4_u32..40, allow_empty: bool,
    ) {
        let placement = [Placement::Loop, Placement::V, Placement::Bidirectional][placement].clone();
        let (costs, memory): (Vec<u32>, Vec<u32>) = costs.into_iter().unzip();
        let weights = Weights {
            layers: floats(&costs),
            embedding: f64::from(embedding),
            loss: f64::from(loss),
            allow_empty,
            memory: Some(Memory {
                layers: floats(&memory),
                embedding: 1.0,
                loss: 2.0,
                mtp: Vec::new(),
                limits: vec![f64::from(limit)],
            }),
            ..Weights::default()
        };
        let Ok(shape) = frame(pp, vp, placement.clone()) else { return Ok(()) };
        let stages = shape.stages_per_replica() as usize;
        let whole = allow_empty || costs.len() < stages;
        let best = splits(size(costs.len()), stages)
            .into_iter()
            .filter(|counts| whole || counts.iter().all(|&count| count > 0))
            .filter(|counts| ranks(&shape, counts, &memory, [1, 2]).iter().all(|&m| m <= limit))
            .map(|counts| ranks(&shape, &counts, &costs, [embedding, loss]).into_iter().max())
            .min();
        match Layout::balanced(&weights, pp, vp, placement) {
            Err(error) => {
                prop_assert_eq!(best, None);
                prop_assert!(error.to_string().contains("there is no split that fits memory_limit"));
            }
            Ok(layout) => {
                let ours = ranks(&shape, &counts(&layout), &costs, [embedding, loss]);
                prop_assert_eq!(Some(ours.iter().copied().max()), best);
                let load = layout.load(&weights).expect("of this layout");
                prop_assert!(load.proved);
                prop_assert_eq!(load.ranks, floats(&ours));
            }
        }
    }

    #[test]
    fn mtp_layers_stand_where_the_rules_let_them(
        pp in 1_u32..6, vp in 1_u32..4, layers in 1_usize..12, mtp in 1_usize..4, v: bool, cost in 0_u32..9,
    ) {
        let placement = if v { Placement::V } else { Placement::Loop };
        let weights = Weights {
            layers: vec![2.0; layers], mtp: vec![f64::from(cost); mtp], loss: 3.0,
            ..Weights::default()
        };
        let layout = Layout::balanced(&weights, pp, vp, placement.clone()).expect("in range");
        prop_assert_eq!(layout.num_mtp_layers() as usize, mtp);
        let expected = crate::layout::rules::Expected::default();
        let again = Layout::from_text(&layout.to_string(), pp, Some(vp), expected, placement);
        prop_assert_eq!(again, Ok(layout));
    }
}

#[test]
fn ranks_of_several_chunks_are_balanced_not_stages() -> Result<()> {
    // By stages alone the first rank gets 3 and 3, the second 2 and 2 and the loss.
    let weights = Weights {
        layers: vec![1.0; 10],
        loss: 2.0,
        ..Weights::default()
    };
    let layout = Layout::balanced(&weights, 2, 2, Placement::Loop)?;
    let load = layout.load(&weights)?;
    assert_eq!(
        (load.ranks.as_slice(), load.best, load.proved),
        (&[6.0, 6.0][..], Some(6.0), true)
    );
    let uneven = Layout::even(10, 2, 2, Placement::Loop)?.load(&weights)?;
    assert_eq!(
        uneven.why,
        "rank 1 is the busiest with 7: layers 4 to 6 (3), layers 9 to 10 (2), loss (2); \
         an equal share of all is 6; Layout.balanced comes to 6"
    );
    Ok(())
}

#[test]
fn memory_moves_layers_away_from_where_they_cost_least() -> Result<()> {
    let memory = Memory {
        layers: vec![1.0; 8],
        embedding: 3.0,
        loss: 3.0,
        limits: vec![4.0],
        ..Memory::default()
    };
    let weights = Weights {
        layers: vec![1.0; 8],
        memory: Some(memory),
        ..Weights::default()
    };
    assert_eq!(counts(&balanced(&weights, 4)?), [1, 3, 3, 1]);
    let error = fault(&weights, 2);
    assert!(
        error.contains("there is no split that fits memory_limit (at most 4 a rank)"),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_rank_leaves_its_neighbour_a_layer_that_fits_there() -> Result<()> {
    // Rank 0 has room for two layers, but rank 1 for the second alone.
    let memory = Memory {
        layers: vec![1.0, 0.0, 1.0, 1.0],
        limits: vec![2.0, 0.0, 2.0],
        ..Memory::default()
    };
    let weights = Weights {
        layers: vec![1.0; 4],
        memory: Some(memory),
        ..Weights::default()
    };
    assert_eq!(counts(&balanced(&weights, 3)?), [1, 1, 2]);
    Ok(())
}

#[test]
fn a_large_search_ends_in_time() -> Result<()> {
    let layers: Vec<f64> = (0..200_u32)
        .map(|layer| f64::from(1000 + layer * 7919 % 701))
        .collect();
    let weights = Weights {
        layers,
        embedding: 3456.0,
        loss: 7891.0,
        ..Weights::default()
    };
    let layout = Layout::balanced(&weights, 16, 4, Placement::V)?;
    let load = layout.load(&weights)?;
    let busiest = load.ranks.iter().copied().fold(0.0, f64::max);
    let share = load.ranks.iter().sum::<f64>() / 16.0;
    assert!(busiest < share * 1.05, "{busiest} against {share}");
    Ok(())
}
