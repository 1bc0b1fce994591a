//! A collective as data: what one rank sends, awaits and reduces, in program order.
//!
//! A plan is an iterator, made on the fly, so that a long one costs no memory. It has several
//! readers: the executor (`engine::exec`) and the checker (`collective::check`).
//!
//! Messages between two ranks are matched in order: the k-th `Send` of a plan from rank a to
//! rank b is the k-th `Source::Message { peer: a }` of rank b's plan. Both have the same length and kind.

/// Which memory a span lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    /// The caller's input: read only. May be the same memory as `Output` (in place).
    Input,
    /// The caller's output.
    Output,
    /// Scratch of the accumulation type (float32 for 16-bit floats, else the element type).
    Scratch,
}

/// Type of the elements of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The collective's element type.
    Element,
    /// The accumulation type.
    Accumulator,
}

/// `len` elements from `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// The memory.
    pub space: Space,
    /// First element.
    pub start: usize,
    /// Number of elements, at least 1 in a step.
    pub len: usize,
}

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The next message from this rank of the group.
    Message {
        /// Rank within the group.
        peer: usize,
        /// Type of the elements on the wire.
        kind: Kind,
    },
    /// Memory of this rank.
    Local(Span),
}

/// One step of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Publish `from` to `peer` (kind: `Accumulator` for `Scratch`, else `Element`). Does not wait;
    /// the plan guarantees that `from` is not changed before the peer has received it.
    Send {
        /// Rank within the group.
        peer: usize,
        /// What to send.
        from: Span,
    },
    /// Await `source`, then `into = finish(source)` or `into = finish(with op source)`.
    Store {
        /// What to await.
        source: Source,
        /// The other operand of the reduction, or a plain copy if there is none.
        with: Option<Span>,
        /// Where the result goes (may be `with` itself). Its type follows from its space; a change
        /// of type on the way rounds once.
        into: Span,
        /// Divide by the group's size (only for averages): set on exactly the last store of an element
        /// before it is sent around.
        finish: bool,
    },
}

/// All steps of one rank. `Send`, so that an engine's thread may run it.
pub type Plan = Box<dyn Iterator<Item = Step> + Send>;

/// What a plan depends on. Equal on all ranks but for `rank`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Rank within the group.
    pub rank: usize,
    /// Size of the group, at least 1.
    pub size: usize,
    /// Elements: of the whole vector (allreduce, broadcast), or of one rank's share (allgather,
    /// reduce_scatter).
    pub count: usize,
    /// Most elements in one message; never changes a result.
    pub chunk: usize,
    /// Is the accumulation type wider than the element type (16-bit floats under sum, average, product)?
    pub widen: bool,
    /// Node of every rank of the group (for hierarchical plans).
    pub nodes: std::sync::Arc<[u32]>,
}

impl Span {
    /// `len` elements of `space` from `start`.
    pub const fn new(space: Space, start: usize, len: usize) -> Span {
        Span { space, start, len }
    }

    /// The same elements of another memory.
    pub const fn of(self, space: Space) -> Span {
        Span { space, ..self }
    }

    /// Block `index` of `parts` that share this span as evenly as possible: the first ones
    /// are one element longer, and with fewer elements than parts the last ones are empty.
    pub fn block(self, parts: usize, index: usize) -> Span {
        let (each, longer) = (self.len / parts, self.len % parts);
        let start = self.start + index * each + index.min(longer);
        Span { space: self.space, start, len: each + usize::from(index < longer) }
    }

    /// Chunk `index` of at most `chunk` elements, if the span reaches that far.
    pub fn chunk(self, chunk: usize, index: usize) -> Option<Span> {
        let chunk = chunk.max(1);
        let skip = index.checked_mul(chunk).filter(|&skip| skip < self.len)?;
        Some(Span { space: self.space, start: self.start + skip, len: chunk.min(self.len - skip) })
    }

    /// All chunks of at most `chunk` elements, none for an empty span.
    pub fn chunks(self, chunk: usize) -> impl Iterator<Item = Span> + Send {
        (0..).map_while(move |index| self.chunk(chunk, index))
    }

    /// What a message sent from this span carries.
    pub const fn kind(self) -> Kind {
        match self.space {
            Space::Scratch => Kind::Accumulator,
            Space::Input | Space::Output => Kind::Element,
        }
    }
}

impl Step {
    /// `into = source`.
    pub const fn copy(source: Source, into: Span) -> Step {
        Step::Store { source, with: None, into, finish: false }
    }

    /// `into = with op source`.
    pub const fn reduce(source: Source, with: Span, into: Span) -> Step {
        Step::Store { source, with: Some(with), into, finish: false }
    }

    /// This store, with the division of averages added if it is the `last` one.
    pub const fn finish_if(self, last: bool) -> Step {
        match self {
            Step::Store { source, with, into, .. } => Step::Store { source, with, into, finish: last },
            send => send,
        }
    }
}

impl Shape {
    /// Where partial results belong: an accumulation type that is wider than the element's
    /// must not be rounded on the way.
    pub fn partial(&self) -> Space {
        if self.widen { Space::Scratch } else { Space::Output }
    }

    /// The rank `ahead` places further round the ring.
    pub const fn after(&self, ahead: usize) -> usize {
        (self.rank + ahead % self.size) % self.size
    }

    /// The rank `back` places behind on the ring.
    pub const fn before(&self, back: usize) -> usize {
        (self.rank + self.size - back % self.size) % self.size
    }
}
