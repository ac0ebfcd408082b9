//! What a layout comes to at given weights, and the weights as Python gives them.

use pipeloom_core::error::Error;
use pipeloom_core::layout::balance::{Load as Core, Memory, Weights};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::convert;
use crate::error::to_py;

/// The cost of each part of a layout, in the caller's unit.
#[pyclass(frozen, module = "pipeloom._core")]
pub(crate) struct Load(pub(crate) Core);

#[pymethods]
impl Load {
    /// Cost of each stage of one replica.
    #[getter]
    fn stages(&self) -> Vec<f64> {
        self.0.stages.clone()
    }

    /// Cost of each rank.
    #[getter]
    fn ranks(&self) -> Vec<f64> {
        self.0.ranks.clone()
    }

    /// The busiest rank.
    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.0
    }

    /// Cost of the busiest rank.
    #[getter]
    fn bottleneck(&self) -> f64 {
        self.0.ranks[self.0.rank.index()]
    }

    /// Cost of the busiest rank of `Layout.balanced`.
    #[getter]
    fn best(&self) -> Option<f64> {
        self.0.best
    }

    /// Whether no split has a smaller bottleneck than `best`.
    #[getter]
    fn proved(&self) -> bool {
        self.0.proved
    }

    /// What the busiest rank holds, and what limits it.
    #[getter]
    fn why(&self) -> &str {
        &self.0.why
    }

    fn __repr__(&self) -> String {
        format!(
            "Load(bottleneck={}, rank={})",
            self.bottleneck(),
            self.0.rank
        )
    }
}

/// What the parts of a model weigh, as `Layout.balanced` and `Layout.load` take it.
pub(crate) struct Given<'a, 'py> {
    pub(crate) layer_costs: Vec<f64>,
    pub(crate) embedding_cost: f64,
    pub(crate) loss_cost: f64,
    pub(crate) mtp_costs: Vec<f64>,
    pub(crate) no_cut_after: Vec<Bound<'py, PyAny>>,
    pub(crate) allow_empty: bool,
    pub(crate) memory_limit: Option<&'a Bound<'py, PyAny>>,
    pub(crate) layer_memory: Option<Vec<f64>>,
    pub(crate) embedding_memory: f64,
    pub(crate) loss_memory: f64,
    pub(crate) mtp_memory: Option<Vec<f64>>,
}

impl Given<'_, '_> {
    pub(crate) fn weights(self) -> PyResult<Weights> {
        let layers = self.no_cut_after.iter();
        let no_cut_after = layers.map(|layer| convert::count("no_cut_after", layer));
        let memory = match (self.memory_limit, self.layer_memory) {
            (None, _) => None,
            (Some(_), None) => {
                return Err(to_py(Error::config(
                    "memory_limit is given without layer_memory",
                    "give layer_memory the memory of each layer",
                )));
            }
            (Some(limit), Some(layers)) => Some(Memory {
                layers,
                embedding: self.embedding_memory,
                loss: self.loss_memory,
                mtp: self.mtp_memory.unwrap_or_default(),
                limits: limits(limit)?,
            }),
        };
        Ok(Weights {
            layers: self.layer_costs,
            embedding: self.embedding_cost,
            loss: self.loss_cost,
            mtp: self.mtp_costs,
            no_cut_after: no_cut_after.collect::<PyResult<_>>()?,
            allow_empty: self.allow_empty,
            memory,
        })
    }
}

/// One limit, or one for each rank.
fn limits(limit: &Bound<'_, PyAny>) -> PyResult<Vec<f64>> {
    let one = limit.extract::<f64>().map(|limit| vec![limit]);
    one.or_else(|_| limit.extract()).map_err(|_| {
        PyTypeError::new_err(
            "memory_limit must be a number or one for each rank\nhint: in the unit of layer_memory",
        )
    })
}
