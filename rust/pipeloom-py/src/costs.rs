//! Class `Costs`, and numbers between Python and the core.

use pipeloom_core::cost::{Links, Number, Values};
use pipeloom_core::error::Error;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyString, PyTuple};

use crate::convert;
use crate::error::to_py;

type Value<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// What ops and transfers cost.
#[pyclass(frozen, eq, hash, skip_from_py_object, module = "pipeloom._core")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Costs(pub(crate) pipeloom_core::cost::Costs);

#[pymethods]
impl Costs {
    #[new]
    #[pyo3(signature = (*, forward=None, backward_input=None, backward_weight=None, backward=None,
        overlapped=None, recompute=None, latency=None, bandwidth=None, boundary_bytes=None,
        memory_forward=None, memory_backward_input=None, memory_backward_weight=None,
        memory_recompute=None, static_memory=None),
        text_signature = "(*, forward=1, backward_input=1, backward_weight=1, backward=None, \
        overlapped=None, recompute=None, latency=0, bandwidth=None, boundary_bytes=0, \
        memory_forward=1, memory_backward_input=0, memory_backward_weight=-1, \
        memory_recompute=0, static_memory=0)")]
    #[allow(clippy::too_many_arguments)] // the public signature
    fn new(
        forward: Value<'_, '_>,
        backward_input: Value<'_, '_>,
        backward_weight: Value<'_, '_>,
        backward: Value<'_, '_>,
        overlapped: Value<'_, '_>,
        recompute: Value<'_, '_>,
        latency: Value<'_, '_>,
        bandwidth: Value<'_, '_>,
        boundary_bytes: Value<'_, '_>,
        memory_forward: Value<'_, '_>,
        memory_backward_input: Value<'_, '_>,
        memory_backward_weight: Value<'_, '_>,
        memory_recompute: Value<'_, '_>,
        static_memory: Value<'_, '_>,
    ) -> PyResult<Self> {
        let none = pipeloom_core::cost::Costs::default();
        let or = |name, value: Value<'_, '_>, default| {
            value.map_or(Ok(default), |value| values(name, value))
        };
        let link = |name, value: Value<'_, '_>, default| {
            value.map_or(Ok(default), |value| links(name, value))
        };
        let optional =
            |name, value: Value<'_, '_>| value.map(|value| values(name, value)).transpose();
        let costs = pipeloom_core::cost::Costs {
            forward: or("forward", forward, none.forward)?,
            backward_input: or("backward_input", backward_input, none.backward_input)?,
            backward_weight: or("backward_weight", backward_weight, none.backward_weight)?,
            backward: optional("backward", backward)?,
            overlapped: optional("overlapped", overlapped)?,
            recompute: optional("recompute", recompute)?,
            latency: link("latency", latency, none.latency)?,
            bandwidth: bandwidth
                .map(|value| links("bandwidth", value))
                .transpose()?,
            boundary_bytes: link("boundary_bytes", boundary_bytes, none.boundary_bytes)?,
            memory_forward: or("memory_forward", memory_forward, none.memory_forward)?,
            memory_backward_input: or(
                "memory_backward_input",
                memory_backward_input,
                none.memory_backward_input,
            )?,
            memory_backward_weight: or(
                "memory_backward_weight",
                memory_backward_weight,
                none.memory_backward_weight,
            )?,
            memory_recompute: or("memory_recompute", memory_recompute, none.memory_recompute)?,
            static_memory: or("static_memory", static_memory, none.static_memory)?,
        };
        costs.validate().map_err(to_py)?;
        Ok(Self(costs))
    }

    #[getter]
    fn forward<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.forward)
    }

    #[getter]
    fn backward_input<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.backward_input)
    }

    #[getter]
    fn backward_weight<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.backward_weight)
    }

    #[getter]
    fn backward<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0
            .backward
            .as_ref()
            .map(|value| values_to_py(py, value))
            .transpose()
    }

    #[getter]
    fn overlapped<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0
            .overlapped
            .as_ref()
            .map(|value| values_to_py(py, value))
            .transpose()
    }

    #[getter]
    fn recompute<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0
            .recompute
            .as_ref()
            .map(|value| values_to_py(py, value))
            .transpose()
    }

    #[getter]
    fn latency<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        links_to_py(py, &self.0.latency)
    }

    #[getter]
    fn bandwidth<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.0
            .bandwidth
            .as_ref()
            .map(|value| links_to_py(py, value))
            .transpose()
    }

    #[getter]
    fn boundary_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        links_to_py(py, &self.0.boundary_bytes)
    }

    #[getter]
    fn memory_forward<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.memory_forward)
    }

    #[getter]
    fn memory_backward_input<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.memory_backward_input)
    }

    #[getter]
    fn memory_backward_weight<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.memory_backward_weight)
    }

    #[getter]
    fn memory_recompute<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.memory_recompute)
    }

    #[getter]
    fn static_memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values_to_py(py, &self.0.static_memory)
    }

    fn __getnewargs_ex__<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        Ok((PyTuple::empty(py), self.arguments(py)?))
    }

    /// The costs that a profiled run measured: `pipeloom.profile` knows how.
    #[staticmethod]
    #[pyo3(signature = (profile, /))]
    fn from_profile<'py>(profile: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let module = profile.py().import("pipeloom.profile")?;
        module.call_method1("measured_costs", (profile,))
    }

    /// Only what differs from the defaults.
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let plain = Self(pipeloom_core::cost::Costs::default()).arguments(py)?;
        let mut parts = Vec::new();
        for (name, value) in self.arguments(py)? {
            let default = plain.get_item(&name)?;
            if !default.is_some_and(|default| default.eq(&value).unwrap_or(false)) {
                parts.push(format!("{name}={}", value.repr()?));
            }
        }
        Ok(format!("Costs({})", parts.join(", ")))
    }
}

impl Costs {
    /// The constructor's arguments, as given.
    fn arguments<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        let costs = &self.0;
        let set = |name, value: Option<&Values>| {
            let value = value.map(|value| values_to_py(py, value)).transpose()?;
            dict.set_item(name, value)
        };
        let set_link = |name, value: Option<&Links>| {
            let value = value.map(|value| links_to_py(py, value)).transpose()?;
            dict.set_item(name, value)
        };
        set("forward", Some(&costs.forward))?;
        set("backward_input", Some(&costs.backward_input))?;
        set("backward_weight", Some(&costs.backward_weight))?;
        set("backward", costs.backward.as_ref())?;
        set("overlapped", costs.overlapped.as_ref())?;
        set("recompute", costs.recompute.as_ref())?;
        set_link("latency", Some(&costs.latency))?;
        set_link("bandwidth", costs.bandwidth.as_ref())?;
        set_link("boundary_bytes", Some(&costs.boundary_bytes))?;
        set("memory_forward", Some(&costs.memory_forward))?;
        set("memory_backward_input", Some(&costs.memory_backward_input))?;
        set(
            "memory_backward_weight",
            Some(&costs.memory_backward_weight),
        )?;
        set("memory_recompute", Some(&costs.memory_recompute))?;
        set("static_memory", Some(&costs.static_memory))?;
        Ok(dict)
    }
}

/// A number as Python has it: `int` if whole, else `float`.
pub(crate) fn number_to_py(py: Python<'_>, number: Number) -> PyResult<Bound<'_, PyAny>> {
    Ok(match number {
        Number::Int(value) => value.into_pyobject(py)?.into_any(),
        Number::Float(value) => value.into_pyobject(py)?.into_any(),
    })
}

fn row_to_py<'py>(py: Python<'py>, row: &[Number]) -> PyResult<Bound<'py, PyAny>> {
    let row = row.iter().map(|&number| number_to_py(py, number));
    Ok(PyTuple::new(py, row.collect::<PyResult<Vec<_>>>()?)?.into_any())
}

fn values_to_py<'py>(py: Python<'py>, values: &Values) -> PyResult<Bound<'py, PyAny>> {
    match values {
        Values::All(number) => number_to_py(py, *number),
        Values::Each(row) => row_to_py(py, row),
    }
}

fn links_to_py<'py>(py: Python<'py>, links: &Links) -> PyResult<Bound<'py, PyAny>> {
    match links {
        Links::All(number) => number_to_py(py, *number),
        Links::Each(rows) => {
            let rows = rows.iter().map(|row| row_to_py(py, row));
            Ok(PyTuple::new(py, rows.collect::<PyResult<Vec<_>>>()?)?.into_any())
        }
    }
}

/// An `int` (or what acts as one) stays whole; anything else that is a number is a fraction.
fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Number> {
    let wrong = || {
        let shown = value
            .repr()
            .map_or_else(|_| "?".to_owned(), |text| text.to_string());
        let shown: String = shown.chars().take(60).collect();
        PyTypeError::new_err(format!(
            "{name} must be a number, but got {shown}\nhint: give an int or a float, or a list \
             with one each"
        ))
    };
    if value.is_instance_of::<PyBool>() || value.is_instance_of::<PyString>() {
        return Err(wrong());
    }
    if let Ok(index) = value.call_method0("__index__") {
        return index.extract().map(Number::Int).map_err(|_| {
            let shown: String = index.to_string().chars().take(40).collect();
            to_py(Error::config(
                format!("{name}={shown} is too large: times and memory are held in 62 bits"),
                "use a larger unit",
            ))
        });
    }
    value
        .extract::<f64>()
        .map(Number::Float)
        .map_err(|_| wrong())
}

/// A number as a fraction.
#[allow(clippy::cast_precision_loss)] // a cost: only its ratio to others counts
pub(crate) fn float(name: &str, value: &Bound<'_, PyAny>) -> PyResult<f64> {
    Ok(match number(name, value)? {
        Number::Int(whole) => whole as f64,
        Number::Float(fraction) => fraction,
    })
}

/// A list of numbers as fractions.
pub(crate) fn floats(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    let items = items(value)
        .ok_or_else(|| convert::wrong_type(name, value, "a list of numbers", "list[float]"))?;
    let one = |(at, item)| float(&format!("{name}[{at}]"), item);
    items.iter().enumerate().map(one).collect()
}

/// One number, or a list of them.
pub(crate) fn one_or_several(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    match items(value) {
        None => Ok(vec![float(name, value)?]),
        Some(_) => floats(name, value),
    }
}

/// The items of a list, tuple or array; none for a number.
fn items<'py>(value: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyDict>()
        || value.len().is_err()
    {
        return None;
    }
    value.try_iter().ok()?.collect::<PyResult<_>>().ok()
}

fn row(name: &str, items: &[Bound<'_, PyAny>]) -> PyResult<Vec<Number>> {
    if items.is_empty() {
        let hint = "give a number, or a list with one for each stage or rank";
        return Err(to_py(Error::config(
            format!("{name} is an empty list"),
            hint,
        )));
    }
    let one = |(at, item)| number(&format!("{name}[{at}]"), item);
    items.iter().enumerate().map(one).collect()
}

fn values(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Values> {
    match items(value) {
        None => number(name, value).map(Values::All),
        Some(items) => row(name, &items).map(|row| Values::Each(row.into())),
    }
}

fn links(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Links> {
    let Some(rows) = items(value) else {
        return number(name, value).map(Links::All);
    };
    let one = |(at, item): (usize, &Bound<'_, PyAny>)| {
        let row_name = format!("{name}[{at}]");
        let row_items = items(item).ok_or_else(|| {
            PyTypeError::new_err(format!(
                "{row_name} must be a list of numbers\nhint: give {name} as one number, or as a \
                 row for each source rank with a number for each destination rank"
            ))
        })?;
        row(&row_name, &row_items).map(Into::into)
    };
    let rows = rows
        .iter()
        .enumerate()
        .map(one)
        .collect::<PyResult<Vec<_>>>()?;
    Ok(Links::Each(rows.into()))
}
