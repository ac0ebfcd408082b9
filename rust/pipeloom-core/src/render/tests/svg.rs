use super::*;
use crate::render::svg::{SvgOptions, svg};

#[test]
fn x() {
    for (n, pp, vp, m) in [
        ("interleaved_1f1b", 4, Some(2), 8),
        ("1f1b", 4, None, 12),
        ("gpipe", 8, None, 1000),
    ] {
        let drawing = drawn(n, pp, vp, m);
        let text = svg(
            &drawing,
            &SvgOptions {
                memory: true,
                ..Default::default()
            },
        )
        .unwrap();
        std::fs::write(format!("/tmp/{n}.svg"), text).unwrap();
    }
}
