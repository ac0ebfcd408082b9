//! Class `Layout`.

use pipeloom_core::ids::{Chunk, Rank};
use pipeloom_core::layout::megatron::Megatron;
use pipeloom_core::layout::rules::Expected;
use pipeloom_core::layout::{Layout as Core, StageContent};
use pipeloom_core::shape::Placement;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::convert::{self, Value, optional};
use crate::detach::detach;
use crate::error::to_py;
use crate::load::{self, Given, Load};

/// Which layers each chunk of each rank builds.
#[pyclass(frozen, eq, hash, module = "pipeloom._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Layout(pub(crate) Core);

impl Layout {
    fn find(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<StageContent> {
        let (rank, chunk) = place(rank, vp_stage)?;
        self.0.at(rank, chunk).map_err(to_py)
    }
}

#[pymethods]
impl Layout {
    // Pickle rebuilds a layout through this; people use `from_string`, which is the same.
    #[new]
    #[pyo3(signature = (text, *, pp, vp=None, num_layers=None, mtp_num_layers=None,
        placement=None),
        text_signature = "(text, *, pp, vp=None, num_layers=None, mtp_num_layers=None, \
        placement='loop')")]
    fn new(
        py: Python<'_>,
        text: Value<'_, '_>,
        pp: Value<'_, '_>,
        vp: Option<Value<'_, '_>>,
        num_layers: Option<Value<'_, '_>>,
        mtp_num_layers: Option<Value<'_, '_>>,
        placement: Option<Value<'_, '_>>,
    ) -> PyResult<Self> {
        let (pp, vp) = (convert::count("pp", pp)?, optional("vp", vp, 1)?);
        let (expected, placement) = (expected(num_layers, mtp_num_layers)?, named(placement)?);
        let text = convert::text("text", text)?;
        detach(py, || Core::from_text(&text, pp, vp, expected, placement)).map(Self)
    }

    /// Reads the layout language; `vp` is inferred from the number of stages.
    #[staticmethod]
    #[pyo3(signature = (text, *, pp, vp=None, num_layers=None, mtp_num_layers=None,
        placement=None),
        text_signature = "(text, *, pp, vp=None, num_layers=None, mtp_num_layers=None, \
        placement='loop')")]
    fn from_string(
        py: Python<'_>,
        text: Value<'_, '_>,
        pp: Value<'_, '_>,
        vp: Option<Value<'_, '_>>,
        num_layers: Option<Value<'_, '_>>,
        mtp_num_layers: Option<Value<'_, '_>>,
        placement: Option<Value<'_, '_>>,
    ) -> PyResult<Self> {
        Self::new(py, text, pp, vp, num_layers, mtp_num_layers, placement)
    }

    /// From the names of the layers of each stage, in stage order.
    #[staticmethod]
    #[pyo3(signature = (names, *, pp, vp=None, num_layers=None, mtp_num_layers=None,
        placement=None),
        text_signature = "(names, *, pp, vp=None, num_layers=None, mtp_num_layers=None, \
        placement='loop')")]
    fn from_names(
        py: Python<'_>,
        names: Value<'_, '_>,
        pp: Value<'_, '_>,
        vp: Option<Value<'_, '_>>,
        num_layers: Option<Value<'_, '_>>,
        mtp_num_layers: Option<Value<'_, '_>>,
        placement: Option<Value<'_, '_>>,
    ) -> PyResult<Self> {
        let names = name_lists(names)?;
        let (pp, vp) = (convert::count("pp", pp)?, optional("vp", vp, 1)?);
        let (expected, placement) = (expected(num_layers, mtp_num_layers)?, named(placement)?);
        detach(py, || Core::from_names(&names, pp, vp, expected, placement)).map(Self)
    }

    /// As many layers on each stage; the remainder goes one each to the first stages.
    #[staticmethod]
    #[pyo3(signature = (num_layers, *, pp, vp=None, placement=None),
        text_signature = "(num_layers, *, pp, vp=None, placement='loop')")]
    fn even(
        py: Python<'_>,
        num_layers: Value<'_, '_>,
        pp: Value<'_, '_>,
        vp: Option<Value<'_, '_>>,
        placement: Option<Value<'_, '_>>,
    ) -> PyResult<Self> {
        let num_layers = convert::count("num_layers", num_layers)?;
        let pp = convert::count("pp", pp)?;
        let vp = optional("vp", vp, 1)?.unwrap_or(1);
        let placement = named(placement)?;
        detach(py, || Core::even(num_layers, pp, vp, placement)).map(Self)
    }

    /// Megatron-core's split arguments.
    #[staticmethod]
    #[pyo3(signature = (num_layers, *, pp, vp=None, num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None, account_for_embedding_in_pipeline_split=None,
        account_for_loss_in_pipeline_split=None, mtp_num_layers=None, placement=None),
        text_signature = "(num_layers, *, pp, vp=None, num_layers_in_first_pipeline_stage=None, \
        num_layers_in_last_pipeline_stage=None, \
        account_for_embedding_in_pipeline_split=False, \
        account_for_loss_in_pipeline_split=False, mtp_num_layers=None, \
        placement='loop')")]
    #[allow(clippy::too_many_arguments)] // Megatron's arguments
    fn megatron(
        py: Python<'_>,
        num_layers: Value<'_, '_>,
        pp: Value<'_, '_>,
        vp: Option<Value<'_, '_>>,
        num_layers_in_first_pipeline_stage: Option<Value<'_, '_>>,
        num_layers_in_last_pipeline_stage: Option<Value<'_, '_>>,
        account_for_embedding_in_pipeline_split: Option<Value<'_, '_>>,
        account_for_loss_in_pipeline_split: Option<Value<'_, '_>>,
        mtp_num_layers: Option<Value<'_, '_>>,
        placement: Option<Value<'_, '_>>,
    ) -> PyResult<Self> {
        let (first, last) = (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
        );
        let split = Megatron {
            num_layers: convert::count("num_layers", num_layers)?,
            pp: convert::count("pp", pp)?,
            vp: optional("vp", vp, 1)?,
            num_layers_in_first_pipeline_stage: optional(
                first,
                num_layers_in_first_pipeline_stage,
                1,
            )?,
            num_layers_in_last_pipeline_stage: optional(
                last,
                num_layers_in_last_pipeline_stage,
                1,
            )?,
            account_for_embedding_in_pipeline_split: convert::flag(
                "account_for_embedding_in_pipeline_split",
                account_for_embedding_in_pipeline_split,
                false,
            )?,
            account_for_loss_in_pipeline_split: convert::flag(
                "account_for_loss_in_pipeline_split",
                account_for_loss_in_pipeline_split,
                false,
            )?,
            mtp_num_layers: optional("mtp_num_layers", mtp_num_layers, 0)?,
            placement: named(placement)?,
        };
        detach(py, || split.layout()).map(Self)
    }

    /// The split whose busiest rank has as little as can be, then its slowest stage.
    #[staticmethod]
    #[pyo3(signature = (layer_costs, *, pp, vp=None, embedding_cost=None, loss_cost=None,
        mtp_costs=None, no_cut_after=None, shared_layers=None, allow_empty=None,
        memory_limit=None, layer_memory=None, embedding_memory=None, loss_memory=None,
        mtp_memory=None, placement=None),
        text_signature = "(layer_costs, *, pp, vp=None, embedding_cost=0.0, loss_cost=0.0, \
        mtp_costs=(), no_cut_after=(), shared_layers=None, allow_empty=False, \
        memory_limit=None, layer_memory=None, embedding_memory=0.0, loss_memory=0.0, \
        mtp_memory=None, placement='loop')")]
    #[allow(clippy::too_many_arguments)] // the public signature
    fn balanced(
        py: Python<'_>,
        layer_costs: Value<'_, '_>,
        pp: Value<'_, '_>,
        vp: Option<Value<'_, '_>>,
        embedding_cost: Option<Value<'_, '_>>,
        loss_cost: Option<Value<'_, '_>>,
        mtp_costs: Option<Value<'_, '_>>,
        no_cut_after: Option<Value<'_, '_>>,
        shared_layers: Option<Value<'_, '_>>,
        allow_empty: Option<Value<'_, '_>>,
        memory_limit: Option<Value<'_, '_>>,
        layer_memory: Option<Value<'_, '_>>,
        embedding_memory: Option<Value<'_, '_>>,
        loss_memory: Option<Value<'_, '_>>,
        mtp_memory: Option<Value<'_, '_>>,
        placement: Option<Value<'_, '_>>,
    ) -> PyResult<Self> {
        let (pp, vp) = (convert::count("pp", pp)?, optional("vp", vp, 1)?);
        let (vp, placement) = (vp.unwrap_or(1), named(placement)?);
        let given = Given {
            layer_costs,
            embedding_cost,
            loss_cost,
            mtp_costs,
            no_cut_after,
            shared_layers,
            allow_empty,
            memory_limit,
            layer_memory,
            embedding_memory,
            loss_memory,
            mtp_memory,
        };
        let weights = given.weights()?;
        detach(py, || Core::balanced(&weights, pp, vp, placement)).map(Self)
    }

    /// What this layout comes to at given costs, and why.
    #[pyo3(signature = (layer_costs, *, embedding_cost=None, loss_cost=None, mtp_costs=None,
        no_cut_after=None, shared_layers=None, allow_empty=None, memory_limit=None,
        layer_memory=None, embedding_memory=None, loss_memory=None, mtp_memory=None),
        text_signature = "($self, layer_costs, *, embedding_cost=0.0, loss_cost=0.0, \
        mtp_costs=(), no_cut_after=(), shared_layers=None, allow_empty=False, \
        memory_limit=None, layer_memory=None, embedding_memory=0.0, loss_memory=0.0, \
        mtp_memory=None)")]
    #[allow(clippy::too_many_arguments)] // those of `balanced`
    fn load(
        &self,
        py: Python<'_>,
        layer_costs: Value<'_, '_>,
        embedding_cost: Option<Value<'_, '_>>,
        loss_cost: Option<Value<'_, '_>>,
        mtp_costs: Option<Value<'_, '_>>,
        no_cut_after: Option<Value<'_, '_>>,
        shared_layers: Option<Value<'_, '_>>,
        allow_empty: Option<Value<'_, '_>>,
        memory_limit: Option<Value<'_, '_>>,
        layer_memory: Option<Value<'_, '_>>,
        embedding_memory: Option<Value<'_, '_>>,
        loss_memory: Option<Value<'_, '_>>,
        mtp_memory: Option<Value<'_, '_>>,
    ) -> PyResult<Load> {
        let given = Given {
            layer_costs,
            embedding_cost,
            loss_cost,
            mtp_costs,
            no_cut_after,
            shared_layers,
            allow_empty,
            memory_limit,
            layer_memory,
            embedding_memory,
            loss_memory,
            mtp_memory,
        };
        let weights = given.weights()?;
        detach(py, || self.0.load(&weights)).map(Load)
    }

    /// This layout, if it keeps these layers on one stage each.
    #[pyo3(signature = (*, no_cut_after=None, shared_layers=None),
        text_signature = "($self, *, no_cut_after=(), shared_layers=None)")]
    fn check(
        slf: Bound<'_, Self>,
        no_cut_after: Option<Value<'_, '_>>,
        shared_layers: Option<Value<'_, '_>>,
    ) -> PyResult<Py<Self>> {
        let together = load::together(no_cut_after, shared_layers)?;
        slf.get().0.require_together(&together).map_err(to_py)?;
        Ok(slf.unbind())
    }

    /// From the number of layers of each chunk of each rank: `counts[rank][chunk]`.
    #[staticmethod]
    #[pyo3(signature = (counts, *, placement=None),
        text_signature = "(counts, *, placement='loop')")]
    fn from_counts(
        py: Python<'_>,
        counts: Value<'_, '_>,
        placement: Option<Value<'_, '_>>,
    ) -> PyResult<Self> {
        let (counts, placement) = (count_lists(counts)?, named(placement)?);
        detach(py, || Core::from_counts(&counts, placement)).map(Self)
    }

    /// The 1-based global numbers of the decoder layers.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn layers(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<Vec<u32>> {
        Ok(self.find(rank, vp_stage)?.layers().collect())
    }

    /// The number of decoder layers.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn num_layers(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<u32> {
        Ok(self.find(rank, vp_stage)?.num_layers)
    }

    /// The number of decoder layers in the stages before.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn offset(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<u32> {
        Ok(self.find(rank, vp_stage)?.offset)
    }

    /// The number of MTP layers.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn num_mtp_layers(
        &self,
        rank: Value<'_, '_>,
        vp_stage: Option<Value<'_, '_>>,
    ) -> PyResult<u32> {
        Ok(self.find(rank, vp_stage)?.num_mtp_layers)
    }

    /// The number of MTP layers in the stages before.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn mtp_offset(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<u32> {
        Ok(self.find(rank, vp_stage)?.mtp_offset)
    }

    /// Whether the chunk holds the embedding.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn pre_process(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<bool> {
        Ok(self.find(rank, vp_stage)?.pre_process)
    }

    /// Whether the chunk holds final norm, output layer and loss.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn post_process(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<bool> {
        Ok(self.find(rank, vp_stage)?.post_process)
    }

    /// The global stage of the chunk.
    #[pyo3(signature = (rank, vp_stage=None))]
    fn stage(&self, rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<u32> {
        let (rank, chunk) = place(rank, vp_stage)?;
        let stage = self.0.stage_at(rank, chunk).map_err(to_py)?;
        Ok(stage.0)
    }

    /// The ranks that hold a copy of the embedding, sorted.
    #[pyo3(signature = (*, tied=None), text_signature = "($self, *, tied=False)")]
    fn embedding_ranks(&self, tied: Option<Value<'_, '_>>) -> PyResult<Vec<u32>> {
        let ranks = self.0.embedding_ranks(convert::flag("tied", tied, false)?);
        Ok(ranks.into_iter().map(|rank| rank.0).collect())
    }

    /// Number of ranks.
    #[getter]
    fn pp(&self) -> u32 {
        self.0.pp()
    }

    /// Number of chunks a rank.
    #[getter]
    fn vp(&self) -> u32 {
        self.0.vp()
    }

    /// The placement's name.
    #[getter]
    fn placement(&self) -> &'static str {
        self.0.placement().name()
    }

    /// Number of decoder layers of the model.
    #[getter]
    fn num_layers_total(&self) -> u32 {
        self.0.num_layers()
    }

    /// Number of MTP layers of the model.
    #[getter]
    fn num_mtp_layers_total(&self) -> u32 {
        self.0.num_mtp_layers()
    }

    /// The layout language; `from_string` reads it back.
    #[pyo3(name = "to_string")]
    fn text(&self) -> String {
        self.0.to_string()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        let (text, pp) = (&self.0, self.0.pp());
        match self.0.placement() {
            Placement::Loop => format!("Layout.from_string(\"{text}\", pp={pp})"),
            other => format!("Layout.from_string(\"{text}\", pp={pp}, placement=\"{other}\")"),
        }
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<((String,), Bound<'py, PyDict>)> {
        let keywords = PyDict::new(py);
        keywords.set_item("pp", self.0.pp())?;
        keywords.set_item("placement", self.placement())?;
        Ok(((self.0.to_string(),), keywords))
    }
}

fn named(placement: Option<Value<'_, '_>>) -> PyResult<Placement> {
    Ok(convert::placement(placement)?.unwrap_or(Placement::Loop))
}

fn expected(
    num_layers: Option<Value<'_, '_>>,
    mtp_num_layers: Option<Value<'_, '_>>,
) -> PyResult<Expected> {
    Ok(Expected {
        num_layers: optional("num_layers", num_layers, 1)?,
        mtp_num_layers: optional("mtp_num_layers", mtp_num_layers, 0)?,
    })
}

fn place(rank: Value<'_, '_>, vp_stage: Option<Value<'_, '_>>) -> PyResult<(Rank, Option<Chunk>)> {
    let chunk = optional("vp_stage", vp_stage, 0)?.map(Chunk);
    Ok((convert::rank(rank)?, chunk))
}

/// `counts[rank][chunk]`, or `counts[rank]` for one chunk a rank.
fn count_lists(counts: Value<'_, '_>) -> PyResult<Vec<Vec<u32>>> {
    let whole = "counts must be a list with a list (or a number) for each rank";
    items(counts, whole)?
        .into_iter()
        .enumerate()
        .map(|(rank, row)| {
            let name = format!("counts[{rank}]");
            let Ok(row) = items(&row, &name) else {
                return Ok(vec![convert::integer(&name, &row, 0, u32::MAX)?]);
            };
            row.iter()
                .enumerate()
                .map(|(chunk, value)| {
                    convert::integer(&format!("{name}[{chunk}]"), value, 0, u32::MAX)
                })
                .collect()
        })
        .collect()
}

/// The names of each stage's layers, as strings or as members of an enum with those names.
fn name_lists(names: Value<'_, '_>) -> PyResult<Vec<Vec<String>>> {
    items(names, "names must be a list of lists, one a stage")?
        .into_iter()
        .enumerate()
        .map(|(s, stage)| {
            items(&stage, &format!("names[{s}] must be a list of names"))?
                .into_iter()
                .enumerate()
                .map(|(i, name)| {
                    name.getattr("name")
                        .unwrap_or(name)
                        .extract::<String>()
                        .map_err(|_| {
                            PyTypeError::new_err(format!(
                                "names[{s}][{i}] is not a name\nhint: give it as a str"
                            ))
                        })
                })
                .collect()
        })
        .collect()
}

/// The items of any iterable but a string or a dict.
pub(crate) fn items<'py>(
    value: &Bound<'py, PyAny>,
    what: &str,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let wrong = || PyTypeError::new_err(format!("{what}\nhint: for a text use Layout.from_string"));
    if value.is_instance_of::<PyString>()
        || value.is_instance_of::<PyBytes>()
        || value.is_instance_of::<PyDict>()
    {
        return Err(wrong());
    }
    value.try_iter().map_err(|_| wrong())?.collect()
}
