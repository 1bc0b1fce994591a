//! Runs the plans of all ranks in memory, and proves that they are right.
//!
//! The executor's rules are the plan's: a rank's steps run in program order; a send does not
//! wait; a store waits for its message; messages between two ranks arrive in the order in which
//! they were sent, and only within a window of coming ones that the receiver has granted. Values are
//! not numbers but expressions, so that "each contribution exactly once, in the same order on
//! every rank, rounded once, divided once" can be read off the result.
//!
//! # What one run proves
//!
//! Which send meets which store is fixed by the plans, so a step that can run stays able to run
//! whatever else happens first: whether all ranks get to the end does not depend on the schedule,
//! nor does any value that is not overwritten while it is read. A larger window only lets more
//! happen, so that a run with window 1 that ends proves all windows. (The schedules exist all
//! the same: they test the checker and this argument.)
//!
//! Overwriting is not left to luck either. For every write the checker asks whether it is *known* to
//! come after all uses of what it overwrites, on the evidence of program order and received
//! messages alone (vector clocks), with no regard to the schedule or the window. A message that is
//! stored as it is (no operand, no change of type) may land in its place as soon as its sender
//! sends it, before the receiving rank has come to the step; any other lands elsewhere, and its step
//! does the writing. A span that is being sent is being read until the peer's step has received it.

mod expression;
mod memory;
#[cfg(test)]
mod tests;

use super::Collective;
use super::plan::{Kind, Shape, Source, Space, Span, Step};
use super::select::{Recipe, normal};
use expression::{Expressions, Id, Node};
use memory::Memory;
use std::sync::Arc;

/// A collective on all ranks of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// What is asked for.
    pub op: Collective,
    /// Number of ranks.
    pub size: usize,
    /// As in [`Shape`].
    pub count: usize,
    /// As in [`Shape`].
    pub chunk: usize,
    /// As in [`Shape`].
    pub widen: bool,
}

impl World {
    /// What `rank`'s plan depends on.
    pub fn shape(&self, rank: usize) -> Shape {
        let World { size, count, chunk, widen, .. } = *self;
        normal(self.op, &Shape { rank, size, count, chunk, widen, nodes: Arc::from(vec![0; size]) })
    }

    /// Is `found` what output element `index` of `rank` must be? If not: why.
    fn judge(&self, rank: usize, index: usize, found: Id, expressions: &Expressions) -> Result<(), String> {
        let (count, widen) = (self.shape(rank).count, self.shape(rank).widen);
        let (source, element) = match self.op {
            Collective::Allreduce(_) | Collective::Barrier => {
                return expressions.is_reduction(found, index, self.size, widen);
            }
            Collective::ReduceScatter(_) => {
                return expressions.is_reduction(found, rank * count + index, self.size, widen);
            }
            Collective::Broadcast { root } => (root, index),
            Collective::Allgather => (index / count, index % count),
        };
        match expressions.node(found) {
            Node::Input { rank, index } if (rank, index) == (source, element) => Ok(()),
            other => Err(format!("is {other:?} instead of element {element} of rank {source}")),
        }
    }
}

/// In which order what can happen does happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// Rank after rank; messages arrive as early as they can.
    Eager,
    /// Rank after rank; a message arrives when its receiver stands still without it.
    Lazy,
    /// This rank moves only when no other can.
    Starve(usize),
    /// At random, from this seed.
    Random(u64),
}

/// Under which rules to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// How many coming messages a rank has granted at a time, at least 1.
    pub window: usize,
    /// Input and output are the same memory (allreduce, broadcast and barrier only).
    pub in_place: bool,
    /// The order of events.
    pub schedule: Schedule,
}

/// What a run has shown, beyond that nothing was wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// How every element of the outputs is computed, rank after rank: equal numbers, the same
    /// inputs in the same order with the same roundings. Comparable between runs.
    pub expressions: Vec<u64>,
    /// Messages, of all ranks together.
    pub messages: usize,
    /// Elements in them.
    pub elements: usize,
}

/// What is wrong with a plan, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}, {}{fault}", Place { step: *.step, span: *.span })]
pub struct Violation {
    /// Whose plan.
    pub rank: usize,
    /// Which step of it, counted from 0; none if the plan as a whole fails.
    pub step: Option<usize>,
    /// The memory in question.
    pub span: Option<Span>,
    /// What is wrong.
    pub fault: Fault,
}

struct Place {
    step: Option<usize>,
    span: Option<Span>,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(step) = self.step {
            write!(f, "step {step}, ")?;
        }
        match self.span {
            Some(Span { space, start, len }) => write!(f, "{space:?} {start}..{}: ", start + len),
            None => Ok(()),
        }
    }
}

/// What can be wrong with a plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A peer that does not exist, or the rank itself.
    #[error("rank {peer} is no peer")]
    NoPeer {
        /// The peer named.
        peer: usize,
    },
    /// A message that the other rank does not await, or does not send.
    #[error("the message has no counterpart in the plan of rank {peer}")]
    Unmatched {
        /// The other rank.
        peer: usize,
    },
    /// Sender and receiver disagree on a message's length.
    #[error("rank {peer} sends {sent} elements in its step {step}, {awaited} are awaited")]
    Length {
        /// The sender.
        peer: usize,
        /// Its step.
        step: usize,
        /// Elements sent.
        sent: usize,
        /// Elements awaited.
        awaited: usize,
    },
    /// Sender and receiver disagree on a message's type.
    #[error("rank {peer} sends {sent:?} in its step {step}, {awaited:?} is awaited")]
    WrongKind {
        /// The sender.
        peer: usize,
        /// Its step.
        step: usize,
        /// Type sent.
        sent: Kind,
        /// Type awaited.
        awaited: Kind,
    },
    /// An empty span, or one longer than a chunk.
    #[error("a step handles 1 to {chunk} elements")]
    Size {
        /// Most elements in one step.
        chunk: usize,
    },
    /// A span that reaches beyond its memory.
    #[error("the memory has {len} elements")]
    OutOfBounds {
        /// Elements in that memory.
        len: usize,
    },
    /// A store into the input.
    #[error("the input must not be written")]
    WritesInput,
    /// The operands and the result of a store differ in length, or overlap without being the same.
    #[error("{other:?} is neither the same memory nor disjoint, or differs in length")]
    Operand {
        /// The operand.
        other: Span,
    },
    /// Reads what nothing was stored in.
    #[error("reads elements that hold nothing yet")]
    Uninitialized,
    /// Overwrites what may not have been received yet.
    #[error("overwrites what step {send} sends to rank {peer}, who may not have received it yet")]
    InFlight {
        /// The sending step of this rank.
        send: usize,
        /// Its receiver.
        peer: usize,
    },
    /// A message may land before a step of this rank has used the memory.
    #[error("the message may land before step {user} is done with this memory")]
    LandsTooEarly {
        /// That step.
        user: usize,
    },
    /// Uses memory in which the message of a later step may have landed.
    #[error("the message of step {landing} may have landed here already")]
    MayHaveLanded {
        /// That step.
        landing: usize,
    },
    /// Nobody can go on.
    #[error("waits for rank {peer} forever")]
    Deadlock {
        /// The rank whose message does not come.
        peer: usize,
    },
    /// A wrong result.
    #[error("output element {index} {why}")]
    Wrong {
        /// Which one.
        index: usize,
        /// What is wrong with it.
        why: String,
    },
    /// Another order of summation than on rank 0.
    #[error("output element {index} is summed in another order than on rank 0")]
    Order {
        /// Which one.
        index: usize,
    },
}

/// How many steps of every rank are known to have run.
#[derive(Clone)]
struct Clock(Vec<usize>);

impl Clock {
    fn has_done(&self, rank: usize, step: usize) -> bool {
        self.0[rank] > step
    }

    fn learn(&mut self, other: &Clock) {
        for (mine, &theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = theirs.max(*mine);
        }
    }
}

struct Rank {
    steps: Vec<Step>,
    /// Of a send: the peer's step that receives it; of a store of a message: the peer's step that sends it.
    partner: Vec<usize>,
    /// What a sender knew when it sent; filled in as sends run.
    sent: Vec<Option<Clock>>,
    /// Messages that have arrived and are not stored yet, unless they landed in place.
    arrived: Vec<Option<Vec<Id>>>,
    /// Steps that await a message, and how many of them are done.
    receives: Vec<usize>,
    received: usize,
    memory: Memory,
    /// `clock[own rank]` is the step to run next.
    clock: Clock,
}

impl Rank {
    fn at(&self, own: usize) -> usize {
        self.clock.0[own]
    }
}

/// Runs the plans that `recipe` makes for the ranks, and proves them right under `rules`, or says
/// what is wrong.
pub fn check(world: &World, rules: &Rules, mut recipe: impl FnMut(&Shape) -> Recipe) -> Result<Proof, Violation> {
    let recipes = (0..world.size).map(|rank| recipe(&world.shape(rank))).collect();
    let mut run = Run::new(world, rules, recipes)?;
    run.play(rules)?;
    run.proof()
}

struct Run<'a> {
    world: &'a World,
    widen: bool,
    ranks: Vec<Rank>,
    expressions: Expressions,
}

impl<'a> Run<'a> {
    fn new(world: &'a World, rules: &Rules, recipes: Vec<Recipe>) -> Result<Run<'a>, Violation> {
        let mut expressions = Expressions::default();
        let Shape { count, chunk, widen, .. } = world.shape(0);
        let (input, output) = (world.op.input_len(count, world.size), world.op.output_len(count, world.size));
        let in_place = rules.in_place && !matches!(world.op, Collective::Allgather | Collective::ReduceScatter(_));
        let mut ranks = Vec::new();
        for (rank, Recipe { plan, scratch }) in recipes.into_iter().enumerate() {
            let values: Vec<Id> = (0..input).map(|index| expressions.id(Node::Input { rank, index })).collect();
            let memory = Memory::new(&values, output, scratch, in_place);
            let steps: Vec<Step> = plan.collect();
            for (number, step) in steps.iter().enumerate() {
                well_formed(step, rank, world.size, chunk, &memory).map_err(|(span, fault)| Violation {
                    rank,
                    step: Some(number),
                    span,
                    fault,
                })?;
            }
            let count = steps.len();
            let receives = (0..count).filter(|&number| receives_from(&steps[number]).is_some()).collect();
            ranks.push(Rank {
                steps,
                partner: vec![usize::MAX; count],
                sent: vec![None; count],
                arrived: vec![None; count],
                receives,
                received: 0,
                memory,
                clock: Clock(vec![0; world.size]),
            });
        }
        match_messages(&mut ranks)?;
        Ok(Run { world, widen, ranks, expressions })
    }

    fn play(&mut self, rules: &Rules) -> Result<(), Violation> {
        let size = self.ranks.len();
        let mut random = match rules.schedule {
            Schedule::Random(seed) => seed,
            _ => 0,
        };
        let mut draw = move |below: usize| {
            // splitmix64
            random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = random;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) % below as u64) as usize
        };
        loop {
            let mut moved = false;
            for turn in 0..size {
                match rules.schedule {
                    Schedule::Eager => moved |= self.turn(turn, rules.window, true)?,
                    Schedule::Lazy => moved |= self.turn(turn, rules.window, false)?,
                    Schedule::Starve(starved) if starved == turn => {}
                    Schedule::Starve(_) => moved |= self.turn(turn, rules.window, true)?,
                    Schedule::Random(_) => moved |= self.turn(draw(size), rules.window, draw(2) == 0)?,
                }
            }
            if moved {
                continue;
            }
            // Nobody moved: the starved rank may, and chance may have passed somebody over.
            for turn in 0..size {
                moved |= self.turn(turn, rules.window, true)?;
            }
            if !moved {
                break;
            }
        }
        for (number, rank) in self.ranks.iter().enumerate() {
            let at = rank.at(number);
            if let Some(&Step::Store { source: Source::Message { peer, .. }, into, .. }) = rank.steps.get(at) {
                return Err(violation(number, at, into, Fault::Deadlock { peer }));
            }
        }
        Ok(())
    }

    /// One step of one rank, if it can; before it, if `eager`, all arrivals that can be. Has anything happened?
    fn turn(&mut self, rank: usize, window: usize, eager: bool) -> Result<bool, Violation> {
        let mut moved = eager && self.deliver(rank, window)?;
        let at = self.ranks[rank].at(rank);
        let Some(&step) = self.ranks[rank].steps.get(at) else { return Ok(moved) };
        if receives_from(&step).is_some() && self.ranks[rank].arrived[at].is_none() {
            moved |= self.deliver(rank, 1)?;
            if self.ranks[rank].arrived[at].is_none() {
                return Ok(moved);
            }
        }
        self.execute(rank, at, step)?;
        self.ranks[rank].clock.0[rank] = at + 1;
        Ok(true)
    }

    /// Lets everything arrive that has been sent and lies within the window, in order per peer.
    fn deliver(&mut self, rank: usize, window: usize) -> Result<bool, Violation> {
        let mut moved = false;
        let mut waiting = Vec::new();
        let next = self.ranks[rank].received;
        let end = self.ranks[rank].receives.len().min(next.saturating_add(window));
        for ordinal in next..end {
            let me = &self.ranks[rank];
            let step = me.receives[ordinal];
            let Step::Store { source, into, .. } = me.steps[step] else { continue };
            let Source::Message { peer, .. } = source else { continue };
            if me.arrived[step].is_some() || waiting.contains(&peer) {
                continue;
            }
            let partner = me.partner[step];
            let sender = &self.ranks[peer];
            let (Some(known), Step::Send { from, .. }) = (&sender.sent[partner], sender.steps[partner]) else {
                waiting.push(peer);
                continue;
            };
            let known = known.clone();
            let values = sender.memory.peek(from).map_err(|fault| violation(peer, partner, from, fault))?;
            let me = &mut self.ranks[rank];
            if lands_in_place(&me.steps[step], self.widen) {
                me.memory
                    .land(rank, step, into, &values, &known)
                    .map_err(|fault| violation(rank, step, into, fault))?;
            }
            me.arrived[step] = Some(values);
            moved = true;
        }
        Ok(moved)
    }

    fn execute(&mut self, rank: usize, at: usize, step: Step) -> Result<(), Violation> {
        let faulty = |span: Span| move |fault| violation(rank, at, span, fault);
        let me = &mut self.ranks[rank];
        match step {
            Step::Send { peer, from } => {
                me.memory.publish(at, from, peer, me.partner[at]).map_err(faulty(from))?;
                let mut known = me.clock.clone();
                known.0[rank] = at + 1; // whoever has the message knows that it was sent
                me.sent[at] = Some(known);
            }
            Step::Store { source, with, into, finish } => {
                let (values, wide) = match source {
                    Source::Local(span) => {
                        (me.memory.read(at, span).map_err(faulty(span))?, span.kind() == Kind::Accumulator)
                    }
                    Source::Message { peer, kind } => {
                        let partner = me.partner[at];
                        let values = me.arrived[at].take().unwrap_or_default();
                        me.received += 1;
                        // Borrowed twice: the peer is another rank.
                        let known = self.ranks[peer].sent[partner].clone();
                        if let Some(known) = known {
                            self.ranks[rank].clock.learn(&known);
                        }
                        (values, kind == Kind::Accumulator)
                    }
                };
                let me = &mut self.ranks[rank];
                let operands = match with {
                    Some(span) => Some(me.memory.read(at, span).map_err(faulty(span))?),
                    None => None,
                };
                let rounds = self.widen && into.space == Space::Output && (wide || with.is_some() || finish);
                let mut results = Vec::with_capacity(values.len());
                for (index, &value) in values.iter().enumerate() {
                    let mut result = value;
                    if let Some(operands) = &operands {
                        result = self.expressions.id(Node::Combine(operands[index], result));
                    }
                    if finish {
                        result = self.expressions.id(Node::Finish(result));
                    }
                    if rounds {
                        result = self.expressions.id(Node::Round(result));
                    }
                    results.push(result);
                }
                if lands_in_place(&step, self.widen) {
                    me.memory.take(at, into, &results).map_err(faulty(into))?;
                } else {
                    let known = me.clock.clone();
                    me.memory.write(at, into, &results, &known).map_err(faulty(into))?;
                }
            }
        }
        Ok(())
    }

    fn proof(self) -> Result<Proof, Violation> {
        let mut proof = Proof { expressions: Vec::new(), messages: 0, elements: 0 };
        let mut first: Vec<Id> = Vec::new();
        let same_everywhere = !matches!(self.world.op, Collective::ReduceScatter(_));
        for (number, rank) in self.ranks.iter().enumerate() {
            let len = self.world.op.output_len(self.world.shape(number).count, self.world.size);
            for index in 0..len {
                let span = Span::new(Space::Output, index, 1);
                let wrong = |fault| Violation { rank: number, step: None, span: Some(span), fault };
                let found = rank.memory.peek(span).map_err(wrong)?[0];
                self.world
                    .judge(number, index, found, &self.expressions)
                    .map_err(|why| wrong(Fault::Wrong { index, why }))?;
                if number == 0 {
                    first.push(found);
                } else if same_everywhere && first[index] != found {
                    return Err(wrong(Fault::Order { index }));
                }
                proof.expressions.push(self.expressions.hash_of(found));
            }
            for step in &rank.steps {
                if let Step::Send { from, .. } = step {
                    proof.messages += 1;
                    proof.elements += from.len;
                }
            }
        }
        Ok(proof)
    }
}

fn violation(rank: usize, step: usize, span: Span, fault: Fault) -> Violation {
    Violation { rank, step: Some(step), span: Some(span), fault }
}

fn receives_from(step: &Step) -> Option<usize> {
    match *step {
        Step::Store { source: Source::Message { peer, .. }, .. } => Some(peer),
        _ => None,
    }
}

/// May an executor let the message land where the step stores it?
fn lands_in_place(step: &Step, widen: bool) -> bool {
    match *step {
        Step::Store { source: Source::Message { kind, .. }, with: None, into, .. } => !widen || kind == into.kind(),
        _ => false,
    }
}

/// What can be said of a step by itself.
fn well_formed(
    step: &Step,
    rank: usize,
    size: usize,
    chunk: usize,
    memory: &Memory,
) -> Result<(), (Option<Span>, Fault)> {
    let inside = |span: Span| match span.len {
        len if len == 0 || len > chunk.max(1) => Err((Some(span), Fault::Size { chunk })),
        _ => memory.place(span).map_err(|fault| (Some(span), fault)),
    };
    let peer_exists = |peer: usize, span: Span| match peer {
        peer if peer == rank || peer >= size => Err((Some(span), Fault::NoPeer { peer })),
        _ => Ok(()),
    };
    match *step {
        Step::Send { peer, from } => {
            peer_exists(peer, from)?;
            inside(from)?;
        }
        Step::Store { source, with, into, .. } => {
            let target = inside(into)?;
            if into.space == Space::Input {
                return Err((Some(into), Fault::WritesInput));
            }
            let mut operands = Vec::from_iter(with);
            match source {
                Source::Local(span) => operands.push(span),
                Source::Message { peer, .. } => peer_exists(peer, into)?,
            }
            for other in operands {
                let place = inside(other)?;
                let apart = place.end <= target.start || target.end <= place.start;
                if other.len != into.len || !(apart || place == target) {
                    return Err((Some(into), Fault::Operand { other }));
                }
            }
        }
    }
    Ok(())
}

/// The k-th send from a to b meets b's k-th receive from a.
fn match_messages(ranks: &mut [Rank]) -> Result<(), Violation> {
    let size = ranks.len();
    let mut sends = vec![Vec::new(); size * size];
    for (rank, me) in ranks.iter().enumerate() {
        for (number, step) in me.steps.iter().enumerate() {
            if let Step::Send { peer, from } = *step {
                sends[rank * size + peer].push((number, from));
            }
        }
    }
    let mut sends: Vec<_> = sends.into_iter().map(Vec::into_iter).collect();
    for rank in 0..size {
        for number in 0..ranks[rank].steps.len() {
            let Step::Store { source: Source::Message { peer, kind }, into, .. } = ranks[rank].steps[number] else {
                continue;
            };
            let wrong = |fault| violation(rank, number, into, fault);
            let Some((step, from)) = sends[peer * size + rank].next() else {
                return Err(wrong(Fault::Unmatched { peer }));
            };
            if from.len != into.len {
                return Err(wrong(Fault::Length { peer, step, sent: from.len, awaited: into.len }));
            }
            if from.kind() != kind {
                return Err(wrong(Fault::WrongKind { peer, step, sent: from.kind(), awaited: kind }));
            }
            ranks[rank].partner[number] = step;
            ranks[peer].partner[step] = number;
        }
    }
    for (pair, mut left) in sends.into_iter().enumerate() {
        if let Some((step, from)) = left.next() {
            return Err(violation(pair / size, step, from, Fault::Unmatched { peer: pair % size }));
        }
    }
    Ok(())
}
