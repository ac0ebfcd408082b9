//! Exact grids.

use super::*;
use crate::cost::{Number, Values};
use crate::render::grid::{GridOptions, grid, of_plan};

#[track_caller]
fn check(drawing: &Drawing, options: &GridOptions, expected: &str) {
    let text = grid(drawing, options).unwrap();
    assert_eq!(text, expected, "\n{text}");
}

#[test]
fn full_scale_shows_each_op() {
    check(
        &drawn("1f1b", 3, None, 4),
        &GridOptions::default(),
        "\
1f1b  pp=3 vp=1 m=4   makespan 18   bubble 33.3%   peak memory 3 2 1
  time |0              5              10             15
rank 0 |F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
rank 1 |.  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
rank 2 |.  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
F forward   B backward   . idle   - goes on
",
    );
}

#[test]
fn chunks_have_letters() {
    check(
        &drawn("interleaved_1f1b", 2, Some(2), 2),
        &GridOptions::default(),
        "\
interleaved_1f1b  pp=2 vp=2 m=2   makespan 15   bubble 20%   peak memory 4 3
  time |0       2       4       6       8       10      12      14
rank 0 |F0a F1a F0b F1b .   .   B0b---- .   B1b---- B0a---- B1a----
rank 1 |.   F0a F1a F0b B0b---- F1b B1b---- B0a---- B1a---- .   .
F forward   B backward   . idle   - goes on   a, b: chunks 0 to 1
",
    );
}

#[test]
fn narrow_rows_keep_equal_ops_equally_long() {
    let options = GridOptions {
        width: Some(40),
        ..GridOptions::default()
    };
    check(
        &drawn("interleaved_1f1b", 2, Some(2), 2),
        &options,
        "\
interleaved_1f1b  pp=2 vp=2 m=2   makespan 15   bubble 20%   peak memory 4 3
  time |0         5         10
rank 0 |F-F-F-F-. . B0b . B1b B0a B1a
rank 1 |. F-F-F-B0b F-B1b B0a B1a . .
F forward   B backward   . idle   - goes on   a, b: chunks 0 to 1
",
    );
}

#[test]
fn a_character_shows_what_takes_most_of_its_time() {
    let options = GridOptions {
        width: Some(25),
        ..GridOptions::default()
    };
    check(
        &drawn("gpipe", 2, None, 16),
        &options,
        "\
gpipe  pp=2 vp=1 m=16   makespan 51   bubble 5.9%   peak memory 16 16
  time |0     20     40
rank 0 |FFFFF.BBBBBBBBBBB
rank 1 |FFFFFFBBBBBBBBBB.
F forward   B backward   . idle   - goes on
scaled: one character is 3 time units and shows what takes most of it; slice with --from and --to to see each op
",
    );
}

#[test]
fn windows_cut_time_and_ranks() {
    let window = Window {
        from: Some(6),
        to: Some(12),
        ranks: Some((1, 3)),
    };
    let options = GridOptions {
        window,
        ..GridOptions::default()
    };
    check(
        &drawn("1f1b", 3, None, 4),
        &options,
        "\
1f1b  pp=3 vp=1 m=4   makespan 18   bubble 33.3%   peak memory 3 2 1
  time |6     8     10
rank 1 |B0 F2 B1--- F3 B2
rank 2 |B1--- F2 B2--- F3
F forward   B backward   . idle   - goes on
",
    );
}

#[test]
fn colour_is_only_added() {
    let drawing = drawn("interleaved_1f1b", 3, Some(2), 4);
    let colored = grid(
        &drawing,
        &GridOptions {
            color: true,
            ..GridOptions::default()
        },
    )
    .unwrap();
    let plain = grid(&drawing, &GridOptions::default()).unwrap();
    let mut stripped = String::new();
    for part in colored.split('\x1b') {
        stripped.push_str(
            part.split_once('m')
                .filter(|p| p.0.starts_with('['))
                .map_or(part, |p| p.1),
        );
    }
    assert!(colored.contains("\x1b[38;2;255;255;255;48;2;0;90;170mF0a\x1b[0m"));
    let bare = |text: &str| text.replace("   - goes on", "").replace(['-', ' '], "");
    assert_eq!(bare(&stripped), bare(&plain));
}

#[test]
fn a_width_without_room_is_refused() {
    let options = GridOptions {
        width: Some(10),
        ..GridOptions::default()
    };
    let error = grid(&drawn("1f1b", 2, None, 2), &options).unwrap_err();
    assert_eq!(error.message, "width=10 is too small for a grid");
}

#[test]
fn uneven_times_are_rounded_to_characters() {
    let all = |value| Values::All(Number::Int(value));
    let costs = Costs {
        forward: all(1001),
        backward: Some(all(1777)),
        ..Costs::default()
    };
    let drawing = drawn_at(&costs, "1f1b", 2, None, 2);
    check(
        &drawing,
        &GridOptions::default(),
        "\
1f1b  pp=2 vp=1 m=2   makespan 8334   bubble 33.3%   peak memory 2 1
  time |0             5000
rank 0 |F0 F1 .  . B0--   .B1--
rank 1 |.  F0 B0-- F1 B1--   .
F forward   B backward   . idle   - goes on
",
    );
}

#[test]
fn small_plans_print_as_grids_and_large_ones_as_a_line() {
    let small = of_plan(&plan("1f1b", 2, None, 2));
    assert!(
        small.ends_with("idle   - goes on") && small.lines().count() == 5,
        "{small}"
    );
    let large = plan("1f1b", 64, None, 1000);
    assert_eq!(of_plan(&large), large.describe());
}
