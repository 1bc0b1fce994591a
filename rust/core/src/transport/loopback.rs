//! Ranks as threads of one process: a write is a memory copy, done by the writer.

use super::{Event, LandingKey, Lane, RawSpan, Transport, Wake, WriteId};
use crate::error::Result;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What others have put before one rank.
#[derive(Default)]
struct Inbox {
    events: Vec<Event>,
    landings: HashMap<LandingKey, RawSpan>,
    woken: bool,
    /// Nobody reads this inbox any more.
    closed: bool,
}

#[derive(Default)]
struct Mailbox {
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // A panic elsewhere leaves the inbox consistent: every critical section below is a few moves.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, event: Event) {
        let mut inbox = self.lock();
        if !inbox.closed {
            inbox.events.push(event);
            self.arrived.notify_one();
        }
    }
}

impl Wake for Mailbox {
    fn wake(&self) {
        self.lock().woken = true;
        self.arrived.notify_one();
    }
}

/// One rank's end of a loopback mesh.
pub struct Loopback {
    rank: usize,
    boxes: Vec<Arc<Mailbox>>,
    next_key: u64,
    closed: bool,
}

/// The ends of a mesh of `size` ranks, in rank order.
pub fn mesh(size: usize) -> Vec<Loopback> {
    let boxes: Vec<Arc<Mailbox>> = (0..size).map(|_| Arc::default()).collect();
    (0..size).map(|rank| Loopback { rank, boxes: boxes.clone(), next_key: 0, closed: false }).collect()
}

impl Loopback {
    fn tell_everybody(&mut self, event: impl Fn(usize) -> Event) {
        if std::mem::replace(&mut self.closed, true) {
            return;
        }
        {
            let mut own = self.boxes[self.rank].lock();
            own.closed = true;
            own.landings.clear();
        }
        for (peer, mailbox) in self.boxes.iter().enumerate() {
            if peer != self.rank {
                mailbox.put(event(self.rank));
            }
        }
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn chunk_bytes(&self, _lane: Lane) -> usize {
        256 << 10
    }

    fn expose(&mut self, _peer: usize, _lane: Lane, landing: RawSpan) -> Result<LandingKey> {
        let key = LandingKey([self.next_key, 0]);
        self.next_key += 1;
        self.boxes[self.rank].lock().landings.insert(key, landing);
        Ok(key)
    }

    fn discards(&self, _peer: usize) -> bool {
        true
    }

    fn withdraw(&mut self, _peer: usize, key: LandingKey) {
        self.boxes[self.rank].lock().landings.remove(&key);
    }

    fn control(&mut self, peer: usize, frame: &[u8]) {
        self.boxes[peer].put(Event::Control { peer: self.rank, frame: frame.into() });
    }

    fn write(&mut self, peer: usize, _lane: Lane, key: LandingKey, source: RawSpan, id: WriteId) {
        {
            let mut inbox = self.boxes[peer].lock();
            if let Some(landing) = inbox.landings.remove(&key) {
                let len = landing.len.min(source.len);
                debug_assert_eq!(landing.len, source.len);
                // SAFETY: the source is readable until `Sent` (contract of `write`). The landing is
                // writable and untouched by its owner until `Arrived` or `withdraw`; `withdraw` needs
                // the lock that we hold. The owner checked that the two do not overlap: a landing
                // area is never the source of another rank's write.
                unsafe { std::ptr::copy_nonoverlapping(source.ptr, landing.ptr, len) };
                inbox.events.push(Event::Arrived { peer: self.rank, key });
                self.boxes[peer].arrived.notify_one();
            }
        }
        self.boxes[self.rank].put(Event::Sent { id });
    }

    fn cancel(&mut self, _which: &dyn Fn(WriteId) -> bool) -> Vec<WriteId> {
        Vec::new() // writes are over when `write` returns
    }

    fn sever(&mut self, peer: usize, cause: &str) {
        self.boxes[self.rank].put(Event::Lost { peer, cause: cause.into() });
        self.boxes[peer].put(Event::Lost { peer: self.rank, cause: "connection closed".into() });
    }

    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<()> {
        let mailbox = &self.boxes[self.rank];
        let until = Instant::now() + wait;
        let mut inbox = mailbox.lock();
        while inbox.events.is_empty() && !inbox.woken {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            inbox = mailbox.arrived.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        inbox.woken = false;
        events.append(&mut inbox.events);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.boxes[self.rank].clone()
    }

    fn close(&mut self, _deadline: Duration) {
        self.tell_everybody(|peer| Event::Departed { peer });
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.tell_everybody(|peer| Event::Lost { peer, cause: "its thread ended without a shutdown".into() });
    }
}
