//! The transport as operations see it: peers with their state, inline credit, landing buffers.

use super::call::GroupId;
use super::memory::HeapBytes;
use super::protocol::{Frame, OpKey};
use crate::error::{Error, Result};
use crate::transport::closed::Closed;
use crate::transport::{Keeper, LandingKey, Lane, RawSpan, Transport, WriteId};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Messages up to this size travel inside a control frame, without a grant.
pub const INLINE_BYTES: usize = 4096;
/// Inline bytes that may be unconsumed at one peer: bounds what a rank that runs ahead can pile up.
const CREDIT_BYTES: u32 = 1 << 20;

/// Bytes of memory that are kept for later operations: of landing areas and scratch.
const POOL_BYTES: usize = 256 << 20;

/// Why a peer will not send anything any more.
#[derive(Debug, Clone)]
pub enum Gone {
    /// It said goodbye.
    Departed,
    /// It broke.
    Lost(String),
}

impl Gone {
    /// In words, for errors.
    pub fn cause(&self) -> String {
        match self {
            Gone::Departed => "it has left the job (shutdown, or the end of its script) before taking part".into(),
            Gone::Lost(cause) => cause.clone(),
        }
    }
}

/// What is known of another rank.
pub struct Peer {
    /// Set once.
    pub gone: Option<Gone>,
    /// Last sign of life.
    pub heard: Instant,
    /// First question since then.
    pub asked: Option<Instant>,
    /// Last time that a write from or to it ended that belonged to an operation which is being left.
    pub moved: Option<Instant>,
    credit: u32,
    owed: u32,
    held: VecDeque<Vec<u8>>,
}

/// Writes within one group between us and one peer, since the group was made.
#[derive(Debug, Default)]
struct Tally {
    made: u64,
    arrived: u64,
    /// All that the peer will ever have made.
    stopped: Option<u64>,
}

/// Counts since the engine started.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    /// Payload bytes handed to the transport.
    pub bytes_sent: u64,
    /// Payload bytes that arrived.
    pub bytes_received: u64,
    /// Payload bytes that the processor copied: all that it did with them beside reductions, and beside what a
    /// transport's system calls copy (TCP).
    pub bytes_copied: u64,
    /// Operations finished.
    pub operations: u64,
    /// Times that the transport was given memory which it had to make known to a device (verbs).
    pub registrations: u64,
}

/// Transport plus bookkeeping; used by one thread at a time.
pub struct Wires {
    /// The byte mover.
    pub transport: Box<dyn Transport>,
    /// By world rank.
    pub peers: Vec<Peer>,
    /// Statistics.
    pub counters: Counters,
    writes: HashMap<WriteId, (OpKey, usize)>,
    landings: HashMap<(usize, LandingKey), (OpKey, u32, usize)>,
    tallies: HashMap<(GroupId, usize), Tally>,
    /// The one given back last is at the end.
    pool: VecDeque<HeapBytes>,
    chunk_bytes: usize,
    next_write: u64,
}

impl Wires {
    /// Over `transport`, with `size` ranks.
    pub fn new(transport: Box<dyn Transport>, size: usize) -> Self {
        let now = Instant::now();
        let peer = || Peer {
            gone: None,
            heard: now,
            asked: None,
            moved: None,
            credit: CREDIT_BYTES,
            owed: 0,
            held: VecDeque::new(),
        };
        let chunk_bytes = transport.chunk_bytes(Lane::Urgent).max(transport.chunk_bytes(Lane::Bulk));
        Wires {
            transport,
            peers: (0..size).map(|_| peer()).collect(),
            counters: Counters::default(),
            writes: HashMap::new(),
            landings: HashMap::new(),
            tallies: HashMap::new(),
            pool: VecDeque::new(),
            chunk_bytes,
            next_write: 0,
        }
    }

    /// Parts from everybody, and from the transport. Nothing is in flight any more.
    pub fn close(&mut self, deadline: Duration) {
        self.transport.close(deadline);
        self.transport = Box::new(Closed);
        self.pool.clear();
    }

    /// A frame that needs no credit.
    pub fn say(&mut self, peer: usize, frame: &Frame) {
        if self.peers[peer].gone.is_none() {
            self.transport.control(peer, &frame.encode());
        }
    }

    /// Asks how far the peer is with `op`.
    pub fn ask(&mut self, peer: usize, op: OpKey) {
        self.peers[peer].asked.get_or_insert_with(Instant::now);
        self.say(peer, &Frame::Query { op });
    }

    /// The peer has given a sign of life.
    pub fn heard(&mut self, peer: usize) {
        (self.peers[peer].heard, self.peers[peer].asked) = (Instant::now(), None);
    }

    /// An inline message: goes out at once, or when the peer has returned credit.
    pub fn say_on_credit(&mut self, peer: usize, frame: &Frame) {
        let bytes = frame.encode();
        self.counters.bytes_sent += bytes.len() as u64;
        self.peers[peer].held.push_back(bytes);
        self.flush(peer);
    }

    /// The peer gave credit back.
    pub fn credit(&mut self, peer: usize, bytes: u32) {
        let peer_state = &mut self.peers[peer];
        peer_state.credit = peer_state.credit.saturating_add(bytes).min(CREDIT_BYTES);
        self.flush(peer);
    }

    fn flush(&mut self, peer: usize) {
        let state = &mut self.peers[peer];
        while let Some(bytes) = state.held.front() {
            let cost = bytes.len() as u32;
            if state.gone.is_none() && cost > state.credit {
                break;
            }
            state.credit = state.credit.saturating_sub(cost);
            if state.gone.is_none() {
                self.transport.control(peer, bytes);
            }
            state.held.pop_front();
        }
    }

    /// An inline message of `cost` bytes (its whole frame) has been consumed.
    pub fn consumed(&mut self, peer: usize, cost: usize) {
        let state = &mut self.peers[peer];
        state.owed += cost as u32;
        if state.owed >= CREDIT_BYTES / 4 {
            let bytes = std::mem::take(&mut state.owed);
            self.say(peer, &Frame::Credit { bytes });
        }
    }

    /// Starts a granted write.
    pub fn write(&mut self, op: OpKey, peer: usize, key: LandingKey, source: RawSpan) -> WriteId {
        let id = WriteId(self.next_write);
        self.next_write += 1;
        self.writes.insert(id, (op, peer));
        self.tally(op.group, peer).made += 1;
        self.counters.bytes_sent += source.len as u64;
        self.transport.write(peer, op.lane, key, source, id);
        id
    }

    /// Whose write was that, and to whom? Each is told once.
    pub fn sent(&mut self, id: WriteId) -> Option<(OpKey, usize)> {
        self.writes.remove(&id)
    }

    fn tally(&mut self, group: GroupId, peer: usize) -> &mut Tally {
        self.tallies.entry((group, peer)).or_default()
    }

    /// Forgets those of an operation's writes that are not under way.
    pub fn cancel(&mut self, op: OpKey) {
        let writes = &self.writes;
        for id in self.transport.cancel(&|id| writes.get(&id).is_some_and(|(owner, _)| *owner == op)) {
            if let Some((_, peer)) = self.writes.remove(&id) {
                // Half of it may be on its way, over a transport whose other end discards it and counts nothing.
                self.tally(op.group, peer).made -= 1;
            }
        }
    }

    /// Tells the peer that no more writes will be made in a group.
    pub fn say_stopped(&mut self, group: GroupId, peer: usize) {
        let writes = self.tally(group, peer).made;
        self.say(peer, &Frame::Stopped { group, writes });
    }

    /// The peer makes no more writes in a group than these.
    pub fn stopped(&mut self, group: GroupId, peer: usize, writes: u64) {
        self.tally(group, peer).stopped = Some(writes);
    }

    /// Exposes a landing area for message `index` of `op`.
    pub fn expose(&mut self, op: OpKey, peer: usize, index: u32, landing: RawSpan) -> Result<LandingKey> {
        let key = self.transport.expose(peer, op.lane, landing)?;
        self.landings.insert((peer, key), (op, index, landing.len));
        Ok(key)
    }

    /// Whose message landed? Each is told once.
    pub fn landed(&mut self, peer: usize, key: LandingKey) -> Option<(OpKey, u32)> {
        let (op, index, bytes) = self.landings.remove(&(peer, key))?;
        self.tally(op.group, peer).arrived += 1;
        self.counters.bytes_received += bytes as u64;
        Some((op, index))
    }

    /// Takes back what nobody uses any more of the memory of an operation that was stopped. True if that is all of it:
    /// nothing reads or writes it afterwards.
    pub fn release(&mut self, op: OpKey) -> bool {
        let Wires { transport, peers, tallies, landings, writes, .. } = self;
        landings.retain(|&(peer, key), &mut (owner, ..)| {
            let unused = || {
                let tally = tallies.get(&(op.group, peer));
                let all = tally.is_some_and(|tally| tally.stopped.is_some_and(|writes| tally.arrived >= writes));
                all || peers[peer].gone.is_some() || transport.discards(peer)
            };
            let over = owner == op && unused();
            if over {
                transport.withdraw(peer, key);
            }
            !over
        });
        writes.retain(|_, &mut (owner, peer)| {
            let over = owner == op && peers[peer].gone.is_some();
            if over {
                // One that has said goodbye may be being written to yet.
                transport.sever(peer, "it is gone");
            }
            !over
        });
        self.holders(op).is_empty()
    }

    /// The peers that may be using an operation's memory.
    pub fn holders(&self, op: OpKey) -> BTreeSet<usize> {
        let writing = self.landings.iter().filter(|(_, (owner, ..))| *owner == op).map(|((peer, _), _)| *peer);
        let written = self.writes.values().filter(|(owner, _)| *owner == op).map(|(_, peer)| *peer);
        writing.chain(written).collect()
    }

    /// Has the transport prepare memory.
    pub fn register(&mut self, (memory, keeper): (RawSpan, Keeper)) -> Result<()> {
        self.counters.registrations += u64::from(self.transport.register(memory, keeper)?);
        Ok(())
    }

    /// Registered memory of at least `bytes`, for a landing area or as scratch; what is in it is anybody's guess.
    pub fn buffer(&mut self, bytes: usize) -> Result<HeapBytes> {
        let len = bytes.checked_next_multiple_of(self.chunk_bytes).unwrap_or(bytes).max(self.chunk_bytes);
        let fits = |buffer: &HeapBytes| buffer.len() >= len && buffer.len() / 2 <= len;
        let buffer = match self.pool.iter().rposition(fits).and_then(|place| self.pool.remove(place)) {
            Some(buffer) => buffer,
            None => HeapBytes::zeroed(len, 64).ok_or_else(|| {
                Error::system(format!("allocating {len} bytes for an operation's messages"), "out of memory")
            })?,
        };
        self.register(buffer.registrable())?;
        Ok(buffer)
    }

    /// Back to the pool, from which the oldest go if there is too much in it.
    pub fn recycle(&mut self, buffer: HeapBytes) {
        if buffer.len() >= self.chunk_bytes {
            self.pool.push_back(buffer);
        }
        let mut bytes: usize = self.pool.iter().map(HeapBytes::len).sum();
        while bytes > POOL_BYTES
            && let Some(oldest) = self.pool.pop_front()
        {
            bytes -= oldest.len();
        }
    }
}
