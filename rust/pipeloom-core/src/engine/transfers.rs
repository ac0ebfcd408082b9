//! Transfers as ops of the program: posting, matching, completing.

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::{Engine, NONE};
use crate::op::{Op, OpKind};
use crate::semantics::Semantics;

/// A transfer that a rank has posted and that has not completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posted {
    pub(crate) position: usize,
    pub(crate) channel: u32,
    pub(crate) is_send: bool,
    time: i64,
}

/// Two matched ends.
#[derive(Clone, Copy, Debug)]
struct Matched {
    send: usize,
    recv: usize,
    posted: i64,
}

/// A channel: what one end has posted and the other not yet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lane {
    /// All of one side, in order.
    pub(crate) posted: VecDeque<Posted>,
    /// Matched, but waiting for the link (with contention only).
    matched: VecDeque<Matched>,
    free: i64,
}

/// A rank's own stream, and its open group.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    /// Posted and not completed, in order (`single_stream` only).
    pub(crate) posted: VecDeque<Posted>,
    /// Members of the group at which the program stands that have not completed.
    pub(crate) open: u32,
    /// Position of the group's first member.
    pub(crate) group_start: usize,
    free: i64,
}

impl Lane {
    pub(crate) fn is_empty(&self) -> bool {
        self.posted.is_empty() && self.matched.is_empty()
    }
}

impl Stream {
    pub(crate) fn is_empty(&self) -> bool {
        self.posted.is_empty() && self.open == 0
    }
}

impl<const TIMED: bool> Engine<'_, TIMED> {
    /// The program of `rank` comes to a transfer.
    pub(super) fn transfer(&mut self, rank: usize, op: Op) {
        let at = self.at[rank];
        match self.semantics {
            Semantics::Buffered => {
                self.at[rank] = at + 1;
                if op.kind.is_send() {
                    self.send_buffered(op);
                }
            }
            Semantics::Streams => {
                self.at[rank] = at + 1;
                if let Some(posted) = self.posted(rank, at) {
                    self.post_on_channel(rank, posted);
                }
            }
            Semantics::SingleStream => {
                self.at[rank] = at + 1;
                if let Some(posted) = self.posted(rank, at) {
                    self.streams[rank].posted.push_back(posted);
                    self.match_streams(rank);
                }
            }
            Semantics::Batched => self.post_group(rank, at, self.program.group_end(rank, at)),
            Semantics::Rendezvous => self.post_group(rank, at, at + 1),
        }
    }

    /// Sends a message that its producer has made; one that has none is a fault of the plan that
    /// the check of data flow reports.
    fn send_buffered(&mut self, op: Op) {
        let channel = self.program.channel(op);
        if channel == NONE {
            return;
        }
        let slot = self.slot(op);
        let made = self.messages[slot];
        if made < 0 && made != super::NOT_YET {
            self.deliver(
                self.program.channels[channel as usize].destination.0,
                slot,
                !made,
            );
        }
    }

    /// The transfer at a position, unless it goes nowhere.
    fn posted(&self, rank: usize, position: usize) -> Option<Posted> {
        let op = self.program.ranks[rank].ops[position];
        if !self.program.in_range(op) {
            return None;
        }
        let channel = self.program.channel(op);
        let ends = *self.program.channels.get(channel as usize)?;
        let end = if op.kind.is_send() {
            ends.source
        } else {
            ends.destination
        };
        (end.index() == rank).then_some(Posted {
            position,
            channel,
            is_send: op.kind.is_send(),
            time: self.now[rank],
        })
    }

    /// Posts ops `from..to` together; the program goes on when all are done.
    fn post_group(&mut self, rank: usize, from: usize, to: usize) {
        self.at[rank] = to;
        self.streams[rank].group_start = from;
        let members = (from..to)
            .filter(|&at| self.posted(rank, at).is_some())
            .count();
        #[allow(clippy::cast_possible_truncation)] // a group has fewer members than a rank has ops
        let open = members as u32;
        self.streams[rank].open = open;
        // All at the time at which the program came here, though members may complete at once.
        let now = self.now[rank];
        for at in from..to {
            if let Some(posted) = self.posted(rank, at) {
                self.post_on_channel(
                    rank,
                    Posted {
                        time: now,
                        ..posted
                    },
                );
            }
        }
    }

    fn post_on_channel(&mut self, rank: usize, mine: Posted) {
        let lane = &mut self.lanes[mine.channel as usize];
        let theirs = match lane.posted.front() {
            Some(other) if other.is_send != mine.is_send => *other,
            Some(_) | None => {
                lane.posted.push_back(mine);
                return;
            }
        };
        lane.posted.pop_front();
        let (send, recv) = if mine.is_send {
            (mine, theirs)
        } else {
            (theirs, mine)
        };
        let posted = mine.time.max(theirs.time);
        let matched = Matched {
            send: send.position,
            recv: recv.position,
            posted,
        };
        if TIMED && self.link_contention {
            lane.matched.push_back(matched);
            if lane.matched.len() == 1 {
                self.contended
                    .push(Reverse((posted.max(lane.free), mine.channel)));
            }
        } else {
            let start = posted.max(lane.free);
            self.complete(mine.channel, matched, start, Some(rank));
        }
    }

    /// Completes the contended transfer that is ready first. Any that is yet to be found out
    /// comes after it, for it needs one of those that wait.
    pub(super) fn settle_contended(&mut self) -> bool {
        let Some(Reverse((ready, channel))) = self.contended.pop() else {
            return false;
        };
        let link = self.program.links[channel as usize] as usize;
        let Some(matched) = self.lanes[channel as usize].matched.pop_front() else {
            return true;
        };
        let start = ready.max(self.link_free[link]);
        self.complete(channel, matched, start, None);
        let lane = &self.lanes[channel as usize];
        self.link_free[link] = lane.free;
        if let Some(next) = lane.matched.front() {
            self.contended
                .push(Reverse((next.posted.max(lane.free), channel)));
        }
        true
    }

    /// Matches the heads of ranks' streams, from `rank` on, while there are any that match.
    fn match_streams(&mut self, rank: usize) {
        self.heads.push(rank);
        while let Some(rank) = self.heads.pop() {
            // Both streams move on: the peer's new head may match a third rank's.
            while let Some(peer) = self.match_heads(rank) {
                self.heads.push(peer);
            }
        }
    }

    /// Completes the head of a rank's stream if its match heads the peer's, and names the peer.
    fn match_heads(&mut self, rank: usize) -> Option<usize> {
        let mine = *self.streams[rank].posted.front()?;
        let channel = self.program.channels[mine.channel as usize];
        let (source, destination) = (channel.source.index(), channel.destination.index());
        let peer = if mine.is_send { destination } else { source };
        let theirs = *self.streams[peer].posted.front()?;
        if theirs.channel != mine.channel || theirs.is_send == mine.is_send {
            return None;
        }
        self.streams[rank].posted.pop_front();
        self.streams[peer].posted.pop_front();
        let free = self.streams[rank].free.max(self.streams[peer].free);
        let start = mine.time.max(theirs.time).max(free);
        let (send, recv) = if mine.is_send {
            (mine, theirs)
        } else {
            (theirs, mine)
        };
        let matched = Matched {
            send: send.position,
            recv: recv.position,
            posted: start,
        };
        self.complete(mine.channel, matched, start, None);
        let end = self.lanes[mine.channel as usize].free;
        self.streams[rank].free = end;
        self.streams[peer].free = end;
        Some(peer)
    }

    /// A transfer runs: its message arrives, and programs that stand at it may go on. `running`
    /// is the rank whose program is being advanced and needs no waking.
    fn complete(&mut self, channel: u32, matched: Matched, start: i64, running: Option<usize>) {
        let end = start + self.channel_time(channel);
        self.lanes[channel as usize].free = end;
        let ends = self.program.channels[channel as usize];
        let (source, destination) = (ends.source.index(), ends.destination.index());
        if TIMED {
            for (rank, at) in [(source, matched.send), (destination, matched.recv)] {
                self.times.set(rank, at, start, end);
            }
        }
        let recv = self.program.ranks[destination].ops[matched.recv];
        debug_assert!(matches!(
            recv.kind,
            OpKind::RecvForward | OpKind::RecvBackward
        ));
        self.deliver(ends.destination.0, self.slot(recv), end);
        for rank in [source, destination] {
            let stream = &mut self.streams[rank];
            if stream.open > 0 {
                stream.open -= 1;
                self.now[rank] = self.now[rank].max(end);
                if self.streams[rank].open == 0 && running != Some(rank) {
                    self.queue(rank);
                }
            }
        }
    }
}
