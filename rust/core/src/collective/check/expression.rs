//! Values as expressions: what an element is the sum of, in which order, rounded where.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

/// An expression of an [`Expressions`]. Equal numbers, equal expressions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Id(usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Node {
    /// Element `index` of a rank's input.
    Input { rank: usize, index: usize },
    /// The reduction of two values, in this order.
    Combine(Id, Id),
    /// Divided, if it is an average.
    Finish(Id),
    /// Rounded from the accumulation type to the element type.
    Round(Id),
}

/// Every expression once.
#[derive(Default)]
pub(super) struct Expressions {
    nodes: Vec<(Node, u64)>,
    known: HashMap<Node, Id>,
}

impl Expressions {
    pub fn id(&mut self, node: Node) -> Id {
        if let Some(&id) = self.known.get(&node) {
            return id;
        }
        let mut hasher = DefaultHasher::new();
        std::mem::discriminant(&node).hash(&mut hasher);
        match node {
            Node::Input { rank, index } => (rank, index).hash(&mut hasher),
            Node::Combine(a, b) => (self.hash_of(a), self.hash_of(b)).hash(&mut hasher),
            Node::Finish(a) | Node::Round(a) => self.hash_of(a).hash(&mut hasher),
        }
        let id = Id(self.nodes.len());
        self.nodes.push((node, hasher.finish()));
        self.known.insert(node, id);
        id
    }

    pub fn node(&self, id: Id) -> Node {
        self.nodes[id.0].0
    }

    /// Equal for equal expressions also of different runs.
    pub fn hash_of(&self, id: Id) -> u64 {
        self.nodes[id.0].1
    }

    /// Is this the sum of element `index` of every rank, each once, completed once and, with
    /// `widen`, rounded once? If not: why.
    pub fn is_reduction(&self, id: Id, index: usize, size: usize, widen: bool) -> Result<(), String> {
        let finished = match self.node(id) {
            Node::Round(inner) if widen => inner,
            _ if widen => return Err("the last step does not round to the element type".into()),
            _ => id,
        };
        let Node::Finish(sum) = self.node(finished) else {
            return Err("the last store of the reduction does not finish".into());
        };
        let mut seen = vec![0usize; size];
        let mut open = vec![sum];
        while let Some(id) = open.pop() {
            match self.node(id) {
                Node::Input { rank, index: found } if found == index => seen[rank] += 1,
                Node::Input { rank, index: found } => {
                    return Err(format!("contains element {found} of rank {rank} instead of element {index}"));
                }
                Node::Combine(a, b) => open.extend([a, b]),
                Node::Finish(_) => return Err("finished before the reduction was complete".into()),
                Node::Round(_) => return Err("rounded before the reduction was complete".into()),
            }
        }
        match seen.iter().enumerate().find(|&(_, &times)| times != 1) {
            Some((rank, times)) => Err(format!("contains the contribution of rank {rank} {times} times")),
            None => Ok(()),
        }
    }
}
