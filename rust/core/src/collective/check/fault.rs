//! What the checker says about a wrong plan.

use crate::collective::plan::{Kind, Span};

/// What is wrong with a plan, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, {}{fault}", Place { step: *.step, span: *.span })]
pub struct Violation {
    /// Whose plan.
    pub rank: usize,
    /// Which step of it, counted from 0; none if the plan as a whole fails.
    pub step: Option<usize>,
    /// The memory in question.
    pub span: Option<Span>,
    /// What is wrong.
    pub fault: Fault,
}

struct Place {
    step: Option<usize>,
    span: Option<Span>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(step) = self.step {
            write!(f, "step {step}, ")?;
        }
        match self.span {
            Some(Span { space, start, len }) => write!(f, "{space:?} {start}..{}: ", start + len),
            None => Ok(()),
        }
    }
}

/// What can be wrong with a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A peer that does not exist, or the rank itself.
    #[error("rank {peer} is no peer")]
    NoPeer {
        /// The peer named.
        peer: usize,
    },
    /// A message that the other rank does not await, or does not send.
    #[error("the message has no counterpart in the plan of rank {peer}")]
    Unmatched {
        /// The other rank.
        peer: usize,
    },
    /// Sender and receiver disagree on a message's length.
    #[error("rank {peer} sends {sent} elements in its step {step}, {awaited} are awaited")]
    Length {
        /// The sender.
        peer: usize,
        /// Its step.
        step: usize,
        /// Elements sent.
        sent: usize,
        /// Elements awaited.
        awaited: usize,
    },
    /// Sender and receiver disagree on a message's type.
    #[error("rank {peer} sends {sent:?} in its step {step}, {awaited:?} is awaited")]
    WrongKind {
        /// The sender.
        peer: usize,
        /// Its step.
        step: usize,
        /// Type sent.
        sent: Kind,
        /// Type awaited.
        awaited: Kind,
    },
    /// An empty span, or one longer than a chunk.
    #[error("a step handles 1 to {chunk} elements")]
    Size {
        /// Most elements in one step.
        chunk: usize,
    },
    /// A span that reaches beyond its memory.
    #[error("the memory has {len} elements")]
    OutOfBounds {
        /// Elements in that memory.
        len: usize,
    },
    /// A store into the input.
    #[error("the input must not be written")]
    WritesInput,
    /// The operands and the result of a store differ in length, or overlap without being the same.
    #[error("{other:?} is neither the same memory nor disjoint, or differs in length")]
    Operand {
        /// The operand.
        other: Span,
    },
    /// Reads what nothing was stored in.
    #[error("reads elements that hold nothing yet")]
    Uninitialized,
    /// Overwrites what may not have been received yet.
    #[error("overwrites what step {send} sends to rank {peer}, who may not have received it yet")]
    InFlight {
        /// The sending step of this rank.
        send: usize,
        /// Its receiver.
        peer: usize,
    },
    /// A message may land before a step of this rank has used the memory.
    #[error("the message may land before step {user} is done with this memory")]
    LandsTooEarly {
        /// That step.
        user: usize,
    },
    /// Uses memory in which the message of a later step may have landed.
    #[error("the message of step {landing} may have landed here already")]
    MayHaveLanded {
        /// That step.
        landing: usize,
    },
    /// Nobody can go on.
    #[error("waits for rank {peer} forever")]
    Deadlock {
        /// The rank whose message does not come.
        peer: usize,
    },
    /// A wrong result.
    #[error("output element {index} {why}")]
    Wrong {
        /// Which one.
        index: usize,
        /// What is wrong with it.
        why: String,
    },
    /// Another order of summation than on rank 0.
    #[error("output element {index} is summed in another order than on rank 0")]
    Order {
        /// Which one.
        index: usize,
    },
}

impl Violation {
    pub(super) fn at(rank: usize, step: usize, span: Span, fault: Fault) -> Violation {
        Violation { rank, step: Some(step), span: Some(span), fault }
    }
}
