//! Any bytes as a CSV are a plan or an error with a hint; a plan's own CSV gives the plan again, and
//! it lowers or says why it does not.
//!
//! `RUSTC_BOOTSTRAP=1 cargo fuzz run --fuzz-dir rust/fuzz csv -- -max_total_time=60`

#![no_main]

use libfuzzer_sys::fuzz_target;
use pipeloom_core::lower;
use pipeloom_core::semantics::Style;
use pipeloom_core::text::csv::{self, Form};

fuzz_target!(|bytes: &[u8]| {
    let plan = match csv::from_csv(&String::from_utf8_lossy(bytes)) {
        Ok(plan) => plan,
        Err(error) => {
            assert!(!error.hint.is_empty(), "{error}");
            return;
        }
    };
    let form = if plan.style().is_some() { Form::ComputeAndTransfers } else { Form::Compute };
    let text = csv::to_csv(&plan, form).expect("the plan has what the form asks for");
    assert_eq!(csv::from_csv(&text).expect("it was read before"), plan);
    for style in Style::ALL {
        let lowered = lower::lower(&plan, style, 1).expect("a plan that was read progresses");
        let text = csv::to_csv(&lowered, Form::ComputeAndTransfers).expect("it has transfers");
        let again = csv::from_csv(&text).map(|plan| plan.total_len());
        assert_eq!(again, Ok(lowered.total_len()), "{style:?}");
    }
});
