//! Plan x transport: runs one rank's steps of one operation.
//!
//! Steps run in program order. A `Send` is handed over and not waited for; a `Store` waits for its
//! message. So that the wire never idles, the executor looks ahead: it takes steps from the plan before
//! their turn and grants their messages a landing area at once, `WINDOW` messages deep. A message that is
//! merely stored (not reduced, not converted) lands in its final place.

use super::call::{Call, Fingerprint};
use super::memory::{HeapBytes, Region};
use super::protocol::{Frame, OpKey};
use super::wires::{INLINE_BYTES, Wires};
use super::work::{WorkState, monotonic_ns};
use crate::collective::plan::{Kind, Plan, Source, Space, Span, Step};
use crate::error::{Error, Result};
use crate::transport::{LandingKey, RawSpan, WriteId};
use mdas_kernels::{DType, Operand, ReduceOp, combine};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Messages granted ahead of the step that consumes them.
const WINDOW: usize = 8;
/// Steps taken from the plan ahead of their turn.
const LOOK_AHEAD: usize = 64;

/// An operation that waits for its turn, with all that it needs.
pub struct Order {
    /// Which.
    pub key: OpKey,
    /// What.
    pub call: Call,
    /// Memory.
    pub input: Region,
    /// Memory.
    pub output: Region,
    /// Where to report.
    pub work: Arc<WorkState>,
    /// Deadline without progress.
    pub timeout: Duration,
    /// Hash of the group's ranks.
    pub members: u32,
}

impl Order {
    /// What all ranks must agree on.
    pub fn fingerprint(&self) -> Fingerprint {
        self.call.fingerprint(self.members)
    }
}

/// How to run it, once chosen.
pub struct Recipe {
    /// The steps.
    pub plan: Plan,
    /// Name of the algorithm.
    pub algorithm: &'static str,
    /// Elements of scratch, in the accumulation type.
    pub scratch: usize,
    /// The accumulation type.
    pub accumulator: DType,
    /// World ranks of the group.
    pub ranks: Arc<[usize]>,
}

/// Bytes of a message that have arrived.
enum Payload {
    /// Already where it belongs.
    InPlace,
    /// In a landing buffer.
    Landed(HeapBytes),
    /// In a control frame; what it cost its sender.
    Inline(Vec<u8>, usize),
}

/// A step taken from the plan, with the number of the message that it waits for.
struct Ahead {
    step: Step,
    index: u32,
}

/// One operation in flight.
pub struct Exec {
    /// Which.
    pub key: OpKey,
    /// What all ranks must agree on.
    pub fingerprint: Fingerprint,
    /// Name of the algorithm.
    pub algorithm: &'static str,
    /// Where to report.
    pub work: Arc<WorkState>,
    /// Deadline without progress.
    pub timeout: Duration,
    /// Last time that anything moved.
    pub moved: Instant,
    /// Questions and answers about the others, while nothing moves.
    pub inquiry: super::inquiry::Inquiry,
    plan: Plan,
    plan_over: bool,
    ranks: Arc<[usize]>,
    reduce: ReduceOp,
    divide_by: Option<u64>,
    input: Region,
    output: Region,
    scratch: HeapBytes,
    /// The input, where a device cannot be told of the caller's memory.
    staged: Option<HeapBytes>,
    dtype: DType,
    accumulator: DType,
    ahead: VecDeque<Ahead>,
    awaited: usize,
    next_send: Vec<u32>,
    next_receive: Vec<u32>,
    buffers: HashMap<(usize, u32), HeapBytes>,
    arrived: HashMap<(usize, u32), Payload>,
    grants: HashMap<(usize, u32), (LandingKey, u64)>,
    ungranted: HashMap<(usize, u32), RawSpan>,
    in_flight: HashMap<WriteId, usize>,
}

impl Exec {
    /// Ready to run; nothing has been sent yet.
    pub fn new(mut order: Order, recipe: Recipe, wires: &mut Wires) -> Result<Self> {
        let size = recipe.ranks.len();
        // What is shorter travels inside control frames.
        let travels = |bytes: usize| bytes > INLINE_BYTES;
        if let Some(output) = order.output.registrable().filter(|_| travels(order.output.len)) {
            wires.register(output)?;
        }
        let mut staged = None;
        if let Some(input) = order.input.registrable().filter(|_| travels(order.input.len))
            && let Err(refusal) = wires.register(input)
        {
            let area = stage(&order, refusal, wires)?;
            order.input.ptr = area.ptr();
            staged = Some(area);
        }
        let bytes = recipe.scratch * recipe.accumulator.size();
        let scratch = match travels(bytes) {
            true => wires.buffer(bytes)?,
            false => HeapBytes::zeroed(bytes, 64).ok_or_else(|| {
                Error::system(format!("allocating {bytes} bytes of scratch for {}", order.key), "out of memory")
            })?,
        };
        let reduce = order.call.reduce_op();
        // A started operation has a start time; setting it twice is impossible, and would change nothing.
        let _ = order.work.started.set(monotonic_ns());
        Ok(Exec {
            key: order.key,
            fingerprint: order.fingerprint(),
            algorithm: recipe.algorithm,
            work: order.work,
            timeout: order.timeout,
            moved: Instant::now(),
            inquiry: Default::default(),
            plan: recipe.plan,
            plan_over: false,
            reduce,
            divide_by: (reduce == ReduceOp::Average).then_some(size as u64),
            ranks: recipe.ranks,
            input: order.input,
            output: order.output,
            scratch,
            staged,
            dtype: order.call.dtype,
            accumulator: recipe.accumulator,
            ahead: VecDeque::new(),
            awaited: 0,
            next_send: vec![0; size],
            next_receive: vec![0; size],
            buffers: HashMap::new(),
            arrived: HashMap::new(),
            grants: HashMap::new(),
            ungranted: HashMap::new(),
            in_flight: HashMap::new(),
        })
    }

    /// Name and number, for errors.
    pub fn describe(&self) -> String {
        let ranks = if self.key.group.0 == 0 { String::new() } else { format!(" of ranks {:?}", self.ranks) };
        format!("{} {}{ranks} ({})", self.fingerprint, self.key, self.algorithm)
    }

    /// The peer allows message `index` to be written.
    pub fn granted(&mut self, peer: usize, index: u32, key: LandingKey, bytes: u64, wires: &mut Wires) -> Result<()> {
        self.moved = Instant::now();
        match self.ungranted.remove(&(peer, index)) {
            Some(source) => self.write(peer, key, bytes, source, wires),
            None => {
                self.grants.insert((peer, index), (key, bytes));
                Ok(())
            }
        }
    }

    /// A message came inside a control frame.
    pub fn inlined(&mut self, peer: usize, index: u32, payload: Vec<u8>, cost: usize) {
        self.moved = Instant::now();
        self.arrived.insert((peer, index), Payload::Inline(payload, cost));
    }

    /// A message has landed.
    pub fn landed(&mut self, peer: usize, index: u32) {
        self.moved = Instant::now();
        let payload = self.buffers.remove(&(peer, index)).map_or(Payload::InPlace, Payload::Landed);
        self.arrived.insert((peer, index), payload);
    }

    /// A write of ours is over.
    pub fn sent(&mut self, id: WriteId) {
        self.moved = Instant::now();
        self.in_flight.remove(&id);
    }

    /// Runs as far as it goes. `Ok(true)`: the operation is complete.
    pub fn advance(&mut self, wires: &mut Wires) -> Result<bool> {
        loop {
            self.look_ahead(wires)?;
            let Some(front) = self.ahead.front() else { break };
            let index = front.index;
            match front.step {
                Step::Send { peer, from } => self.send(self.ranks[peer], index, from, wires)?,
                Step::Store { source: Source::Local(from), with, into, finish } => {
                    self.combine(self.address(from), self.type_of(from.space), with, into, finish, wires);
                }
                Step::Store { source: Source::Message { peer, kind }, with, into, finish } => {
                    let peer = self.ranks[peer];
                    let Some(payload) = self.arrived.remove(&(peer, index)) else { break };
                    self.awaited -= 1;
                    let dtype = self.type_of_kind(kind);
                    match payload {
                        Payload::InPlace => {}
                        Payload::Landed(buffer) => {
                            self.combine(buffer.ptr(), dtype, with, into, finish, wires);
                            wires.recycle(buffer);
                        }
                        Payload::Inline(bytes, cost) => {
                            if bytes.len() != into.len * dtype.size() {
                                return Err(self.disagreement(peer, into.len * dtype.size(), bytes.len()));
                            }
                            self.combine(bytes.as_ptr(), dtype, with, into, finish, wires);
                            wires.consumed(peer, cost);
                        }
                    }
                }
            }
            self.ahead.pop_front();
        }
        if self.plan_over && self.ahead.is_empty() && self.ungranted.is_empty() && self.in_flight.is_empty() {
            return Ok(true);
        }
        self.needs_nobody_gone(wires)?;
        Ok(false)
    }

    /// Makes no more writes, and consumes nothing any more. Its memory may be in use, until [`Wires::release`] says that
    /// it is not.
    pub fn stop(&mut self, wires: &mut Wires) {
        wires.cancel(self.key);
        for ((peer, _), payload) in self.arrived.drain() {
            if let Payload::Inline(_, cost) = payload {
                wires.consumed(peer, cost);
            }
        }
    }

    /// It is complete, or was stopped, and its memory is not in use: what it needed is for the next one.
    pub fn retire(self, wires: &mut Wires) {
        let own = [Some(self.scratch), self.staged].into_iter().flatten();
        self.buffers.into_values().chain(own).for_each(|memory| wires.recycle(memory));
    }

    fn look_ahead(&mut self, wires: &mut Wires) -> Result<()> {
        while !self.plan_over && self.awaited < WINDOW && self.ahead.len() < LOOK_AHEAD {
            let Some(step) = self.plan.next() else {
                self.plan_over = true;
                break;
            };
            let index = match step {
                Step::Send { peer, .. } => next(&mut self.next_send[peer]),
                Step::Store { source: Source::Local(_), .. } => 0,
                Step::Store { source: Source::Message { peer, kind }, with, into, finish } => {
                    let index = next(&mut self.next_receive[peer]);
                    self.awaited += 1;
                    let dtype = self.type_of_kind(kind);
                    let bytes = into.len * dtype.size();
                    if bytes > INLINE_BYTES {
                        let in_place = with.is_none()
                            && dtype == self.type_of(into.space)
                            && !(finish && self.divide_by.is_some());
                        self.grant(self.ranks[peer], index, bytes, in_place.then(|| self.address(into)), wires)?;
                    }
                    index
                }
            };
            self.ahead.push_back(Ahead { step, index });
        }
        Ok(())
    }

    fn grant(
        &mut self,
        peer: usize,
        index: u32,
        bytes: usize,
        place: Option<*mut u8>,
        wires: &mut Wires,
    ) -> Result<()> {
        let ptr = match place {
            Some(ptr) => ptr,
            None => {
                let buffer = wires.buffer(bytes)?;
                let ptr = buffer.ptr();
                self.buffers.insert((peer, index), buffer);
                ptr
            }
        };
        let key = wires.expose(self.key, peer, index, RawSpan { ptr, len: bytes })?;
        wires.say(peer, &Frame::Grant { op: self.key, call: self.fingerprint, index, key, bytes: bytes as u64 });
        Ok(())
    }

    fn send(&mut self, peer: usize, index: u32, from: Span, wires: &mut Wires) -> Result<()> {
        let source = RawSpan { ptr: self.address(from), len: from.len * self.type_of(from.space).size() };
        if source.len <= INLINE_BYTES {
            // SAFETY: `address` gave a span inside memory that this operation owns a share of; the plan
            // (as proved by the checker) does not change a span that is being sent.
            let payload = unsafe { std::slice::from_raw_parts(source.ptr, source.len) }.to_vec();
            wires.counters.bytes_copied += source.len as u64;
            wires.say_on_credit(peer, &Frame::Inline { op: self.key, call: self.fingerprint, index, payload });
            return Ok(());
        }
        match self.grants.remove(&(peer, index)) {
            Some((key, bytes)) => self.write(peer, key, bytes, source, wires),
            None => {
                self.ungranted.insert((peer, index), source);
                Ok(())
            }
        }
    }

    fn write(&mut self, peer: usize, key: LandingKey, bytes: u64, source: RawSpan, wires: &mut Wires) -> Result<()> {
        if bytes != source.len as u64 {
            return Err(self.disagreement(peer, source.len, bytes as usize));
        }
        let id = wires.write(self.key, peer, key, source);
        self.in_flight.insert(id, peer);
        Ok(())
    }

    /// Equal calls, yet messages of different sizes: the ranks run different versions or settings.
    fn disagreement(&self, peer: usize, ours: usize, theirs: usize) -> Error {
        Error::Mismatch {
            operation: self.describe(),
            rank: self.inquiry.own_rank,
            ours: format!("a message of {ours} bytes ({})", self.algorithm),
            peer,
            theirs: format!("one of {theirs} bytes; do all ranks run with the same version and MDAS_* settings?"),
        }
    }

    /// Who has gone will never send what we await, grant what we want to send, or take what is on its way.
    fn needs_nobody_gone(&self, wires: &Wires) -> Result<()> {
        let awaited = self.ahead.front().and_then(|front| match front.step {
            Step::Store { source: Source::Message { peer, .. }, .. } => Some(self.ranks[peer]),
            _ => None,
        });
        let unsent = self.ungranted.keys().map(|&(peer, _)| peer).chain(self.in_flight.values().copied());
        let missing = awaited.into_iter().chain(unsent);
        for peer in missing {
            if let Some(gone) = &wires.peers[peer].gone {
                return Err(Error::PeerLost { operation: self.describe(), peer, cause: gone.cause() });
            }
        }
        Ok(())
    }

    fn type_of_kind(&self, kind: Kind) -> DType {
        if kind == Kind::Accumulator { self.accumulator } else { self.dtype }
    }

    fn type_of(&self, space: Space) -> DType {
        if space == Space::Scratch { self.accumulator } else { self.dtype }
    }

    fn address(&self, span: Span) -> *mut u8 {
        let (base, len) = match span.space {
            Space::Input => (self.input.ptr, self.input.len),
            Space::Output => (self.output.ptr, self.output.len),
            Space::Scratch => (self.scratch.ptr(), self.scratch.len()),
        };
        let size = self.type_of(span.space).size();
        // A plan that leaves its memory is a bug of ours; better to stop than to write elsewhere.
        assert!((span.start + span.len) * size <= len, "plan {} leaves its memory: {span:?}", self.algorithm);
        // SAFETY: inside the region, as just checked.
        unsafe { base.add(span.start * size) }
    }

    fn combine(
        &self,
        source: *const u8,
        dtype: DType,
        with: Option<Span>,
        into: Span,
        finish: bool,
        wires: &mut Wires,
    ) {
        if with.is_none() {
            wires.counters.bytes_copied += (into.len * self.type_of(into.space).size()) as u64;
        }
        let with = with.map(|span| Operand { ptr: self.address(span), dtype: self.type_of(span.space) });
        let divide_by = if finish { self.divide_by } else { None };
        // SAFETY: all operands have `into.len` elements of their types inside memory that the operation owns
        // (`address` checks it; a message's length was checked on arrival or fixed by its grant). The plan never
        // lets spans overlap other than exactly.
        unsafe {
            combine(
                self.reduce,
                self.address(into),
                self.type_of(into.space),
                Operand { ptr: source, dtype },
                with,
                into.len,
                divide_by,
            );
        }
    }
}

/// A copy of the input in memory of ours. Soft-RoCE and most adapters cannot even read what the process may only read.
fn stage(order: &Order, refusal: Error, wires: &mut Wires) -> Result<HeapBytes> {
    let Region { ptr, len, .. } = order.input;
    let Ok(area) = wires.buffer(len) else { return Err(refusal) };
    // SAFETY: the input is readable while the operation lasts (contract of `Region`), the area is as long at least and
    // nobody else's.
    unsafe { ptr.copy_to_nonoverlapping(area.ptr(), len) };
    wires.counters.bytes_copied += len as u64;
    log::debug!("{} {}: its input is copied, since {refusal}", order.fingerprint(), order.key);
    Ok(area)
}

fn next(counter: &mut u32) -> u32 {
    let value = *counter;
    *counter += 1;
    value
}
