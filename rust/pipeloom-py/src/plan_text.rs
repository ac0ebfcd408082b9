//! Lowering, buffers and files of class `Plan`: what its methods delegate to.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use pipeloom_core::error::Error;
use pipeloom_core::ids::Rank;
use pipeloom_core::lower::{self, Channel, Direction};
use pipeloom_core::plan::Plan as CorePlan;
use pipeloom_core::text::{Action, csv, saved};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::convert::{self, Value};
use crate::detach::detach;
use crate::error::to_py;
use crate::plan::Plan;

/// The order in which a rank makes the transfers of a synchronous exchange.
#[pyfunction]
#[pyo3(signature = (rank, have))]
pub(crate) fn p2p_order(
    rank: &Bound<'_, PyAny>,
    have: &Bound<'_, PyAny>,
) -> PyResult<Vec<&'static str>> {
    let rank = convert::rank(rank)?;
    let no_list = || convert::wrong_type("have", have, "a list of names", "list[str]");
    if have.is_instance_of::<PyString>() || have.is_instance_of::<PyDict>() {
        return Err(no_list());
    }
    let names: Vec<String> = have
        .try_iter()
        .map_err(|_| no_list())?
        .map(|name| convert::text("have", &name?))
        .collect::<PyResult<_>>()?;
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    pipeloom_core::p2p_order::p2p_order(rank, &names).map_err(to_py)
}

/// The plan of a saved text: what pickles call.
#[pyfunction]
#[pyo3(signature = (text))]
pub(crate) fn plan_from_saved(py: Python<'_>, text: &str) -> PyResult<Plan> {
    detach(py, || saved::from_saved(text)).map(Plan)
}

pub(crate) fn lower(
    py: Python<'_>,
    plan: &CorePlan,
    p2p: Option<Value<'_, '_>>,
    backend: Option<Value<'_, '_>>,
    prefetch: Option<Value<'_, '_>>,
) -> PyResult<Plan> {
    let p2p = p2p.map_or(Ok("auto".to_owned()), |p2p| convert::text("p2p", p2p))?;
    let backend = backend
        .map(|backend| convert::text("backend", backend))
        .transpose()?;
    let prefetch = prefetch.map_or(Ok(1), |prefetch| convert::count("prefetch", prefetch))?;
    let style = lower::style_from_name(&p2p, backend.as_deref()).map_err(to_py)?;
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

pub(crate) fn buffer_lifetimes(
    py: Python<'_>,
    plan: &CorePlan,
    rank: Rank,
    channel: &Bound<'_, PyAny>,
) -> PyResult<Vec<(usize, Option<usize>)>> {
    let Some(channel) = channel_of(plan, rank, channel)? else {
        return Ok(Vec::new());
    };
    let lifetimes = detach(py, || lower::buffer_lifetimes(plan, rank, channel))?;
    Ok(lifetimes
        .into_iter()
        .map(|life| (life.posted, life.last_read))
        .collect())
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
        let name = value
            .extract::<String>()
            .map_err(|_| not_a_channel(channel))?;
        Direction::from_name(&name).map_err(|error| {
            to_py(Error::config(
                format!("channel: {}", error.message),
                error.hint,
            ))
        })
    };
    let end =
        |name: &str, value: &Bound<'_, PyAny>| convert::integer(name, value, 0, u32::MAX).map(Rank);
    if !channel.is_instance_of::<PyString>() {
        let parts: Vec<Bound<'_, PyAny>> = channel.extract().map_err(|_| not_a_channel(channel))?;
        let (source, destination, last) = match parts.as_slice() {
            [source, last] => (source, None, last),
            [source, destination, last] => (source, Some(destination), last),
            _ => return Err(not_a_channel(channel)),
        };
        return Ok(Some(Channel {
            source: end("channel source", source)?,
            destination: destination.map_or(Ok(rank), |destination| {
                end("channel destination", destination)
            })?,
            direction: direction(last)?,
        }));
    }
    let direction = direction(channel)?;
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

fn not_a_channel(channel: &Bound<'_, PyAny>) -> PyErr {
    convert::wrong_type(
        "channel",
        channel,
        "(source, destination, direction), (source, direction) or a direction",
        "(0, 1, \"forward\"), (0, \"forward\") or \"backward\"",
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
            let path = convert::path("text_or_path", text_or_path)?;
            py.detach(|| read_text(&path, "or the text of a CSV"))?
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
    let text = py.detach(|| read_text(path, "one that plan.save wrote"))?;
    detach(py, || saved::from_saved(&text)).map(Plan)
}

fn read_text(path: &Path, or: &str) -> PyResult<String> {
    let hint = format!("give a path to a file, {or}");
    let bytes = fs::read(path).map_err(|error| about("read", path, &error, &hint))?;
    String::from_utf8(bytes).map_err(|_| {
        to_py(Error::parse(
            format!("{} is not text in UTF-8", path.display()),
            "give a file written by plan.save, plan.to_csv or PyTorch",
        ))
    })
}

/// An `OSError` that names the path.
fn about(what: &str, path: &Path, error: &io::Error, hint: &str) -> io::Error {
    let text = format!("can't {what} {}: {error}\nhint: {hint}", path.display());
    io::Error::new(error.kind(), text)
}

/// Writes a file at once: whoever reads the path sees all of the text, or what was there before.
/// What is no file (a pipe, a device) is written to, not replaced; a link keeps pointing.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let hint = "give a path in a folder that can be written";
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        let written = File::options().write(true).open(path);
        let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
        return written.map_err(|error| about("write", path, &error, hint));
    }
    let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
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
    done.map_err(|error| about("write", path, &error, hint))
}
