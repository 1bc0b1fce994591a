//! Who is late? Asked while an operation does not move, told in warnings and in deadline errors.

use super::protocol::OpKey;
use super::wires::Wires;
use crate::error::Error;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What one operation knows of the others' progress.
#[derive(Debug, Default)]
pub struct Inquiry {
    /// The rank that asks.
    pub own_rank: usize,
    /// When the last question went out.
    pub asked: Option<Instant>,
    /// A warning was given for the present wait.
    pub warned: bool,
    /// By rank: operations called in this lane of this group.
    pub answers: BTreeMap<usize, u64>,
}

/// Ranks by what keeps them.
struct Late {
    silent: Vec<usize>,
    not_called: Vec<usize>,
}

impl Inquiry {
    /// How often to ask, given the deadline.
    pub fn interval(timeout: Duration) -> Duration {
        (timeout / 8).clamp(Duration::from_millis(20), Duration::from_secs(1))
    }

    fn late(&self, op: OpKey, ranks: &[usize], timeout: Duration, wires: &Wires, now: Instant) -> Late {
        let patience = timeout.mul_f64(0.4).min(Duration::from_secs(5));
        let others = || ranks.iter().copied().filter(|&rank| rank != self.own_rank);
        let silent = |rank: &usize| now.duration_since(wires.peers[*rank].heard) > patience;
        Late {
            silent: others().filter(silent).collect(),
            not_called: others().filter(|rank| self.answers.get(rank).is_some_and(|&called| called <= op.seq)).collect(),
        }
    }

    /// One sentence about who is late.
    pub fn verdict(&self, op: OpKey, ranks: &[usize], timeout: Duration, wires: &Wires, now: Instant) -> String {
        let late = self.late(op, ranks, timeout, wires, now);
        let mut parts = Vec::new();
        if !late.silent.is_empty() {
            parts.push(format!("no sign of life from {}", names(&late.silent)));
        }
        let waiting: Vec<_> = late.not_called.iter().copied().filter(|rank| !late.silent.contains(rank)).collect();
        if !waiting.is_empty() {
            let verb = if waiting.len() == 1 { "has" } else { "have" };
            parts.push(format!("{} {verb} not called it yet (alive, busy elsewhere)", names(&waiting)));
        }
        if parts.is_empty() {
            parts.push("all ranks have called it and are alive, but no byte moves".into());
        }
        parts.join("; ")
    }

    /// The error at the deadline: a silent rank is lost, a late one makes a timeout.
    pub fn judge(&self, operation: String, op: OpKey, ranks: &[usize], timeout: Duration, waited: Duration, wires: &Wires, now: Instant) -> Error {
        let detail = self.verdict(op, ranks, timeout, wires, now);
        match self.late(op, ranks, timeout, wires, now).silent.first() {
            Some(&peer) => Error::PeerLost {
                operation,
                peer,
                cause: format!("{detail}; waited {:.1} s (stopped, swapping, or its network is down)", waited.as_secs_f64()),
            },
            None => Error::Timeout { operation, waited, timeout, detail },
        }
    }
}

fn names(ranks: &[usize]) -> String {
    let list = ranks.iter().take(16).map(usize::to_string).collect::<Vec<_>>().join(", ");
    let more = if ranks.len() > 16 { format!(" and {} more", ranks.len() - 16) } else { String::new() };
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}{more}") }
}
