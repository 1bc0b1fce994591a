//! Two binary trees: every chunk needs `O(log size)` messages, and every link works all the time.
//!
//! (Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
//! 2009.) In one binary tree half of the ranks are leaves, whose links idle half of the time. So the
//! vector is cut in two, and each half has a tree of its own, such that whoever is a leaf of one has
//! children in the other. Chunk after chunk sums go up to the root, and come down finished.
//!
//! The first tree, of the ranks in order: rank r, whose lowest set bit is b, has the children `r - b/2`
//! and `r + b/2`, and odd ranks are leaves; rank 0 is the root, with one child. The second tree is the
//! first one of the ranks in reverse order, or, for an odd number of them, of the ranks moved by one.
//!
//! ```text
//! size 8                0                    7
//!                       4                    3
//!                   2       6            5       1
//!                  1 3     5 7          6 4     2 0
//! ```
//!
//! In program order the way down runs some chunks behind the way up, so that both are on the wire at
//! once. In place nothing is overwritten too early: what comes down is finished, and so with what this
//! rank has sent up in it.

use super::Collective;
use super::plan::{Kind, Shape, Space, Span};
use super::select::{Algorithm, Recipe};
use super::stage::{self, Stage};

/// Two binary trees in a pipeline: for large groups.
pub const DOUBLE_TREE: Algorithm = Algorithm { name: "double_tree", build };

fn build(op: Collective, shape: &Shape) -> Option<Recipe> {
    let Collective::Allreduce(_) = op else { return None };
    let scratch = if shape.widen { shape.count } else { 0 };
    let trees = [false, true].map(|second| Tree::new(shape, second));
    let chunks = trees[0].half.len.div_ceil(shape.chunk.max(1));
    // A chunk is finished after as many hops as the tree is high, and each is one tick of its sender's.
    let behind = 2 + shape.size.ilog2() as usize;
    let (chunk, partial) = (shape.chunk, shape.partial());
    let ticks = (0..chunks.saturating_add(behind)).flat_map(move |tick| {
        let mut stages: Vec<Stage> = trees.iter().flat_map(|tree| tree.up(tick, chunk, partial)).collect();
        if let Some(tick) = tick.checked_sub(behind) {
            stages.extend(trees.iter().flat_map(|tree| tree.down(tick, chunk)));
        }
        stages
    });
    Some(Recipe { plan: stage::plan(ticks, shape.chunk), scratch })
}

/// A rank's place in one of the trees.
struct Tree {
    half: Span,
    parent: Option<usize>,
    /// With what they send: a leaf its input, another a partial sum.
    children: Vec<(usize, bool)>,
}

impl Tree {
    fn new(shape: &Shape, second: bool) -> Tree {
        let Shape { rank, size, count, .. } = *shape;
        // The ranks in reverse order, or moved by one: there and back.
        let turn = |from: usize, by: usize| match (second, size % 2) {
            (false, _) => from,
            (true, 0) => size - 1 - from,
            (true, _) => (from + by) % size,
        };
        let place = turn(rank, size - 1);
        let rank_at = |place| turn(place, 1);
        let children = children(place, size).map(|child| (rank_at(child), children(child, size).next().is_none()));
        Tree {
            half: Span::new(Space::Input, 0, count).block(2, usize::from(second)),
            parent: parent(place, size).map(rank_at),
            children: children.collect(),
        }
    }

    /// Sums the children's chunks up, and sends the sum on.
    fn up(&self, index: usize, chunk: usize, partial: Space) -> Vec<Stage> {
        let Some(own) = self.half.chunk(chunk, index) else { return vec![] };
        let mut stages = Vec::new();
        for (number, &(peer, leaf)) in self.children.iter().enumerate() {
            let last = number + 1 == self.children.len();
            let finish = last && self.parent.is_none();
            stages.push(Stage::Store {
                peer,
                kind: if leaf { Kind::Element } else { own.of(partial).kind() },
                with: Some(if number == 0 { Space::Input } else { partial }),
                into: own.of(if finish { Space::Output } else { partial }),
                finish,
                pass_on: if last { self.parent.into_iter().collect() } else { vec![] },
            });
        }
        if self.children.is_empty() {
            stages.extend(self.parent.map(|peer| Stage::Send { peer, from: own }));
        }
        stages
    }

    /// Hands the finished chunk to the children.
    fn down(&self, index: usize, chunk: usize) -> Vec<Stage> {
        let Some(own) = self.half.chunk(chunk, index) else { return vec![] };
        let children = self.children.iter().map(|&(peer, _)| peer);
        match self.parent {
            Some(parent) => vec![Stage::receive(parent, own, children.collect())],
            None => children.map(|peer| Stage::Send { peer, from: own.of(Space::Output) }).collect(),
        }
    }
}

/// By places in the first tree.
fn parent(place: usize, size: usize) -> Option<usize> {
    let bit = lowest_bit(place)?;
    let above = (place ^ bit) | (bit << 1);
    Some(if above < size { above } else { place ^ bit })
}

fn children(place: usize, size: usize) -> impl Iterator<Item = usize> {
    // The root's only child has the highest bit; of the others' second children some lie outside.
    let below = match lowest_bit(place) {
        None => size.next_power_of_two(),
        Some(bit) => bit,
    };
    let first = lowest_bit(place).filter(|bit| *bit > 1).map(|bit| place - bit / 2);
    let second = std::iter::successors(Some(below / 2), |step| Some(step / 2))
        .take_while(|step| *step > 0)
        .map(move |step| place + step)
        .find(|child| *child < size);
    first.into_iter().chain(second)
}

fn lowest_bit(place: usize) -> Option<usize> {
    (place > 0).then(|| place & place.wrapping_neg())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn parents_and_children_agree_and_everybody_hangs_on_the_root() {
        for size in 2..70 {
            for place in 0..size {
                for child in children(place, size) {
                    assert_eq!(parent(child, size), Some(place), "size {size}");
                }
                let path: Vec<usize> = std::iter::successors(Some(place), |at| parent(*at, size)).collect();
                assert_eq!(path.last(), Some(&0));
                assert!(path.len() <= 2 + size.ilog2() as usize, "size {size}, place {place}: {path:?}");
                let above = parent(place, size).map(|above| children(above, size).any(|child| child == place));
                assert_ne!(above, Some(false), "size {size}: place {place} is no child of its parent");
            }
        }
    }

    #[test]
    fn nobody_has_children_in_both_trees_but_the_few_that_an_odd_size_leaves() {
        for size in 2..40 {
            let both = |rank: &usize| {
                let shape =
                    Shape { rank: *rank, size, count: 8, chunk: 1, widen: false, nodes: Arc::from(vec![0; size]) };
                [false, true].iter().all(|&second| Tree::new(&shape, second).children.len() == 2)
            };
            assert_eq!((0..size).filter(both).count(), 0, "size {size}");
        }
    }
}
