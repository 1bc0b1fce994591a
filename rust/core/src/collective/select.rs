//! The table of algorithms, and the rule that chooses one.
//!
//! The choice decides the order of summation, so it depends only on what is equal on all ranks:
//! operation, count, element size, which ranks share a node, accumulation type, and the two settings.

use super::Collective;
use super::direct::DIRECT;
use super::double_tree::DOUBLE_TREE;
use super::exchange::EXCHANGE;
use super::halving_doubling::HALVING_DOUBLING;
use super::hierarchical::{self, HIERARCHICAL};
use super::plan::{Plan, Shape, Source, Space, Span, Step};
use super::ring::RING;
use super::tree::{CHAIN, TREE};

/// One way to carry out collectives.
#[derive(Clone, Copy)]
pub struct Algorithm {
    /// As it appears in settings, traces and benchmarks.
    pub name: &'static str,
    /// The plan of one rank; `None` for a collective that this algorithm does not know.
    /// Called for at least 2 ranks and 1 element; a barrier has exactly 1.
    pub build: fn(Collective, &Shape) -> Option<Recipe>,
}

/// All algorithms.
pub const ALGORITHMS: &[Algorithm] =
    &[RING, TREE, CHAIN, EXCHANGE, DIRECT, HALVING_DOUBLING, DOUBLE_TREE, HIERARCHICAL];

/// A plan, and what it needs.
pub struct Recipe {
    /// The steps of one rank.
    pub plan: Plan,
    /// Elements of [`Space::Scratch`] that the executor provides.
    pub scratch: usize,
}

/// What [`plan_for`] chose.
pub struct Planned {
    /// The steps of one rank.
    pub plan: Plan,
    /// Elements of [`Space::Scratch`] that the executor provides.
    pub scratch: usize,
    /// The algorithm's name, "local" if there is nothing to exchange.
    pub name: &'static str,
}

impl From<Planned> for Recipe {
    fn from(Planned { plan, scratch, .. }: Planned) -> Recipe {
        Recipe { plan, scratch }
    }
}

impl Algorithm {
    /// The algorithm of that name.
    pub fn named(name: &str) -> Option<Algorithm> {
        ALGORITHMS.iter().find(|algorithm| algorithm.name == name).copied()
    }

    /// The plan of one rank; `None` for a collective that this algorithm does not know.
    /// Any size and count; a group of 1 and an empty vector need no algorithm.
    pub fn plan(self, op: Collective, shape: &Shape) -> Option<Planned> {
        let shape = normal(op, shape);
        if shape.size > 1 && shape.count > 0 {
            let Recipe { plan, scratch } = (self.build)(op, &shape)?;
            Some(Planned { plan, scratch, name: self.name })
        } else {
            Some(Planned { plan: alone(op, shape), scratch: 0, name: "local" })
        }
    }
}

impl std::fmt::Debug for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Algorithm {
    fn eq(&self, other: &Algorithm) -> bool {
        self.name == other.name
    }
}

impl Eq for Algorithm {}

/// The plan of one rank for a collective of elements of `element_bytes`.
///
/// `small_bytes`: up to this length latency decides, beyond it bandwidth. `forced`: to be used
/// wherever it knows the collective. Both must be equal on all ranks.
pub fn plan_for(
    op: Collective,
    element_bytes: usize,
    shape: &Shape,
    small_bytes: usize,
    forced: Option<Algorithm>,
) -> Planned {
    let chosen = || choose(op, element_bytes, &normal(op, shape), small_bytes).plan(op, shape);
    match forced.and_then(|algorithm| algorithm.plan(op, shape)).or_else(chosen) {
        Some(planned) => planned,
        None => unreachable!("choose() returns an algorithm that knows {op:?}; a test covers every collective"),
    }
}

/// The rule.
fn choose(op: Collective, element_bytes: usize, shape: &Shape, small_bytes: usize) -> Algorithm {
    let bytes = shape.count.saturating_mul(element_bytes);
    let to_all_others = bytes.saturating_mul(shape.size - 1);
    match op {
        Collective::Allreduce(_) | Collective::Barrier if to_all_others <= small_bytes => EXCHANGE,
        Collective::Allreduce(_) | Collective::Barrier if bytes <= small_bytes => TREE,
        Collective::Allreduce(_) if hierarchical::fits(&shape.nodes) => HIERARCHICAL,
        Collective::Allreduce(_) if shape.widen => DIRECT,
        Collective::Allreduce(_) => RING,
        Collective::Barrier => TREE,
        Collective::ReduceScatter(_) if shape.widen || to_all_others <= small_bytes => DIRECT,
        Collective::Allgather if to_all_others <= small_bytes => DIRECT,
        Collective::ReduceScatter(_) | Collective::Allgather => RING,
        Collective::Broadcast { .. } if bytes <= small_bytes => TREE,
        Collective::Broadcast { .. } => CHAIN,
    }
}

/// A barrier has one element, and only reductions accumulate.
pub(super) fn normal(op: Collective, shape: &Shape) -> Shape {
    let mut shape = shape.clone();
    match op {
        Collective::Allreduce(_) | Collective::ReduceScatter(_) => {}
        Collective::Broadcast { .. } | Collective::Allgather => shape.widen = false,
        Collective::Barrier => (shape.count, shape.widen) = (1, false),
    }
    shape
}

/// A rank alone: its input is the result.
fn alone(op: Collective, shape: Shape) -> Plan {
    let reduces = !matches!(op, Collective::Broadcast { .. } | Collective::Allgather);
    let input = Span::new(Space::Input, 0, shape.count);
    let copy = move |chunk: Span| Step::copy(Source::Local(chunk), chunk.of(Space::Output)).finish_if(reduces);
    Box::new(input.chunks(shape.chunk).map(copy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mdas_kernels::ReduceOp;

    const SUM: Collective = Collective::Allreduce(ReduceOp::Sum);

    /// The name of what is chosen for float32, or for bfloat16 with `widen`, with 64 KiB counting as small.
    fn name(op: Collective, size: usize, count: usize, widen: bool, forced: Option<Algorithm>) -> &'static str {
        let shape = |rank| Shape { rank, size, count, chunk: 1000, widen, nodes: vec![0; size].into() };
        let names = [0, size - 1].map(|rank| plan_for(op, if widen { 2 } else { 4 }, &shape(rank), 65536, forced).name);
        assert_eq!(names[0], names[1], "all ranks choose the same");
        names[0]
    }

    #[test]
    fn length_and_size_decide() {
        assert_eq!(name(SUM, 2, 16384, false, None), "exchange");
        assert_eq!(name(SUM, 2, 16385, false, None), "ring");
        assert_eq!(name(SUM, 17, 1024, false, None), "exchange");
        assert_eq!(name(SUM, 17, 1025, false, None), "tree");
        assert_eq!(name(SUM, 17, 16384, false, None), "tree");
        assert_eq!(name(SUM, 17, 16385, false, None), "ring");
        assert_eq!(name(SUM, 17, 32769, true, None), "direct");
        assert_eq!(name(Collective::Barrier, 17, 0, false, None), "exchange");
        assert_eq!(name(Collective::ReduceScatter(ReduceOp::Sum), 4, 100_000, false, None), "ring");
        assert_eq!(name(Collective::ReduceScatter(ReduceOp::Sum), 4, 100_000, true, None), "direct");
        assert_eq!(name(Collective::Allgather, 4, 10, false, None), "direct");
        assert_eq!(name(Collective::Allgather, 4, 100_000, false, None), "ring");
        assert_eq!(name(Collective::Broadcast { root: 1 }, 4, 10, false, None), "tree");
        assert_eq!(name(Collective::Broadcast { root: 1 }, 4, 100_000, false, None), "chain");
    }

    #[test]
    fn nothing_to_exchange_needs_no_algorithm() {
        assert_eq!(name(SUM, 1, 100, false, None), "local");
        assert_eq!(name(SUM, 4, 0, true, Some(DIRECT)), "local");
    }

    #[test]
    fn a_forced_algorithm_is_used_where_it_knows_the_collective() {
        for &algorithm in ALGORITHMS {
            assert_eq!(Algorithm::named(algorithm.name), Some(algorithm));
        }
        assert_eq!(Algorithm::named("carrier pigeon"), None);
        assert_eq!(name(SUM, 4, 10, false, Algorithm::named("ring")), "ring");
        assert_eq!(name(SUM, 4, 10, false, Algorithm::named("chain")), "exchange");
    }
}
