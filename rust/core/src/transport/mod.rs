//! Transports move bytes between ranks; they know nothing of collectives.
//!
//! The model is the one of RDMA: a rank *exposes* a landing area, tells its peer
//! about it in a control frame (the *grant*), and the peer *writes* into it. Nothing
//! lands in memory that was not exposed for that very write.

pub mod closed;
pub mod loopback;
pub mod mixed;
pub(crate) mod poller;
pub mod tcp;
pub mod verbs;

use crate::error::Result;
use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Two lanes between every pair of ranks: small urgent messages never queue behind bulk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Lane {
    /// Control frames, statistics, sketches, barriers. Served first.
    Urgent = 0,
    /// Gradient buckets.
    Bulk = 1,
}

/// Memory that somebody else keeps alive and in place (see `engine::Region`).
#[derive(Debug, Clone, Copy)]
pub struct RawSpan {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: a RawSpan is only an address; whoever dereferences it vouches for it. The engine
// keeps the owner of the memory alive until the transport has reported `Sent`/`Arrived`,
// has forgotten the write (`cancel`), was allowed to forget the landing area (`withdraw`), or has no
// connection with the peer any more (`Departed`, for landing areas; `Lost`).
unsafe impl Send for RawSpan {}

/// Can be upgraded as long as some memory is in place.
pub type Keeper = Weak<dyn Any + Send + Sync>;

/// A keeper of memory that is not ours, but stays where it is in one operation after the other, as long as some object
/// lives. Whoever uses the memory holds on to it; while only its maker does, a registration may be given up.
#[derive(Debug)]
pub struct Identity;

/// Names a landing area towards the peer: what a grant carries (TCP: a landing number;
/// verbs: remote address and rkey). Opaque to all but the transport that made it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LandingKey(pub [u64; 2]);

/// Chosen by the caller of [`Transport::write`], returned in [`Event::Sent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WriteId(pub u64);

/// Longest control frame, in bytes; longer data goes through a grant.
pub const MAX_CONTROL_BYTES: usize = 8192;

/// What a poll reports.
#[derive(Debug)]
pub enum Event {
    /// A control frame from `peer`, in the order in which the peer sent them.
    Control {
        /// Sender.
        peer: usize,
        /// The frame, at most [`MAX_CONTROL_BYTES`].
        frame: Box<[u8]>,
    },
    /// All bytes of the peer's write are in the landing area, which is no longer exposed.
    Arrived {
        /// Writer.
        peer: usize,
        /// The landing area.
        key: LandingKey,
    },
    /// The source of this write may be reused.
    Sent {
        /// The write.
        id: WriteId,
    },
    /// The peer said goodbye, and everything that it had sent has been reported.
    Departed {
        /// Who left.
        peer: usize,
    },
    /// The peer is gone without a goodbye, or broke the protocol. Reported once.
    Lost {
        /// Who is gone.
        peer: usize,
        /// errno in words, "connection closed", ...
        cause: String,
    },
}

/// Ends a blocking [`Transport::poll`] from any thread.
pub trait Wake: Send + Sync {
    /// Never blocks.
    fn wake(&self);
}

/// A way to move bytes. Driven by one thread at a time; no call but `poll` waits.
/// Ranks are world ranks; a transport is never asked to talk to its own rank.
pub trait Transport: Send {
    /// "tcp", "loopback", ...
    fn name(&self) -> &'static str;

    /// Largest single write that is sensible, in bytes: the executor cuts messages to it.
    fn chunk_bytes(&self, lane: Lane) -> usize;

    /// Prepares memory from which writes will be made, or in which landing areas will lie: it stays prepared as long as
    /// `keeper` is alive, which the memory's owner keeps. Returns whether anything had to be done: it is prepared
    /// already for this keeper, or the transport has nothing to prepare, as most.
    fn register(&mut self, _memory: RawSpan, _keeper: Keeper) -> Result<bool> {
        Ok(false)
    }

    /// Lets `peer` write exactly `landing.len` bytes, once.
    fn expose(&mut self, peer: usize, lane: Lane, landing: RawSpan) -> Result<LandingKey>;

    /// Can it discard what `peer` writes to a landing area that has been withdrawn? If not, an area may be withdrawn only
    /// when the peer will not write to it any more, or has no connection any more.
    fn discards(&self, peer: usize) -> bool;

    /// Takes back a landing area. When this returns, nothing will be written to it any more
    /// (bytes that still come are discarded, or do not come; see [`Transport::discards`]).
    fn withdraw(&mut self, peer: usize, key: LandingKey);

    /// Queues a control frame on the urgent lane. To a peer that is lost: silently dropped.
    fn control(&mut self, peer: usize, frame: &[u8]);

    /// Queues a write of `source` into the peer's landing area. The caller keeps `source`
    /// alive and unchanged until `Sent`, until [`Transport::cancel`] names it, or until the peer is lost.
    fn write(&mut self, peer: usize, lane: Lane, key: LandingKey, source: RawSpan, id: WriteId);

    /// Forgets writes for which `which` holds, as far as they are not under way, and says which those were: their sources
    /// are not read any more, and no `Sent` comes. Of all others `Sent` comes, or has come. (A frame that is half on
    /// the wire is completed from a copy, and counts as forgotten.)
    fn cancel(&mut self, which: &dyn Fn(WriteId) -> bool) -> Vec<WriteId>;

    /// Ends the connection with `peer`, also if that has departed. When this returns, nothing is written to our memory or
    /// read from it on its account; if it was connected, the next poll reports it as `Lost` with this cause.
    fn sever(&mut self, peer: usize, cause: &str);

    /// Moves bytes, waits up to `wait` if there is nothing to do, appends what happened.
    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<()>;

    /// Ends a poll early.
    fn waker(&self) -> Arc<dyn Wake>;

    /// Its sockets. A forked child closes its copies: peers notice a death only when the last one is closed.
    fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    /// Says goodbye to every peer, lets what is queued go out, closes. Returns when all is
    /// closed or after `deadline`.
    fn close(&mut self, deadline: Duration);
}

/// A transport that can be waited for together with others (see [`mixed`]).
pub trait Waitable: Transport {
    /// Becomes readable when there may be something to do.
    fn signal(&self) -> BorrowedFd<'_>;

    /// Before a wait for [`Waitable::signal`]: when to poll at the latest; now, if there is something to do already.
    fn before_wait(&mut self) -> Result<Option<Instant>>;
}
