//! Deadlocks: who waits for whom when a plan gets stuck, one violation for each cycle.
//!
//! Each thing that can be stuck (a rank's program; under `single_stream` also its stream) waits
//! for one other, so the waits form a graph with one edge from each node: every walk along it
//! ends at something that no rank provides, or in a cycle.

use std::fmt::Write as _;
use std::ops::Range;

use crate::engine::{Engine, NONE, Posted, Program, pair_second};
use crate::ids::{Rank, Stage};
use crate::op::{Op, OpKind};
use crate::semantics::Semantics;
use crate::violation::Violation;

/// Lines of a cycle that are shown before the middle is left out.
const SHOWN: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Program(usize),
    Stream(usize),
}

/// One stuck node.
struct Wait {
    rank: usize,
    position: usize,
    op: Op,
    /// What it waits for, in words.
    wanted: String,
    next: Option<Node>,
}

impl Wait {
    fn place(&self) -> (Rank, u64) {
        let rank = u32::try_from(self.rank).unwrap_or(NONE);
        (Rank(rank), self.position as u64)
    }
}

type Stuck<'a> = Engine<'a, false>;

/// What stopped a run.
pub(super) struct Deadlock {
    /// How many ranks wait for each other; 0: a rank waits for what nobody provides.
    pub(super) num_ranks: usize,
    pub(super) violation: Violation,
}

/// The deadlocks of a run that did not finish.
pub(super) fn deadlocks(engine: &Stuck<'_>) -> Vec<Deadlock> {
    let ranks = engine.program.ranks.len();
    let nodes = (0..ranks)
        .map(Node::Program)
        .chain((0..ranks).map(Node::Stream));
    // Which walk came to a node first; 0: none.
    let mut seen = vec![0; 2 * ranks];
    let mut deadlocks = Vec::new();
    let mut lost = None;
    for (walk, start) in (1..).zip(nodes) {
        let mut path: Vec<(Node, Wait)> = Vec::new();
        let mut next = Some(start);
        while let Some(node) = next {
            let mark = &mut seen[index(node, ranks)];
            if *mark == walk {
                let from = path
                    .iter()
                    .position(|(other, _)| *other == node)
                    .unwrap_or(0);
                deadlocks.push(cycle(engine.semantics, path.split_off(from)));
            }
            if *mark != 0 {
                break;
            }
            *mark = walk;
            let Some(wait) = wait(engine, node) else {
                break;
            };
            next = wait.next;
            path.push((node, wait));
        }
        if next.is_none() && lost.is_none() {
            lost = path.pop();
        }
    }
    if deadlocks.is_empty() {
        deadlocks.extend(lost.map(|(_, wait)| {
            let message = format!("stuck under {}: {}", engine.semantics, sentence(&wait));
            Deadlock {
                num_ranks: 0,
                violation: violation(engine.semantics, &wait, message, Vec::new()),
            }
        }));
    }
    deadlocks
}

fn index(node: Node, ranks: usize) -> usize {
    match node {
        Node::Program(rank) => rank,
        Node::Stream(rank) => ranks + rank,
    }
}

fn sentence(wait: &Wait) -> String {
    let Wait {
        rank,
        position,
        op,
        wanted,
        ..
    } = wait;
    format!("rank {rank}, position {position}: {op} waits for {wanted}")
}

fn violation(
    semantics: Semantics,
    wait: &Wait,
    message: String,
    cycle: Vec<(Rank, u64)>,
) -> Violation {
    let hint = match semantics {
        // Transfers are made by the plan's own order there: only that can be mended.
        Semantics::Buffered => "move one of these ops to another place on its rank",
        Semantics::Streams
        | Semantics::SingleStream
        | Semantics::Batched
        | Semantics::Rendezvous => {
            "move one of these ops to another place on its rank, or let plan.lower(\"fifo\") place \
             the transfers: it progresses under all semantics"
        }
    };
    Violation {
        rule: "progress",
        rank: wait.place().0,
        position: wait.position as u64,
        op: wait.op.to_string(),
        message,
        hint: hint.to_owned(),
        cycle,
    }
}

/// One cycle, told from its lowest rank on.
fn cycle(semantics: Semantics, path: Vec<(Node, Wait)>) -> Deadlock {
    let mut waits: Vec<Wait> = path.into_iter().map(|(_, wait)| wait).collect();
    let lowest = waits.iter().enumerate().min_by_key(|(_, wait)| wait.rank);
    let lowest = lowest.map_or(0, |(at, _)| at);
    waits.rotate_left(lowest);
    let mut ranks: Vec<usize> = waits.iter().map(|wait| wait.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let mut message = match ranks.len() {
        1 => format!(
            "deadlock under {semantics}: rank {} waits for itself",
            ranks[0]
        ),
        n => format!("deadlock under {semantics}: {n} ranks wait for each other"),
    };
    let hidden = hidden(waits.len());
    for (at, wait) in waits.iter().enumerate() {
        if at == hidden.start && !hidden.is_empty() {
            let _ = write!(message, "\n  ... {} more ...", hidden.len());
        }
        if !hidden.contains(&at) {
            let _ = write!(message, "\n  {}", sentence(wait));
        }
    }
    Deadlock {
        num_ranks: ranks.len(),
        violation: violation(
            semantics,
            &waits[0],
            message,
            waits.iter().map(Wait::place).collect(),
        ),
    }
}

/// The middle of a long cycle, which is left out.
pub(super) fn hidden(len: usize) -> Range<usize> {
    if len > SHOWN {
        SHOWN / 2..len - SHOWN / 2 + 1
    } else {
        0..0
    }
}

/// What a node waits for, if it is stuck.
fn wait(engine: &Stuck<'_>, node: Node) -> Option<Wait> {
    match node {
        Node::Stream(rank) => stream_wait(engine, rank),
        Node::Program(rank) if engine.streams[rank].open > 0 => group_wait(engine, rank),
        Node::Program(rank) => {
            let ops = &engine.program.ranks[rank].ops;
            let at = engine.at[rank];
            let op = *ops.get(at)?;
            let second = pair_second(ops, at).filter(|_| engine.is_ready(op));
            let op = second.unwrap_or(op);
            Some(compute_wait(
                engine,
                rank,
                at + usize::from(second.is_some()),
                op,
            ))
        }
    }
}

/// A program that stands at a group: its first member that is not done waits for its match.
fn group_wait(engine: &Stuck<'_>, rank: usize) -> Option<Wait> {
    let program = engine.program;
    let members = engine.streams[rank].group_start..engine.at[rank];
    let pending = members.into_iter().find_map(|position| {
        let op = program.ranks[rank].ops[position];
        let channel = program.in_range(op).then(|| program.channel(op))?;
        let lane = engine.lanes.get(channel as usize)?;
        let mine = |posted: &&Posted| is_at(posted, position, op);
        lane.posted.iter().find(mine).map(|_| (position, op))
    });
    let (position, op) = pending?;
    let (wanted, next) = counterpart(engine, position, op);
    Some(Wait {
        rank,
        position,
        op,
        wanted,
        next,
    })
}

fn is_at(posted: &Posted, position: usize, op: Op) -> bool {
    posted.position == position && posted.is_send == op.kind.is_send()
}

/// What would complete a posted transfer: the op at the other end that has not been posted.
fn counterpart(engine: &Stuck<'_>, position: usize, op: Op) -> (String, Option<Node>) {
    let program = engine.program;
    let channel = program.channel(op);
    let ends = program.channels[channel as usize];
    let peer = ends.end(!op.kind.is_send()).index();
    let lane = &engine.lanes[channel as usize].posted;
    let ahead = lane
        .iter()
        .position(|posted| is_at(posted, position, op))
        .unwrap_or(0);
    let opposite = |other: &Op| {
        !other.kind.is_compute()
            && other.kind.is_send() != op.kind.is_send()
            && program.in_range(*other)
            && program.channel(*other) == channel
    };
    let from = engine.at[peer];
    let coming = program.ranks[peer].ops.iter().enumerate().skip(from);
    match coming.filter(|(_, other)| opposite(other)).nth(ahead) {
        Some((at, other)) => (
            format!("{other} at position {at} of rank {peer}"),
            Some(Node::Program(peer)),
        ),
        None => (
            format!(
                "rank {peer} to {} it, which it never does",
                if op.kind.is_send() { "receive" } else { "send" }
            ),
            None,
        ),
    }
}

/// The head of a rank's stream waits for its match.
fn stream_wait(engine: &Stuck<'_>, rank: usize) -> Option<Wait> {
    let program = engine.program;
    let head = engine.streams[rank].posted.front()?;
    let op = program.ranks[rank].ops[head.position];
    let ends = program.channels[head.channel as usize];
    let peer = ends.end(!head.is_send).index();
    let theirs = &engine.streams[peer].posted;
    let matching = theirs
        .iter()
        .find(|posted| posted.channel == head.channel && posted.is_send != head.is_send);
    let (wanted, next) = match (matching, theirs.front()) {
        (Some(posted), Some(front)) => {
            let ops = &program.ranks[peer].ops;
            let (other, before) = (ops[posted.position], ops[front.position]);
            let wanted = format!(
                "{other} at position {} of rank {peer}, behind {before} in its stream",
                posted.position
            );
            (wanted, Some(Node::Stream(peer)))
        }
        _ => counterpart(engine, head.position, op),
    };
    Some(Wait {
        rank,
        position: head.position,
        op,
        wanted,
        next,
    })
}

/// A compute op waits for the first thing it reads that is not there.
fn compute_wait(engine: &Stuck<'_>, rank: usize, position: usize, op: Op) -> Wait {
    let (wanted, next) = missing_input(engine, rank, op);
    Wait {
        rank,
        position,
        op,
        wanted,
        next,
    }
}

fn missing_input(engine: &Stuck<'_>, rank: usize, op: Op) -> (String, Option<Node>) {
    let program = engine.program;
    let links = program.stages[op.stage.index()];
    let (neighbour, recv, send, produces): (_, _, _, fn(OpKind) -> bool) = match op.kind {
        OpKind::Forward => (
            links.previous,
            OpKind::RecvForward,
            OpKind::SendForward,
            |kind| kind == OpKind::Forward,
        ),
        OpKind::Backward | OpKind::BackwardInput => (
            links.next,
            OpKind::RecvBackward,
            OpKind::SendBackward,
            OpKind::gives_input_gradient,
        ),
        OpKind::BackwardWeight
        | OpKind::SendForward
        | OpKind::RecvForward
        | OpKind::SendBackward
        | OpKind::RecvBackward => {
            return behind(
                program,
                rank,
                engine.at[rank],
                |other| {
                    (other.stage, other.unit) == (op.stage, op.unit)
                        && other.kind.gives_input_gradient()
                },
                "its input half",
            );
        }
    };
    if !engine.has_own(op) {
        return behind(
            program,
            rank,
            engine.at[rank],
            |other| {
                other.stage == op.stage
                    && ((other.unit == op.unit && other.kind == OpKind::Forward)
                        || (other.unit != op.unit && produces(other.kind)))
            },
            "what it needs of its own stage",
        );
    }
    let recv = Op { kind: recv, ..op };
    let from = |other: &Op, wanted: fn(OpKind) -> bool| {
        other.stage == Stage(neighbour) && other.unit == op.unit && wanted(other.kind)
    };
    if program.channel(recv) == NONE {
        return behind(program, rank, 0, |other| from(other, produces), "its input");
    }
    if engine.semantics == Semantics::Buffered {
        let sent = Op {
            kind: send,
            stage: Stage(neighbour),
            ..op
        };
        return source(program, Stage(neighbour), |other| {
            if program.lowered {
                other.same(sent)
            } else {
                from(other, produces)
            }
        });
    }
    own_receive(engine, rank, recv)
}

/// The op of another stage's rank that gives the input, where messages need no receive.
fn source(
    program: &Program<'_>,
    stage: Stage,
    wanted: impl Fn(&Op) -> bool,
) -> (String, Option<Node>) {
    let peer = program.shape.rank_of(stage).index();
    let ops = &program.ranks[peer].ops;
    match ops.iter().enumerate().find(|(_, op)| wanted(op)) {
        Some((at, op)) => (
            format!("{op} at position {at} of rank {peer}"),
            Some(Node::Program(peer)),
        ),
        None => (
            format!("stage {stage} of rank {peer}, which never gives it"),
            None,
        ),
    }
}

/// A compute op waits for its receive, or for what that waits for.
fn own_receive(engine: &Stuck<'_>, rank: usize, recv: Op) -> (String, Option<Node>) {
    let mine = engine.program.ranks[rank]
        .ops
        .iter()
        .position(|other| other.same(recv));
    match mine {
        Some(at) if at >= engine.at[rank] => (
            format!("{recv} at position {at} of the same rank, behind it"),
            Some(Node::Program(rank)),
        ),
        Some(at) if engine.semantics == Semantics::SingleStream => (
            format!("{recv} at position {at}, which waits in the rank's stream"),
            Some(Node::Stream(rank)),
        ),
        Some(at) => counterpart(engine, at, recv),
        None => (format!("{recv}, which rank {rank} never runs"), None),
    }
}

/// An op of the same rank that stands at or behind position `from`.
fn behind(
    program: &Program<'_>,
    rank: usize,
    from: usize,
    wanted: impl Fn(&Op) -> bool,
    what: &str,
) -> (String, Option<Node>) {
    let ops = &program.ranks[rank].ops;
    match ops.iter().enumerate().skip(from).find(|(_, op)| wanted(op)) {
        Some((at, op)) => (
            format!("{op} at position {at} of the same rank, behind it"),
            Some(Node::Program(rank)),
        ),
        None => (format!("{what}, which rank {rank} never runs"), None),
    }
}
