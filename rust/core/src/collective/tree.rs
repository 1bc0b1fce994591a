//! The binomial tree: few messages one after the other, for vectors that are all latency.
//!
//! Write the ranks in binary. Rank r's parent is r without its lowest set bit; rank 0 is the
//! root. Going up, every rank adds its children's sums to its own input, nearest child first,
//! and sends the result to its parent: after `log2(size)` rounds the root has the sum of all.
//! Going down, the root sends it to its children, farthest first (that one has the most
//! left to do), and they to theirs. `2 log2(size)` messages one after the other, against the
//! ring's `2 (size - 1)`; but the root's link carries `log2(size)` whole vectors.
//!
//! ```text
//! 0 --- 1          up:   1 to 0, 3 to 2, 5 to 4; then 2 to 0; then 4 to 0
//! |---- 2 --- 3    down: 0 to 4; then 0 to 2, ...
//! |---- 4 --- 5
//! ```
//!
//! A subtree is a run of neighbouring ranks, so that the sum is in rank order, grouped by
//! subtrees. With a wider accumulation type all of the way up carries it, and the root rounds.
//!
//! In place nothing is overwritten too early: what lands in the output is the root's result,
//! which exists because the parent has received what this rank sent up.
//!
//! A broadcast is the way down alone, with ranks counted from the root. For large vectors a
//! chain is better: rank after rank passes on every chunk, so that every link carries the
//! vector once, whatever the size of the group. A barrier is an allreduce of one element.

use super::Collective;
use super::plan::{Plan, Shape, Source, Space, Span, Step};
use super::select::{Algorithm, Recipe};

/// Binomial tree: for small vectors, in large groups.
pub const TREE: Algorithm = Algorithm { name: "tree", build };

/// From rank to rank in a row: broadcast of large vectors.
pub const CHAIN: Algorithm = Algorithm { name: "chain", build: build_chain };

fn build(op: Collective, shape: &Shape) -> Option<Recipe> {
    let scratch = if shape.widen { shape.count } else { 0 };
    match op {
        Collective::Allreduce(_) | Collective::Barrier => {
            let down = Relatives::in_tree(shape, 0).pass_down(shape);
            Some(Recipe { plan: Box::new(reduce_to_zero(shape.clone()).chain(down)), scratch })
        }
        Collective::Broadcast { root } => {
            Some(Recipe { plan: broadcast(shape, root, Relatives::in_tree(shape, root)), scratch: 0 })
        }
        Collective::Allgather | Collective::ReduceScatter(_) => None,
    }
}

fn build_chain(op: Collective, shape: &Shape) -> Option<Recipe> {
    match op {
        Collective::Broadcast { root } => {
            Some(Recipe { plan: broadcast(shape, root, Relatives::in_chain(shape, root)), scratch: 0 })
        }
        _ => None,
    }
}

/// Whom a rank receives from and whom it sends to on the way down.
struct Relatives {
    parent: Option<usize>,
    /// Nearest first.
    children: Vec<usize>,
}

impl Relatives {
    fn in_tree(shape: &Shape, root: usize) -> Relatives {
        let size = shape.size;
        let place = shape.before(root);
        let rank_at = |place: usize| (place + root) % size;
        let parent = (place > 0).then(|| rank_at(place & (place - 1)));
        // Children differ in a bit below the lowest set one.
        let bits = if place > 0 { place.trailing_zeros() } else { usize::BITS - 1 };
        let children = (0..bits).map(|bit| place + (1 << bit)).take_while(|&child| child < size).map(rank_at).collect();
        Relatives { parent, children }
    }

    fn in_chain(shape: &Shape, root: usize) -> Relatives {
        let place = shape.before(root);
        let parent = (place > 0).then(|| shape.before(1));
        let children = (place + 1 < shape.size).then(|| shape.after(1)).into_iter().collect();
        Relatives { parent, children }
    }

    /// Receives every chunk of the output from the parent and passes it on at once.
    fn pass_down(self, shape: &Shape) -> impl Iterator<Item = Step> + Send + use<> {
        let Relatives { parent, children } = self;
        Span::new(Space::Output, 0, shape.count).chunks(shape.chunk).flat_map(move |chunk| {
            let receive = parent.map(|peer| Step::copy(Source::Message { peer, kind: chunk.kind() }, chunk));
            let sends: Vec<Step> = children.iter().rev().map(|&peer| Step::Send { peer, from: chunk }).collect();
            receive.into_iter().chain(sends)
        })
    }
}

/// Leaves the reduction in rank 0's output.
fn reduce_to_zero(shape: Shape) -> impl Iterator<Item = Step> + Send {
    let Relatives { parent, children } = Relatives::in_tree(&shape, 0);
    Span::new(Space::Input, 0, shape.count).chunks(shape.chunk).flat_map(move |input| {
        let mut steps = Vec::with_capacity(children.len() + 2);
        let mut sum = input;
        if shape.widen {
            sum = input.of(Space::Scratch);
            steps.push(Step::copy(Source::Local(input), sum));
        }
        let partial = input.of(shape.partial());
        for (index, &peer) in children.iter().enumerate() {
            let last = parent.is_none() && index + 1 == children.len();
            let into = if last { input.of(Space::Output) } else { partial };
            steps.push(Step::reduce(Source::Message { peer, kind: partial.kind() }, sum, into).finish_if(last));
            sum = into;
        }
        steps.extend(parent.map(|peer| Step::Send { peer, from: sum }));
        steps
    })
}

fn broadcast(shape: &Shape, root: usize, relatives: Relatives) -> Plan {
    let own = (shape.rank == root).then(|| {
        let input = Span::new(Space::Input, 0, shape.count);
        input.chunks(shape.chunk).map(|chunk| Step::copy(Source::Local(chunk), chunk.of(Space::Output)))
    });
    Box::new(own.into_iter().flatten().chain(relatives.pass_down(shape)))
}
