//! Python bindings of pipeloom-core: the export list.

mod convert;
mod costs;
mod detach;
mod error;
mod layout;
mod load;
mod plan;
mod plan_text;
mod planning;
mod render;
mod report;
mod timeline;
mod violation;

use pyo3::prelude::*;

// Columns are large and short-lived. The system allocator gives their pages back at each free,
// and faulting them in again costs five times what filling them does.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::costs::Costs;
    #[pymodule_export]
    use crate::error::{CheckError, ConfigError, LayoutError, ParseError, PlanError, SearchError};
    #[pymodule_export]
    use crate::layout::Layout;
    #[pymodule_export]
    use crate::load::Load;
    #[pymodule_export]
    use crate::plan::Plan;
    #[pymodule_export]
    use crate::plan_text::{p2p_order, plan_from_saved};
    #[pymodule_export]
    use crate::planning::{legal_num_microbatches, plan, schedules_table};
    #[pymodule_export]
    use crate::render::Drawing;
    #[pymodule_export]
    use crate::report::Report;
    #[pymodule_export]
    use crate::timeline::Timeline;
    #[pymodule_export]
    use crate::violation::Violation;

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    /// `release` or `debug`; benchmarks refuse the latter.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const build_profile: &str = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
}
