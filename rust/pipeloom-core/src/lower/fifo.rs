//! One ordered stream of transfers a rank, and the same transfers in groups.
//!
//! Compute ops are put in one global order: by their end in a simulation with unit costs and free
//! transfers, then by rank. Every op costs at least 1, so an op stands behind what it waits for.
//! Each op is followed by its transfers, and each rank's program is its part of that order: no
//! wait can be circular, under any semantics. A receive stands behind only those compute ops of
//! its rank that end no later than its producer, so with free transfers it is posted in time and
//! delays nothing.

use super::compute_ops;
use super::links::{Links, NONE, receive_of};
use super::program::Program;
use super::unit_time::ends;
use crate::error::Result;
use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};
use crate::plan::Plan;
use crate::rank_ops::{RankOps, join};

/// Transfers in one global order, each a group of its own.
pub(super) fn lower(plan: &Plan) -> Result<Vec<RankOps>> {
    let shape = plan.shape();
    let links = Links::new(shape);
    let orders: Vec<Vec<Op>> = shape.ranks().map(|rank| compute_ops(plan, rank)).collect();
    let ends = ends(shape, &orders)?;
    let messages = messages(&links, &orders, &ends);
    let programs = shape.ranks().zip(&orders).map(|(rank, order)| {
        // Of a source, activations first: the order in which a pair sends.
        let channels = links.inbound(rank.0).iter().rev();
        let mut inboxes: Vec<Inbox<'_>> = channels
            .map(|&channel| Inbox::new(links.source(channel), &messages[channel as usize]))
            .collect();
        program(&links, rank, order, &ends[rank.index()], &mut inboxes)
    });
    Ok(programs.collect())
}

/// The order of [`lower`] with all transfers between two compute ops in one group.
pub(super) fn lower_batched(plan: &Plan) -> Result<Vec<RankOps>> {
    let mut ranks = lower(plan)?;
    for RankOps { ops } in &mut ranks {
        let alike = |one: &Op, other: &Op| one.kind.is_compute() == other.kind.is_compute();
        for neighbours in ops.chunk_by_mut(alike) {
            if !neighbours[0].kind.is_compute() {
                join(neighbours);
            }
        }
    }
    Ok(ranks)
}

/// What a channel carries: the end of its producer, and the receive that takes it.
struct Message {
    end: u32,
    recv: Op,
}

/// The messages of every channel, in send order.
fn messages(links: &Links, orders: &[Vec<Op>], ends: &[Vec<u32>]) -> Vec<Vec<Message>> {
    let mut messages: Vec<Vec<Message>> = links.rooms();
    for (&op, &end) in orders
        .iter()
        .zip(ends)
        .flat_map(|(order, ends)| order.iter().zip(ends))
    {
        if let Some(target) = links.target(op).filter(|target| target.channel != NONE) {
            let recv = receive_of(op, target);
            messages[target.channel as usize].push(Message { end, recv });
        }
    }
    messages
}

/// Place in the global order of what ends at `end` on `rank`.
#[inline]
fn key(end: u32, rank: u32) -> u64 {
    u64::from(end) << 32 | u64::from(rank)
}

/// The messages of one channel that its receiver has yet to place.
struct Inbox<'a> {
    source: u32,
    messages: std::slice::Iter<'a, Message>,
    /// Key of the next message's producer; the largest there is once all are placed.
    next: u64,
}

impl<'a> Inbox<'a> {
    fn new(source: u32, messages: &'a [Message]) -> Self {
        let mut inbox = Self {
            source,
            messages: messages.iter(),
            next: 0,
        };
        inbox.peek();
        inbox
    }

    #[inline]
    fn peek(&mut self) {
        let next = self.messages.as_slice().first();
        self.next = next.map_or(u64::MAX, |message| key(message.end, self.source));
    }
}

/// Merges a rank's ops, each followed by its sends, with the receives of all its channels.
fn program(
    links: &Links,
    rank: Rank,
    order: &[Op],
    ends: &[u32],
    inboxes: &mut [Inbox<'_>],
) -> RankOps {
    let mut program = Program::for_ops(links, order);
    let mut pair = None;
    for (&op, &end) in order.iter().zip(ends) {
        if pair.is_none() {
            receive_before(key(end, rank.0), inboxes, &mut program);
        }
        program.push(op);
        if op.flags.has(Flags::PAIR_FIRST) {
            pair = Some(op);
        } else if let Some(first) = pair.take() {
            send_pair(links, [first, op], &mut program);
        } else if let Some(send) = links.send(op) {
            program.push(send);
        }
    }
    receive_before(u64::MAX, inboxes, &mut program);
    program.finish()
}

/// Places all receives whose producers stand before `key` in the global order. A pair sends its
/// activation first, and of its two inboxes that of activations comes first.
#[inline]
fn receive_before(key: u64, inboxes: &mut [Inbox<'_>], program: &mut Program) {
    loop {
        let Some(first) = inboxes.iter_mut().min_by_key(|inbox| inbox.next) else {
            return;
        };
        if first.next >= key {
            return;
        }
        let Some(message) = first.messages.next() else {
            return;
        };
        program.push(message.recv);
        first.peek();
    }
}

/// Places the sends of an overlapped pair, the activation first.
fn send_pair(links: &Links, pair: [Op; 2], program: &mut Program) {
    let mut sends: Vec<Op> = pair.into_iter().filter_map(|op| links.send(op)).collect();
    sends.sort_by_key(|send| send.kind != OpKind::SendForward);
    for send in sends {
        program.push(send);
    }
}
