//! Several pictures above each other, to one scale of time.

use std::fmt::Write as _;

use super::{Frame, PX, Picture, Px, RIGHT, SvgOptions, common_styles, open, paper, svg};
use crate::error::{Error, Result};
use crate::render::{Drawing, Window};

/// Width of the longest plan's boxes without a width.
const PLOT: i64 = 1000 * PX;

/// Draws whole plans above each other; a unit of time is as long in each, if they share it.
///
/// # Errors
/// If there is none, or one can't be drawn, as [`svg`] says.
pub fn stack(drawings: &[&Drawing], options: &SvgOptions) -> Result<String> {
    if options.window != Window::default() {
        return Err(Error::config(
            "a window has no use with several plans",
            "draw one plan to see a part of it",
        ));
    }
    if let [only] = drawings {
        return svg(only, options);
    }
    let frames = frames(drawings, options)?;
    let Some(width) = frames.iter().map(|frame| frame.width).max() else {
        return Err(Error::config(
            "there is no plan to draw",
            "name at least one",
        ));
    };
    let height = frames.iter().map(|frame| frame.height).sum();
    let mut text = String::new();
    let title: Vec<&str> = drawings.iter().map(|it| it.schedule.as_str()).collect();
    open(&mut text, (width, height), &title.join(", "));
    text.push_str("<style>\n");
    common_styles(&mut text, options.memory);
    text.push_str("</style>\n");
    paper(&mut text);
    let mut y = 0;
    for (at, (drawing, frame)) in drawings.iter().zip(frames).enumerate() {
        let _ = writeln!(text, "<g transform=\"translate(0 {})\">", Px(y));
        y += frame.height;
        let view = drawing.slice(&options.window)?;
        let mut picture = Picture {
            text,
            frame,
            view,
            prefix: format!("p{at}"),
        };
        picture.text.push_str("<style>\n");
        picture.styles();
        picture.text.push_str("</style>\n");
        picture.content(&known(drawing, options));
        text = picture.text;
        text.push_str("</g>\n");
    }
    text.push_str("</svg>\n");
    Ok(text)
}

/// Of what is asked for, what a drawing knows: a measured one may stand below a predicted one.
fn known(drawing: &Drawing, options: &SvgOptions) -> SvgOptions {
    SvgOptions {
        memory: options.memory && drawing.lanes.iter().all(|lane| lane.peak_memory.is_some()),
        critical_path: options.critical_path && !drawing.critical_path.is_empty(),
        ..options.clone()
    }
}

/// The frames: one left edge, one scale.
fn frames(drawings: &[&Drawing], options: &SvgOptions) -> Result<Vec<Frame>> {
    let mut frames = Vec::with_capacity(drawings.len());
    for drawing in drawings {
        let view = drawing.slice(&Window::default())?;
        view.limit("an SVG picture", super::MAX_OPS)?;
        frames.push(Frame::new(view, &known(drawing, options))?);
    }
    let left = frames.iter().map(|frame| frame.left).max().unwrap_or(0);
    let plot = match options.width {
        Some(width) => i64::from(width) * PX - left - RIGHT,
        None => PLOT,
    };
    // Lengths in units of time, as fractions with one denominator.
    let unit = |it: &Drawing| i128::from(it.ticks_per_unit);
    let all: i128 = drawings.iter().map(|it| unit(it)).max().unwrap_or(1);
    let length = |it: &Drawing| (i128::from(it.makespan()) * all / unit(it)).max(1);
    let longest = drawings.iter().map(|it| length(it)).max().unwrap_or(1);
    for (frame, drawing) in frames.iter_mut().zip(drawings) {
        frame.left = left;
        let own = i128::from(plot) * length(drawing) / longest;
        frame.plot = i64::try_from(own).unwrap_or(plot).max(PX);
        frame.width = left + plot + RIGHT;
        let view = drawing.slice(&Window::default())?;
        frame.set_texts(view, &known(drawing, options));
    }
    Ok(frames)
}
