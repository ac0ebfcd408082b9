//! The rule about channels: both ends name the same tensors in the same order.

use crate::engine::Program;
use crate::ids::Rank;
use crate::op::Op;
use crate::violation::Violation;

/// The n-th send and the n-th receive of each channel must name the same tensor.
pub(super) fn check(program: &Program<'_>) -> Vec<Violation> {
    let mut violations = Vec::new();
    for (channel, [sends, recvs]) in program.channels.iter().zip(program.channel_ends()) {
        let (source, destination) = (channel.source, channel.destination);
        let op = |rank: Rank, at: usize| program.ranks[rank.index()].ops[at];
        let matches = |send: Op, recv: Op| {
            let links = program.stages[send.stage.index()];
            let reader = if channel.backward {
                links.previous
            } else {
                links.next
            };
            reader == recv.stage.0 && send.unit == recv.unit
        };
        let pairs = || {
            sends
                .iter()
                .zip(&recvs)
                .map(|(&s, &r)| (s, op(source, s), r, op(destination, r)))
        };
        let wrong = pairs()
            .filter(|&(_, send, _, recv)| !matches(send, recv))
            .count();
        let first = pairs()
            .enumerate()
            .find(|&(_, (_, send, _, recv))| !matches(send, recv));
        if let Some((n, (send_at, send, recv_at, recv))) = first {
            let more = if wrong > 1 {
                format!(" (and {} more pairs differ)", wrong - 1)
            } else {
                String::new()
            };
            violations.push(Violation {
                rule: "channel_pairing",
                rank: destination,
                position: recv_at as u64,
                op: recv.to_string(),
                message: format!(
                    "transfer {n} from rank {source} to rank {destination} is {send} at position \
                     {send_at} there, but {recv} here{more}"
                ),
                hint: "both ranks name a channel's tensors in the same order".to_owned(),
                cycle: Vec::new(),
            });
        }
    }
    violations
}
