//! Python values to core types. Whatever is out of range becomes an error that names the
//! argument: callers never see an `OverflowError` or a bare `TypeError`.

use std::path::PathBuf;

use pipeloom_core::error::Error;
use pipeloom_core::ids::Rank;
use pipeloom_core::op::Op;
use pipeloom_core::shape::Placement;
use pipeloom_core::text::Action;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};

use crate::error::to_py;

/// An argument as Python gave it.
pub(crate) type Value<'a, 'py> = &'a Bound<'py, PyAny>;

/// An integer argument within `low..=high`.
///
/// # Errors
/// `TypeError` if it is no integer, `ConfigError` if it is out of range.
pub(crate) fn integer(name: &str, value: &Bound<'_, PyAny>, low: u32, high: u32) -> PyResult<u32> {
    if value.is_instance_of::<PyBool>() {
        return Err(not_an_integer(name, value));
    }
    // Through __index__, so that numpy's integers are taken like Python's.
    let index = if value.is_instance_of::<PyInt>() {
        value.clone()
    } else {
        value
            .call_method0("__index__")
            .map_err(|_| not_an_integer(name, value))?
    };
    match index.extract::<i64>() {
        Ok(number) if (i64::from(low)..=i64::from(high)).contains(&number) => {
            u32::try_from(number).map_err(|_| not_an_integer(name, value))
        }
        _ => {
            let text = index
                .str()
                .map_or_else(|_| "a huge number".to_owned(), |s| s.to_string());
            let too_low = match index.extract::<i64>() {
                Ok(number) => number < i64::from(low),
                Err(_) => text.starts_with('-'),
            };
            let range = match (high, too_low) {
                (u32::MAX, true) => format!("at least {low}"),
                (u32::MAX, false) => format!("at most {high}"),
                _ => format!("between {low} and {high}"),
            };
            let shown: String = text.chars().take(40).collect();
            Err(to_py(Error::config(
                format!("{name}={shown} is out of range: it must be {range}"),
                format!("give {name} a number that is {range}"),
            )))
        }
    }
}

fn not_an_integer(name: &str, value: &Bound<'_, PyAny>) -> PyErr {
    wrong_type(name, value, "an integer", "int")
}

/// The `TypeError` for an argument of another type than `what`.
pub(crate) fn wrong_type(name: &str, value: &Bound<'_, PyAny>, what: &str, class: &str) -> PyErr {
    let kind = value
        .get_type()
        .name()
        .map_or_else(|_| "?".to_owned(), |n| n.to_string());
    let shown: String = value
        .repr()
        .map_or_else(|_| "?".to_owned(), |s| s.to_string())
        .chars()
        .take(60)
        .collect();
    PyTypeError::new_err(format!(
        "{name} must be {what}, but got {shown} of type {kind}\nhint: give {name} as {class}"
    ))
}

/// An integer of at least `low`, if one was given.
pub(crate) fn optional(
    name: &str,
    value: Option<Value<'_, '_>>,
    low: u32,
) -> PyResult<Option<u32>> {
    value
        .map(|value| integer(name, value, low, u32::MAX))
        .transpose()
}

/// A text argument.
///
/// # Errors
/// `TypeError` if it is no string.
pub(crate) fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    value
        .extract()
        .map_err(|_| wrong_type(name, value, "a string of valid Unicode", "str"))
}

/// A flag; none given: the default.
///
/// # Errors
/// `TypeError` if it is no bool.
pub(crate) fn flag(name: &str, value: Option<Value<'_, '_>>, default: bool) -> PyResult<bool> {
    value.map_or(Ok(default), |value| {
        value
            .extract()
            .map_err(|_| wrong_type(name, value, "True or False", "bool"))
    })
}

/// A path to a file.
///
/// # Errors
/// `TypeError` if it is no string and no `os.PathLike`.
pub(crate) fn path(name: &str, value: Value<'_, '_>) -> PyResult<PathBuf> {
    value
        .extract()
        .map_err(|_| wrong_type(name, value, "a path", "str or pathlib.Path"))
}

/// A placement, if one was given.
///
/// # Errors
/// `TypeError` if it is no string, `ConfigError` if there is none of that name.
pub(crate) fn placement(value: Option<Value<'_, '_>>) -> PyResult<Option<Placement>> {
    value
        .map(|value| Placement::from_name(&text("placement", value)?).map_err(to_py))
        .transpose()
}

/// A count: at least 1.
pub(crate) fn count(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u32> {
    integer(name, value, 1, u32::MAX)
}

/// A rank; whether the plan has it is the core's to say.
pub(crate) fn rank(value: &Bound<'_, PyAny>) -> PyResult<Rank> {
    integer("rank", value, 0, u32::MAX).map(Rank)
}

/// A compute or transfer op from PyTorch's action text; of an overlapped pair, its forward.
pub(crate) fn op(value: Value<'_, '_>) -> PyResult<Op> {
    let text = text("op", value)?;
    match Action::parse(&text) {
        Ok(Action::One(op) | Action::Pair(op, _)) => Ok(op),
        Ok(Action::Sharding) => text.parse().map_err(to_py),
        Err(error) => Err(to_py(error)),
    }
}

/// A layout.
pub(crate) fn layout(value: &Bound<'_, PyAny>) -> PyResult<pipeloom_core::layout::Layout> {
    match value.cast::<crate::layout::Layout>() {
        Ok(layout) => Ok(layout.get().0.clone()),
        Err(_) => Err(PyTypeError::new_err(format!(
            "layout must be a pipeloom.Layout, but got {}\nhint: make one with Layout.even, \
             Layout.megatron, Layout.from_counts or Layout.from_string",
            value.get_type()
        ))),
    }
}

/// What `__reduce__` returns: a callable that makes the object again, and its arguments.
pub(crate) type Again<'py, Arguments> = PyResult<(Bound<'py, PyAny>, Arguments)>;
