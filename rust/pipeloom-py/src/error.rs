//! Exceptions, and the one match from core errors to them.

use pipeloom_core::error::{Error, ErrorKind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::{create_exception, types::PyTuple};

create_exception!(
    pipeloom,
    PlanError,
    PyValueError,
    "Base class of every error of the planner."
);
create_exception!(
    pipeloom,
    ConfigError,
    PlanError,
    "An argument is out of range or contradicts another."
);
create_exception!(
    pipeloom,
    LayoutError,
    PlanError,
    "A layout loses, repeats or misplaces a layer, or its text is wrong."
);
create_exception!(
    pipeloom,
    ParseError,
    PlanError,
    "A text, CSV or saved plan can't be read."
);
create_exception!(
    pipeloom,
    CheckError,
    PlanError,
    "A plan breaks rules; `violations` lists all of them."
);
create_exception!(
    pipeloom,
    SearchError,
    PlanError,
    "A search found nothing within its limits."
);

/// The exception of a core error.
pub(crate) fn to_py(error: Error) -> PyErr {
    let text = error.to_string();
    match error.kind {
        ErrorKind::Config => ConfigError::new_err(text),
        ErrorKind::Layout => LayoutError::new_err(text),
        ErrorKind::Parse => ParseError::new_err(text),
        ErrorKind::Search => SearchError::new_err(text),
        ErrorKind::Check => with_violations(CheckError::new_err(text), error),
    }
}

fn with_violations(exception: PyErr, error: Error) -> PyErr {
    Python::attach(|py| {
        let violations: Vec<crate::violation::Violation> = error
            .violations
            .into_iter()
            .map(crate::violation::Violation::from)
            .collect();
        let set = PyTuple::new(
            py,
            violations
                .into_iter()
                .map(|v| Py::new(py, v))
                .collect::<PyResult<Vec<_>>>()?,
        )
        .and_then(|tuple| exception.value(py).setattr("violations", tuple));
        PyResult::Ok(if let Err(failed) = set {
            failed
        } else {
            exception
        })
    })
    .unwrap_or_else(|failed| failed)
}
