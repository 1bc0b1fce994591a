//! One TCP connection to a peer: what waits to go out, what is half come in.

use super::frame::Decoder;
use super::landing::{Arrivals, Landings};
use super::outgoing::Outgoing;
use super::socket;
use super::transit::Transit;
use crate::transport::{Event, Lane};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Holds a header and small frames; bodies of data frames go past it.
const BUFFER_BYTES: usize = 8 << 10;
const PIECES: usize = 16;

/// How far reading came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All that is possible for now is done.
    Blocked,
    /// The quantum is used up; there may be more.
    More,
    /// The peer ended the stream.
    End,
}

/// A connection and its state.
pub struct Connection {
    pub socket: OwnedFd,
    pub peer: usize,
    pub lane: Lane,
    pub outgoing: Outgoing,
    decoder: Decoder,
    buffer: Box<[u8; BUFFER_BYTES]>,
    pub readable: bool,
    pub writable: bool,
    /// The end of the stream is in sight: read until it is reached.
    pub hangup: bool,
    /// The end of the stream was reached.
    pub finished: bool,
    /// `outgoing` ends with our last frame: shut the stream down behind it.
    pub last: bool,
    /// Why sending failed.
    pub failure: Option<String>,
    /// Is it in the queue of connections to serve?
    pub queued: bool,
    /// Urgent connection: how long frames are under way.
    pub transit: Transit,
    /// What the kernel was told last.
    limit: f64,
}

impl Connection {
    pub fn new(socket: OwnedFd, peer: usize, lane: Lane, clock: Instant) -> Self {
        Connection {
            socket,
            peer,
            lane,
            outgoing: Outgoing::default(),
            decoder: Decoder::default(),
            buffer: Box::new([0; BUFFER_BYTES]),
            readable: true,
            writable: true,
            hangup: false,
            finished: false,
            last: false,
            failure: None,
            queued: false,
            transit: Transit::new(clock),
            limit: f64::INFINITY,
        }
    }

    /// Is there something that can be done without waiting?
    pub fn ready(&self) -> bool {
        (self.readable && !self.finished) || (self.writable && !self.outgoing.is_empty())
    }

    /// Has the peer said goodbye on this connection?
    pub fn said_goodbye(&self) -> bool {
        self.decoder.ended()
    }

    /// Nothing more can be sent; what has come in can still be read.
    pub fn fail(&mut self, error: &io::Error) {
        self.failure.get_or_insert_with(|| describe(error));
        self.outgoing.clear();
        self.last = false;
        self.readable = true;
        self.hangup = true;
    }

    /// Limits the rate of sending, in bytes per second.
    pub fn limit(&mut self, rate: f64) -> io::Result<()> {
        if self.limit != rate {
            socket::set_pacing_rate(&self.socket, rate)?;
            self.limit = rate;
        }
        Ok(())
    }

    /// Reads about `quantum` bytes; the error says why the connection cannot go on.
    pub fn read(
        &mut self,
        quantum: usize,
        landings: &mut Landings,
        events: &mut Vec<Event>,
    ) -> Result<Progress, String> {
        let mut sink = Arrivals { peer: self.peer, landings, events, transit: &mut self.transit };
        let mut moved = 0;
        while self.readable {
            if moved >= quantum {
                return Ok(Progress::More);
            }
            let direct = self.decoder.direct().and_then(|(key, offset, remaining)| {
                let place = sink.landings.place(self.peer, key, offset)?;
                Some((place, remaining.min(quantum - moved), remaining))
            });
            let buffer = libc::iovec { iov_base: self.buffer.as_mut_ptr().cast(), iov_len: BUFFER_BYTES };
            let (mut pieces, count, body) = match direct {
                None => ([buffer; 2], 1, 0),
                Some((place, body, remaining)) => {
                    let landing = libc::iovec { iov_base: place.cast(), iov_len: body };
                    ([landing, buffer], if body == remaining { 2 } else { 1 }, body)
                }
            };
            let room: usize = pieces[..count].iter().map(|piece| piece.iov_len).sum();
            // SAFETY: the buffer is ours and not borrowed elsewhere. `place` is within an exposed
            // landing, which is ours until `Arrived` or `withdraw` (contract of `Transport::expose`),
            // neither of which can happen during the call; its frame's length was compared with the
            // landing's when the frame began, and `body` is at most what remains of the frame.
            let n = match unsafe { socket::receive(&self.socket, &mut pieces[..count]) } {
                Ok(0) => {
                    self.finished = true;
                    return Ok(Progress::End);
                }
                Ok(n) => n,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => {
                        self.readable = false;
                        break;
                    }
                    ErrorKind::Interrupted => continue,
                    _ => return Err(describe(&error)),
                },
            };
            moved += n;
            let placed = n.min(body);
            self.decoder.advance(placed, &mut sink);
            self.decoder.feed(&self.buffer[..n - placed], &mut sink)?;
            if let Some(echo) = sink.transit.echo() {
                self.outgoing.bare(echo);
            }
            // A short read means that the socket is empty; epoll reports what comes later (epoll(7)).
            if n < room && !self.hangup {
                self.readable = false;
            }
        }
        Ok(Progress::Blocked)
    }

    /// Sends about `quantum` bytes; an error means that nothing more can be sent.
    pub fn write(&mut self, quantum: usize, events: &mut Vec<Event>) -> io::Result<Progress> {
        let mut moved = 0;
        while self.writable && !self.outgoing.is_empty() {
            if moved >= quantum {
                return Ok(Progress::More);
            }
            let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PIECES];
            let (count, offered) = self.outgoing.pieces(quantum - moved, &mut pieces);
            // SAFETY: the pieces are headers and frames that `outgoing` owns, and sources that the
            // callers of `Transport::write` keep alive until `Sent` or `cancel`, neither of which can
            // happen during the call.
            match unsafe { socket::send(&self.socket, &mut pieces[..count]) } {
                Ok(n) => {
                    moved += n;
                    self.writable = n == offered;
                    self.outgoing.advance(n, |id| events.push(Event::Sent { id }));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.last && self.outgoing.is_empty() {
            self.last = false;
            socket::shutdown_write(&self.socket)?;
        }
        Ok(Progress::Blocked)
    }
}

/// An error of a connection, in words that name the errno.
pub fn describe(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset => "connection reset by the peer (ECONNRESET)".into(),
        ErrorKind::BrokenPipe => "connection closed by the peer (EPIPE)".into(),
        ErrorKind::TimedOut => "the peer's host does not answer (ETIMEDOUT)".into(),
        ErrorKind::HostUnreachable => "no route to the peer's host (EHOSTUNREACH)".into(),
        _ => error.to_string(),
    }
}
