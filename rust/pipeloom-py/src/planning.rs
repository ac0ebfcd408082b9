//! The functions that make plans.

use pipeloom_core::schedules::{self, Argument, Request};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{self, optional};
use crate::detach::detach;
use crate::plan::Plan;

/// Plans a step; see `pipeloom.plan`.
#[pyfunction]
#[pyo3(signature = (schedule, *, pp, num_microbatches, vp=None, microbatch_group_size=None,
    placement=None, num_seq_pieces=None, reverse_backward=None, forward_only=None,
    extra_warmup=None, num_microbatches_with_partial_activation_checkpoints=None, layout=None,
    costs=None, memory_limit=None))]
#[allow(clippy::too_many_arguments)] // the public signature
pub(crate) fn plan(
    py: Python<'_>,
    schedule: &Bound<'_, PyAny>,
    pp: &Bound<'_, PyAny>,
    num_microbatches: &Bound<'_, PyAny>,
    vp: Option<&Bound<'_, PyAny>>,
    microbatch_group_size: Option<&Bound<'_, PyAny>>,
    placement: Option<&Bound<'_, PyAny>>,
    num_seq_pieces: Option<&Bound<'_, PyAny>>,
    reverse_backward: Option<&Bound<'_, PyAny>>,
    forward_only: Option<&Bound<'_, PyAny>>,
    extra_warmup: Option<&Bound<'_, PyAny>>,
    num_microbatches_with_partial_activation_checkpoints: Option<&Bound<'_, PyAny>>,
    layout: Option<&Bound<'_, PyAny>>,
    costs: Option<&Bound<'_, PyAny>>,
    memory_limit: Option<&Bound<'_, PyAny>>,
) -> PyResult<Plan> {
    let kept = "num_microbatches_with_partial_activation_checkpoints";
    let request = Request {
        schedule: convert::text("schedule", schedule)?,
        pp: convert::count("pp", pp)?,
        vp: optional("vp", vp, 1)?,
        num_microbatches: convert::count("num_microbatches", num_microbatches)?,
        microbatch_group_size: optional("microbatch_group_size", microbatch_group_size, 1)?,
        placement: convert::placement(placement)?,
        num_seq_pieces: optional("num_seq_pieces", num_seq_pieces, 1)?.unwrap_or(1),
        reverse_backward: reverse_backward
            .map(|value| convert::flag("reverse_backward", Some(value), true))
            .transpose()?,
        forward_only: convert::flag("forward_only", forward_only, false)?,
        extra_warmup: optional("extra_warmup", extra_warmup, 0)?.unwrap_or(0),
        partial_checkpoints: optional(
            kept,
            num_microbatches_with_partial_activation_checkpoints,
            0,
        )?,
        layout: layout.map(convert::layout).transpose()?,
        for_searches: [
            (costs.is_some(), Argument::Costs),
            (memory_limit.is_some(), Argument::MemoryLimit),
        ]
        .into_iter()
        .filter_map(|(given, argument)| given.then_some(argument))
        .collect(),
    };
    detach(py, || schedules::plan(&request)).map(Plan)
}

/// The smallest number of microbatches that `plan` accepts; see
/// `pipeloom.legal_num_microbatches`.
#[pyfunction]
#[pyo3(signature = (schedule, *, pp, vp=None, at_least, microbatch_group_size=None, placement=None,
    num_seq_pieces=None, forward_only=None, extra_warmup=None))]
#[allow(clippy::too_many_arguments)] // the public signature
pub(crate) fn legal_num_microbatches(
    py: Python<'_>,
    schedule: &Bound<'_, PyAny>,
    pp: &Bound<'_, PyAny>,
    vp: Option<&Bound<'_, PyAny>>,
    at_least: &Bound<'_, PyAny>,
    microbatch_group_size: Option<&Bound<'_, PyAny>>,
    placement: Option<&Bound<'_, PyAny>>,
    num_seq_pieces: Option<&Bound<'_, PyAny>>,
    forward_only: Option<&Bound<'_, PyAny>>,
    extra_warmup: Option<&Bound<'_, PyAny>>,
) -> PyResult<u32> {
    let request = Request {
        microbatch_group_size: optional("microbatch_group_size", microbatch_group_size, 1)?,
        placement: convert::placement(placement)?,
        num_seq_pieces: optional("num_seq_pieces", num_seq_pieces, 1)?.unwrap_or(1),
        forward_only: convert::flag("forward_only", forward_only, false)?,
        extra_warmup: optional("extra_warmup", extra_warmup, 0)?.unwrap_or(0),
        ..Request::new(
            &convert::text("schedule", schedule)?,
            convert::count("pp", pp)?,
            optional("vp", vp, 1)?,
            convert::count("at_least", at_least)?,
        )
    };
    detach(py, || schedules::legal_num_microbatches(&request))
}

/// The schedules as (name, summary, source, constraints, vp, placement, arguments).
#[pyfunction]
pub(crate) fn schedules_table(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    schedules::FAMILIES
        .iter()
        .map(|family| {
            let row = PyDict::new(py);
            row.set_item("name", family.name)?;
            row.set_item("summary", family.summary)?;
            row.set_item("source", family.source)?;
            row.set_item("constraints", family.constraints)?;
            let vp = match family.chunks {
                schedules::Chunks::Any | schedules::Chunks::Even => None,
                schedules::Chunks::Exactly(own) => Some(own),
            };
            row.set_item("vp", vp)?;
            row.set_item("placement", family.placement.name())?;
            let arguments: Vec<&str> = family.arguments.iter().map(|a| a.name()).collect();
            row.set_item("arguments", arguments)?;
            Ok(row)
        })
        .collect()
}
