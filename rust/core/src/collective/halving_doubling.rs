//! Recursive halving and doubling: as few bytes as the ring, in `2 log2(size)` messages.
//!
//! (Rabenseifner, "Optimization of collective reduction operations", 2004.) In round k a rank works
//! with the one whose number differs in bit k. Halving: of the span that both still work on, each
//! keeps one half and gives the other away, and adds what it is given. After all rounds every rank
//! has one finished block. Doubling: the same rounds backwards, in which each gives what it has.
//!
//! ```text
//! size 4, blocks 0 1 2 3        rank 0    rank 1    rank 2    rank 3
//! halving, bit 0: keeps         0 1       2 3       0 1       2 3
//! halving, bit 1: keeps         0         2         1         3
//! doubling, bit 1: has          0 1       2 3       0 1       2 3
//! doubling, bit 0: has          0 1 2 3   ...
//! ```
//!
//! The largest messages go between neighbours, which often share a node. Where the size is no power of
//! two, some ranks are guests: they give their input to the neighbour below, and get the result from
//! there. That costs two more vectors on these links.
//!
//! In place nothing is overwritten too early: a half comes back from the rank to which it was given,
//! finished, and so with the contribution in it that was sent there.

use super::Collective;
use super::plan::{Kind, Shape, Space, Span};
use super::select::{Algorithm, Recipe};
use super::stage::{self, Stage};

/// Halving and doubling: for vectors of medium length.
pub const HALVING_DOUBLING: Algorithm = Algorithm { name: "halving_doubling", build };

fn build(op: Collective, shape: &Shape) -> Option<Recipe> {
    let Collective::Allreduce(_) = op else { return None };
    let scratch = if shape.widen { shape.count } else { 0 };
    Some(Recipe { plan: stage::plan(Group::of(shape).stages(shape).into_iter(), shape.chunk), scratch })
}

/// Who takes part in the rounds: a power of two.
struct Group {
    size: usize,
    guests: usize,
}

impl Group {
    fn of(shape: &Shape) -> Group {
        let size = 1 << shape.size.ilog2();
        Group { size, guests: shape.size - size }
    }

    fn rank(&self, member: usize) -> usize {
        if member < self.guests { 2 * member } else { member + self.guests }
    }

    fn guest(&self, member: usize) -> Option<usize> {
        (member < self.guests).then(|| self.rank(member) + 1)
    }

    fn stages(&self, shape: &Shape) -> Vec<Stage> {
        let whole = Span::new(Space::Input, 0, shape.count);
        let rank = shape.rank;
        let member = if rank < 2 * self.guests { rank / 2 } else { rank - self.guests };
        if rank != self.rank(member) {
            let host = rank - 1;
            return vec![Stage::Send { peer: host, from: whole }, Stage::receive(host, whole, vec![])];
        }
        let mut stages = Vec::new();
        let guest = self.guest(member);
        if let Some(peer) = guest {
            let into = whole.of(shape.partial());
            let (kind, with) = (Kind::Element, Some(Space::Input));
            stages.push(Stage::Store { peer, kind, with, into, finish: false, pass_on: vec![] });
        }
        let (halving, doubling): (Vec<_>, Vec<_>) = self.rounds(member, shape).into_iter().unzip();
        stages.extend(halving.into_iter().flatten());
        stages.extend(doubling.into_iter().rev().flatten());
        stages.extend(guest.map(|peer| Stage::Send { peer, from: whole.of(Space::Output) }));
        stages
    }

    /// For every bit what is done when halving, and when doubling.
    fn rounds(&self, member: usize, shape: &Shape) -> Vec<([Stage; 2], [Stage; 2])> {
        let whole = Span::new(Space::Input, 0, shape.count);
        // Where a member's contribution to the first round lies.
        let first = |member: usize| if self.guest(member).is_some() { shape.partial() } else { Space::Input };
        let rounds = self.size.ilog2();
        let (mut start, mut blocks) = (0, self.size);
        let mut all = Vec::new();
        for round in 0..rounds {
            let bit = 1 << round;
            let (other, last) = (member ^ bit, round + 1 == rounds);
            let peer = self.rank(other);
            blocks /= 2;
            let half = |upper: bool| {
                let low = start + if upper { blocks } else { 0 };
                let (from, last) = (whole.block(self.size, low), whole.block(self.size, low + blocks - 1));
                Span::new(Space::Input, from.start, last.start + last.len - from.start)
            };
            let upper = member & bit != 0;
            let (keep, give) = (half(upper), half(!upper));
            let space = |member| if round == 0 { first(member) } else { shape.partial() };
            let into = keep.of(if last { Space::Output } else { shape.partial() });
            let kind = keep.of(space(other)).kind();
            let with = Some(space(member));
            all.push((
                [
                    Stage::Send { peer, from: give.of(space(member)) },
                    Stage::Store { peer, kind, with, into, finish: last, pass_on: vec![] },
                ],
                [Stage::Send { peer, from: keep.of(Space::Output) }, Stage::receive(peer, give, vec![])],
            ));
            start += if upper { blocks } else { 0 };
        }
        all
    }
}
