//! Saved plans: an exact round trip, in lines of text.
//!
//! ```text
//! pipeloom-plan 1
//! schedule 1f1b
//! shape pp=2 vp=1 num_microbatches=2 num_seq_pieces=1 placement=loop
//! params group=0 extra_warmup=0 reverse_backward=0 forward_only=0 kept_activations=none
//! orders rule
//! style none
//! promises buffered
//! checksum 0123456789abcdef
//! ```
//!
//! `orders rule`: the schedule's rule says the rest. `orders lowered` and `orders ops`: a line
//! `rank ...` for each rank follows the promises, with its ops in action text; `!` marks a
//! recomputed op, `+` joins the transfers of one group. The checksum is FNV-1a of all bytes before
//! its line.

use super::{Action, Reader, push_op, read_action, shown};
use crate::check;
use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank};
use crate::op::{Flags, Op};
use crate::plan::{Plan, RankOps};
use crate::schedules::{self, Argument, Params, Request};
use crate::semantics::{Semantics, Style};
use crate::shape::{Placement, Shape};

/// The format's version; older ones load too.
pub const VERSION: u32 = 1;

const MAGIC: &str = "pipeloom-plan";
const CHECKSUM: &str = "checksum ";

/// Writes a plan.
pub fn to_saved(plan: &Plan) -> String {
    let shape = plan.shape();
    // By name, so that a new parameter can't be forgotten here.
    let Params {
        group,
        extra_warmup,
        reverse_backward,
        forward_only,
        kept_activations,
    } = plan.params();
    let orders = match (plan.family(), plan.held_ops(Rank(0))) {
        (Some(_), None) => "rule",
        (Some(_), Some(_)) => "lowered",
        (None, _) => "ops",
    };
    let kept = kept_activations.map_or_else(|| "none".to_owned(), |kept| kept.to_string());
    let promises: Vec<&str> = plan.promises().iter().map(|s| s.name()).collect();
    let mut text = format!(
        "{MAGIC} {VERSION}\nschedule {}\nshape pp={} vp={} num_microbatches={} num_seq_pieces={} \
         placement={}\nparams group={group} extra_warmup={extra_warmup} reverse_backward={} \
         forward_only={} kept_activations={kept}\norders {orders}\nstyle {}\npromises {}\n",
        plan.schedule().escape_default(),
        shape.pp(),
        shape.vp(),
        shape.num_microbatches(),
        shape.num_seq_pieces(),
        placement_text(shape.placement()),
        u8::from(*reverse_backward),
        u8::from(*forward_only),
        plan.style().map_or("none", Style::name),
        promises.join(" "),
    );
    if orders != "rule" {
        for rank in shape.ranks() {
            text.push_str("rank");
            push_ops(&mut text, &plan.rank_ops(rank));
            text.push('\n');
        }
    }
    let sum = checksum(&text);
    text + &format!("{CHECKSUM}{sum:016x}\n")
}

fn placement_text(placement: &Placement) -> String {
    let Placement::Table(table) = placement else {
        return placement.name().to_owned();
    };
    let places: Vec<String> = table.iter().map(|(r, c)| format!("{r}.{c}")).collect();
    format!("table:{}", places.join(","))
}

fn push_ops(text: &mut String, held: &RankOps) {
    for &op in &held.ops {
        text.push(if op.flags.has(Flags::PAIR_SECOND) {
            ';'
        } else if op.flags.has(Flags::JOINED) {
            '+'
        } else {
            ' '
        });
        if op.flags.has(Flags::PAIR_FIRST) {
            text.push('(');
        }
        push_op(text, op);
        if op.flags.has(Flags::RECOMPUTE) {
            text.push('!');
        }
        if op.flags.has(Flags::PAIR_SECOND) {
            text.push(')');
        }
    }
}

/// FNV-1a: short, and the same everywhere.
fn checksum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Reads a plan.
///
/// # Errors
/// If the text is no saved plan, is damaged, or was written by a newer version; if its ops break
/// a rule.
pub fn from_saved(text: &str) -> Result<Plan> {
    let body = verified(text)?;
    let mut lines = Lines {
        rest: body.lines(),
        number: 1,
    };
    lines.rest.next();
    let schedule = unescape(lines.next("schedule")?);
    let shape = read_shape(&lines.fields("shape")?)?;
    let params = read_params(&lines.fields("params")?)?;
    let orders = lines.next("orders")?;
    let style = read_style(lines.next("style")?)?;
    let promises: Vec<Semantics> = lines
        .next("promises")?
        .split(' ')
        .map(Semantics::from_name)
        .collect::<Result<_>>()
        .map_err(|error| damaged(&error.message))?;
    let plan = match orders {
        "rule" => by_rule(&schedule, &shape, &params)?,
        "lowered" | "ops" => {
            let ops = lines.ranks(&shape)?;
            let base = if orders == "lowered" {
                let rule = by_rule(&schedule, &shape, &params)?;
                require_same_compute(&rule, &ops)?;
                rule
            } else {
                Plan::held(&schedule, shape, ops.clone()).with_params(params)
            };
            let plan = match style {
                Some(style) => base.with_transfers(style, ops),
                None => base,
            };
            check::check(&plan, None).into_result()?;
            plan
        }
        other => return Err(damaged(&format!("orders {} is unknown", shown(other)))),
    };
    Ok(plan.with_promises(&promises))
}

fn damaged(what: &str) -> Error {
    Error::parse(
        format!("the saved plan is damaged: {what}"),
        "save the plan again with plan.save(path)",
    )
}

/// The text before the checksum line, if it is whole and of a version we know.
fn verified(text: &str) -> Result<&str> {
    let header = text.lines().next().unwrap_or("");
    let version = header
        .strip_prefix(MAGIC)
        .and_then(|v| v.trim().parse::<u32>().ok());
    match version {
        None | Some(0) => {
            return Err(Error::parse(
                format!("this is no saved plan: it begins with {}", shown(header)),
                "files written by plan.save(path) begin with \"pipeloom-plan\"; a CSV is read by \
                 Plan.from_csv",
            ));
        }
        Some(version) if version > VERSION => {
            return Err(Error::parse(
                format!(
                    "the saved plan has format {version}, but this version of pipeloom reads \
                     formats up to {VERSION}"
                ),
                "update pipeloom",
            ));
        }
        Some(_) => {}
    }
    let at = text
        .rfind(CHECKSUM)
        .ok_or_else(|| damaged("its checksum is missing"))?;
    let (body, last) = text.split_at(at);
    let sum = last.trim_end().strip_prefix(CHECKSUM);
    let sum = sum.and_then(|sum| u64::from_str_radix(sum, 16).ok());
    if sum == Some(checksum(body)) {
        Ok(body)
    } else {
        Err(damaged("its checksum does not match its content"))
    }
}

struct Lines<'a> {
    rest: std::str::Lines<'a>,
    number: usize,
}

impl<'a> Lines<'a> {
    /// The value of the next line, which must have this key.
    fn next(&mut self, key: &str) -> Result<&'a str> {
        self.number += 1;
        let value = self.rest.next().and_then(|line| line.strip_prefix(key));
        match value.map(|value| (value, value.strip_prefix(' '))) {
            Some((_, Some(value))) => Ok(value),
            Some(("", None)) => Ok(""),
            _ => Err(damaged(&format!("line {} is not {key:?}", self.number))),
        }
    }

    /// The `name=value` pairs of the next line.
    fn fields(&mut self, key: &str) -> Result<Fields<'a>> {
        let pairs = self
            .next(key)?
            .split(' ')
            .filter_map(|pair| pair.split_once('='));
        Ok(Fields(pairs.collect()))
    }

    fn ranks(&mut self, shape: &Shape) -> Result<Vec<RankOps>> {
        let mut ranks = Vec::new();
        for _ in shape.ranks() {
            let line = self.next("rank")?;
            let wrong = |word: &str| damaged(&format!("{} is not an op", shown(word)));
            let mut reader = Reader::default();
            for word in line.split(' ').filter(|word| !word.is_empty()) {
                read_word(word, &mut reader).ok_or_else(|| wrong(word))?;
            }
            ranks.push(reader.ranks);
        }
        Ok(ranks)
    }
}

/// Reads `0F1`, `0F1!`, `(0F1;3B0)` or `0SEND_F1+0RECV_B0`.
fn read_word(word: &str, reader: &mut Reader) -> Option<()> {
    if let Some(pair) = word
        .strip_prefix('(')
        .and_then(|pair| pair.strip_suffix(')'))
    {
        let (first, second) = pair.split_once(';')?;
        let Action::Pair(first, second) = super::paired(read_op(first)?, read_op(second)?) else {
            return None;
        };
        reader.compute(first);
        reader.compute(second);
        return Some(());
    }
    let ops: Vec<Op> = word.split('+').map(read_op).collect::<Option<_>>()?;
    match ops.as_slice() {
        [only] => reader.push(*only),
        group if group.iter().any(|op| op.kind.is_compute()) => return None,
        group => reader.group(group),
    }
    Some(())
}

fn read_op(text: &str) -> Option<Op> {
    let (text, flags) = match text.strip_suffix('!') {
        Some(text) => (text, Flags::RECOMPUTE),
        None => (text, Flags::NONE),
    };
    match read_action(text) {
        Ok(Action::One(op)) => Some(Op { flags, ..op }),
        _ => None,
    }
}

struct Fields<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Fields<'a> {
    fn text(&self, name: &str) -> Result<&'a str> {
        let found = self.0.iter().find(|(other, _)| *other == name);
        found
            .map(|(_, value)| *value)
            .ok_or_else(|| damaged(&format!("{name} is missing")))
    }

    fn number(&self, name: &str) -> Result<u32> {
        let value = self.text(name)?;
        value
            .parse()
            .map_err(|_| damaged(&format!("{name}={} is no number", shown(value))))
    }
}

fn read_shape(fields: &Fields<'_>) -> Result<Shape> {
    let text = fields.text("placement")?;
    let placement = match text.strip_prefix("table:") {
        None => Placement::from_name(text).map_err(|error| damaged(&error.message))?,
        Some(places) => {
            let place = |place: &str| {
                let (rank, chunk) = place.split_once('.')?;
                Some((Rank(rank.parse().ok()?), Chunk(chunk.parse().ok()?)))
            };
            let table = places.split(',').map(place).collect::<Option<Vec<_>>>();
            let table = table.ok_or_else(|| damaged("its placement can't be read"))?;
            Placement::Table(table.into())
        }
    };
    Shape::new(
        fields.number("pp")?,
        fields.number("vp")?,
        fields.number("num_microbatches")?,
        fields.number("num_seq_pieces")?,
        placement,
    )
    .map_err(|error| damaged(&error.message))
}

fn read_params(fields: &Fields<'_>) -> Result<Params> {
    Ok(Params {
        group: fields.number("group")?,
        extra_warmup: fields.number("extra_warmup")?,
        reverse_backward: fields.number("reverse_backward")? != 0,
        forward_only: fields.number("forward_only")? != 0,
        kept_activations: match fields.text("kept_activations")? {
            "none" => None,
            _ => Some(fields.number("kept_activations")?),
        },
    })
}

fn read_style(name: &str) -> Result<Option<Style>> {
    if name == "none" {
        return Ok(None);
    }
    let styles = Style::ALL.into_iter().chain([Style::Text]);
    let found = styles.into_iter().find(|style| style.name() == name);
    found
        .map(Some)
        .ok_or_else(|| damaged(&format!("style {} is unknown", shown(name))))
}

/// Plans again by the schedule's rule, which must come to the saved shape and parameters.
fn by_rule(schedule: &str, shape: &Shape, params: &Params) -> Result<Plan> {
    let family = schedules::family(schedule)?;
    let uses = |argument| family.arguments.contains(&argument);
    let request = Request {
        microbatch_group_size: (uses(Argument::GroupSize) && params.group > 0)
            .then_some(params.group),
        reverse_backward: uses(Argument::ReverseBackward).then_some(params.reverse_backward),
        forward_only: uses(Argument::ForwardOnly) && params.forward_only,
        num_seq_pieces: shape.num_seq_pieces(),
        extra_warmup: params.extra_warmup,
        partial_checkpoints: params.kept_activations,
        ..Request::new(
            schedule,
            shape.pp(),
            Some(shape.vp()),
            shape.num_microbatches(),
        )
    };
    let plan = schedules::plan(&request)?;
    if plan.shape() == shape && plan.params() == params {
        return Ok(plan);
    }
    Err(damaged(&format!(
        "{schedule} has other parameters than those saved"
    )))
}

/// Refuses ops whose compute order is not the rule's.
fn require_same_compute(rule: &Plan, ranks: &[RankOps]) -> Result<()> {
    for (rank, held) in rule.shape().ranks().zip(ranks) {
        let compute = held.ops.iter().filter(|op| op.kind.is_compute());
        if !compute.eq(&rule.rank_ops(rank).ops) {
            let schedule = rule.schedule();
            return Err(damaged(&format!(
                "rank {rank} does not run the order of {schedule}"
            )));
        }
    }
    Ok(())
}

/// Undoes `escape_default`.
fn unescape(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c != '\\' {
            plain.push(c);
            continue;
        }
        match rest.next() {
            Some('n') => plain.push('\n'),
            Some('r') => plain.push('\r'),
            Some('t') => plain.push('\t'),
            Some('u') => {
                let code: String = rest.by_ref().skip(1).take_while(|&c| c != '}').collect();
                plain.extend(u32::from_str_radix(&code, 16).ok().and_then(char::from_u32));
            }
            Some(other) => plain.push(other),
            None => {}
        }
    }
    plain
}
