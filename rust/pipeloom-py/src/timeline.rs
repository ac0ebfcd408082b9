//! Class `Timeline`: when each op of a plan runs.

use numpy::IntoPyArray;
use pipeloom_core::cost::Number;
use pipeloom_core::render::Drawing;
use pipeloom_core::render::svg::{SvgOptions, svg};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::convert::{self, Again};
use crate::costs::{Costs, number_to_py};
use crate::detach::detach;
use crate::error::to_py;
use crate::plan::Plan;

/// When each op of a plan runs, in the unit of the costs.
#[pyclass(frozen, module = "pipeloom._core")]
pub(crate) struct Timeline(
    pub(crate) pipeloom_core::simulate::Timeline,
    pub(crate) Given,
);

/// What `Plan.simulate` was given, beside the plan.
pub(crate) struct Given {
    pub(crate) costs: Py<Costs>,
    pub(crate) link_contention: bool,
}

#[pymethods]
impl Timeline {
    #[getter]
    fn plan(&self) -> Plan {
        Plan(self.0.plan().clone())
    }

    #[getter]
    fn costs(&self, py: Python<'_>) -> Py<Costs> {
        self.1.costs.clone_ref(py)
    }

    #[getter]
    fn link_contention(&self) -> bool {
        self.1.link_contention
    }

    /// Simulating again gives the same: a pickle holds the plan and the costs, not the times.
    fn __reduce__<'py>(&self, py: Python<'py>) -> Again<'py, (Py<Costs>, &'static str, bool)> {
        let simulate = self.plan().into_bound_py_any(py)?.getattr("simulate")?;
        let arguments = (self.costs(py), self.semantics(), self.link_contention());
        Ok((simulate, arguments))
    }

    #[getter]
    fn semantics(&self) -> &'static str {
        self.0.semantics().name()
    }

    #[getter]
    fn makespan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        number_to_py(py, self.0.ticks().time(self.0.makespan()))
    }

    #[getter]
    fn span<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        number_to_py(py, self.0.ticks().time(self.0.span()))
    }

    #[getter]
    fn bubble_ratio(&self) -> f64 {
        self.0.bubble_ratio()
    }

    #[getter]
    fn bubble_span(&self) -> f64 {
        self.0.bubble_span()
    }

    #[pyo3(signature = (rank))]
    fn bubble(&self, rank: &Bound<'_, PyAny>) -> PyResult<f64> {
        self.0.bubble(convert::rank(rank)?).map_err(to_py)
    }

    #[pyo3(signature = (rank))]
    fn bubble_parts<'py>(
        &self,
        py: Python<'py>,
        rank: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let rank = convert::rank(rank)?;
        let parts = detach(py, || self.0.bubbles(rank))?;
        let dict = PyDict::new(py);
        for (name, ticks) in [
            ("warmup", parts.warmup),
            ("steady", parts.steady),
            ("cooldown", parts.cooldown),
            ("transfer", parts.transfer),
        ] {
            dict.set_item(name, number_to_py(py, self.0.ticks().time(ticks))?)?;
        }
        Ok(dict)
    }

    #[pyo3(signature = (rank))]
    fn work<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let rank = convert::rank(rank)?;
        self.0.plan().require_rank(rank).map_err(to_py)?;
        number_to_py(py, self.0.ticks().time(self.0.work()[rank.index()]))
    }

    #[pyo3(signature = (rank))]
    fn start<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let rank = convert::rank(rank)?;
        let times = detach(py, || self.0.start(rank))?;
        Ok(column(py, times, self.0.ticks().time_bits))
    }

    #[pyo3(signature = (rank))]
    fn end<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let rank = convert::rank(rank)?;
        let times = detach(py, || self.0.end(rank))?;
        Ok(column(py, times, self.0.ticks().time_bits))
    }

    #[pyo3(signature = (rank))]
    fn peak_memory<'py>(
        &self,
        py: Python<'py>,
        rank: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let rank = convert::rank(rank)?;
        self.0.plan().require_rank(rank).map_err(to_py)?;
        number_to_py(
            py,
            self.0.ticks().memory(self.0.peak_memory()[rank.index()]),
        )
    }

    #[pyo3(signature = (rank))]
    fn memory<'py>(
        &self,
        py: Python<'py>,
        rank: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let rank = convert::rank(rank)?;
        let curve = detach(py, || self.0.memory(rank))?;
        Ok(column(py, curve, self.0.ticks().memory_bits))
    }

    #[getter]
    fn critical_path(&self, py: Python<'_>) -> PyResult<Vec<(u32, u64)>> {
        let path = detach(py, || Ok(self.0.critical_path()))?;
        Ok(path.into_iter().map(|(rank, at)| (rank.0, at)).collect())
    }

    #[getter]
    fn bounds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let bounds = detach(py, || Ok(self.0.bounds()))?;
        let dict = PyDict::new(py);
        for bound in bounds.all {
            dict.set_item(
                bound.name,
                number_to_py(py, self.0.ticks().time(bound.ticks))?,
            )?;
        }
        Ok(dict)
    }

    #[getter]
    fn lower_bound<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bounds = detach(py, || Ok(self.0.bounds()))?;
        number_to_py(py, self.0.ticks().time(bounds.binding().ticks))
    }

    #[getter]
    fn span_bound<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let bounds = detach(py, || Ok(self.0.bounds()))?;
        number_to_py(py, self.0.ticks().time(bounds.span))
    }

    #[getter]
    fn binding_bound(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(detach(py, || Ok(self.0.bounds()))?.binding().name)
    }

    #[getter]
    fn gap(&self, py: Python<'_>) -> PyResult<f64> {
        detach(py, || Ok(self.0.gap()))
    }

    /// The picture in a notebook, with memory; None if there are too many ops.
    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let options = SvgOptions {
            memory: true,
            ..SvgOptions::default()
        };
        detach(py, || {
            let drawing = Drawing::predicted(&self.0)?;
            Ok(svg(&drawing, &options).ok())
        })
    }

    fn __repr__(&self) -> String {
        let time = |ticks| self.0.ticks().time(ticks);
        format!(
            "Timeline(makespan={}, span={}, bubble_ratio={:.4}, semantics={:?})",
            time(self.0.makespan()),
            time(self.0.span()),
            self.0.bubble_ratio(),
            self.0.semantics().name()
        )
    }
}

/// Ticks as an array in the caller's unit: `int64`, or `float64` if the unit was split.
fn column(py: Python<'_>, ticks: Vec<i64>, bits: u32) -> Bound<'_, PyAny> {
    if bits == 0 {
        return ticks.into_pyarray(py).into_any();
    }
    let unit = |ticks| match Number::of_ticks(ticks, bits) {
        Number::Float(value) => value,
        Number::Int(_) => f64::NAN, // never: fractions are floats
    };
    let units: Vec<f64> = ticks.into_iter().map(unit).collect();
    units.into_pyarray(py).into_any()
}
