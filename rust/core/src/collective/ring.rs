//! The ring: every link carries the least that an allreduce needs, all the time.
//!
//! The ranks stand in a circle; each sends only to the next and receives only from the one
//! before. The vector is cut into `size` blocks. Block b starts its journey at rank b as that
//! rank's raw input. Each rank on the way adds its own input to what arrives and passes the
//! sum on, so that after `size - 1` hops, at rank b - 1, block b holds all contributions:
//! that is the reduce-scatter. It then travels `size - 1` hops further, and every rank keeps
//! a copy as it passes: the allgather. At any moment every rank sends one block while it
//! receives another; altogether it sends `2 (size - 1) / size` vectors, and no algorithm
//! sends less. The price is latency, `2 (size - 1)` messages one after the other.
//!
//! ```text
//! size 3, rows are hops; ab: sum of the contributions of ranks a and b
//!          rank 0 sends     rank 1 sends     rank 2 sends
//! hop 0    block 0: 0       block 1: 1       block 2: 2
//! hop 1    block 2: 20      block 0: 01      block 1: 12
//! hop 2    block 1: 120     block 2: 201     block 0: 012     complete: finished here, once
//! hop 3    block 0: 012     block 1: 120     block 2: 201     just passed on
//! ```
//!
//! Chunks make it a pipeline: a rank does not wait for a whole block, but passes every chunk
//! on as soon as it has been reduced. In program order a rank sends all chunks of its first
//! block, and then, for hop after hop and chunk after chunk, stores one and sends it on.
//!
//! In place (input and output the same memory) nothing is overwritten too early: the only
//! thing that ever lands in the output unreduced is a complete block, and it is complete
//! because, among others, the next rank has received what this rank sent of it.

use super::Collective;
use super::plan::{Kind, Plan, Shape, Source, Space, Span, Step};
use super::select::{Algorithm, Recipe};

/// Reduce-scatter and allgather round a ring: best for large vectors.
pub const RING: Algorithm = Algorithm { name: "ring", build };

fn build(op: Collective, shape: &Shape) -> Option<Recipe> {
    let (shape, count) = (shape.clone(), shape.count);
    match op {
        Collective::Allreduce(_) => {
            let scratch = if shape.widen { count } else { 0 };
            Some(Recipe { plan: allreduce(shape), scratch })
        }
        Collective::ReduceScatter(_) => {
            let scratch = op.input_len(count, shape.size);
            Some(Recipe { plan: reduce_scatter(shape), scratch })
        }
        Collective::Allgather => Some(Recipe { plan: allgather(shape), scratch: 0 }),
        Collective::Broadcast { .. } | Collective::Barrier => None,
    }
}

/// What a rank does with one chunk: add its own contribution to what arrives, pass it on.
struct Hop {
    arriving: Option<Kind>,
    own: Option<Span>,
    into: Span,
    last: bool,
    pass_on: bool,
}

impl Hop {
    fn steps(self, shape: &Shape) -> impl Iterator<Item = Step> + Send + use<> {
        let store = self.arriving.map(|kind| Step::Store {
            source: Source::Message { peer: shape.before(1), kind },
            with: self.own,
            into: self.into,
            finish: self.last,
        });
        let send = self.pass_on.then_some(Step::Send { peer: shape.after(1), from: self.into });
        store.into_iter().chain(send)
    }
}

/// What arrives at this hop of a reduce-scatter: nothing, a raw input, or a partial sum.
fn arriving(shape: &Shape, hop: usize) -> Option<Kind> {
    match hop {
        0 => None,
        1 => Some(Kind::Element),
        _ => Some(Span::new(shape.partial(), 0, 1).kind()),
    }
}

fn allreduce(shape: Shape) -> Plan {
    let complete = shape.size - 1;
    let last = 2 * complete;
    Box::new((0..=last).flat_map(move |hop| {
        let shape = shape.clone();
        let block = Span::new(Space::Input, 0, shape.count).block(shape.size, shape.before(hop));
        block.chunks(shape.chunk).flat_map(move |own| {
            let (arriving, space) = match hop {
                0 => (None, Space::Input),
                _ if hop < complete => (arriving(&shape, hop), shape.partial()),
                _ if hop == complete => (arriving(&shape, hop), Space::Output),
                _ => (Some(Kind::Element), Space::Output),
            };
            let contributes = 0 < hop && hop <= complete;
            let own_input = contributes.then_some(own);
            Hop { arriving, own: own_input, into: own.of(space), last: hop == complete, pass_on: hop < last }
                .steps(&shape)
        })
    }))
}

/// As the first half of the allreduce, but one place back, so that rank r ends with block r.
/// Partial sums lie in scratch, each at its own place: the output has room for one block only.
fn reduce_scatter(shape: Shape) -> Plan {
    let complete = shape.size - 1;
    Box::new((0..=complete).flat_map(move |hop| {
        let shape = shape.clone();
        let start = shape.before(1 + hop) * shape.count;
        let block = Span::new(Space::Input, start, shape.count);
        block.chunks(shape.chunk).flat_map(move |own| {
            let (arriving, into) = match hop {
                0 => (None, own),
                // Sums from two ranks on live in scratch, whose messages carry the accumulation type.
                1 => (Some(Kind::Element), own.of(Space::Scratch)),
                _ => (Some(Kind::Accumulator), own.of(Space::Scratch)),
            };
            let into = if hop == complete { Span::new(Space::Output, own.start - start, own.len) } else { into };
            let own = (hop > 0).then_some(own);
            Hop { arriving, own, into, last: hop == complete, pass_on: hop < complete }.steps(&shape)
        })
    }))
}

fn allgather(shape: Shape) -> Plan {
    let last = shape.size - 1;
    Box::new((0..=last).flat_map(move |hop| {
        let shape = shape.clone();
        let start = shape.before(hop) * shape.count;
        let block = Span::new(Space::Output, start, shape.count);
        block.chunks(shape.chunk).flat_map(move |into| {
            let input = Span::new(Space::Input, into.start - start, into.len);
            let copy = (hop == 0).then_some(Step::copy(Source::Local(input), into));
            let arriving = (hop > 0).then_some(Kind::Element);
            copy.into_iter().chain(Hop { arriving, own: None, into, last: false, pass_on: hop < last }.steps(&shape))
        })
    }))
}
