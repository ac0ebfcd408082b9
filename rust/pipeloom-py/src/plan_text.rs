//! Lowering, buffers and files of class `Plan`: what its methods delegate to.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use pipeloom_core::error::Error;
use pipeloom_core::ids::Rank;
use pipeloom_core::lower::{self, Channel, Direction};
use pipeloom_core::plan::Plan as CorePlan;
use pipeloom_core::text::{Action, csv, saved};
use pyo3::exceptions::{PyFileNotFoundError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::convert;
use crate::detach::detach;
use crate::error::to_py;
use crate::plan::Plan;

/// The order in which a rank makes the transfers of a synchronous exchange.
#[pyfunction]
#[pyo3(signature = (rank, have, /))]
pub(crate) fn p2p_order(
    rank: &Bound<'_, PyAny>,
    have: &Bound<'_, PyAny>,
) -> PyResult<Vec<&'static str>> {
    let rank = convert::rank(rank)?;
    let names: Vec<String> = have
        .try_iter()?
        .map(|name| name?.extract())
        .collect::<PyResult<_>>()?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    pipeloom_core::p2p_order::p2p_order(rank, &names).map_err(to_py)
}

/// The plan of a saved text: what pickles call.
#[pyfunction]
#[pyo3(signature = (text, /))]
pub(crate) fn plan_from_saved(py: Python<'_>, text: &str) -> PyResult<Plan> {
    detach(py, || saved::from_saved(text)).map(Plan)
}

pub(crate) fn lower(
    py: Python<'_>,
    plan: &CorePlan,
    p2p: &str,
    backend: Option<&str>,
    prefetch: Option<&Bound<'_, PyAny>>,
) -> PyResult<Plan> {
    let prefetch = prefetch.map_or(Ok(1), |prefetch| convert::count("prefetch", prefetch))?;
    let style = lower::style_from_name(p2p, backend).map_err(to_py)?;
    detach(py, || lower::lower(plan, style, prefetch)).map(Plan)
}

pub(crate) fn buffers(
    py: Python<'_>,
    plan: &CorePlan,
    rank: Rank,
    channel: &Bound<'_, PyAny>,
) -> PyResult<u32> {
    match channel_of(plan, rank, channel)? {
        Some(channel) => detach(py, || lower::buffers(plan, rank, channel)),
        None => Ok(0),
    }
}

/// A channel that ends at `rank`, given as (source, destination, direction), as
/// (source, direction), or as the direction alone where the rank has one source in it. None: it
/// has no source.
fn channel_of(
    plan: &CorePlan,
    rank: Rank,
    channel: &Bound<'_, PyAny>,
) -> PyResult<Option<Channel>> {
    plan.require_rank(rank).map_err(to_py)?;
    let direction = |value: &Bound<'_, PyAny>| -> PyResult<Direction> {
        Direction::from_name(&value.extract::<String>()?).map_err(to_py)
    };
    let end =
        |name: &str, value: &Bound<'_, PyAny>| convert::integer(name, value, 0, u32::MAX).map(Rank);
    if let Ok(parts) = channel.cast::<PyTuple>() {
        let (source, destination, last) = match parts.len() {
            2 => (0, None, 1),
            3 => (0, Some(1), 2),
            _ => return Err(not_a_channel()),
        };
        return Ok(Some(Channel {
            source: end("source", &parts.get_item(source)?)?,
            destination: match destination {
                Some(at) => end("destination", &parts.get_item(at)?)?,
                None => rank,
            },
            direction: direction(&parts.get_item(last)?)?,
        }));
    }
    let direction = direction(channel).map_err(|error| {
        if error.is_instance_of::<PyTypeError>(channel.py()) {
            not_a_channel()
        } else {
            error
        }
    })?;
    match lower::sources(plan, rank, direction).as_slice() {
        [] => Ok(None),
        &[source] => Ok(Some(Channel {
            source,
            destination: rank,
            direction,
        })),
        several => {
            let ranks: Vec<String> = several.iter().map(ToString::to_string).collect();
            Err(to_py(Error::config(
                format!(
                    "channel {:?} of rank {rank} has several sources: ranks {}",
                    direction.name(),
                    ranks.join(", ")
                ),
                format!(
                    "name the source too, as in ({}, {:?})",
                    ranks[0],
                    direction.name()
                ),
            )))
        }
    }
}

fn not_a_channel() -> PyErr {
    PyTypeError::new_err(
        "channel must be (source, destination, direction), (source, direction) or a direction\n\
         hint: a direction is \"forward\" or \"backward\", as in plan.buffers(1, (0, \"forward\"))",
    )
}

/// Writes a CSV to a path, or gives its text.
pub(crate) fn to_csv(
    py: Python<'_>,
    plan: &CorePlan,
    path: Option<PathBuf>,
    comms: bool,
) -> PyResult<Option<String>> {
    let form = if comms {
        csv::Form::ComputeAndTransfers
    } else {
        csv::Form::Compute
    };
    let text = detach(py, || csv::to_csv(plan, form))?;
    let Some(path) = path else {
        return Ok(Some(text));
    };
    py.detach(|| write_whole(&path, &text))?;
    Ok(None)
}

/// Reads a CSV from its text, or from a path.
pub(crate) fn from_csv(py: Python<'_>, text_or_path: &Bound<'_, PyAny>) -> PyResult<Plan> {
    let text = match text_or_path.extract::<String>() {
        Ok(text) if is_csv(&text) => text,
        _ => {
            let path: PathBuf = text_or_path.extract()?;
            py.detach(|| read_text(&path))?
        }
    };
    detach(py, || csv::from_csv(&text)).map(Plan)
}

/// Whether a `str` is the text of a CSV: it has several rows, or it looks like one and is no file.
fn is_csv(text: &str) -> bool {
    let one_row = || text.is_empty() || text.contains(',') || Action::parse(text).is_ok();
    text.contains(['\n', '\r']) || one_row() && !Path::new(text).exists()
}

pub(crate) fn save(py: Python<'_>, plan: &CorePlan, path: &Path) -> PyResult<()> {
    py.detach(|| write_whole(path, &saved::to_saved(plan)))
        .map_err(PyErr::from)
}

pub(crate) fn load(py: Python<'_>, path: &Path) -> PyResult<Plan> {
    let text = py.detach(|| read_text(path))?;
    detach(py, || saved::from_saved(&text)).map(Plan)
}

fn read_text(path: &Path) -> PyResult<String> {
    let bytes = fs::read(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => PyFileNotFoundError::new_err(format!(
            "no such file: {}\nhint: give a path to a file, or the text of a CSV",
            path.display()
        )),
        _ => PyErr::from(error),
    })?;
    String::from_utf8(bytes).map_err(|_| {
        to_py(Error::parse(
            format!("{} is not text in UTF-8", path.display()),
            "give a file written by plan.save, plan.to_csv or PyTorch",
        ))
    })
}

/// Writes a file at once: whoever reads the path sees all of the text, or what was there before.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let draft = path.with_file_name(name);
    let written = File::create(&draft).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let done = written.and_then(|()| fs::rename(&draft, path));
    if done.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&draft);
    }
    done
}
