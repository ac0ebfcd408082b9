//! The colours of all pictures, in one place.
//!
//! Kinds are hues, chunks are shades of the hue, from dark to light. The shades were chosen so that
//! people with any of the common colour-vision deficiencies tell kinds apart; a test keeps it so.

use std::fmt;

use crate::op::OpKind;

/// A colour in sRGB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Color {
    /// Red.
    pub r: u8,
    /// Green.
    pub g: u8,
    /// Blue.
    pub b: u8,
}

impl Color {
    const fn new(r: u8, g: u8, b: u8) -> Self {
        Self { r, g, b }
    }

    /// The colour at `part / whole` of the way to `other`.
    fn towards(self, other: Self, part: u32, whole: u32) -> Self {
        let mix = |from: u8, to: u8| {
            let mixed = (u32::from(from) * (whole - part) + u32::from(to) * part) / whole;
            u8::try_from(mixed).unwrap_or(u8::MAX)
        };
        Self::new(
            mix(self.r, other.r),
            mix(self.g, other.g),
            mix(self.b, other.b),
        )
    }

    /// The ink that is read best on this colour: black or white.
    #[must_use]
    pub fn ink(self) -> Self {
        // Relative luminance with gamma 2 for 2.4, in units of 255^2 / 10000. Both inks contrast
        // equally where it is about 0.203.
        let square = |channel: u8| u32::from(channel).pow(2);
        let luminance = 2126 * square(self.r) + 7152 * square(self.g) + 722 * square(self.b);
        if luminance > 2030 * 255 * 255 {
            BLACK
        } else {
            WHITE
        }
    }
}

/// `#rrggbb`.
impl fmt::Display for Color {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{:02x}{:02x}{:02x}", self.r, self.g, self.b)
    }
}

/// Ink on light colours.
pub const BLACK: Color = Color::new(0, 0, 0);
/// Paper, and ink on dark colours.
pub const WHITE: Color = Color::new(255, 255, 255);
/// Text beside the boxes.
pub const TEXT: Color = Color::new(34, 34, 34);
/// Axes, rulers and the bubble's outline.
pub const RULE: Color = Color::new(150, 150, 150);
/// Idle time.
pub const BUBBLE: Color = Color::new(240, 240, 240);
/// The memory curve.
pub const MEMORY: Color = Color::new(95, 95, 95);
/// The paper below the memory curve.
pub const MEMORY_FILL: Color = Color::new(215, 215, 215);
/// The outline of the critical path.
pub const CRITICAL: Color = BLACK;

/// The fill of an op of `kind` on chunk `chunk` of `num_chunks`.
pub fn fill(kind: OpKind, chunk: u32, num_chunks: u32) -> Color {
    let (dark, light) = match kind {
        OpKind::Forward => (Color::new(0, 90, 170), Color::new(130, 190, 250)),
        OpKind::Backward => (Color::new(205, 80, 10), Color::new(245, 150, 105)),
        OpKind::BackwardInput => (Color::new(235, 195, 0), Color::new(255, 243, 150)),
        OpKind::BackwardWeight => (Color::new(120, 30, 90), Color::new(200, 110, 170)),
        // Transfers have a strip of their own, where they need not differ from computation.
        OpKind::SendForward | OpKind::RecvForward => return Color::new(110, 150, 190),
        OpKind::SendBackward | OpKind::RecvBackward => return Color::new(200, 140, 110),
    };
    let last = num_chunks.saturating_sub(1).max(1);
    dark.towards(light, chunk.min(last), last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [OpKind; 4] = [
        OpKind::Forward,
        OpKind::Backward,
        OpKind::BackwardInput,
        OpKind::BackwardWeight,
    ];

    fn linear(channel: u8) -> f64 {
        let v = f64::from(channel) / 255.0;
        if v <= 0.04045 {
            v / 12.92
        } else {
            ((v + 0.055) / 1.055).powf(2.4)
        }
    }

    /// CIE L*a*b* of a linear colour.
    fn lab([r, g, b]: [f64; 3]) -> [f64; 3] {
        let f = |t: f64| {
            if t > 0.008_856 {
                t.cbrt()
            } else {
                7.787 * t + 16.0 / 116.0
            }
        };
        let x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505);
        let y = f(0.2126 * r + 0.7152 * g + 0.0722 * b);
        let z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089);
        [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
    }

    /// How a full deficiency sees it (Machado, Oliveira, Fernandes 2009, severity 1).
    fn seen(color: Color, matrix: [[f64; 3]; 3]) -> [f64; 3] {
        let rgb = [linear(color.r), linear(color.g), linear(color.b)];
        let row = |i: usize| {
            (0..3)
                .map(|j| matrix[i][j] * rgb[j])
                .sum::<f64>()
                .clamp(0.0, 1.0)
        };
        lab([row(0), row(1), row(2)])
    }

    const VISIONS: [[[f64; 3]; 3]; 4] = [
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        [
            [0.152, 1.053, -0.205],
            [0.115, 0.786, 0.099],
            [-0.004, -0.048, 1.052],
        ],
        [
            [0.367, 0.861, -0.228],
            [0.280, 0.673, 0.047],
            [-0.012, 0.043, 0.969],
        ],
        [
            [1.256, -0.077, -0.179],
            [-0.078, 0.931, 0.148],
            [0.005, 0.691, 0.304],
        ],
    ];

    fn distance(a: Color, b: Color) -> f64 {
        VISIONS
            .iter()
            .map(|&matrix| {
                let (p, q) = (seen(a, matrix), seen(b, matrix));
                p.iter()
                    .zip(q)
                    .map(|(x, y)| (x - y).powi(2))
                    .sum::<f64>()
                    .sqrt()
            })
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn kinds_differ_for_every_vision_in_every_shade() {
        for chunks in [1, 2, 3, 4, 8] {
            for a in 0..chunks {
                for b in 0..chunks {
                    for (i, &kind) in KINDS.iter().enumerate() {
                        for &other in &KINDS[i + 1..] {
                            let d = distance(fill(kind, a, chunks), fill(other, b, chunks));
                            assert!(d > 16.0, "{kind}{a} and {other}{b} of {chunks}: {d:.1}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn neighbouring_chunks_differ() {
        for kind in KINDS {
            let d = distance(fill(kind, 0, 2), fill(kind, 1, 2));
            assert!(d > 20.0, "{kind}: {d:.1}");
        }
    }

    #[test]
    fn ink_is_readable() {
        let luminance =
            |c: Color| 0.2126 * linear(c.r) + 0.7152 * linear(c.g) + 0.0722 * linear(c.b);
        for kind in OpKind::ALL {
            for chunk in 0..4 {
                let paper = fill(kind, chunk, 4);
                let (a, b) = (luminance(paper), luminance(paper.ink()));
                let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                assert!(contrast >= 4.5, "{kind}{chunk}: {contrast:.2}");
            }
        }
    }
}
