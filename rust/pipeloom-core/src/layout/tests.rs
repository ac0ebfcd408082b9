use std::sync::Arc;

use proptest::prelude::*;

use super::megatron::Megatron;
use super::rules::Expected;
use super::*;

const ANY: Expected = Expected {
    num_layers: None,
    mtp_num_layers: None,
};

fn read(text: &str, pp: u32) -> Result<Layout> {
    Layout::from_text(text, pp, None, ANY, Placement::Loop)
}

/// The decoder layers of each stage, in stage order.
fn layers(layout: &Layout) -> Vec<u32> {
    layout.stages().iter().map(|s| s.num_layers).collect()
}

fn fault(result: Result<Layout>) -> String {
    match result {
        Err(error) => error.to_string(),
        Ok(layout) => panic!("{layout} was accepted"),
    }
}

#[test]
fn eight_layers_on_two_ranks_with_two_chunks() -> Result<()> {
    let layout = Layout::even(8, 2, 2, Placement::Loop)?;
    let at = |r, c| layout.at(Rank(r), Some(Chunk(c)));
    assert_eq!(at(0, 0)?.layers().collect::<Vec<_>>(), [1, 2]);
    assert_eq!(at(0, 1)?.layers().collect::<Vec<_>>(), [5, 6]);
    assert_eq!(at(1, 0)?.layers().collect::<Vec<_>>(), [3, 4]);
    assert_eq!(at(1, 1)?.layers().collect::<Vec<_>>(), [7, 8]);
    assert!(at(0, 0)?.pre_process && !at(0, 1)?.pre_process);
    assert!(at(1, 1)?.post_process && !at(0, 1)?.post_process);
    Ok(())
}

#[test]
fn the_last_stage_of_a_v_is_on_rank_0() -> Result<()> {
    let layout = Layout::even(8, 4, 2, Placement::V)?;
    let rank0 = layout.at(Rank(0), Some(Chunk(1)))?;
    assert!(rank0.post_process);
    assert_eq!(rank0.layers().collect::<Vec<_>>(), [8]);
    Ok(())
}

#[test]
fn a_replica_builds_the_same_layers_in_the_other_direction() -> Result<()> {
    let layout = Layout::even(4, 2, 1, Placement::Bidirectional)?;
    let mirrored = layout.at(Rank(1), Some(Chunk(1)))?;
    assert_eq!(mirrored, layout.at(Rank(0), Some(Chunk(0)))?);
    assert!(layout.at(Rank(0), None).is_err());
    Ok(())
}

#[test]
fn a_table_may_give_ranks_different_numbers_of_chunks() -> Result<()> {
    let places = [(0, 0), (1, 0), (0, 1)].map(|(r, c)| (Rank(r), Chunk(c)));
    let table = Placement::Table(Arc::from(places));
    let layout = Layout::from_counts(&[vec![1, 3], vec![2]], table.clone())?;
    assert_eq!(layers(&layout), [1, 2, 3]);
    assert!(Layout::from_counts(&[vec![1, 3], vec![2, 9]], table.clone()).is_err());
    let split = Megatron {
        vp: Some(2),
        placement: table,
        ..Megatron::new(12, 2)
    };
    assert!(
        split.layout().is_err(),
        "layers for a chunk that is not there"
    );
    Ok(())
}

#[test]
fn megatron_refuses_what_would_lose_layers() {
    assert!(fault(Megatron::new(30, 4).layout()).contains("num_layers=30"));
    let sized = |num_layers, pp, first, last| Megatron {
        num_layers_in_first_pipeline_stage: first,
        num_layers_in_last_pipeline_stage: last,
        ..Megatron::new(num_layers, pp)
    };
    let message = fault(sized(46, 2, Some(11), Some(11)).layout());
    assert!(
        message.contains("24 of num_layers=46 layers unassigned"),
        "{message}"
    );
    assert!(fault(sized(20, 1, None, Some(1)).layout()).contains("19"));
    assert!(sized(3, 1, Some(3), None).layout().is_ok());
    assert!(fault(sized(4, 4, Some(3), Some(2)).layout()).contains("more than num_layers=4"));
}

#[test]
fn megatron_with_both_sizes_on_two_ranks_is_right_where_it_divides_by_zero() -> Result<()> {
    let layout = Megatron {
        vp: Some(2),
        num_layers_in_first_pipeline_stage: Some(2),
        num_layers_in_last_pipeline_stage: Some(4),
        ..Megatron::new(6, 2)
    }
    .layout()?;
    assert_eq!(layers(&layout), [1, 2, 1, 2]);
    Ok(())
}

#[test]
fn texts_give_the_stages_that_they_say() -> Result<()> {
    for (text, pp, expected) in [
        (
            "Et*3|(tt|)*29,m|L",
            16,
            [&[3][..], &[2; 29], &[0, 0]].concat(),
        ),
        ("E(t)*2*3|tL", 2, vec![4, 1]),
        ("E((t|)*2t|)*2L", 7, vec![1, 1, 1, 1, 1, 1, 0]),
        (" E t * 2 |\n ( t t | ) * 2\n L ", 4, vec![2, 2, 2, 0]),
        ("E(t)|(t)L", 2, vec![1, 1]),
        ("E||t|L", 4, vec![0, 0, 1, 0]),
        ("Et|*3tL", 4, vec![1, 0, 0, 1]),
        ("Et*,3L", 1, vec![3]),
        ("Et*0t|tL", 2, vec![1, 1]),
    ] {
        let counts = layers(&read(text, pp)?);
        assert_eq!(counts, expected, "{text}");
    }
    Ok(())
}

#[test]
fn texts_that_lie_are_refused() {
    for (text, pp, part) in [
        ("", 1, "the layout is empty"),
        ("|", 1, "the layout is empty"),
        ("E|L", 2, "0 decoder layers"),
        ("Et|TL", 2, "column 4: `T`"),
        ("tt|ttL", 2, "embedding appears 0 times, expected 1"),
        (
            "E|(t|)*10m|m|m|LL|LL",
            8,
            "loss appears 4 times, expected 1",
        ),
        ("|Et|L", 3, "embedding is in stage 1"),
        ("Et|tL|", 3, "loss is in stage 1"),
        ("tE|L", 2, "a decoder layer stands before the embedding"),
        ("Et|Lt", 2, "a decoder layer stands after the loss"),
        (
            "Et|m|tL",
            3,
            "a decoder layer in stage 2 follows an MTP layer in stage 1",
        ),
        ("Et|t|tL", 2, "3 stages, not a multiple of pp=2"),
        ("EtL", 0, "pp is 0"),
        ("Et|t|tm|L", 2, "rank 0"),
        ("Et|m|m|L", 2, "chunk 0"),
        ("Et*2*3L", 1, "column 5: a second `*`"),
        ("E(*2)tL", 1, "nothing to repeat"),
        ("E(t|2)*2L", 1, "`2` without `*`"),
        ("E(t*L", 1, "`*` without a number"),
        ("E()*3tL", 1, "the parentheses are empty"),
        ("E(tL", 1, "never closed"),
        ("Et)L", 1, "closes nothing"),
        ("Et*99999999999999999999999L", 1, "expands to more than"),
        ("E((((t*999)*999)*999)*999)*999L", 1, "expands to more than"),
        ("Et*1048577L", 1, "more than 1048576"),
        ("Et(|)*1048576L", 1, "1048576 stages"),
    ] {
        let message = fault(read(text, pp));
        assert!(message.contains(part), "{text}: {message}");
        assert!(message.contains("\nhint: "), "{text}: {message}");
    }
    let nothing = read("E(t*0)*99999999999999999999999tL", 1).map(|layout| layers(&layout));
    assert_eq!(nothing, Ok(vec![1]), "nothing repeated is nothing, at once");
    let wasteful = format!("E{}tL", "(t*1000000)*0".repeat(5));
    assert!(fault(read(&wasteful, 1)).contains("expands to more than"));
    let deep = format!("E{}t{}L", "(".repeat(65), ")".repeat(65));
    assert!(fault(read(&deep, 1)).contains("deeper"));
}

#[test]
fn expected_counts_name_both_numbers() {
    let read = |num_layers, mtp_num_layers| {
        let expected = Expected {
            num_layers,
            mtp_num_layers,
        };
        Layout::from_text("Et|tmL", 2, Some(1), expected, Placement::Loop)
    };
    assert!(read(Some(2), Some(1)).is_ok());
    assert!(fault(read(Some(3), None)).contains("has 2 decoder layers, but num_layers=3"));
    assert!(fault(read(None, Some(0))).contains("has 1 MTP layers, but mtp_num_layers=0"));
    let wrong = Layout::from_text("Et|tmL", 2, Some(2), ANY, Placement::Loop);
    assert!(fault(wrong).contains("2 stages, but pp=2 and vp=2 make 4"));
}

#[test]
fn mtp_may_spread_over_ranks() -> Result<()> {
    let layout = read("E|(t|)*11m|m|m|L", 8)?;
    for rank in 4..7 {
        assert_eq!(layout.at(Rank(rank), Some(Chunk(1)))?.num_mtp_layers, 1);
    }
    assert_eq!(layout.embedding_ranks(false), [0, 4, 5, 6].map(Rank));
    assert_eq!(layout.embedding_ranks(true), [0, 4, 5, 6, 7].map(Rank));
    // The last stage of a V is on rank 0: there it must be allowed.
    Layout::from_text("Et|t|t|tmL", 2, None, ANY, Placement::V)?;
    Ok(())
}

#[test]
fn names_read_like_the_language() -> Result<()> {
    let names = |list: &[&[&str]], pp| {
        let list: Vec<Vec<&str>> = list.iter().map(|stage| stage.to_vec()).collect();
        Layout::from_names(&list, pp, None, ANY, Placement::Loop)
    };
    let layout = names(&[&[" Embedding ", "DECODER"], &["decoder", "Loss"]], 2)?;
    assert_eq!(layout, names(&[&["E", "t"], &["t", "L"]], 2)?);
    assert_eq!(layout.to_string(), "Et|tL");
    assert!(fault(names(&[&["embedding"], &["encoder", "loss"]], 2)).contains("names[1][0]"));
    assert!(fault(names(&[&["E", "|", "L"]], 1)).contains("\"|\""));
    Ok(())
}

#[test]
fn a_layout_fits_its_own_shape_alone() -> Result<()> {
    let layout = Layout::even(8, 4, 1, Placement::Loop)?;
    let shape = |pp, vp, placement| Shape::new(pp, vp, 6, 1, placement);
    layout.matches(&shape(4, 1, Placement::Loop)?)?;
    // With one chunk a rank, both placements are the same.
    layout.matches(&shape(4, 1, Placement::V)?)?;
    for (plan, part) in [
        (shape(2, 1, Placement::Loop)?, "pp=4, but the plan has pp=2"),
        (shape(4, 2, Placement::Loop)?, "vp=1, but the plan has vp=2"),
        (shape(4, 1, Placement::Bidirectional)?, "num_replicas=1"),
    ] {
        let message = layout.matches(&plan).map_err(|e| e.to_string());
        assert!(
            message.clone().is_err_and(|m| m.contains(part)),
            "{message:?}"
        );
    }
    let v = Layout::even(8, 4, 2, Placement::V)?;
    let message = v
        .matches(&shape(4, 2, Placement::Loop)?)
        .map_err(|e| e.to_string());
    assert!(message.is_err_and(|m| m.contains("\"v\", but the plan has placement=\"loop\"")));
    Ok(())
}

fn placements() -> impl Strategy<Value = Placement> {
    prop_oneof![
        Just(Placement::Loop),
        Just(Placement::V),
        Just(Placement::Bidirectional)
    ]
}

/// Any layout: counts in stage order, MTP layers where rule allows (the last stage at least).
fn layouts() -> impl Strategy<Value = Layout> {
    (1_u32..6, 1_u32..4, placements()).prop_flat_map(|(pp, vp, placement)| {
        let num_stages = (pp * vp) as usize;
        let decoder = prop_oneof![
            proptest::collection::vec(0_u32..3, num_stages),
            proptest::collection::vec(0_u32..40, num_stages)
        ];
        (decoder, 0_u32..6).prop_map(move |(mut decoder, mtp)| {
            decoder[0] += u32::from(decoder.iter().all(|&count| count == 0));
            let last = decoder.len() - 1;
            let counts = decoder.iter().enumerate().map(|(s, &decoder)| LayerCount {
                decoder,
                mtp: if s == last { mtp } else { 0 },
            });
            let shape = frame(pp, vp, placement.clone()).expect("small");
            Layout::new(shape, counts).expect("has a layer")
        })
    })
}

proptest! {
    #[test]
    fn each_layer_is_on_exactly_one_stage_and_in_order(layout in layouts()) {
        let mut seen = Vec::new();
        let shape = layout.shape.clone();
        for stage in (0..shape.stages_per_replica()).map(Stage) {
            let (rank, chunk) = (shape.rank_of(stage), shape.chunk_of(stage));
            let content = layout.at(rank, Some(chunk)).expect("in range");
            prop_assert_eq!(content.offset as usize, seen.len());
            seen.extend(content.layers());
        }
        prop_assert_eq!(seen, (1..=layout.num_layers()).collect::<Vec<_>>());
        prop_assert_eq!(layout.stages().iter().filter(|s| s.pre_process).count(), 1);
        prop_assert_eq!(layout.stages().iter().filter(|s| s.post_process).count(), 1);
    }

    #[test]
    fn text_round_trips(layout in layouts()) {
        let text = layout.to_string();
        let back = Layout::from_text(&text, layout.pp(), None, ANY, layout.placement().clone());
        prop_assert_eq!(back, Ok(layout), "{}", text);
    }

    #[test]
    fn any_text_is_a_layout_or_an_error(
        text in r"(E)?[tmL|(), *0-9\n]{0,40}(L)?", pp in 0_u32..5,
    ) {
        match read(&text, pp) {
            Ok(layout) => {
                let back = read(&layout.to_string(), pp);
                prop_assert_eq!(back, Ok(layout));
            }
            Err(error) => prop_assert!(!error.hint.is_empty()),
        }
    }

    #[test]
    fn even_spreads_within_one(num_layers in 1_u32..200, pp in 1_u32..9, vp in 1_u32..5) {
        let counts = layers(&Layout::even(num_layers, pp, vp, Placement::V).expect("in range"));
        prop_assert_eq!(counts.iter().sum::<u32>(), num_layers);
        prop_assert!(counts.is_sorted_by(|a, b| a >= b && a - b <= 1));
        prop_assert!(counts[0] - counts[counts.len() - 1] <= 1);
    }

    #[test]
    fn megatron_places_all_layers_or_refuses(
        num_layers in 0_u32..60, pp in 0_u32..6, vp in proptest::option::of(0_u32..4),
        first in proptest::option::weighted(0.3, 0_u32..20),
        last in proptest::option::weighted(0.3, 0_u32..20),
        embedding in any::<bool>(), loss in any::<bool>(), placement in placements(),
    ) {
        let split = Megatron {
            vp,
            num_layers_in_first_pipeline_stage: first,
            num_layers_in_last_pipeline_stage: last,
            account_for_embedding_in_pipeline_split: embedding,
            account_for_loss_in_pipeline_split: loss,
            placement,
            ..Megatron::new(num_layers, pp)
        };
        if let Ok(layout) = split.layout() {
            prop_assert_eq!(layout.num_layers(), num_layers);
        }
    }
}
