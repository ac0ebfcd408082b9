//! Python bindings of pipeloom-core: the export list.

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
