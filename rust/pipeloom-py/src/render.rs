//! Class `Drawing`: pictures of a plan with times.

use std::collections::BTreeMap;

use numpy::PyReadonlyArray1;
use pipeloom_core::error::Error;
use pipeloom_core::ids::Rank;
use pipeloom_core::render::grid::{GridOptions, grid};
use pipeloom_core::render::svg::{SvgOptions, stack, svg};
use pipeloom_core::render::trace::{TraceOptions, trace};
use pipeloom_core::render::waits::{self, Awaited};
use pipeloom_core::render::{self, Half, Window, boxes, page, palette};
use pyo3::prelude::*;

use crate::convert;
use crate::detach::detach;
use crate::error::to_py;
use crate::plan::Plan;
use crate::timeline::Timeline;

/// A plan with a start and an end for each op; see `pipeloom.plot`.
#[pyclass(frozen, module = "pipeloom._core")]
pub(crate) struct Drawing(render::Drawing);

/// A stretch of time in the caller's unit, either end open, and of ranks.
type Part = (Option<f64>, Option<f64>, Option<(u32, u32)>);

#[pymethods]
impl Drawing {
    /// The drawing of measured times, in integer ticks.
    #[new]
    #[pyo3(signature = (plan, start, end, *, ticks_per_unit=1, note=""))]
    fn new(
        py: Python<'_>,
        plan: &Plan,
        start: Vec<PyReadonlyArray1<'_, i64>>,
        end: Vec<PyReadonlyArray1<'_, i64>>,
        ticks_per_unit: i64,
        note: &str,
    ) -> PyResult<Self> {
        let owned = |columns: &[PyReadonlyArray1<'_, i64>]| -> Vec<Vec<i64>> {
            columns
                .iter()
                .map(|column| column.as_array().to_vec())
                .collect()
        };
        let (start, end) = (owned(&start), owned(&end));
        detach(py, || {
            let drawing = render::Drawing::new(&plan.0, &start, &end, ticks_per_unit)?;
            Ok(drawing.with_note(note))
        })
        .map(Self)
    }

    /// The drawing of a simulated plan.
    #[staticmethod]
    #[pyo3(signature = (timeline, /, *, critical_path=false, note=""))]
    fn predicted(
        py: Python<'_>,
        timeline: &Timeline,
        critical_path: bool,
        note: &str,
    ) -> PyResult<Self> {
        let drawing = detach(py, || {
            let drawing = render::Drawing::predicted(&timeline.0)?.with_note(note);
            Ok(if critical_path {
                drawing.with_critical_path(&timeline.0)
            } else {
                drawing
            })
        })?;
        Ok(Self(drawing))
    }

    #[pyo3(signature = (part, *, width=None, color=false, memory=false, critical_path=false))]
    fn grid(
        &self,
        py: Python<'_>,
        part: Part,
        width: Option<&Bound<'_, PyAny>>,
        color: bool,
        memory: bool,
        critical_path: bool,
    ) -> PyResult<String> {
        let width = width
            .map(|width| convert::count("width", width))
            .transpose()?;
        let options = GridOptions {
            window: self.window(part)?,
            width: width.map(|width| width as usize),
            color,
            memory,
            critical_path,
        };
        detach(py, || grid(&self.0, &options))
    }

    #[pyo3(signature = (part, *, width=None, memory=false, critical_path=false))]
    fn svg(
        &self,
        py: Python<'_>,
        part: Part,
        width: Option<&Bound<'_, PyAny>>,
        memory: bool,
        critical_path: bool,
    ) -> PyResult<String> {
        let width = width
            .map(|width| convert::count("width", width))
            .transpose()?;
        let options = SvgOptions {
            window: self.window(part)?,
            width,
            memory,
            critical_path,
        };
        detach(py, || svg(&self.0, &options))
    }

    /// Several pictures above each other, to one scale of time.
    #[staticmethod]
    #[pyo3(signature = (drawings, /, *, width=None, memory=false, critical_path=false))]
    fn stack(
        py: Python<'_>,
        drawings: Vec<PyRef<'_, Self>>,
        width: Option<&Bound<'_, PyAny>>,
        memory: bool,
        critical_path: bool,
    ) -> PyResult<String> {
        let options = SvgOptions {
            window: Window::default(),
            width: width
                .map(|width| convert::count("width", width))
                .transpose()?,
            memory,
            critical_path,
        };
        let drawings: Vec<&render::Drawing> = drawings.iter().map(|it| &it.0).collect();
        detach(py, || stack(&drawings, &options))
    }

    /// The drawing as JSON, for the interactive page.
    fn page_data(&self, py: Python<'_>) -> PyResult<String> {
        detach(py, || page::data(&self.0))
    }

    /// (time, memory) at each change of a rank's memory, from the first op on; empty if unknown.
    #[allow(clippy::cast_precision_loss)] // for a picture
    #[pyo3(signature = (rank, /))]
    fn memory_steps(&self, rank: &Bound<'_, PyAny>) -> PyResult<Vec<(f64, f64)>> {
        let rank = convert::rank(rank)?;
        let Some(lane) = self.0.lanes.get(rank.index()) else {
            return Err(to_py(Error::config(
                format!("rank {rank} is out of range for pp={}", self.0.lanes.len()),
                "count ranks from 0",
            )));
        };
        if lane.peak_memory.is_none() {
            return Ok(Vec::new());
        }
        let memory = |ticks: i64| ticks as f64 / self.0.memory_ticks_per_unit as f64;
        let first = (self.0.begin(), lane.base_memory);
        let steps = std::iter::once(first).chain(lane.memory_steps());
        Ok(steps
            .map(|(at, level)| (self.time(at), memory(level)))
            .collect())
    }

    /// The picture in a notebook.
    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<String> {
        detach(py, || svg(&self.0, &SvgOptions::default()))
    }

    #[pyo3(signature = (part, *, microseconds_per_unit))]
    fn trace(
        &self,
        py: Python<'_>,
        part: Part,
        microseconds_per_unit: &Bound<'_, PyAny>,
    ) -> PyResult<String> {
        let microseconds_per_unit = convert::count("microseconds_per_unit", microseconds_per_unit)?;
        let options = TraceOptions {
            window: self.window(part)?,
            microseconds_per_unit,
        };
        detach(py, || trace(&self.0, &options))
    }

    /// What pictures outside the core need: (rank, label, fill, ink, start, end, half,
    /// critical, recompute) of each box; half is 0 for a whole row, 1 for its upper and 2 for its lower half.
    #[pyo3(signature = (part, /, *, critical_path=false))]
    fn boxes(&self, py: Python<'_>, part: Part, critical_path: bool) -> PyResult<Vec<BoxRow>> {
        let window = self.window(part)?;
        let boxes = detach(py, || boxes::boxes(&self.0, &window, critical_path))?;
        let row = |painted: boxes::PaintedBox| {
            let half = match painted.half {
                None => 0,
                Some(Half::Upper) => 1,
                Some(Half::Lower) => 2,
            };
            let (fill, ink) = (painted.fill.to_string(), painted.fill.ink().to_string());
            let (start, end) = (self.time(painted.start), self.time(painted.end));
            (
                painted.rank.0,
                painted.label,
                fill,
                ink,
                start,
                end,
                half,
                painted.critical,
                painted.recompute,
            )
        };
        Ok(boxes.into_iter().map(row).collect())
    }

    /// (rank, fill, start, end, whether it sends) of each transfer that takes time.
    #[pyo3(signature = (part, /))]
    fn transfers(&self, py: Python<'_>, part: Part) -> PyResult<Vec<TransferRow>> {
        let window = self.window(part)?;
        let transfers = detach(py, || boxes::transfers(&self.0, &window))?;
        let row = |(rank, fill, start, end, sends): boxes::PaintedTransfer| {
            let (start, end) = (self.time(start), self.time(end));
            (rank.0, fill.to_string(), start, end, sends)
        };
        Ok(transfers.into_iter().map(row).collect())
    }

    /// The idle stretches inside a part: (rank, start, end, reason, (op, its rank)); the last
    /// is none unless the rank waits for an op.
    #[pyo3(signature = (part, /))]
    fn waits(&self, py: Python<'_>, part: Part) -> PyResult<Vec<WaitRow>> {
        let window = self.window(part)?;
        let waits = detach(py, || waits::waits(&self.0, &window))?;
        let row = |(rank, wait)| self.wait_row(rank, wait);
        Ok(waits.into_iter().map(row).collect())
    }

    /// Each rank's longest wait inside a part, as `waits` has it; none for a rank without.
    #[pyo3(signature = (part, /))]
    fn longest_waits(&self, py: Python<'_>, part: Part) -> PyResult<Vec<(u32, Option<WaitRow>)>> {
        let window = self.window(part)?;
        let waits = detach(py, || waits::longest(&self.0, &window))?;
        let row = |(rank, wait): (Rank, Option<waits::Wait>)| {
            (rank.0, wait.map(|wait| self.wait_row(rank, wait)))
        };
        Ok(waits.into_iter().map(row).collect())
    }

    /// Times that the makespan can't go below: (time, its text, what it means, whether it is the
    /// busiest rank's work).
    #[getter]
    fn limits(&self) -> Vec<(f64, String, &'static str, bool)> {
        let limits = self.0.limits().into_iter();
        limits
            .map(|it| {
                (
                    self.time(it.ticks),
                    it.text.clone(),
                    it.meaning(),
                    it.of_work,
                )
            })
            .collect()
    }

    /// Each rank's idle share of the makespan, in percent.
    #[getter]
    fn idle_percent(&self) -> Vec<i64> {
        let ranks = self.0.shape.ranks();
        ranks.map(|rank| self.0.idle_percent(rank)).collect()
    }

    /// Each rank's peak memory as text; empty if unknown.
    #[getter]
    fn memory_peaks(&self) -> Vec<String> {
        let peaks = self.0.lanes.iter().filter_map(|lane| lane.peak_memory);
        peaks.map(|peak| self.0.memory_text(peak)).collect()
    }

    /// Whether a critical path is known.
    #[getter]
    fn has_critical_path(&self) -> bool {
        !self.0.critical_path.is_empty()
    }

    /// What the memory curves count in.
    #[getter]
    fn memory_meaning(&self) -> String {
        self.0.memory_meaning()
    }

    /// (name, fills from dark to light) of each kind of op in a part, and what the numbers count.
    #[pyo3(signature = (part, /))]
    fn legend(&self, py: Python<'_>, part: Part) -> PyResult<Vec<(String, Vec<String>)>> {
        let window = self.window(part)?;
        let rows = detach(py, || boxes::legend(&self.0, &window))?;
        let named = |fills: Vec<palette::Color>| fills.iter().map(ToString::to_string).collect();
        let row = |(name, fills)| (name, named(fills));
        Ok(rows.into_iter().map(row).collect())
    }

    /// What the dashes of a recomputed op mean; empty if none is.
    #[getter]
    fn recomputed(&self) -> &'static str {
        if self.0.recomputes() {
            render::RECOMPUTED
        } else {
            ""
        }
    }

    /// Colours of what is no op.
    #[classattr]
    fn paper() -> BTreeMap<&'static str, String> {
        let colors = [
            ("idle", palette::BUBBLE),
            ("memory", palette::MEMORY_FILL),
            ("memory line", palette::MEMORY),
        ];
        colors
            .into_iter()
            .map(|(name, color)| (name, color.to_string()))
            .collect()
    }

    /// Number of ranks.
    #[getter]
    fn pp(&self) -> u32 {
        self.0.shape.pp()
    }

    /// Schedule, shape, makespan, bubble, peak memory.
    #[getter]
    fn headline(&self) -> String {
        self.0.headline()
    }

    /// First and last time.
    #[getter]
    fn extent(&self) -> (f64, f64) {
        (self.time(self.0.begin()), self.time(self.0.end()))
    }

    fn __repr__(&self) -> String {
        format!("Drawing({:?})", self.0.headline())
    }
}

/// One box of a picture.
type BoxRow = (u32, String, String, String, f64, f64, u8, bool, bool);
/// One transfer of a picture.
type TransferRow = (u32, String, f64, f64, bool);
/// One idle stretch.
type WaitRow = (u32, f64, f64, String, Option<(String, u32)>);

impl Drawing {
    /// Ticks in the caller's unit.
    #[allow(clippy::cast_precision_loss)] // for a picture
    fn time(&self, ticks: i64) -> f64 {
        ticks as f64 / self.0.ticks_per_unit as f64
    }

    fn wait_row(&self, rank: Rank, wait: waits::Wait) -> WaitRow {
        let awaited = match wait.awaited {
            Awaited::Op { rank, op } => Some((format!("{}{}", op.kind, op.unit), rank.0)),
            Awaited::Done | Awaited::Unknown => None,
        };
        let (start, end) = (self.time(wait.start), self.time(wait.end));
        (rank.0, start, end, wait.reason(), awaited)
    }

    fn window(&self, (from, to, ranks): Part) -> PyResult<Window> {
        Ok(Window {
            from: from.map(|time| self.ticks(time)).transpose()?,
            to: to.map(|time| self.ticks(time)).transpose()?,
            ranks,
        })
    }

    /// A time in ticks.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)] // checked below
    fn ticks(&self, time: f64) -> PyResult<i64> {
        let ticks = (time * self.0.ticks_per_unit as f64).round();
        if ticks.abs() < 9.0e18 {
            return Ok(ticks as i64);
        }
        Err(to_py(Error::config(
            format!("window has the time {time:e}, which is no time of this plan"),
            "give two times in the unit of the costs, or None for an open end",
        )))
    }
}
