//! The planner of pipeloom: pipeline-parallel schedules as data.
//!
//! | concept | where |
//! |---|---|
//! | ranks, stages, units: index types | [`ids`] |
//! | one entry of a rank's order | [`op`] |
//! | the pipeline's shape and placement | [`shape`] |
//! | which layers each stage builds | [`layout`] |
//! | a rank's order in closed form | [`order`] |
//! | all ranks' orders | [`plan`] |
//! | a rank's order as arrays | [`columns`] |
//! | the rules that make plans | [`schedules`] |
//! | sends and receives for any plan | [`lower`] |
//! | a plan as text, CSV and saved file | [`text`] |
//! | what transfers may do to the program | [`semantics`] |
//! | which forwards are run again | [`recompute`] |
//! | pictures: text, SVG, Chrome trace | [`render`] |
//! | what ops cost | [`cost`] |
//! | which rules a plan breaks | [`check`] |
//! | when each op runs, and its memory | [`simulate`] |
//! | what is wrong with bad input | [`error`] |
//!
//! No Python, no IO, no clock, no randomness: the same input gives the same plan everywhere.
//!
//! ```
//! use pipeloom_core::{ids::Rank, schedules};
//!
//! let plan = schedules::plan(&schedules::Request::new("interleaved_1f1b", 4, Some(2), 8))?;
//! assert_eq!(plan.num_warmup(Rank(0)), 10);
//! assert_eq!(plan.op(Rank(3), 0)?.to_string(), "3F0");
//! # Ok::<(), pipeloom_core::error::Error>(())
//! ```

mod actions;
pub mod check;
pub mod columns;
pub mod cost;
pub(crate) mod engine;
pub mod error;
pub mod ids;
pub mod layout;
pub mod lower;
pub mod op;
pub mod order;
pub mod p2p_order;
pub mod plan;
mod rank_ops;
pub mod recompute;
pub mod render;
pub mod schedules;
pub mod semantics;
pub mod shape;
pub mod simulate;
pub mod text;
pub mod violation;
