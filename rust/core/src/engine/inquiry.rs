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

/// A wait that is being looked into.
pub struct Wait<'a> {
    /// What is waited for.
    pub op: OpKey,
    /// World ranks of its group.
    pub ranks: &'a [usize],
    /// A rank that has given no sign of life for a good part of this time is silent.
    pub patience: Duration,
    /// How long nothing has moved.
    pub waited: Duration,
    /// The present.
    pub now: Instant,
}

/// Ranks by what keeps them.
struct Late {
    silent: Vec<usize>,
    not_called: Vec<usize>,
}

impl Inquiry {
    /// How often to ask, given the time that the answers are for.
    pub fn interval(patience: Duration) -> Duration {
        (patience / 8).clamp(Duration::from_millis(20), Duration::from_secs(1))
    }

    fn late(&self, wait: &Wait, wires: &Wires) -> Late {
        let patience = wait.patience.mul_f64(0.4).min(Duration::from_secs(5));
        let others = || wait.ranks.iter().copied().filter(|&rank| rank != self.own_rank);
        let silent = |rank: &usize| wait.now.duration_since(wires.peers[*rank].heard) > patience;
        let not_called = |rank: &usize| self.answers.get(rank).is_some_and(|&called| called <= wait.op.seq);
        Late { silent: others().filter(silent).collect(), not_called: others().filter(not_called).collect() }
    }

    /// One sentence about who is late.
    pub fn verdict(&self, wait: &Wait, wires: &Wires) -> String {
        let late = self.late(wait, wires);
        let mut parts = Vec::new();
        if !late.silent.is_empty() {
            parts.push(format!("no sign of life from {}", names(&late.silent)));
        }
        let busy: Vec<_> = late.not_called.iter().copied().filter(|rank| !late.silent.contains(rank)).collect();
        if !busy.is_empty() {
            let verb = if busy.len() == 1 { "has" } else { "have" };
            parts.push(format!("{} {verb} not called it yet (alive, busy elsewhere)", names(&busy)));
        }
        if parts.is_empty() {
            parts.push("all ranks have called it and are alive, but no byte moves".into());
        }
        parts.join("; ")
    }

    /// The error at the deadline: a silent rank is lost, a late one makes a timeout.
    pub fn judge(&self, operation: String, wait: &Wait, wires: &Wires) -> Error {
        let detail = self.verdict(wait, wires);
        let waited = wait.waited;
        match self.late(wait, wires).silent.first() {
            Some(&peer) => Error::PeerLost {
                operation,
                peer,
                cause: format!(
                    "it gave no sign of life while we waited for {:.1} s (stopped, swapping, or its network is down): {detail}",
                    waited.as_secs_f64()
                ),
            },
            None => Error::Timeout { operation, waited, timeout: wait.patience, detail },
        }
    }
}

fn names(ranks: &[usize]) -> String {
    let list = ranks.iter().take(16).map(usize::to_string).collect::<Vec<_>>().join(", ");
    let more = if ranks.len() > 16 { format!(" and {} more", ranks.len() - 16) } else { String::new() };
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}{more}") }
}
