//! Class `Plan`.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use numpy::{Element, IntoPyArray, PyUntypedArray};
use pipeloom_core::columns::Columns;
use pipeloom_core::semantics::Semantics;
use pipeloom_core::simulate::simulate;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::convert::{self, Value};
use crate::costs::Costs;
use crate::detach::detach;
use crate::error::to_py;
use crate::plan_text;
use crate::timeline::{Given, Timeline};

/// All ranks' orders of one step.
#[pyclass(frozen, module = "pipeloom._core")]
pub(crate) struct Plan(pub(crate) pipeloom_core::plan::Plan);

#[pymethods]
impl Plan {
    #[getter]
    fn schedule(&self) -> &str {
        self.0.schedule()
    }

    #[getter]
    fn pp(&self) -> u32 {
        self.0.shape().pp()
    }

    #[getter]
    fn vp(&self) -> u32 {
        self.0.shape().vp()
    }

    #[getter]
    fn num_microbatches(&self) -> u32 {
        self.0.shape().num_microbatches()
    }

    #[getter]
    fn num_seq_pieces(&self) -> u32 {
        self.0.shape().num_seq_pieces()
    }

    #[getter]
    fn num_stages(&self) -> u32 {
        self.0.shape().num_stages()
    }

    #[getter]
    fn num_replicas(&self) -> u32 {
        self.0.shape().num_replicas()
    }

    #[getter]
    fn placement(&self) -> &'static str {
        self.0.shape().placement().name()
    }

    #[getter]
    fn forward_only(&self) -> bool {
        self.0.forward_only()
    }

    #[getter]
    fn microbatch_group_size(&self) -> Option<u32> {
        self.0.group_size()
    }

    #[getter]
    fn semantics(&self) -> Vec<&'static str> {
        self.0.promises().iter().map(|s| s.name()).collect()
    }

    #[getter]
    fn style(&self) -> Option<&'static str> {
        self.0.style().map(pipeloom_core::semantics::Style::name)
    }

    #[getter]
    fn num_ops(&self, py: Python<'_>) -> PyResult<u64> {
        detach(py, || Ok(self.0.total_len()))
    }

    /// (rank, chunk) of each stage.
    #[getter]
    fn stages(&self, py: Python<'_>) -> PyResult<Vec<(u32, u32)>> {
        let shape = self.0.shape();
        let stages = (0..shape.num_stages()).map(pipeloom_core::ids::Stage);
        let places = stages.map(|stage| (shape.rank_of(stage).0, shape.chunk_of(stage).0));
        detach(py, || Ok(places.collect()))
    }

    #[pyo3(signature = (rank))]
    fn num_ops_of(&self, rank: &Bound<'_, PyAny>) -> PyResult<u64> {
        let rank = convert::rank(rank)?;
        self.0.require_rank(rank).map_err(to_py)?;
        Ok(self.0.len(rank))
    }

    #[pyo3(signature = (rank))]
    fn num_warmup(&self, rank: &Bound<'_, PyAny>) -> PyResult<u32> {
        let rank = convert::rank(rank)?;
        self.0.require_rank(rank).map_err(to_py)?;
        Ok(self.0.num_warmup(rank))
    }

    #[pyo3(signature = (k, forward=None), text_signature = "($self, k, forward=True)")]
    fn chunk_id(&self, k: Value<'_, '_>, forward: Option<Value<'_, '_>>) -> PyResult<u32> {
        let forward = convert::flag("forward", forward, true)?;
        let k = convert::integer("k", k, 0, u32::MAX)?;
        self.0
            .virtual_microbatch(k, forward)
            .map(|found| found.0.0)
            .map_err(to_py)
    }

    #[pyo3(signature = (k, forward=None), text_signature = "($self, k, forward=True)")]
    fn microbatch_id(&self, k: Value<'_, '_>, forward: Option<Value<'_, '_>>) -> PyResult<u32> {
        let forward = convert::flag("forward", forward, true)?;
        let k = convert::integer("k", k, 0, u32::MAX)?;
        let found = self.0.virtual_microbatch(k, forward).map_err(to_py)?;
        Ok(self.0.shape().split_unit(found.1).0)
    }

    #[pyo3(signature = (rank))]
    fn recompute_mask<'py>(
        &self,
        py: Python<'py>,
        rank: &Bound<'_, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let rank = convert::rank(rank)?;
        self.0.require_rank(rank).map_err(to_py)?;
        let mask = detach(py, || Ok(self.0.recompute_mask(rank)))?;
        Ok(mask.map(|mask| mask.into_pyarray(py).into_any()))
    }

    #[pyo3(signature = (rank))]
    fn ops(&self, py: Python<'_>, rank: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let rank = convert::rank(rank)?;
        self.0.require_rank(rank).map_err(to_py)?;
        detach(py, || Ok(self.0.actions(rank)))
    }

    #[pyo3(signature = (rank, i))]
    fn op(&self, rank: &Bound<'_, PyAny>, i: &Bound<'_, PyAny>) -> PyResult<String> {
        let rank = convert::rank(rank)?;
        let i = convert::integer("i", i, 0, u32::MAX)?;
        self.0.action(rank, u64::from(i)).map_err(to_py)
    }

    #[pyo3(signature = (rank, op))]
    fn position(&self, rank: &Bound<'_, PyAny>, op: &Bound<'_, PyAny>) -> PyResult<u64> {
        let rank = convert::rank(rank)?;
        self.0.action_of(rank, convert::op(op)?).map_err(to_py)
    }

    #[pyo3(signature = (rank))]
    fn columns<'py>(
        &self,
        py: Python<'py>,
        rank: &Bound<'_, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let rank = convert::rank(rank)?;
        self.0.require_rank(rank).map_err(to_py)?;
        let columns = detach(py, || Ok(self.0.columns(rank)))?;
        columns_to_dict(py, columns)
    }

    #[pyo3(signature = (semantics=None, max_buffers=None))]
    fn check(
        &self,
        py: Python<'_>,
        semantics: Option<&Bound<'_, PyAny>>,
        max_buffers: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<crate::report::Report> {
        crate::report::check_plan(py, &self.0, semantics, max_buffers)
    }

    #[pyo3(
        signature = (costs, semantics=None, link_contention=None),
        text_signature = "($self, costs, semantics='buffered', link_contention=False)"
    )]
    fn simulate(
        &self,
        py: Python<'_>,
        costs: Value<'_, '_>,
        semantics: Option<Value<'_, '_>>,
        link_contention: Option<Value<'_, '_>>,
    ) -> PyResult<Timeline> {
        let costs = costs.cast::<Costs>().map_err(|_| {
            convert::wrong_type("costs", costs, "pipeloom.Costs", "pipeloom.Costs(...)")
        })?;
        let semantics = match semantics {
            None => Semantics::Buffered,
            Some(name) => {
                Semantics::from_name(&convert::text("semantics", name)?).map_err(to_py)?
            }
        };
        let link_contention = convert::flag("link_contention", link_contention, false)?;
        let given = Given {
            costs: costs.clone().unbind(),
            link_contention,
        };
        let costs = &costs.get().0;
        detach(py, || simulate(&self.0, costs, semantics, link_contention))
            .map(|timeline| Timeline(timeline, given))
    }

    #[pyo3(
        signature = (p2p=None, backend=None, prefetch=None),
        text_signature = "($self, p2p='auto', backend=None, prefetch=1)"
    )]
    fn lower(
        &self,
        py: Python<'_>,
        p2p: Option<Value<'_, '_>>,
        backend: Option<Value<'_, '_>>,
        prefetch: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        plan_text::lower(py, &self.0, p2p, backend, prefetch)
    }

    fn without_transfers(&self, py: Python<'_>) -> PyResult<Self> {
        detach(py, || Ok(self.0.without_transfers())).map(Self)
    }

    #[pyo3(signature = (rank, channel))]
    fn buffers(
        &self,
        py: Python<'_>,
        rank: &Bound<'_, PyAny>,
        channel: &Bound<'_, PyAny>,
    ) -> PyResult<u32> {
        plan_text::buffers(py, &self.0, convert::rank(rank)?, channel)
    }

    #[pyo3(signature = (rank, channel))]
    fn buffer_lifetimes(
        &self,
        py: Python<'_>,
        rank: &Bound<'_, PyAny>,
        channel: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<(usize, Option<usize>)>> {
        plan_text::buffer_lifetimes(py, &self.0, convert::rank(rank)?, channel)
    }

    #[pyo3(
        signature = (path=None, comms=None),
        text_signature = "($self, path=None, comms=False)"
    )]
    fn to_csv(
        &self,
        py: Python<'_>,
        path: Option<Value<'_, '_>>,
        comms: Option<Value<'_, '_>>,
    ) -> PyResult<Option<String>> {
        let path = path.map(|path| convert::path("path", path)).transpose()?;
        let comms = convert::flag("comms", comms, false)?;
        plan_text::to_csv(py, &self.0, path, comms)
    }

    #[staticmethod]
    #[pyo3(signature = (text_or_path))]
    fn from_csv(py: Python<'_>, text_or_path: &Bound<'_, PyAny>) -> PyResult<Self> {
        plan_text::from_csv(py, text_or_path)
    }

    /// (rank, column, text) of the actions of a CSV that the plan has no use for.
    #[getter]
    fn dropped_actions(&self) -> Vec<(u32, usize, String)> {
        let dropped = self.0.dropped().iter();
        dropped
            .map(|action| (action.rank.0, action.column, action.action.clone()))
            .collect()
    }

    #[pyo3(signature = (path))]
    fn save(&self, py: Python<'_>, path: Value<'_, '_>) -> PyResult<()> {
        plan_text::save(py, &self.0, &convert::path("path", path)?)
    }

    #[staticmethod]
    #[pyo3(signature = (path))]
    fn load(py: Python<'_>, path: Value<'_, '_>) -> PyResult<Self> {
        plan_text::load(py, &convert::path("path", path)?)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        let read = py.import("pipeloom._core")?.getattr("plan_from_saved")?;
        let text = detach(py, || Ok(pipeloom_core::text::saved::to_saved(&self.0)))?;
        Ok((read, (text,)))
    }

    fn __eq__(&self, py: Python<'_>, other: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(other) = other.cast::<Self>() else {
            return Ok(false);
        };
        let other = other.get();
        detach(py, || Ok(self.0 == other.0))
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<u64> {
        // Fixed keys: the same plan hashes alike in every process.
        let mut hasher = DefaultHasher::new();
        detach(py, || {
            self.0.hash(&mut hasher);
            Ok(hasher.finish())
        })
    }

    fn __str__(&self, py: Python<'_>) -> PyResult<String> {
        detach(py, || Ok(pipeloom_core::render::grid::of_plan(&self.0)))
    }

    /// The picture in a notebook, at unit costs; None where `print` shows no grid.
    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        detach(py, || Ok(pipeloom_core::render::svg::of_plan(&self.0)))
    }

    fn __repr__(&self) -> String {
        self.0.describe()
    }
}

fn columns_to_dict(py: Python<'_>, columns: Columns) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    let len = columns.kind.len();
    dict.set_item(pyo3::intern!(py, "kind"), columns.kind.into_pyarray(py))?;
    dict.set_item(pyo3::intern!(py, "stage"), columns.stage.into_pyarray(py))?;
    dict.set_item(pyo3::intern!(py, "chunk"), columns.chunk.into_pyarray(py))?;
    dict.set_item(
        pyo3::intern!(py, "microbatch"),
        columns.microbatch.into_pyarray(py),
    )?;
    let piece = or_zeros(py, columns.piece, len)?;
    dict.set_item(pyo3::intern!(py, "piece"), piece)?;
    let recompute = or_zeros(py, columns.recompute, len)?;
    dict.set_item(pyo3::intern!(py, "recompute"), recompute)?;
    let optional: [(&Bound<'_, PyString>, Option<Vec<u32>>); 3] = [
        (pyo3::intern!(py, "pair"), columns.pair),
        (pyo3::intern!(py, "peer"), columns.peer),
        (pyo3::intern!(py, "group"), columns.group),
    ];
    for (name, column) in optional {
        if let Some(column) = column {
            dict.set_item(name, column.into_pyarray(py))?;
        }
    }
    Ok(dict)
}

/// A column as an array; one that is all zeros takes no memory: a read-only array of stride 0.
fn or_zeros<T: Element>(
    py: Python<'_>,
    column: Option<Vec<T>>,
    len: usize,
) -> PyResult<Bound<'_, PyAny>> {
    if let Some(column) = column {
        Ok(column.into_pyarray(py).into_any())
    } else {
        let zero = PyBytes::new(py, &[0; 4]);
        let new = py.get_type::<PyUntypedArray>();
        new.call1((len, numpy::dtype::<T>(py), zero, 0, (0,)))
    }
}
