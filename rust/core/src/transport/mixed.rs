//! Several transports as one: every peer is reached by one of them.
//!
//! Where some hosts of a job have RDMA and others do not, say. All ranks list the parts in the same order, so that they
//! also close them in the same order.

use super::poller::Poller;
use super::{Event, Keeper, LandingKey, Lane, RawSpan, Transport, Waitable, Wake, WriteId};
use crate::error::{Error, Result};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Peers shared out over transports.
pub struct Mixed {
    parts: Vec<Box<dyn Waitable>>,
    /// The part that reaches each peer.
    route: Vec<usize>,
    poller: Poller,
}

impl Mixed {
    /// `route[peer]` is the index of the part that reaches `peer` (anything, for our own rank).
    ///
    /// # Errors
    /// [`Error::Invalid`] if a peer's part does not exist.
    pub fn new(parts: Vec<Box<dyn Waitable>>, route: Vec<usize>) -> Result<Mixed> {
        let system = |cause: std::io::Error| Error::system("mixed: preparing to wait", cause);
        if let Some(peer) = route.iter().position(|part| *part >= parts.len()) {
            let (part, count) = (route[peer], parts.len());
            return Err(Error::Invalid(format!("mixed: rank {peer} is to be reached by part {part} of {count}")));
        }
        let poller = Poller::new().map_err(system)?;
        for (index, part) in parts.iter().enumerate() {
            poller.watch(part.signal(), index).map_err(system)?;
        }
        Ok(Mixed { parts, route, poller })
    }

    fn to(&mut self, peer: usize) -> &mut dyn Waitable {
        self.parts[self.route[peer]].as_mut()
    }
}

impl Transport for Mixed {
    fn name(&self) -> &'static str {
        "mixed"
    }

    fn chunk_bytes(&self, lane: Lane) -> usize {
        self.parts.iter().map(|part| part.chunk_bytes(lane)).min().unwrap_or(usize::MAX)
    }

    fn register(&mut self, memory: RawSpan, keeper: Keeper) -> Result<bool> {
        self.parts.iter_mut().try_fold(false, |any, part| Ok(part.register(memory, keeper.clone())? || any))
    }

    fn expose(&mut self, peer: usize, lane: Lane, landing: RawSpan) -> Result<LandingKey> {
        if peer >= self.route.len() {
            let size = self.route.len();
            return Err(Error::Invalid(format!("mixed: memory is exposed to rank {peer} of {size}")));
        }
        self.to(peer).expose(peer, lane, landing)
    }

    fn discards(&self, peer: usize) -> bool {
        self.parts[self.route[peer]].discards(peer)
    }

    fn withdraw(&mut self, peer: usize, key: LandingKey) {
        self.to(peer).withdraw(peer, key);
    }

    fn control(&mut self, peer: usize, frame: &[u8]) {
        self.to(peer).control(peer, frame);
    }

    fn write(&mut self, peer: usize, lane: Lane, key: LandingKey, source: RawSpan, id: WriteId) {
        self.to(peer).write(peer, lane, key, source, id);
    }

    fn cancel(&mut self, which: &dyn Fn(WriteId) -> bool) -> Vec<WriteId> {
        self.parts.iter_mut().flat_map(|part| part.cancel(which)).collect()
    }

    fn sever(&mut self, peer: usize, cause: &str) {
        self.to(peer).sever(peer, cause);
    }

    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<()> {
        let before = events.len();
        let deadline = Instant::now().checked_add(wait);
        loop {
            for part in &mut self.parts {
                part.poll(Duration::ZERO, events)?;
            }
            let mut until = deadline;
            if events.len() > before || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                until = Some(Instant::now()); // only whether somebody has woken us
            } else {
                for part in &mut self.parts {
                    until = part.before_wait()?.into_iter().chain(until).min();
                }
            }
            let left = until.map_or(wait, |until| until.saturating_duration_since(Instant::now()));
            let woken = self.poller.wait(left, |_| {}).map_err(|cause| Error::system("mixed: epoll_wait", cause))?;
            let over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if woken || over || events.len() > before {
                return Ok(());
            }
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.poller.waker()
    }

    fn sockets(&self) -> Vec<BorrowedFd<'_>> {
        self.parts.iter().flat_map(|part| part.sockets()).collect()
    }

    fn close(&mut self, deadline: Duration) {
        let each = deadline / self.parts.len().max(1) as u32;
        for part in &mut self.parts {
            part.close(each);
        }
    }
}

#[cfg(test)]
mod tests;
