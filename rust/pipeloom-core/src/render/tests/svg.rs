//! Pictures: well-formed, inside their frame, the same bytes each time.

use std::collections::BTreeMap;

use super::*;
use crate::render::svg::{SvgOptions, svg};

fn options() -> SvgOptions {
    SvgOptions {
        memory: true,
        ..SvgOptions::default()
    }
}

/// Checks that elements nest and gives the attributes of each `tag`.
#[track_caller]
fn elements(text: &str, tag: &str) -> Vec<BTreeMap<String, String>> {
    let mut open = Vec::new();
    let mut found = Vec::new();
    for part in text.split('<').skip(1) {
        let (inside, after) = part.split_once('>').unwrap();
        assert!(
            !after.contains('>') || after.contains('{'),
            "stray >: {after}"
        );
        if let Some(name) = inside.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name.to_owned()));
            continue;
        }
        let closed = inside.ends_with('/');
        let inside = inside.trim_end_matches('/');
        let name = inside.split_whitespace().next().unwrap();
        if !closed {
            open.push(name.to_owned());
        }
        if name == tag {
            let quoted: Vec<&str> = inside[name.len()..].split('"').collect();
            let pairs = quoted.chunks_exact(2);
            found.push(
                pairs
                    .map(|p| {
                        (
                            p[0].trim().trim_end_matches('=').to_owned(),
                            p[1].to_owned(),
                        )
                    })
                    .collect(),
            );
        }
    }
    assert!(open.is_empty(), "not closed: {open:?}");
    found
}

fn number(attributes: &BTreeMap<String, String>, name: &str) -> f64 {
    attributes[name].parse().unwrap()
}

#[test]
fn each_op_has_a_box_and_a_label_inside_the_frame() {
    let drawing = drawn("interleaved_1f1b", 4, Some(2), 8);
    let text = svg(&drawing, &options()).unwrap();
    let root = &elements(&text, "svg")[0];
    let (width, height) = (number(root, "width"), number(root, "height"));
    let boxes: Vec<_> = elements(&text, "rect")
        .into_iter()
        .filter(|r| r.get("class").is_some_and(|c| c.ends_with(" b")))
        .collect();
    assert_eq!(boxes.len(), 4 * 8 * 2 * 2);
    for b in &boxes {
        assert!(number(b, "x") >= 0.0 && number(b, "x") + number(b, "width") <= width);
        assert!(number(b, "y") >= 0.0 && number(b, "y") + number(b, "height") <= height);
    }
    let labels = elements(&text, "text")
        .into_iter()
        .filter(|t| t["class"].starts_with('t'))
        .count();
    assert_eq!(labels, boxes.len());
    assert_eq!(
        elements(&text, "path")
            .iter()
            .filter(|p| p.get("class").is_some_and(|class| class == "mem"))
            .count(),
        4
    );
    assert_eq!(text, svg(&drawing, &options()).unwrap());
}

#[test]
fn widths_are_in_proportion_to_time() {
    let drawing = drawn("1f1b", 2, None, 3);
    let text = svg(
        &drawing,
        &SvgOptions {
            width: Some(800),
            ..SvgOptions::default()
        },
    )
    .unwrap();
    let widths = |class: &str| -> Vec<f64> {
        let boxes = elements(&text, "rect").into_iter();
        boxes
            .filter(|r| r.get("class").is_some_and(|c| c == class))
            .map(|r| number(&r, "width"))
            .collect()
    };
    let (forward, backward) = (widths("F0 b"), widths("B0 b"));
    assert_eq!((forward.len(), backward.len()), (6, 6));
    for (f, b) in forward.iter().zip(&backward) {
        assert!((b - 2.0 * f).abs() < 0.05, "{f} {b}");
    }
}

#[test]
fn thin_boxes_are_merged() {
    let drawing = drawn("gpipe", 4, None, 2000);
    let text = svg(
        &drawing,
        &SvgOptions {
            width: Some(600),
            ..SvgOptions::default()
        },
    )
    .unwrap();
    let boxes = elements(&text, "rect")
        .iter()
        .filter(|r| r.contains_key("class"))
        .count();
    assert_eq!(boxes, 4 * 3, "idle, forward and backward of each rank");
}

#[test]
fn too_many_ops_are_refused_with_a_way_out() {
    let drawing = drawn("1f1b", 16, None, 8000);
    let error = svg(&drawing, &SvgOptions::default()).unwrap_err();
    assert_eq!(
        error.message,
        "an SVG picture of 256000 ops is too big: the limit is 200000"
    );
    assert!(error.hint.contains("--from"));
    let window = Window {
        to: Some(100),
        ..Window::default()
    };
    svg(
        &drawing,
        &SvgOptions {
            window,
            ..SvgOptions::default()
        },
    )
    .unwrap();
}

#[test]
fn text_is_escaped() {
    let mut drawing = drawn("1f1b", 2, None, 2);
    drawing.schedule = "<a & \"b\">\u{1}".to_owned();
    let text = svg(&drawing, &SvgOptions::default()).unwrap();
    assert!(text.contains("&lt;a &amp; &quot;b&quot;&gt;\u{fffd}"));
    elements(&text, "svg");
}

#[test]
fn what_is_unknown_is_not_drawn() {
    let mut drawing = drawn("1f1b", 2, None, 2);
    drawing.critical_path.clear();
    let path = SvgOptions {
        critical_path: true,
        ..SvgOptions::default()
    };
    assert!(
        svg(&drawing, &path)
            .unwrap_err()
            .message
            .contains("critical path")
    );
    drawing.critical_path = vec![(Rank(0), 0), (Rank(1), 0)];
    let text = svg(&drawing, &path).unwrap();
    let outlines = text.matches("fill=\"none\" stroke=\"#000000\"").count();
    assert_eq!(outlines, 3, "two ops and the legend");
    drawing.lanes[0].peak_memory = None;
    assert!(
        svg(&drawing, &options())
            .unwrap_err()
            .message
            .contains("memory")
    );
    let wide = SvgOptions {
        width: Some(100_000),
        ..SvgOptions::default()
    };
    assert!(
        svg(&drawing, &wide)
            .unwrap_err()
            .message
            .contains("width=100000")
    );
}
