//! The one door into the core for anything that is not O(1): the interpreter is released, and a
//! core error becomes an exception.

use pipeloom_core::error::Result;
use pyo3::marker::Ungil;
use pyo3::prelude::*;

use crate::error::to_py;

/// Runs a core call without the interpreter.
pub(crate) fn detach<T: Ungil + Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T> + Ungil + Send,
) -> PyResult<T> {
    py.detach(call).map_err(to_py)
}
