//! What a layout comes to at given weights, and the weights as Python gives them.

use pipeloom_core::error::Error;
use pipeloom_core::layout::balance::{Load as Core, Memory, Weights};
use pipeloom_core::layout::together::Together;
use pyo3::prelude::*;

use crate::convert::{self, Value};
use crate::costs::{float, floats, one_or_several};
use crate::error::to_py;
use crate::layout::items;

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
    pub(crate) layer_costs: Value<'a, 'py>,
    pub(crate) embedding_cost: Option<Value<'a, 'py>>,
    pub(crate) loss_cost: Option<Value<'a, 'py>>,
    pub(crate) mtp_costs: Option<Value<'a, 'py>>,
    pub(crate) no_cut_after: Option<Value<'a, 'py>>,
    pub(crate) shared_layers: Option<Value<'a, 'py>>,
    pub(crate) allow_empty: Option<Value<'a, 'py>>,
    pub(crate) memory_limit: Option<Value<'a, 'py>>,
    pub(crate) layer_memory: Option<Value<'a, 'py>>,
    pub(crate) embedding_memory: Option<Value<'a, 'py>>,
    pub(crate) loss_memory: Option<Value<'a, 'py>>,
    pub(crate) mtp_memory: Option<Value<'a, 'py>>,
}

impl Given<'_, '_> {
    pub(crate) fn weights(&self) -> PyResult<Weights> {
        Ok(Weights {
            layers: floats("layer_costs", self.layer_costs)?,
            embedding: one("embedding_cost", self.embedding_cost)?,
            loss: one("loss_cost", self.loss_cost)?,
            mtp: several("mtp_costs", self.mtp_costs)?,
            together: together(self.no_cut_after, self.shared_layers)?,
            allow_empty: convert::flag("allow_empty", self.allow_empty, false)?,
            memory: self.memory()?,
        })
    }

    fn memory(&self) -> PyResult<Option<Memory>> {
        let Some(limit) = self.memory_limit else {
            let (embedding, loss) = ("embedding_memory", "loss_memory");
            let given = [
                ("layer_memory", self.layer_memory.is_some()),
                (embedding, one(embedding, self.embedding_memory)? != 0.0),
                (loss, one(loss, self.loss_memory)? != 0.0),
                ("mtp_memory", self.mtp_memory.is_some()),
            ];
            let unused = given.into_iter().find(|(_, given)| *given);
            return unused.map_or(Ok(None), |(name, _)| {
                Err(to_py(Error::config(
                    format!("{name} is given without memory_limit"),
                    format!("give memory_limit the most memory of a rank, or leave {name} out"),
                )))
            });
        };
        let Some(layers) = self.layer_memory else {
            return Err(to_py(Error::config(
                "memory_limit is given without layer_memory",
                "give layer_memory the memory of each layer",
            )));
        };
        Ok(Some(Memory {
            layers: floats("layer_memory", layers)?,
            embedding: one("embedding_memory", self.embedding_memory)?,
            loss: one("loss_memory", self.loss_memory)?,
            mtp: several("mtp_memory", self.mtp_memory)?,
            limits: one_or_several("memory_limit", limit)?,
        }))
    }
}

/// A number; none given: 0.
fn one(name: &str, value: Option<Value<'_, '_>>) -> PyResult<f64> {
    value.map_or(Ok(0.0), |value| float(name, value))
}

/// A list of numbers; none given: empty.
fn several(name: &str, value: Option<Value<'_, '_>>) -> PyResult<Vec<f64>> {
    value.map_or(Ok(Vec::new()), |value| floats(name, value))
}

/// Layers that must stand on one stage.
pub(crate) fn together(
    no_cut_after: Option<Value<'_, '_>>,
    shared_layers: Option<Value<'_, '_>>,
) -> PyResult<Together> {
    Ok(Together {
        no_cut_after: no_cut_after.map_or(Ok(Vec::new()), layer_numbers)?,
        shared: shared_layers.map_or(Ok(Vec::new()), layer_pairs)?,
    })
}

/// A dict of layer numbers.
fn layer_pairs(shared: Value<'_, '_>) -> PyResult<Vec<(u32, u32)>> {
    let wrong = || {
        let what = "a dict from each layer to the layer that it shares with";
        convert::wrong_type("shared_layers", shared, what, "dict[int, int]")
    };
    let pairs = shared.call_method0("items").map_err(|_| wrong())?;
    let pairs: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)> = pairs
        .try_iter()
        .and_then(|pairs| pairs.map(|pair| pair?.extract()).collect())
        .map_err(|_| wrong())?;
    let pair = |(layer, source): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let layer = convert::count("shared_layers key", &layer)?;
        let source = convert::count(&format!("shared_layers[{layer}]"), &source)?;
        Ok((layer, source))
    };
    pairs.into_iter().map(pair).collect()
}

/// The numbers of layers, from 1.
fn layer_numbers(layers: Value<'_, '_>) -> PyResult<Vec<u32>> {
    let found = items(layers, "no_cut_after").map_err(|_| {
        convert::wrong_type(
            "no_cut_after",
            layers,
            "a list of layer numbers",
            "list[int]",
        )
    })?;
    found
        .into_iter()
        .map(|layer| convert::count("no_cut_after", &layer))
        .collect()
}
