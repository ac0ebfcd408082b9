//! Small cases for the fuzz targets (bytes choose) and for long runs by seed (a generator chooses),
//! and what must hold in each.

use pipeloom_core::check;
use pipeloom_core::cost::{Costs, Links, Number, Values};
use pipeloom_core::ids::Rank;
use pipeloom_core::lower;
use pipeloom_core::plan::Plan;
use pipeloom_core::schedules::{self, FAMILIES, Request};
use pipeloom_core::semantics::{Semantics, Style};
use pipeloom_core::simulate::simulate;
use pipeloom_core::text::csv::{self, Form};

/// What became of a case.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The requests were refused with hints, or the plan has no CSV.
    NoPlan,
    /// What was done to the plan's text was refused with a hint.
    Refused,
    /// All that must hold does.
    Held,
}

/// Where choices come from: bytes while there are any, then a generator.
pub(crate) struct Source<'a> {
    bytes: &'a [u8],
    state: u64,
}

impl<'a> Source<'a> {
    #[allow(dead_code)] // the fuzz targets'
    pub(crate) fn of_bytes(bytes: &'a [u8]) -> Self {
        Self { bytes, state: 0 }
    }

    #[allow(dead_code)] // the long runs'
    pub(crate) fn of_seed(seed: u64) -> Self {
        Self {
            bytes: &[],
            state: seed,
        }
    }

    /// A number below `n`, which is at most 256.
    fn below(&mut self, n: usize) -> usize {
        if let Some((&byte, rest)) = self.bytes.split_first() {
            self.bytes = rest;
            return usize::from(byte) % n;
        }
        // SplitMix64
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::from((z >> 56) as u8) * n / 256
    }

    fn number(&mut self, low: u32, high: u32) -> u32 {
        low + u32::try_from(self.below((high - low + 1) as usize)).unwrap_or(0)
    }

    fn maybe(&mut self, low: u32, high: u32) -> Option<u32> {
        (self.below(3) == 0).then(|| self.number(low, high))
    }

    fn request(&mut self) -> Request {
        let family = FAMILIES[self.below(FAMILIES.len())];
        let (pp, m) = (self.number(1, 5), self.number(1, 9));
        let mut request = Request::new(family.name, pp, None, m);
        request.vp = self.maybe(1, 4);
        if self.below(4) > 0 {
            return request;
        }
        request.microbatch_group_size = self.maybe(1, 9);
        request.num_seq_pieces = self.maybe(1, 3).unwrap_or(1);
        request.reverse_backward = self.maybe(0, 1).map(|value| value == 1);
        request.forward_only = self.below(4) == 0;
        request.extra_warmup = self.maybe(0, 1).unwrap_or(0);
        request.partial_checkpoints = self.maybe(0, 4);
        request
    }

    /// A plan of some family; none: a few requests in a row were refused, each with a hint.
    fn plan(&mut self) -> Option<Plan> {
        (0..4).find_map(|_| match schedules::plan(&self.request()) {
            Ok(plan) => Some(plan),
            Err(error) => {
                assert!(!error.hint.is_empty(), "{error}");
                None
            }
        })
    }

    fn style(&mut self) -> Style {
        Style::ALL[self.below(Style::ALL.len())]
    }

    fn lowered(&mut self, plan: &Plan) -> Plan {
        let (style, prefetch) = (self.style(), self.number(1, 3));
        lower::lower(plan, style, prefetch).expect("a plan of a family progresses")
    }

    fn costs(&mut self, plan: &Plan) -> Costs {
        let stages = plan.shape().num_stages();
        let mut values = |high: u32| {
            let mut number = || Number::Int(i64::from(self.number(0, high)));
            if number() == Number::Int(0) {
                Values::Each((0..stages).map(|_| number()).collect())
            } else {
                Values::All(number())
            }
        };
        let (forward, backward_input, backward_weight) = (values(5), values(5), values(5));
        let (recompute, overlapped) = (values(4), values(9));
        Costs {
            forward,
            backward_input,
            backward_weight,
            recompute: (self.below(2) == 0).then_some(recompute),
            overlapped: (self.below(2) == 0).then_some(overlapped),
            latency: Links::All(Number::Int(i64::from(self.number(0, 4)))),
            ..Costs::default()
        }
    }
}

/// Something is done to a plan's CSV: it is refused with all that is wrong and a hint, or what was
/// read runs and can be lowered.
pub(crate) fn checking(source: &mut Source<'_>) -> Outcome {
    let Some(mut plan) = source.plan() else {
        return Outcome::NoPlan;
    };
    let lowered = source.below(2) == 0;
    if lowered {
        plan = source.lowered(&plan);
    }
    let report = check::check(&plan, None);
    assert!(report.ok(), "{report}");
    let form = if lowered {
        Form::ComputeAndTransfers
    } else {
        Form::Compute
    };
    let Ok(text) = csv::to_csv(&plan, form) else {
        return Outcome::NoPlan;
    };
    let rows = text
        .lines()
        .map(|row| row.split(',').map(str::to_owned).collect());
    let mut rows: Vec<Vec<String>> = rows.collect();
    for _ in 0..=source.below(2) {
        mutate(source, &mut rows);
    }
    let rows: Vec<String> = rows.iter().map(|row| row.join(",")).collect();
    match csv::from_csv(&(rows.join("\n") + "\n")) {
        Err(error) => {
            assert!(!error.hint.is_empty(), "{error}");
            Outcome::Refused
        }
        Ok(plan) => {
            assert!(check::check(&plan, None).ok());
            simulate(&plan, &Costs::default(), Semantics::Buffered, false).expect("it progresses");
            lower::lower(&plan, source.style(), 1).expect("it progresses");
            Outcome::Held
        }
    }
}

fn mutate(source: &mut Source<'_>, rows: &mut [Vec<String>]) {
    let (row, other) = (source.below(rows.len()), source.below(rows.len()));
    if rows[row].is_empty() {
        return;
    }
    let length = rows[row].len().min(256);
    let (from, to) = (source.below(length), source.below(length));
    match source.below(6) {
        0 => drop(rows[row].remove(from)),
        1 => {
            let field = rows[row][from].clone();
            rows[row].insert(to, field);
        }
        2 => {
            let field = rows[row].remove(from);
            let to = to.min(rows[other].len());
            rows[other].insert(to, field);
        }
        3 => rows[row].swap(from, to),
        4 => {
            let digit = char::from(b'0' + source.number(0, 9) as u8);
            rows[row][from] = rows[row][from].replace(char::is_numeric, &digit.to_string());
        }
        _ => {
            let (old, new) = [
                ("F", "B"),
                ("B", "I"),
                ("I", "W"),
                ("SEND", "RECV"),
                ("B", "F"),
            ][source.below(5)];
            rows[row][from] = rows[row][from].replace(old, new);
        }
    }
}

/// A lowered plan breaks no rule and gets stuck under nothing that its style promises.
pub(crate) fn lowering(source: &mut Source<'_>) -> Outcome {
    let Some(plan) = source.plan() else {
        return Outcome::NoPlan;
    };
    let lowered = source.lowered(&plan);
    let report = check::check(&lowered, None);
    assert!(report.ok(), "{report}");
    let progresses = |progress: &check::Progress| progress.progresses == Some(true);
    assert!(report.progress.iter().all(progresses), "{report}");
    Outcome::Held
}

/// No plan is faster than its lower bounds; idle time and critical path tell all of it.
pub(crate) fn simulating(source: &mut Source<'_>) -> Outcome {
    let Some(mut plan) = source.plan() else {
        return Outcome::NoPlan;
    };
    let costs = source.costs(&plan);
    if source.below(2) == 0 {
        plan = source.lowered(&plan);
    }
    let promised = plan.promises();
    let semantics = promised[source.below(promised.len())];
    let contention = source.below(2) == 0;
    let timeline = simulate(&plan, &costs, semantics, contention).expect("it progresses");
    let (makespan, bounds) = (timeline.makespan(), timeline.bounds());
    assert!(
        bounds.binding().ticks <= makespan,
        "{} of {makespan}: {bounds:?}",
        plan.describe()
    );
    assert!(timeline.span() <= makespan);
    for rank in (0..plan.shape().pp()).map(Rank) {
        let bubbles = timeline.bubbles(rank).expect("a rank of the plan");
        assert_eq!(bubbles.total(), makespan - timeline.work()[rank.index()]);
    }
    let path = timeline.critical_path();
    let (&(rank, at), &(end_rank, end_at)) = (&path[0], &path[path.len() - 1]);
    let time = |of: Vec<i64>, at: u64| of[usize::try_from(at).expect("a position")];
    let first = time(timeline.start(rank).expect("a rank of the plan"), at);
    let last = time(timeline.end(end_rank).expect("a rank of the plan"), end_at);
    assert_eq!(last - first, makespan, "{}", plan.describe());
    Outcome::Held
}
