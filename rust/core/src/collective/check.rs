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
mod fault;
mod memory;
mod structure;
#[cfg(test)]
mod tests;

use super::Collective;
use super::plan::{Kind, Shape, Source, Space, Span, Step};
use super::select::{Recipe, normal};
use expression::{Expressions, Id, Node};
pub use fault::{Fault, Violation};
use memory::Memory;
use std::sync::Arc;
use structure::{match_messages, well_formed};

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
    /// Which ranks share a node.
    pub nodes: Nodes,
}

/// How ranks are spread over nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nodes {
    /// All on one.
    One,
    /// So many neighbouring ranks on each; the last one may have fewer.
    Blocks(usize),
    /// Rank after rank on the next of so many.
    Cyclic(usize),
}

impl World {
    /// What `rank`'s plan depends on.
    pub fn shape(&self, rank: usize) -> Shape {
        let World { size, count, chunk, widen, nodes, .. } = *self;
        let node = |rank: usize| match nodes {
            Nodes::One => 0,
            Nodes::Blocks(each) => rank / each,
            Nodes::Cyclic(count) => rank % count,
        };
        let nodes: Arc<[u32]> = (0..size).map(|rank| node(rank) as u32).collect();
        normal(self.op, &Shape { rank, size, count, chunk, widen, nodes })
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
                return Err(Violation::at(number, at, into, Fault::Deadlock { peer }));
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
            let values = sender.memory.peek(from).map_err(|fault| Violation::at(peer, partner, from, fault))?;
            let me = &mut self.ranks[rank];
            if lands_in_place(&me.steps[step], self.widen) {
                me.memory
                    .land(rank, step, into, &values, &known)
                    .map_err(|fault| Violation::at(rank, step, into, fault))?;
            }
            me.arrived[step] = Some(values);
            moved = true;
        }
        Ok(moved)
    }

    fn execute(&mut self, rank: usize, at: usize, step: Step) -> Result<(), Violation> {
        let faulty = |span: Span| move |fault| Violation::at(rank, at, span, fault);
        match step {
            Step::Send { peer, from } => {
                let me = &mut self.ranks[rank];
                me.memory.publish(at, from, peer, me.partner[at]).map_err(faulty(from))?;
                let mut known = me.clock.clone();
                known.0[rank] = at + 1; // whoever has the message knows that it was sent
                me.sent[at] = Some(known);
            }
            Step::Store { source, with, into, finish } => {
                let (values, kind) = match source {
                    Source::Local(span) => (self.ranks[rank].memory.read(at, span).map_err(faulty(span))?, span.kind()),
                    Source::Message { peer, kind } => (self.receive(rank, at, peer), kind),
                };
                let me = &mut self.ranks[rank];
                let operands = match with {
                    Some(span) => Some(me.memory.read(at, span).map_err(faulty(span))?),
                    None => None,
                };
                let computes = kind == Kind::Accumulator || with.is_some() || finish;
                let rounds = self.widen && into.space == Space::Output && computes;
                let compute = |(index, mut value): (usize, Id)| {
                    if let Some(operands) = &operands {
                        value = self.expressions.id(Node::Combine(operands[index], value));
                    }
                    if finish {
                        value = self.expressions.id(Node::Finish(value));
                    }
                    if rounds {
                        value = self.expressions.id(Node::Round(value));
                    }
                    value
                };
                let results: Vec<Id> = values.into_iter().enumerate().map(compute).collect();
                let stored = if lands_in_place(&step, self.widen) {
                    me.memory.take(at, into, &results)
                } else {
                    me.memory.write(at, into, &results, &me.clock)
                };
                stored.map_err(faulty(into))?;
            }
        }
        Ok(())
    }

    /// Takes the message that has arrived for step `at`, and with it what its sender knew.
    fn receive(&mut self, rank: usize, at: usize, peer: usize) -> Vec<Id> {
        let known = self.ranks[peer].sent[self.ranks[rank].partner[at]].clone();
        let me = &mut self.ranks[rank];
        if let Some(known) = known {
            me.clock.learn(&known);
        }
        me.received += 1;
        me.arrived[at].take().unwrap_or_default()
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
