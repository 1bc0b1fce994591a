//! Stages: what plans that move whole spans between pairs of ranks are made of.
//!
//! A stage is one span that goes to, or comes from, another rank, chunk by chunk. Both ends cut it
//! alike, so that the chunks of the k-th stage to a rank meet those of its k-th stage from there.
//! All memories of a plan that is made of stages are indexed alike: element i of the input belongs to
//! element i of scratch and output.

use super::plan::{Kind, Plan, Source, Space, Span, Step};

/// One span on its way.
#[derive(Debug, Clone)]
pub enum Stage {
    /// To `peer`.
    Send {
        /// Rank within the group.
        peer: usize,
        /// What.
        from: Span,
    },
    /// From `peer`.
    Store {
        /// Rank within the group.
        peer: usize,
        /// Type of the elements on the wire.
        kind: Kind,
        /// Where the other operand lies; `None` for a plain copy.
        with: Option<Space>,
        /// Where it goes.
        into: Span,
        /// See [`Step::Store`].
        finish: bool,
        /// Every chunk goes on to these ranks as soon as it is stored.
        pass_on: Vec<usize>,
    },
}

impl Stage {
    /// Copies what comes from `peer`, finished, to the output.
    pub fn receive(peer: usize, span: Span, pass_on: Vec<usize>) -> Stage {
        let into = span.of(Space::Output);
        Stage::Store { peer, kind: Kind::Element, with: None, into, finish: false, pass_on }
    }

    fn steps(self, chunk: usize) -> Box<dyn Iterator<Item = Step> + Send> {
        match self {
            Stage::Send { peer, from } => Box::new(from.chunks(chunk).map(move |from| Step::Send { peer, from })),
            Stage::Store { peer, kind, with, into, finish, pass_on } => {
                Box::new(into.chunks(chunk).flat_map(move |into| {
                    let source = Source::Message { peer, kind };
                    let store = Step::Store { source, with: with.map(|space| into.of(space)), into, finish };
                    let sends: Vec<Step> = pass_on.iter().map(|&peer| Step::Send { peer, from: into }).collect();
                    std::iter::once(store).chain(sends)
                }))
            }
        }
    }
}

/// The stages one after the other, in chunks of at most `chunk` elements.
pub fn plan(stages: impl Iterator<Item = Stage> + Send + 'static, chunk: usize) -> Plan {
    Box::new(stages.flat_map(move |stage| stage.steps(chunk)))
}
