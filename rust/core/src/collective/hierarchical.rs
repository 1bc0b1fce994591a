//! Two levels: what a node can add up by itself does not cross the network.
//!
//! The vector is cut into as many blocks as a node has ranks; block l belongs to the ranks with local
//! index l. (1) Within each node every rank adds up its block over the node's ranks. (2) Between the
//! nodes the ranks of the same local index run a ring over their block, all of them in parallel, so that
//! every rank's connection carries its share. (3) What is finished goes to the node's other ranks at
//! once, chunk by chunk, while the ring goes on.
//!
//! ```text
//! 2 nodes x 2 ranks        node A: ranks 0, 1        node B: ranks 2, 3
//! (1) within the nodes     0: block 0 of A, 1: block 1 of A, 2: block 0 of B, 3: block 1 of B
//! (2) between the nodes    0 with 2 over block 0, 1 with 3 over block 1
//! (3) within the nodes     0 gives block 0 to 1, ...
//! ```
//!
//! With L ranks on each of M nodes, `2 (M - 1) / M` vectors leave a node; of a ring over all ranks in the
//! order of nodes `2 (LM - 1) / LM` do: for 2 x 2 that is 1 against 1.5.
//!
//! Sums are taken in the order of local indices from the owner's on, and then round the ring of nodes. In
//! place nothing is overwritten too early, for the ring's reasons and, between the ranks of a node,
//! since what comes back from the owner of a block contains what it was sent of it.

use super::Collective;
use super::plan::{Kind, Shape, Space, Span};
use super::select::{Algorithm, Recipe};
use super::stage::{self, Stage};

/// Within nodes, between nodes, within nodes: for nodes that have several ranks, each equally many.
pub const HIERARCHICAL: Algorithm = Algorithm { name: "hierarchical", build };

fn build(op: Collective, shape: &Shape) -> Option<Recipe> {
    let Collective::Allreduce(_) = op else { return None };
    let place = Place::of(shape)?;
    let scratch = if shape.widen { shape.count } else { 0 };
    Some(Recipe { plan: stage::plan(place.stages(shape).into_iter(), shape.chunk), scratch })
}

/// Are there several nodes, with several ranks each, and equally many?
pub fn fits(nodes: &[u32]) -> bool {
    let node = |which: u32| nodes.iter().filter(|node| **node == which).count();
    let first = nodes.first().map_or(0, |first| node(*first));
    1 < first && first < nodes.len() && nodes.iter().all(|which| node(*which) == first)
}

/// Where a rank stands.
struct Place {
    /// The ranks of its node, from itself on.
    locals: Vec<usize>,
    /// Its index among them, and how many they are.
    local: (usize, usize),
    /// Its neighbours among the ranks of the same local index, back and ahead.
    before: usize,
    after: usize,
    /// Index of its node, and the number of nodes.
    node: (usize, usize),
}

impl Place {
    fn of(shape: &Shape) -> Option<Place> {
        if !fits(&shape.nodes) {
            return None;
        }
        let mut nodes: Vec<Vec<usize>> = Vec::new();
        let mut numbers: Vec<u32> = shape.nodes.to_vec();
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers {
            nodes.push((0..shape.size).filter(|rank| shape.nodes[*rank] == number).collect());
        }
        let node = nodes.iter().position(|ranks| ranks.contains(&shape.rank))?;
        let local = nodes[node].iter().position(|rank| *rank == shape.rank)?;
        let (count, each) = (nodes.len(), nodes[node].len());
        let mut locals = nodes[node].clone();
        locals.rotate_left(local);
        Some(Place {
            locals,
            local: (local, each),
            before: nodes[(node + count - 1) % count][local],
            after: nodes[(node + 1) % count][local],
            node: (node, count),
        })
    }

    fn stages(&self, shape: &Shape) -> Vec<Stage> {
        let whole = Span::new(Space::Input, 0, shape.count);
        let (local, each) = self.local;
        let others = &self.locals[1..];
        let block = |ahead: usize| whole.block(each, (local + ahead) % each);
        let mut stages: Vec<Stage> =
            others.iter().enumerate().map(|(index, &peer)| Stage::Send { peer, from: block(1 + index) }).collect();
        let own = block(0);
        let mut with = Space::Input;
        for &peer in others {
            let into = own.of(shape.partial());
            let (kind, operand) = (Kind::Element, Some(with));
            stages.push(Stage::Store { peer, kind, with: operand, into, finish: false, pass_on: vec![] });
            with = shape.partial();
        }
        // What the others have finished is fetched one hop later: it need not be there at once.
        let (_, count) = self.node;
        let complete = count - 1;
        for hop in 0..=2 * complete {
            stages.push(self.hop(hop, own, shape.partial()));
            if hop > complete {
                stages.extend(self.fetch(hop - 1, block));
            }
        }
        stages.extend(self.fetch(2 * complete, block));
        stages
    }

    /// The part of a block that is at this rank at this hop of the ring of nodes.
    fn part(&self, block: Span, hop: usize) -> Span {
        let (node, count) = self.node;
        block.block(count, (node + 2 * count - hop) % count)
    }

    /// One hop of the ring of nodes over this rank's block, from partial sums.
    fn hop(&self, hop: usize, own: Span, partial: Space) -> Stage {
        let complete = self.node.1 - 1;
        let part = self.part(own, hop);
        if hop == 0 {
            return Stage::Send { peer: self.after, from: part.of(partial) };
        }
        let mut pass_on = Vec::new();
        if hop < 2 * complete {
            pass_on.push(self.after);
        }
        if hop >= complete {
            pass_on.extend(&self.locals[1..]);
        }
        if hop > complete {
            return Stage::receive(self.before, part, pass_on);
        }
        let finish = hop == complete;
        let into = part.of(if finish { Space::Output } else { partial });
        Stage::Store { peer: self.before, kind: part.of(partial).kind(), with: Some(partial), into, finish, pass_on }
    }

    /// What the node's other ranks have of their blocks after that hop.
    fn fetch(&self, hop: usize, block: impl Fn(usize) -> Span) -> Vec<Stage> {
        let others = self.locals.iter().enumerate().skip(1);
        others.map(|(ahead, &peer)| Stage::receive(peer, self.part(block(ahead), hop), vec![])).collect()
    }
}
