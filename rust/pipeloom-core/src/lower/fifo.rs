//! One ordered stream of transfers a rank, and the same transfers in groups.
//!
//! Compute ops are put in one global order: by their end in a simulation with unit costs and free
//! transfers, then by rank. Every op costs at least 1, so an op stands behind what it waits for.
//! Each op is followed by its transfers, and each rank's program is its part of that order: no
//! wait can be circular, under any semantics. A receive stands behind only those compute ops of
//! its rank that end no later than its producer, so with free transfers it is posted in time and
//! delays nothing.

use super::channels::Channels;
use super::compute_ops;
use super::program::{Links, Program};
use super::unit_time::ends;
use crate::error::Result;
use crate::ids::Rank;
use crate::op::{Flags, Op, OpKind};
use crate::plan::{NO_GROUP, Plan, RankOps};

/// Transfers in one global order, each a group of its own.
pub(super) fn lower(plan: &Plan) -> Result<Vec<RankOps>> {
    let shape = plan.shape();
    let links = Links::new(shape);
    let orders: Vec<Vec<Op>> = shape.ranks().map(|rank| compute_ops(plan, rank)).collect();
    let timed = Timed {
        ends: ends(&links, &orders, shape.num_units())?,
        orders,
    };
    let mut channels = Channels::new(&links, shape.pp(), shape.num_units() as usize);
    for order in &timed.orders {
        for (at, &op) in (0u32..).zip(order) {
            channels.add(op, at);
        }
    }
    let programs = shape
        .ranks()
        .map(|rank| program(&links, &channels, &timed, rank));
    Ok(programs.collect())
}

/// The order of [`lower`] with all transfers between two compute ops in one group.
pub(super) fn lower_batched(plan: &Plan) -> Result<Vec<RankOps>> {
    let mut ranks = lower(plan)?;
    for RankOps { groups, .. } in &mut ranks {
        let (mut next, mut inside) = (0, false);
        for group in groups {
            if *group == NO_GROUP {
                next += u32::from(inside);
                inside = false;
            } else {
                *group = next;
                inside = true;
            }
        }
    }
    Ok(ranks)
}

/// All ranks' compute ops, with the end of each.
struct Timed {
    orders: Vec<Vec<Op>>,
    ends: Vec<Vec<u32>>,
}

impl Timed {
    /// Place of a rank's op in the global order.
    #[inline]
    fn key(&self, rank: u32, position: u32) -> u64 {
        let end = self.ends[rank as usize][position as usize];
        u64::from(end) << 32 | u64::from(rank)
    }
}

/// The messages of one channel that its receiver has yet to place.
struct Inbox<'a> {
    source: u32,
    producers: std::slice::Iter<'a, u32>,
    /// Key of the next message's producer; the largest there is once all are placed.
    key: u64,
}

impl Inbox<'_> {
    #[inline]
    fn peek(&mut self, timed: &Timed) {
        let next = self.producers.as_slice().first();
        self.key = next.map_or(u64::MAX, |&at| timed.key(self.source, at));
    }
}

/// Merges a rank's ops, each followed by its sends, with the receives of all its channels.
fn program(links: &Links, channels: &Channels, timed: &Timed, rank: Rank) -> RankOps {
    let order = &timed.orders[rank.index()];
    let mut program = links.program(rank, order);
    let mut inboxes: Vec<Inbox<'_>> = channels
        .inbound(rank.0)
        .map(|messages| Inbox {
            source: messages.source,
            producers: messages.producers.iter(),
            key: 0,
        })
        .collect();
    for inbox in &mut inboxes {
        inbox.peek(timed);
    }
    let mut slot = 0..0;
    while slot.end < order.len() {
        let paired = order[slot.end].flags.has(Flags::PAIR_FIRST);
        slot = slot.end..order.len().min(slot.end + 1 + usize::from(paired));
        #[allow(clippy::cast_possible_truncation)] // below MAX_OPS
        let key = timed.key(rank.0, slot.start as u32);
        receive_before(key, links, timed, &mut inboxes, &mut program);
        for &op in &order[slot.clone()] {
            program.compute(op);
        }
        send_after(links, &order[slot.clone()], &mut program);
    }
    receive_before(u64::MAX, links, timed, &mut inboxes, &mut program);
    program.finish()
}

/// Places all receives whose producers stand before `key` in the global order. A pair sends
/// its activation first, and channels of activations come first among the inboxes.
#[inline]
fn receive_before(
    key: u64,
    links: &Links,
    timed: &Timed,
    inboxes: &mut [Inbox<'_>],
    program: &mut Program,
) {
    while let Some(first) = inboxes.iter_mut().min_by_key(|inbox| inbox.key) {
        if first.key >= key {
            break;
        }
        let Some(&at) = first.producers.next() else {
            break;
        };
        let made = timed.orders[first.source as usize][at as usize];
        if let Some((_, recv, _)) = links.transfer(made) {
            program.transfer(recv);
        }
        first.peek(timed);
    }
}

/// Places the sends of an op, or of a pair.
#[inline]
fn send_after(links: &Links, finished: &[Op], program: &mut Program) {
    let mut gradient = None;
    for &op in finished {
        match links.transfer(op) {
            Some((send, _, _)) if send.kind == OpKind::SendForward => program.transfer(send),
            Some((send, _, _)) => gradient = Some(send),
            None => {}
        }
    }
    if let Some(send) = gradient {
        program.transfer(send);
    }
}
