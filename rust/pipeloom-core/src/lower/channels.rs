//! The messages of every channel, in send order.

use std::collections::BTreeMap;

use super::program::{Links, NONE};
use crate::ids::{Stage, Unit};
use crate::op::{Op, OpKind};

/// One channel's messages, as the positions of their producers in the source's order.
pub(super) struct Messages<'a> {
    pub(super) source: u32,
    pub(super) producers: &'a [u32],
}

struct Span {
    source: u32,
    start: usize,
    sent: usize,
}

/// All channels of a plan.
pub(super) struct Channels {
    /// By stage: the channel of its output and of its input gradient.
    of_stage: Vec<[u32; 2]>,
    spans: Vec<Span>,
    /// By receiving rank: its channels, those of activations first.
    inbound: Vec<Vec<u32>>,
    producers: Vec<u32>,
}

impl Channels {
    /// The channels between the stages, without messages yet.
    pub(super) fn new(links: &Links, ranks: u32, units: usize) -> Self {
        let mut of_stage = vec![[NONE; 2]; links.num_stages()];
        let mut inbound = vec![Vec::new(); ranks as usize];
        let mut lens: BTreeMap<(usize, u32, u32), (u32, usize)> = BTreeMap::new();
        for (stage, channels) in (0u32..).map(Stage).zip(&mut of_stage) {
            for (direction, kind) in [OpKind::Forward, OpKind::Backward].into_iter().enumerate() {
                let made = Op::new(stage, kind, Unit(0));
                if let Some((_, _, receiver)) = links.transfer(made) {
                    let fresh = u32::try_from(lens.len()).unwrap_or(NONE);
                    let key = (direction, receiver, links.rank_of(stage));
                    let (id, len) = lens.entry(key).or_insert((fresh, 0));
                    *len += units;
                    channels[direction] = *id;
                }
            }
        }
        let mut spans: Vec<Span> = Vec::new();
        spans.resize_with(lens.len(), || Span {
            source: NONE,
            start: 0,
            sent: 0,
        });
        let mut end = 0;
        // Keys are sorted by direction first.
        for ((_, receiver, source), (id, len)) in lens {
            spans[id as usize] = Span {
                source,
                start: end,
                sent: 0,
            };
            end += len;
            inbound[receiver as usize].push(id);
        }
        Self {
            of_stage,
            spans,
            inbound,
            producers: vec![0; end],
        }
    }

    /// Adds what the op at position `at` of its rank sends, if anything. Ranks may come in any
    /// order, a rank's ops in theirs.
    #[inline]
    pub(super) fn add(&mut self, op: Op, at: u32) {
        let direction = match op.kind {
            OpKind::Forward => 0,
            OpKind::Backward | OpKind::BackwardInput => 1,
            _ => return,
        };
        let channel = self.of_stage[op.stage.index()][direction];
        if channel != NONE {
            let span = &mut self.spans[channel as usize];
            self.producers[span.start + span.sent] = at;
            span.sent += 1;
        }
    }

    /// The channels that end at a rank, those of activations first.
    pub(super) fn inbound(&self, rank: u32) -> impl Iterator<Item = Messages<'_>> {
        self.inbound[rank as usize].iter().map(|&channel| {
            let span = &self.spans[channel as usize];
            Messages {
                source: span.source,
                producers: &self.producers[span.start..span.start + span.sent],
            }
        })
    }
}
