//! Class `Violation`: one broken rule.

use pipeloom_core::check;
use pyo3::prelude::*;

/// One broken rule of a plan.
#[pyclass(frozen, eq, get_all, skip_from_py_object, module = "pipeloom._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    rule: String,
    rank: u32,
    position: u64,
    op: String,
    message: String,
    hint: String,
}

impl From<check::Violation> for Violation {
    fn from(violation: check::Violation) -> Self {
        Self {
            rule: violation.rule.to_owned(),
            rank: violation.rank.0,
            position: violation.position,
            op: violation.op,
            message: violation.message,
            hint: violation.hint,
        }
    }
}

#[pymethods]
impl Violation {
    // Pickle rebuilds violations through this, so that a CheckError can leave its process.
    #[new]
    fn new(
        rule: String,
        rank: u32,
        position: u64,
        op: String,
        message: String,
        hint: String,
    ) -> Self {
        Self {
            rule,
            rank,
            position,
            op,
            message,
            hint,
        }
    }

    fn __getnewargs__(&self) -> (&str, u32, u64, &str, &str, &str) {
        (
            &self.rule,
            self.rank,
            self.position,
            &self.op,
            &self.message,
            &self.hint,
        )
    }

    fn __repr__(&self) -> String {
        format!(
            "Violation(rule={:?}, rank={}, position={}, op={:?}, message={:?}, hint={:?})",
            self.rule, self.rank, self.position, self.op, self.message, self.hint
        )
    }
}
