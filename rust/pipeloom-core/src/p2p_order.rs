//! The even/odd order of a synchronous exchange with both neighbours.
//!
//! If all ranks sent first, blocking transfers would wait in a circle. So even ranks send where
//! odd ranks receive:
//!
//! ```text
//! even: send next      receive previous  send previous  receive next
//! odd:  receive previous  send next      receive next   send previous
//! ```

use crate::error::{Error, Result};
use crate::ids::Rank;
use crate::op::OpKind;

/// Names of the transfers of an exchange, in the order of an even rank.
pub const TRANSFERS: [&str; 4] = ["send_next", "recv_prev", "send_prev", "recv_next"];

/// In the order of [`TRANSFERS`]: the kind of op that each is.
const KINDS: [OpKind; 4] = [
    OpKind::SendForward,
    OpKind::RecvForward,
    OpKind::SendBackward,
    OpKind::RecvBackward,
];

/// Where each of [`TRANSFERS`] stands on an even and on an odd rank.
const PLACES: [[u8; 4]; 2] = [[0, 1, 2, 3], [1, 0, 3, 2]];

/// The place of a kind of transfer in the exchange of a rank; compute ops have none.
pub(crate) fn place(rank: Rank, kind: OpKind) -> u8 {
    let at = KINDS.iter().position(|&other| other == kind);
    at.map_or(u8::MAX, |at| PLACES[rank.index() % 2][at])
}

/// The given transfers in the order in which `rank` makes them.
///
/// ```
/// use pipeloom_core::{ids::Rank, p2p_order::p2p_order};
///
/// let have = ["send_next", "recv_prev"];
/// assert_eq!(p2p_order(Rank(0), &have)?, ["send_next", "recv_prev"]);
/// assert_eq!(p2p_order(Rank(1), &have)?, ["recv_prev", "send_next"]);
/// # Ok::<(), pipeloom_core::error::Error>(())
/// ```
///
/// # Errors
/// If a name is unknown or given twice.
pub fn p2p_order(rank: Rank, have: &[&str]) -> Result<Vec<&'static str>> {
    let mut present = [false; 4];
    for name in have {
        let Some(at) = TRANSFERS.iter().position(|other| other == name) else {
            return Err(Error::config(
                format!("transfer {name:?} in have is unknown"),
                format!("each is one of {}", TRANSFERS.join(", ")),
            ));
        };
        if std::mem::replace(&mut present[at], true) {
            return Err(Error::config(
                format!("transfer {name:?} stands twice in have"),
                "name each transfer once",
            ));
        }
    }
    let places = PLACES[rank.index() % 2];
    let mut order: Vec<usize> = (0..4).filter(|&at| present[at]).collect();
    order.sort_by_key(|&at| places[at]);
    Ok(order.into_iter().map(|at| TRANSFERS[at]).collect())
}
