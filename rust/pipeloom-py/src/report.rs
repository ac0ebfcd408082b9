//! Class `Report`: what checking a plan found.

use pipeloom_core::check;
use pipeloom_core::error::{Error, Result};
use pipeloom_core::semantics::Semantics;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::convert::{self, Again};
use crate::detach::detach;
use crate::error::to_py;
use crate::plan::Plan;
use crate::violation::Violation;

/// What checking a plan found.
#[pyclass(frozen, module = "pipeloom._core")]
pub(crate) struct Report(check::Report);

#[pymethods]
impl Report {
    #[getter]
    fn plan(&self) -> Plan {
        Plan(self.0.plan().clone())
    }

    #[getter]
    fn ok(&self) -> bool {
        self.0.ok()
    }

    #[getter]
    fn violations(&self) -> Vec<Violation> {
        self.0
            .violations
            .iter()
            .cloned()
            .map(Violation::from)
            .collect()
    }

    #[getter]
    fn unpromised(&self) -> Vec<Violation> {
        self.0
            .unpromised
            .iter()
            .cloned()
            .map(Violation::from)
            .collect()
    }

    #[getter]
    fn progress<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for progress in &self.0.progress {
            dict.set_item(progress.semantics.name(), progress.progresses)?;
        }
        Ok(dict)
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    /// A report is what `Plan.check` returned, so its plan keeps all rules: checking again gives it.
    fn __reduce__<'py>(&self, py: Python<'py>) -> Again<'py, (Bound<'py, PyAny>,)> {
        let asked = &self.0.progress;
        let names = || asked.iter().map(|progress| progress.semantics.name());
        let semantics = if asked.len() == Semantics::ALL.len() {
            "all".into_bound_py_any(py)?
        } else {
            names().collect::<Vec<_>>().into_bound_py_any(py)?
        };
        let check = self.plan().into_bound_py_any(py)?.getattr("check")?;
        Ok((check, (semantics,)))
    }

    fn __repr__(&self) -> String {
        let (broken, unpromised) = (self.0.violations.len(), self.0.unpromised.len());
        let ok = if self.0.ok() { "True" } else { "False" };
        format!("Report(ok={ok}, violations={broken}, unpromised={unpromised})")
    }
}

/// What `semantics` of `Plan.check` asks for.
enum Asked {
    Promised,
    All,
    These(Vec<Semantics>),
}

fn asked(semantics: Option<&Bound<'_, PyAny>>) -> PyResult<Asked> {
    let Some(given) = semantics else {
        return Ok(Asked::Promised);
    };
    if given.is_instance_of::<PyString>() {
        return match convert::text("semantics", given)?.as_str() {
            "all" => Ok(Asked::All),
            name => Ok(Asked::These(vec![
                Semantics::from_name(name).map_err(to_py)?,
            ])),
        };
    }
    let names: Vec<String> = given.extract().map_err(|_| {
        convert::wrong_type(
            "semantics",
            given,
            "a name, a list of names, \"all\" or None",
            "one of them, such as \"rendezvous\"",
        )
    })?;
    if names.is_empty() {
        return Err(to_py(Error::config(
            "semantics is an empty list",
            "name one or more, or leave it out for those that the plan promises",
        )));
    }
    let names = names
        .iter()
        .map(|name| Semantics::from_name(name).map_err(to_py));
    names.collect::<PyResult<_>>().map(Asked::These)
}

/// `Plan.check`.
pub(crate) fn check_plan(
    py: Python<'_>,
    plan: &pipeloom_core::plan::Plan,
    semantics: Option<&Bound<'_, PyAny>>,
    max_buffers: Option<&Bound<'_, PyAny>>,
) -> PyResult<Report> {
    let asked = asked(semantics)?;
    let max_buffers = convert::optional("max_buffers", max_buffers, 0)?;
    detach(py, || report(plan, asked, max_buffers)).map(Report)
}

fn report(
    plan: &pipeloom_core::plan::Plan,
    asked: Asked,
    max_buffers: Option<u32>,
) -> Result<check::Report> {
    let report = match asked {
        Asked::Promised => check::check(plan, None),
        Asked::All => check::check(plan, Some(&Semantics::ALL)),
        Asked::These(these) => check::check_strictly(plan, &these)?,
    };
    match max_buffers {
        Some(most) => report.within_buffers(most)?.into_result(),
        None => report.into_result(),
    }
}
