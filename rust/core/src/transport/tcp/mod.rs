//! TCP: per peer one urgent connection and a few bulk ones, driven by epoll.
//!
//! Payload goes from the caller's memory into the socket and from the socket into the landing
//! area, without a copy of ours in between. What is read and written in one turn is bounded, so
//! that urgent connections are looked at again after every quantum of bulk.

mod connection;
mod frame;
mod landing;
mod outgoing;
mod pacing;
pub(crate) mod socket;
mod transit;

use crate::error::{Error, Result};
use crate::transport::poller::{Poller, Ready};
use crate::transport::{Event, LandingKey, Lane, MAX_CONTROL_BYTES, RawSpan, Transport, Waitable, Wake, WriteId};
use connection::{Connection, Progress};
use landing::Landings;
use pacing::{Pacer, Sample};
use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bulk bytes that are moved before urgent connections are looked at again.
const QUANTUM_BYTES: usize = 256 << 10;

/// Largest urgent write: what an urgent frame may have to wait for on its own connection.
const URGENT_CHUNK_BYTES: usize = 64 << 10;

/// Longest wait within [`Transport::close`] before the rates are looked at again.
const CLOSING_TURN: Duration = Duration::from_millis(5);

/// How fast bulk goes to one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// At the rate that the link turns out to have, so that the queues of the network stay short.
    Measured,
    /// As fast as TCP lets it.
    Free,
    /// At most this many bytes per second: a slow network for those who have none.
    Limited(u32),
}

/// How a [`Tcp`] works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpOptions {
    /// Bulk connections per peer, at least 1.
    pub bulk_connections: usize,
    /// How fast bulk may go.
    pub pace: Pace,
    /// Largest bulk write, in bytes.
    pub chunk_bytes: usize,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions { bulk_connections: 2, pace: Pace::Measured, chunk_bytes: 512 << 10 }
    }
}

/// The connected streams to one peer.
#[derive(Debug)]
pub struct Streams {
    /// Control frames and urgent data.
    pub urgent: TcpStream,
    /// Bulk data; at least one.
    pub bulk: Vec<TcpStream>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Connected,
    /// Its goodbyes have come on all connections.
    Departed,
    Lost,
}

struct Peer {
    state: State,
    /// Indices of its connections; the first is the urgent one. Empty for our own rank.
    connections: Vec<usize>,
    /// How fast bulk may go to it.
    pacer: Pacer,
}

/// The TCP transport.
///
/// A write to a peer that is lost or departed is dropped: there will be no `Sent`, and its source
/// is not read any more.
pub struct Tcp {
    rank: usize,
    options: TcpOptions,
    peers: Vec<Peer>,
    connections: Vec<Option<Connection>>,
    landings: Landings,
    poller: Poller,
    urgent_ready: VecDeque<usize>,
    bulk_ready: VecDeque<usize>,
    /// Peers that bulk goes to, and when to look at its rates next.
    paced: Vec<usize>,
    next_pacing: Instant,
    start: Instant,
    /// Reused by `turn`.
    touched: Vec<usize>,
    /// What happened while nobody asked.
    backlog: Vec<Event>,
    closing: bool,
}

impl Tcp {
    /// A transport for `rank` over the streams to other ranks, in the order of ranks (`None`: not reached by it).
    pub fn new(rank: usize, streams: Vec<Option<Streams>>, options: TcpOptions) -> Result<Tcp> {
        let system = |cause: std::io::Error| Error::system("tcp: preparing the connections", cause);
        let token = getrandom::u64().map_err(|cause| Error::system("tcp: reading random bytes", cause))?;
        let mut tcp = Tcp {
            rank,
            options,
            peers: Vec::with_capacity(streams.len()),
            connections: Vec::new(),
            landings: Landings::new(token),
            poller: Poller::new().map_err(system)?,
            urgent_ready: VecDeque::new(),
            bulk_ready: VecDeque::new(),
            paced: Vec::new(),
            next_pacing: Instant::now(),
            start: Instant::now(),
            touched: Vec::new(),
            backlog: Vec::new(),
            closing: false,
        };
        for (peer, streams) in streams.into_iter().enumerate() {
            let mut connections = Vec::new();
            if let Some(Streams { urgent, bulk }) = streams {
                if peer == rank || bulk.is_empty() {
                    return Err(Error::Invalid(format!(
                        "tcp: rank {rank} got {} bulk streams to rank {peer}",
                        bulk.len()
                    )));
                }
                let lanes = std::iter::once(Lane::Urgent).chain(std::iter::repeat(Lane::Bulk));
                for (stream, lane) in std::iter::once(urgent).chain(bulk).zip(lanes) {
                    let socket = socket::prepare(stream, lane == Lane::Urgent).map_err(system)?;
                    if let (Pace::Limited(rate), Lane::Bulk) = (tcp.options.pace, lane) {
                        let share = f64::from(rate) / tcp.options.bulk_connections as f64;
                        socket::set_pacing_rate(&socket, share).map_err(system)?;
                    }
                    connections.push(tcp.connections.len());
                    tcp.poller.add(&socket, tcp.connections.len()).map_err(system)?;
                    tcp.connections.push(Some(Connection::new(socket, peer, lane, tcp.start)));
                }
            }
            tcp.peers.push(Peer { state: State::Connected, connections, pacer: Pacer::default() });
        }
        Ok(tcp)
    }

    /// The connection that a frame for `peer` goes out on; `None` if the peer is gone.
    fn outlet(&mut self, peer: usize, lane: Lane) -> Option<usize> {
        let Peer { state: State::Connected, connections, pacer } = self.peers.get(peer)? else { return None };
        let waiting = |index: &usize| self.connections[*index].as_ref().map_or(usize::MAX, |c| c.outgoing.bytes());
        match lane {
            Lane::Urgent => connections.first().copied(),
            // Several streams help where the network is faster than one; where it is slow, one fills it evenly.
            Lane::Bulk if pacer.rate().is_finite() => connections.get(1).copied(),
            Lane::Bulk => connections.iter().skip(1).copied().min_by_key(waiting),
        }
    }

    fn enqueue(&mut self, index: usize) {
        if let Some(connection) = &mut self.connections[index]
            && !connection.queued
            && connection.ready()
        {
            connection.queued = true;
            match connection.lane {
                Lane::Urgent => self.urgent_ready.push_back(index),
                Lane::Bulk => self.bulk_ready.push_back(index),
            }
        }
    }

    /// Waits up to `timeout` for sockets, serves all urgent ones and one bulk one. Returns whether the waker was used.
    fn turn(&mut self, timeout: Duration, events: &mut Vec<Event>) -> Result<bool> {
        let idle = self.urgent_ready.is_empty() && self.bulk_ready.is_empty();
        let timeout = if idle { timeout } else { Duration::ZERO };
        let mut touched = std::mem::take(&mut self.touched);
        let connections = &mut self.connections;
        let woken = self
            .poller
            .wait(timeout, |Ready { index, readable, writable, hangup }| {
                if let Some(connection) = connections.get_mut(index).and_then(Option::as_mut) {
                    connection.readable |= readable;
                    connection.writable |= writable;
                    connection.hangup |= hangup;
                    touched.push(index);
                }
            })
            .map_err(|cause| Error::system("tcp: epoll_wait", cause))?;
        for index in touched.drain(..) {
            self.enqueue(index);
        }
        self.touched = touched;
        for _ in 0..self.urgent_ready.len() {
            if let Some(index) = self.urgent_ready.pop_front() {
                self.serve(index, events);
            }
        }
        if let Some(index) = self.bulk_ready.pop_front() {
            self.serve(index, events);
        }
        Ok(woken)
    }

    /// Reads and writes a quantum on one connection.
    fn serve(&mut self, index: usize, events: &mut Vec<Event>) {
        let Some(connection) = &mut self.connections[index] else { return };
        connection.queued = false;
        let peer = connection.peer;
        // Written first: what we owe others is never held up by what they send us.
        if let Err(error) = connection.write(QUANTUM_BYTES, events) {
            // What the peer sent before it went is still to be read; the end of the stream follows.
            connection.fail(&error);
        }
        let progress = connection.read(QUANTUM_BYTES, &mut self.landings, events);
        let goodbye = connection.said_goodbye();
        let awaited = self.peers[peer].state == State::Connected && !self.closing;
        match progress {
            Ok(Progress::End) if !awaited => self.release(index),
            Ok(Progress::End) if !goodbye => {
                let cause = connection.failure.take().unwrap_or_else(|| "connection closed".into());
                self.lose(peer, cause, events);
            }
            Ok(_) => self.enqueue(index),
            Err(cause) => self.lose(peer, cause, events),
        }
        if goodbye && self.peers[peer].state == State::Connected {
            self.depart(peer, events);
        }
    }

    /// Once all connections have said goodbye: nothing more comes, so nothing more is sent.
    fn depart(&mut self, peer: usize, events: &mut Vec<Event>) {
        let connections = self.peers[peer].connections.clone();
        let said = |index: &usize| self.connections[*index].as_ref().is_none_or(Connection::said_goodbye);
        if !connections.iter().all(said) {
            return;
        }
        self.peers[peer].state = State::Departed;
        self.landings.forget(peer);
        events.push(Event::Departed { peer });
        for index in connections {
            let Some(connection) = &mut self.connections[index] else { continue };
            connection.outgoing.clear();
            connection.last = false;
            // The leaver waits for our end of the stream before it closes. An error means that it does not.
            if socket::shutdown_write(&connection.socket).is_err() || connection.finished {
                self.release(index);
            }
        }
    }

    fn lose(&mut self, peer: usize, cause: String, events: &mut Vec<Event>) {
        self.landings.forget(peer);
        for index in self.peers[peer].connections.clone() {
            self.release(index);
        }
        if self.peers[peer].state == State::Connected {
            self.peers[peer].state = State::Lost;
            events.push(Event::Lost { peer, cause });
        }
    }

    /// Closes a connection; queues may still name its index.
    fn release(&mut self, index: usize) {
        self.connections[index] = None;
    }

    /// Adjusts the rates of bulk if it is time. Returns when it is time again.
    fn pace(&mut self, now: Instant) -> Option<Instant> {
        if self.paced.is_empty() {
            return None;
        }
        if now >= self.next_pacing {
            let at = (now - self.start).as_secs_f64();
            let mut paced = std::mem::take(&mut self.paced);
            // An error means that a connection is broken: reading will tell.
            paced.retain(|peer| self.pace_peer(*peer, at).unwrap_or(false));
            self.paced = paced;
            self.next_pacing = now + pacing::INTERVAL;
        }
        Some(self.next_pacing)
    }

    /// Returns whether there is still bulk on its way to `peer`.
    fn pace_peer(&mut self, peer: usize, at: f64) -> std::io::Result<bool> {
        let Peer { connections, pacer, .. } = &mut self.peers[peer];
        let (mut acked, mut active, mut shortest, mut rtt) = (0, Vec::new(), u32::MAX, u32::MAX);
        let mut limited = false;
        for index in connections.iter() {
            let Some(connection) = &self.connections[*index] else { continue };
            let info = socket::info(&connection.socket)?;
            shortest = shortest.min(info.min_rtt);
            if connection.lane == Lane::Bulk {
                acked += info.bytes_acked;
                limited |= info.notsent_bytes > 0;
                if !connection.outgoing.is_empty() || info.notsent_bytes > 0 {
                    active.push(*index);
                    rtt = rtt.min(info.rtt());
                }
            }
        }
        if active.is_empty() {
            pacer.update(Sample { at, queue: 0.0, acked, busy: false, limited });
            return Ok(false);
        }
        // The round trip is measured by the kernels, but contains the other direction's queue; the probes
        // know the direction, but contain the peer's being late: the smaller of the two is our queue.
        let mut queue = f64::from(rtt.saturating_sub(shortest)) * 1e-6;
        let urgent = connections[0];
        if let Some(connection) = &mut self.connections[urgent] {
            queue = queue.min(connection.transit.queue().unwrap_or(queue));
            connection.outgoing.bare(connection.transit.probe());
        }
        pacer.update(Sample { at, queue, acked, busy: true, limited });
        let rate = pacer.rate() / active.len() as f64;
        log::trace!(
            "tcp: {at:.4} rank {peer}: queue {:.0} us, rate {:.1} MB/s, acked {acked}, {pacer:?}",
            queue * 1e6,
            rate * 1e-6
        );
        for index in &active {
            if let Some(connection) = &mut self.connections[*index] {
                connection.limit(rate)?;
            }
        }
        self.enqueue(urgent);
        Ok(true)
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn chunk_bytes(&self, lane: Lane) -> usize {
        match lane {
            Lane::Urgent => URGENT_CHUNK_BYTES.min(self.options.chunk_bytes),
            Lane::Bulk => self.options.chunk_bytes,
        }
    }

    fn expose(&mut self, peer: usize, _lane: Lane, landing: RawSpan) -> Result<LandingKey> {
        if peer == self.rank || peer >= self.peers.len() {
            let size = self.peers.len();
            return Err(Error::Invalid(format!("tcp: rank {} of {size} exposes memory to rank {peer}", self.rank)));
        }
        Ok(self.landings.expose(peer, landing))
    }

    fn discards(&self, _peer: usize) -> bool {
        true
    }

    fn withdraw(&mut self, peer: usize, key: LandingKey) {
        self.landings.withdraw(peer, key);
    }

    fn control(&mut self, peer: usize, frame: &[u8]) {
        assert!(frame.len() <= MAX_CONTROL_BYTES, "a control frame of {} bytes", frame.len());
        if let Some(index) = self.outlet(peer, Lane::Urgent)
            && let Some(connection) = &mut self.connections[index]
        {
            connection.outgoing.control(frame);
            self.enqueue(index);
        }
    }

    fn write(&mut self, peer: usize, lane: Lane, key: LandingKey, source: RawSpan, id: WriteId) {
        if let Some(index) = self.outlet(peer, lane)
            && let Some(connection) = &mut self.connections[index]
        {
            connection.outgoing.data(key, source, id);
            if self.options.pace == Pace::Measured && lane == Lane::Bulk && !self.paced.contains(&peer) {
                self.paced.push(peer);
            }
            self.enqueue(index);
        }
    }

    fn cancel(&mut self, which: &dyn Fn(WriteId) -> bool) -> Vec<WriteId> {
        let mut forgotten = Vec::new();
        for connection in self.connections.iter_mut().flatten() {
            connection.outgoing.cancel(which, &mut forgotten);
        }
        forgotten
    }

    fn sever(&mut self, peer: usize, cause: &str) {
        let mut events = std::mem::take(&mut self.backlog);
        self.lose(peer, cause.into(), &mut events);
        self.backlog = events;
    }

    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<()> {
        let (mut now, before) = (Instant::now(), events.len());
        events.append(&mut self.backlog);
        let deadline = if events.len() > before { Some(now) } else { now.checked_add(wait) };
        loop {
            let until = self.pace(now).into_iter().chain(deadline).min();
            let timeout = until.map_or(wait, |until| until.saturating_duration_since(now));
            let woken = self.turn(timeout, events)?;
            now = Instant::now();
            if woken || events.len() > before || deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.poller.waker()
    }

    fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        self.connections.iter().flatten().map(|connection| connection.socket.as_fd()).collect()
    }

    fn close(&mut self, deadline: Duration) {
        self.closing = true;
        for index in 0..self.connections.len() {
            if let Some(connection) = &mut self.connections[index]
                && self.peers[connection.peer].state == State::Connected
            {
                connection.outgoing.bare(frame::Header::GOODBYE);
                connection.last = true;
                self.enqueue(index);
            }
        }
        let end = Instant::now() + deadline;
        let mut events = Vec::new();
        while self.connections.iter().any(Option::is_some) {
            let now = Instant::now();
            if now >= end {
                let late = |peer: &Peer| peer.connections.iter().any(|index| self.connections[*index].is_some());
                let late: Vec<usize> = (0..self.peers.len()).filter(|rank| late(&self.peers[*rank])).collect();
                log::warn!("tcp: closing without an answer from ranks {late:?} within {deadline:?}");
                break;
            }
            self.pace(now);
            if let Err(error) = self.turn((end - now).min(CLOSING_TURN), &mut events) {
                log::warn!("{error}");
                break;
            }
            events.clear();
        }
        self.connections.iter_mut().for_each(|connection| *connection = None);
    }
}

impl Waitable for Tcp {
    fn signal(&self) -> BorrowedFd<'_> {
        self.poller.signal()
    }

    fn before_wait(&mut self) -> Result<Option<Instant>> {
        let now = Instant::now();
        let idle = self.urgent_ready.is_empty() && self.bulk_ready.is_empty() && self.backlog.is_empty();
        Ok(if idle { self.pace(now) } else { Some(now) })
    }
}

#[cfg(test)]
mod tests;
