//! InfiniBand verbs: reliable connections, over which data is written where the peer wants it.
//!
//! A rank uses one or more ports at once, its rails; the n-th of one rank talks to the n-th of another. Per peer there is
//! a queue pair for the urgent lane, on the first rail, and one for bulk on every rail, so that urgent messages never
//! stand behind bulk. On which rail a landing area is written its owner decides, in turn. Control frames are sends into receives that are always posted; the sender never has more of them under way than the peer has room for.
//! Data is an RDMA write with an immediate, against the peer's grant, whose key is (address, rkey and a number of the
//! landing area, which also says the rail); the immediate brings that number back and so tells the peer that the data is
//! there. No processor touches it on the way.
//!
//! The authenticated stream from the bootstrap stays open: a peer that dies while we only wait for its data is noticed by
//! the end of that stream. Completions are polled, and waited for through a completion channel when there are none.
//!
//! A write that is posted cannot be called back, nor discarded where it arrives: the engine waits until the peer has
//! said that it writes no more, and ends the connection (`sever`) if that takes too long. Only the end of its queue
//! pairs takes memory from a peer for sure, and from this peer alone: a registration may serve others' writes, too.

mod channel;
mod frames;
mod kept;
mod progress;
mod rail;
mod registry;
mod setup;
#[cfg(test)]
mod tests;

use crate::bootstrap::wire::Patience;
use crate::error::{Error, Result};
use crate::transport::poller::Poller;
use crate::transport::tcp::socket;
use crate::transport::{Event, Keeper, LandingKey, Lane, MAX_CONTROL_BYTES, RawSpan, Transport, Wake, WriteId};
use channel::{Channel, Request};
use frames::Frames;
use mdas_verbs::Completion;
use mdas_verbs::choose::Choice;
use mdas_verbs::sys::Sge;
use rail::Rail;
use registry::Registry;
use std::collections::HashMap;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Receives posted per peer for control frames, and for the news of urgent writes.
const FRAMES: usize = 32;
/// Control frames that may be under way to a peer: the rest is for news, and for frames that only return credit.
const CREDIT: u32 = 20;
/// A peer is told of so many frames taken in, if nothing is sent to it anyway.
const OWED: u32 = 8;
/// Receives posted per peer for the news of bulk writes. With fewer than are written the sender is told to wait.
const NEWS: usize = 64;
/// Buffers for sending frames that are too long to be inline.
const SEND_BUFFERS: usize = 64;
/// Completions that are looked at before anything else.
const BATCH: usize = 64;
/// So long completions are polled for before we sleep.
const SPIN: Duration = Duration::from_micros(20);
/// So often memory is looked for that nobody keeps any more.
const TIDY: Duration = Duration::from_millis(100);
/// Longest sleep within [`Transport::close`].
const CLOSING_TURN: Duration = Duration::from_millis(5);

/// Places of a peer's channels: the urgent one, then bulk's, by rail.
const URGENT: usize = 0;
const BULK: usize = 1;

/// To the poller: of the first rail, then those of the others.
const CHANNEL: usize = usize::MAX >> 1;
const DEVICE: usize = CHANNEL - rail::MOST;

/// How a [`Verbs`] works.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ports to use at once, as many on all ranks.
    pub rails: Vec<Choice>,
    /// A packet is sent again after 4.096 us * 2^timeout without an answer, ...
    pub timeout: u8,
    /// ... so many times, before the connection is given up.
    pub retry_count: u8,
    /// Traffic class (RoCE: type of service).
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
    /// May the device make writes visible in any order before their completion?
    pub relaxed_ordering: bool,
    /// Largest write, in bytes.
    pub chunk_bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Connected,
    Departed,
    Lost,
}

struct Peer {
    state: State,
    stream: Option<OwnedFd>,
    /// The urgent one, then one per rail; none for our own rank, and once it is gone.
    channels: Vec<Channel>,
    /// On which it writes next.
    next_rail: usize,
}

struct Landing {
    peer: usize,
    bytes: usize,
    key: LandingKey,
}

/// The verbs transport.
///
/// A write to a peer that is lost or departed is dropped: there will be no `Sent`, and its source is not read any more.
pub struct Verbs {
    // Queue pairs go before the memory that is posted on them.
    peers: Vec<Peer>,
    frames: Frames,
    registry: Registry,
    rails: Vec<Rail>,
    chunk_bytes: usize,
    rank: usize,
    /// Exposed, by immediate.
    landings: HashMap<u32, Landing>,
    next_landing: u32,
    poller: Poller,
    tidied: Instant,
    /// What happened while nobody asked.
    backlog: Vec<Event>,
    completions: Vec<Completion>,
}

impl Verbs {
    /// Connects with other ranks over these streams, in the order of ranks (`None`: not reached by it); they stay open.
    ///
    /// `keep_going` is asked at least every 100 ms; false ends the wait with [`Error::Closed`].
    ///
    /// # Errors
    /// [`Error::Configuration`] says which verb failed on which device, or which rank did not answer.
    pub fn connect(
        rank: usize,
        streams: Vec<Option<TcpStream>>,
        options: &Options,
        deadline: Duration,
        keep_going: &dyn Fn() -> bool,
    ) -> Result<Verbs> {
        let system = |cause: std::io::Error| Error::system("verbs: preparing the connections", cause);
        let mut rails = Rail::open_all(options, streams.len())?;
        let frames = Frames::new(&rails[0].domain, streams.len() * FRAMES, SEND_BUFFERS)?;
        let channels = setup::channels(&rails, &streams)?;
        let patience = Patience { deadline: Instant::now() + deadline, keep_going };
        setup::connect(rank, &streams, &channels, &rails, &frames, options, &patience)?;
        let poller = Poller::new().map_err(system)?;
        for (index, rail) in rails.iter().enumerate() {
            poller.add(rail.queue.channel.descriptor(), CHANNEL + index).map_err(system)?;
            poller.add(rail.context.events(), DEVICE + index).map_err(system)?;
        }
        let mut peers = Vec::new();
        for (peer, (stream, channels)) in streams.into_iter().zip(channels).enumerate() {
            let stream = stream.map(|stream| socket::prepare(stream, true)).transpose().map_err(system)?;
            if let Some(stream) = &stream {
                poller.add(stream, peer).map_err(system)?;
            }
            for (place, channel) in channels.iter().enumerate() {
                rails[channel.rail].numbers.insert(channel.pair.number(), (peer, place));
            }
            peers.push(Peer { state: State::Connected, stream, channels, next_rail: 0 });
        }
        let domains = rails.iter().map(|rail| rail.domain.clone()).collect();
        let registry = Registry::new(domains, options.relaxed_ordering);
        Ok(Verbs {
            peers,
            frames,
            registry,
            rails,
            chunk_bytes: options.chunk_bytes,
            rank,
            landings: HashMap::new(),
            next_landing: 0,
            poller,
            tidied: Instant::now(),
            backlog: Vec::new(),
            completions: Vec::new(),
        })
    }

    /// [`Transport::register`] for memory of another device (a GPU's, say), which that exports as a DMA-buf: `memory` is
    /// the address range that landing areas and sources will be named by, which begins at `offset` of the DMA-buf.
    ///
    /// # Errors
    /// Also where libibverbs, or the driver of a rail's device, has no such registration.
    pub fn register_dmabuf(
        &mut self,
        descriptor: BorrowedFd<'_>,
        offset: u64,
        memory: RawSpan,
        keeper: Keeper,
    ) -> Result<bool> {
        let registered = self.registry.register_dmabuf(descriptor, offset, memory, keeper);
        registered.map_err(|error| Error::system("verbs: registering a DMA-buf", error))
    }

    fn channel(&mut self, peer: usize, place: usize) -> Option<&mut Channel> {
        let peer = self.peers.get_mut(peer).filter(|peer| peer.state == State::Connected)?;
        peer.channels.get_mut(place)
    }

    /// Posts what there is room for. A verb that fails means that the connection is broken.
    fn pump(&mut self, peer: usize, place: usize, events: &mut Vec<Event>) {
        let Some(channel) = self.peers[peer].channels.get_mut(place) else { return };
        if let Err(error) = channel.pump(&mut self.frames) {
            self.lose(peer, error.to_string(), events);
        }
    }

    /// Queues a request, and posts what there is room for. What comes of it is told by the next poll.
    fn push(&mut self, peer: usize, place: usize, request: Request) {
        if let Some(channel) = self.channel(peer, place) {
            channel.push(request);
            let mut events = std::mem::take(&mut self.backlog);
            self.pump(peer, place, &mut events);
            self.backlog = events;
        }
    }

    /// Ends the connection with a peer: afterwards the devices neither read nor write for it.
    fn disconnect(&mut self, peer: usize) {
        for channel in self.peers[peer].channels.drain(..) {
            self.rails[channel.rail].numbers.remove(&channel.pair.number());
            channel.abandon(&mut self.frames);
        }
        self.landings.retain(|_, landing| landing.peer != peer);
        self.peers[peer].stream = None;
    }

    fn lose(&mut self, peer: usize, cause: String, events: &mut Vec<Event>) {
        self.disconnect(peer);
        if self.peers[peer].state == State::Connected {
            self.peers[peer].state = State::Lost;
            events.push(Event::Lost { peer, cause });
        }
    }

    fn depart(&mut self, peer: usize, events: &mut Vec<Event>) {
        self.peers[peer].state = State::Departed;
        events.push(Event::Departed { peer });
        self.landings.retain(|_, landing| landing.peer != peer);
        // The queue pairs stay until its stream ends: it waits for its goodbye to be acknowledged.
        for channel in &mut self.peers[peer].channels {
            channel.drop_waiting(|_| true, &mut Vec::new());
        }
    }
}

impl Transport for Verbs {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn chunk_bytes(&self, lane: Lane) -> usize {
        match lane {
            Lane::Urgent => self.chunk_bytes.min(64 << 10),
            Lane::Bulk => self.chunk_bytes,
        }
    }

    fn register(&mut self, memory: RawSpan, keeper: Keeper) -> Result<bool> {
        self.registry.register(memory, keeper).map_err(|error| Error::system("verbs: registering memory", error))
    }

    fn expose(&mut self, peer: usize, lane: Lane, landing: RawSpan) -> Result<LandingKey> {
        if peer == self.rank || peer >= self.peers.len() {
            let size = self.peers.len();
            return Err(Error::Invalid(format!("verbs: rank {} of {size} exposes memory to rank {peer}", self.rank)));
        }
        let rail = if lane == Lane::Urgent { 0 } else { self.peers[peer].next_rail };
        let Some((_, rkey)) = self.registry.keys(landing, rail) else {
            return Err(Error::Invalid(format!(
                "verbs: {} bytes at {:p} are not registered",
                landing.len, landing.ptr
            )));
        };
        if lane == Lane::Bulk {
            self.peers[peer].next_rail = (rail + 1) % self.rails.len();
        }
        let mut number = self.next_landing + rail as u32;
        while self.landings.contains_key(&number) {
            number = number.wrapping_add(rail::STEP);
        }
        self.next_landing = (number - rail as u32).wrapping_add(rail::STEP);
        let key = LandingKey([landing.ptr as u64, u64::from(rkey) << 32 | u64::from(number)]);
        self.landings.insert(number, Landing { peer, bytes: landing.len, key });
        Ok(key)
    }

    fn discards(&self, _peer: usize) -> bool {
        false
    }

    fn withdraw(&mut self, peer: usize, key: LandingKey) {
        let number = key.0[1] as u32;
        if self.landings.get(&number).is_some_and(|landing| landing.peer == peer && landing.key == key) {
            self.landings.remove(&number);
        }
    }

    fn control(&mut self, peer: usize, frame: &[u8]) {
        assert!(frame.len() <= MAX_CONTROL_BYTES, "a control frame of {} bytes", frame.len());
        self.push(peer, URGENT, Request::Frame(frame.into()));
    }

    fn write(&mut self, peer: usize, lane: Lane, key: LandingKey, source: RawSpan, id: WriteId) {
        let rail = rail::of(key);
        let Some((lkey, _)) = self.registry.keys(source, rail) else {
            let (count, RawSpan { ptr, len }) = (self.rails.len(), source);
            let cause = if rail < count {
                format!("{len} bytes at {ptr:p} are not registered any more")
            } else {
                format!("protocol error: it wants to be written to on rail {rail} of {count}")
            };
            let mut events = std::mem::take(&mut self.backlog);
            self.lose(peer, cause, &mut events);
            self.backlog = events;
            return;
        };
        let piece = Sge { addr: source.ptr as u64, length: source.len as u32, lkey };
        let [address, rest] = key.0;
        let place = if lane == Lane::Urgent { URGENT } else { BULK + rail };
        let to = (address, (rest >> 32) as u32);
        self.push(peer, place, Request::Write { id, piece, to, immediate: rest as u32 });
    }

    fn cancel(&mut self, which: &dyn Fn(WriteId) -> bool) -> Vec<WriteId> {
        let mut dropped = Vec::new();
        for channel in self.peers.iter_mut().flat_map(|peer| &mut peer.channels) {
            channel.drop_waiting(which, &mut dropped);
        }
        dropped
    }

    fn sever(&mut self, peer: usize, cause: &str) {
        let mut events = std::mem::take(&mut self.backlog);
        self.lose(peer, cause.into(), &mut events);
        self.backlog = events;
    }

    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<()> {
        let before = events.len();
        events.append(&mut self.backlog);
        self.drain(events)?;
        let now = Instant::now();
        if now.duration_since(self.tidied) >= TIDY {
            self.tidied = now;
            self.registry.tidy();
        }
        let deadline = now.checked_add(wait);
        loop {
            let left = deadline.map_or(wait, |deadline| deadline.saturating_duration_since(Instant::now()));
            let wait = if events.len() > before { Duration::ZERO } else { left };
            let woken = self.turn(wait, events)?;
            events.append(&mut self.backlog);
            if woken || events.len() > before || left.is_zero() {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.poller.waker()
    }

    fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        self.peers.iter().filter_map(|peer| peer.stream.as_ref().map(AsFd::as_fd)).collect()
    }

    fn close(&mut self, deadline: Duration) {
        let mut events = Vec::new();
        for peer in 0..self.peers.len() {
            for place in 0..self.peers[peer].channels.len() {
                self.push(peer, place, Request::Goodbye);
            }
        }
        let end = Instant::now() + deadline;
        let busy = |peer: &Peer| peer.state == State::Connected && peer.channels.iter().any(|channel| !channel.idle());
        while self.peers.iter().any(busy) {
            let now = Instant::now();
            if now >= end {
                let late: Vec<usize> = (0..self.peers.len()).filter(|peer| busy(&self.peers[*peer])).collect();
                log::warn!("verbs: closing without an answer from ranks {late:?} within {deadline:?}");
                break;
            }
            if let Err(error) = self.turn((end - now).min(CLOSING_TURN), &mut events) {
                log::warn!("{error}");
                break;
            }
            events.clear();
        }
        for peer in 0..self.peers.len() {
            self.disconnect(peer);
        }
        self.landings.clear();
        // Whoever still holds a finished operation holds us, but need not hold pinned memory.
        self.registry.clear();
    }
}
