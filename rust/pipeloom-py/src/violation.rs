//! Class `Violation`: one broken rule.

use pyo3::prelude::*;

/// One broken rule of a plan.
#[pyclass(frozen, eq, skip_from_py_object, module = "pipeloom._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) pipeloom_core::check::Violation);

#[pymethods]
impl Violation {
    #[getter]
    fn rule(&self) -> &'static str {
        self.0.rule
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.0.rank.0
    }

    #[getter]
    fn position(&self) -> u64 {
        self.0.position
    }

    #[getter]
    fn op(&self) -> &str {
        &self.0.op
    }

    #[getter]
    fn message(&self) -> &str {
        &self.0.message
    }

    #[getter]
    fn hint(&self) -> &str {
        &self.0.hint
    }

    fn __repr__(&self) -> String {
        let v = &self.0;
        format!(
            "Violation(rule={:?}, rank={}, position={}, op={:?}, message={:?}, hint={:?})",
            v.rule, v.rank, v.position, v.op, v.message, v.hint
        )
    }
}
