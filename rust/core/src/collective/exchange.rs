//! All to all: one message's latency, for vectors so small that bytes do not count.
//!
//! Every rank sends its whole vector to every other, and each combines all of them itself, in
//! rank order, its own in its place; so all get the same bits without a second message.
//! With two ranks this is also the cheapest way for vectors of some size, since a tree would send
//! the same bytes in twice the time.
//!
//! What is sent is a copy of the input in scratch. In place, the output is the input, and a
//! rank that has got all it needs finishes while its own vector may still be on the way to a
//! slow peer: nothing that arrives tells it that all others have received.
//!
//! Scratch: first that copy, then the partial sums.

use super::Collective;
use super::plan::{Kind, Plan, Shape, Source, Space, Span, Step};
use super::select::{Algorithm, Recipe};

/// Every rank to every rank: for tiny vectors.
pub const EXCHANGE: Algorithm = Algorithm { name: "exchange", build };

fn build(op: Collective, shape: &Shape) -> Option<Recipe> {
    match op {
        Collective::Allreduce(_) | Collective::Barrier => {
            Some(Recipe { plan: allreduce(shape.clone()), scratch: 2 * shape.count })
        }
        _ => None,
    }
}

fn allreduce(shape: Shape) -> Plan {
    let copied = Span::new(Space::Scratch, 0, shape.count);
    let send = {
        let shape = shape.clone();
        copied.chunks(shape.chunk).flat_map(move |copy| {
            let shape = shape.clone();
            std::iter::once(Step::copy(Source::Local(copy.of(Space::Input)), copy))
                .chain((1..shape.size).map(move |ahead| Step::Send { peer: shape.after(ahead), from: copy }))
        })
    };
    let combine = copied.chunks(shape.chunk).flat_map(move |copy| {
        let Shape { rank, size, count, .. } = shape;
        let sums = Span { start: copy.start + count, ..copy };
        let from = move |peer| match peer {
            _ if peer == rank => Source::Local(copy),
            peer => Source::Message { peer, kind: Kind::Accumulator },
        };
        (0..size).map(move |peer| {
            let last = peer + 1 == size;
            let into = if last { copy.of(Space::Output) } else { sums };
            match peer {
                0 => Step::copy(from(0), into),
                _ => Step::reduce(from(peer), sums, into).finish_if(last),
            }
        })
    });
    Box::new(send.chain(combine))
}
