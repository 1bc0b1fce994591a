//! Collectives as plans: pure functions from what is asked for to what each rank does.
//!
//! A plan ([`plan`]) says in program order what one rank sends, awaits and reduces. It knows
//! nothing of connections, bytes or threads: `engine::exec` runs it over a transport, and
//! [`check`] runs the plans of all ranks in memory and proves them right. One file per
//! algorithm; [`select`] holds the table of them and the rule that chooses.
//!
//! To add an algorithm: write its file with a constant [`select::Algorithm`], add that to
//! [`select::ALGORITHMS`]. The checker's tests take it from there.

pub mod check;
pub mod direct;
pub mod double_tree;
pub mod exchange;
pub mod halving_doubling;
pub mod hierarchical;
pub mod plan;
pub mod ring;
pub mod select;
mod stage;
pub mod tree;

use mdas_kernels::ReduceOp;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the reduction of all inputs.
    Allreduce(ReduceOp),
    /// Every rank gets the root's input.
    Broadcast {
        /// Rank within the group.
        root: usize,
    },
    /// Every rank gets the inputs of all ranks, in rank order.
    Allgather,
    /// Rank r gets share r of the reduction of all inputs.
    ReduceScatter(ReduceOp),
    /// Nobody leaves before everybody has come.
    Barrier,
}

impl Collective {
    /// Elements of one rank's input, for `count` as in [`plan::Shape`].
    pub fn input_len(self, count: usize, size: usize) -> usize {
        match self {
            Collective::ReduceScatter(_) => count * size,
            Collective::Barrier => 1,
            _ => count,
        }
    }

    /// Elements of one rank's output, for `count` as in [`plan::Shape`].
    pub fn output_len(self, count: usize, size: usize) -> usize {
        match self {
            Collective::Allgather => count * size,
            Collective::Barrier => 1,
            _ => count,
        }
    }
}
