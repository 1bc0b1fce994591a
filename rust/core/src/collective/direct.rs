//! Direct: every block's owner collects the raw blocks itself, and sends out the result.
//!
//! Sums of 16-bit floats are kept in float32 and rounded once. A ring would have to carry
//! float32 partial sums, twice the bytes. Here rank b owns block b: all others send it their
//! raw 16-bit blocks, it adds them up in rank order in float32 scratch, rounds once, and sends
//! the finished block to all. So 16 bits per element travel in both halves, and the result is
//! that of a plain loop over the ranks.
//!
//! The vector goes chunk by chunk. In program order, at tick t a rank
//!
//! 1. sends chunk t of its input to every owner,
//! 2. reduces chunk `t - AHEAD` of its own block, and sends the result to everybody,
//! 3. receives chunk `t - 2 AHEAD` of everybody else's block.
//!
//! Why this cannot stand still: a receive of tick t waits for sends of ticks up to `t - AHEAD`,
//! and sends wait for nothing but the steps before them. The same lag in both halves makes
//! messages between two ranks arrive in the order in which they were sent. All links work at
//! once: at any tick a rank sends to all others and receives from all others, and it starts
//! with the neighbour on the side from which the owners' rank order makes them listen.
//!
//! In place nothing is overwritten too early. A chunk of block b that lands in the output comes
//! from its owner, who reduced it, having received what this rank had sent of it; and nobody
//! else was sent this rank's chunk. A rank's own block is never sent raw.

use super::Collective;
use super::plan::{Kind, Plan, Shape, Source, Space, Span, Step};
use super::select::{Algorithm, Recipe};
use std::sync::Arc;

/// Reduction at each block's owner, in rank order: for large vectors of 16-bit floats.
pub const DIRECT: Algorithm = Algorithm { name: "direct", build };

/// By how many chunks a rank's sends run ahead of its reductions.
const AHEAD: usize = 2;

fn build(op: Collective, shape: &Shape) -> Option<Recipe> {
    let direct = match op {
        Collective::Allreduce(_) => Direct { shape: shape.clone(), reduces: true, gathers: true },
        Collective::ReduceScatter(_) => Direct { shape: shape.clone(), reduces: true, gathers: false },
        Collective::Allgather => Direct { shape: shape.clone(), reduces: false, gathers: true },
        Collective::Broadcast { .. } | Collective::Barrier => return None,
    };
    let scratch = if direct.reduces { direct.block(Space::Input, 0).len } else { 0 };
    Some(Recipe { plan: direct.plan(), scratch })
}

struct Direct {
    shape: Shape,
    reduces: bool,
    gathers: bool,
}

impl Direct {
    fn plan(self) -> Plan {
        let chunks = self.block(Space::Input, 0).len.div_ceil(self.shape.chunk.max(1));
        let direct = Arc::new(self);
        let ticks = chunks.saturating_add(2 * AHEAD);
        Box::new((0..ticks).flat_map(move |tick| {
            let mut steps = Vec::new();
            direct.scatter(tick, &mut steps);
            if let Some(chunk) = tick.checked_sub(AHEAD) {
                direct.reduce(chunk, &mut steps);
                direct.spread(chunk, &mut steps);
            }
            if let Some(chunk) = tick.checked_sub(2 * AHEAD) {
                direct.gather(chunk, &mut steps);
            }
            steps
        }))
    }

    /// Block `owner` of a memory that holds the whole vector, or of one that holds the own block only.
    fn block(&self, space: Space, owner: usize) -> Span {
        let Shape { size, count, .. } = self.shape;
        match (self.reduces, self.gathers) {
            (true, true) => Span::new(space, 0, count).block(size, owner),
            _ => Span::new(space, owner * count, count),
        }
    }

    /// Where the own block's result lies.
    fn own_result(&self) -> Span {
        if self.gathers {
            self.block(Space::Output, self.shape.rank)
        } else {
            Span::new(Space::Output, 0, self.shape.count)
        }
    }

    fn scatter(&self, index: usize, steps: &mut Vec<Step>) {
        if !self.reduces {
            return;
        }
        for back in 1..self.shape.size {
            let peer = self.shape.before(back);
            let chunk = self.block(Space::Input, peer).chunk(self.shape.chunk, index);
            steps.extend(chunk.map(|from| Step::Send { peer, from }));
        }
    }

    fn reduce(&self, index: usize, steps: &mut Vec<Step>) {
        let Shape { rank, size, chunk, .. } = self.shape;
        let Some(into) = self.own_result().chunk(chunk, index) else { return };
        let own_start = self.block(Space::Input, rank).start;
        let skip = into.start - self.own_result().start;
        let input = Span::new(Space::Input, if self.reduces { own_start + skip } else { skip }, into.len);
        if !self.reduces {
            steps.push(Step::copy(Source::Local(input), into));
            return;
        }
        let sums = Span::new(Space::Scratch, skip, into.len);
        for peer in 0..size {
            let last = peer + 1 == size;
            let source =
                if peer == rank { Source::Local(input) } else { Source::Message { peer, kind: Kind::Element } };
            steps.push(match peer {
                0 => Step::copy(source, sums),
                _ => Step::reduce(source, sums, if last { into } else { sums }).finish_if(last),
            });
        }
    }

    fn spread(&self, index: usize, steps: &mut Vec<Step>) {
        let Some(from) = self.own_result().chunk(self.shape.chunk, index).filter(|_| self.gathers) else { return };
        steps.extend((1..self.shape.size).map(|ahead| Step::Send { peer: self.shape.after(ahead), from }));
    }

    fn gather(&self, index: usize, steps: &mut Vec<Step>) {
        if !self.gathers {
            return;
        }
        for back in 1..self.shape.size {
            let peer = self.shape.before(back);
            let chunk = self.block(Space::Output, peer).chunk(self.shape.chunk, index);
            steps.extend(chunk.map(|into| Step::copy(Source::Message { peer, kind: Kind::Element }, into)));
        }
    }
}
