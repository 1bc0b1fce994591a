//! A transport that, like a device, can neither call a write back nor discard one, between ranks of one process.

use crate::engine::progress::lock;
use crate::error::{Error, Result};
use crate::transport::loopback::{self, Loopback};
use crate::transport::{Event, Keeper, LandingKey, Lane, RawSpan, Transport, Wake, WriteId};
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Writes that a device works on at a time; others wait, and can be forgotten.
const POSTED: usize = 4;

struct Write {
    due: Instant,
    peer: usize,
    lane: Lane,
    key: LandingKey,
    source: RawSpan,
    id: WriteId,
}

/// What the ranks of one fabric share.
#[derive(Default)]
pub struct Fabric {
    /// Areas that may be written to: owner, writer, key.
    pub open: Mutex<HashSet<(usize, usize, LandingKey)>>,
    /// Writes to anything else, and why connections were ended.
    faults: Mutex<Vec<String>>,
}

impl Fabric {
    pub fn faults(&self) -> Vec<String> {
        lock(&self.faults).clone()
    }
}

/// One rank's device: every write takes its time, and one to what is not exposed costs the connection.
pub struct Device {
    inner: Loopback,
    pub rank: usize,
    delay: Duration,
    posted: VecDeque<Write>,
    fabric: Arc<Fabric>,
    /// No memory larger than this can be registered.
    pub limit: usize,
}

pub fn devices(size: usize, delay: Duration) -> (Vec<Device>, Arc<Fabric>) {
    let fabric = Arc::<Fabric>::default();
    let device = |(rank, inner)| Device {
        inner,
        rank,
        delay,
        posted: VecDeque::new(),
        fabric: fabric.clone(),
        limit: usize::MAX,
    };
    (loopback::mesh(size).into_iter().enumerate().map(device).collect(), fabric)
}

impl Device {
    fn perform(&mut self, write: Write) {
        let Write { peer, lane, key, source, id, .. } = write;
        // Held until the write is done: an area is withdrawn before it or after it.
        let mut open = lock(&self.fabric.open);
        if open.remove(&(peer, self.rank, key)) {
            self.inner.write(peer, lane, key, source, id);
        } else {
            drop(open);
            let fault = format!("rank {} writes to what rank {peer} has taken back", self.rank);
            lock(&self.fabric.faults).push(fault.clone());
            self.posted.retain(|write| write.peer != peer);
            self.inner.sever(peer, &fault);
        }
    }
}

impl Transport for Device {
    fn name(&self) -> &'static str {
        "device"
    }

    fn chunk_bytes(&self, _lane: Lane) -> usize {
        16 << 10
    }

    fn register(&mut self, memory: RawSpan, _keeper: Keeper) -> Result<bool> {
        if memory.len > self.limit {
            return Err(Error::system("registering memory", format!("{} bytes are too many", memory.len)));
        }
        Ok(true)
    }

    fn expose(&mut self, peer: usize, lane: Lane, landing: RawSpan) -> Result<LandingKey> {
        let key = self.inner.expose(peer, lane, landing)?;
        lock(&self.fabric.open).insert((self.rank, peer, key));
        Ok(key)
    }

    fn discards(&self, _peer: usize) -> bool {
        false
    }

    fn withdraw(&mut self, peer: usize, key: LandingKey) {
        lock(&self.fabric.open).remove(&(self.rank, peer, key));
        self.inner.withdraw(peer, key);
    }

    fn control(&mut self, peer: usize, frame: &[u8]) {
        self.inner.control(peer, frame);
    }

    fn write(&mut self, peer: usize, lane: Lane, key: LandingKey, source: RawSpan, id: WriteId) {
        let last = self.posted.back().map_or_else(Instant::now, |write| write.due.max(Instant::now()));
        self.posted.push_back(Write { due: last + self.delay, peer, lane, key, source, id });
    }

    fn cancel(&mut self, which: &dyn Fn(WriteId) -> bool) -> Vec<WriteId> {
        let waiting = self.posted.split_off(self.posted.len().min(POSTED));
        let (forgotten, kept): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|write| which(write.id));
        self.posted.extend(kept);
        forgotten.into_iter().map(|write| write.id).collect()
    }

    fn sever(&mut self, peer: usize, cause: &str) {
        lock(&self.fabric.faults).push(format!("rank {} ends the connection with rank {peer}: {cause}", self.rank));
        lock(&self.fabric.open).retain(|(owner, writer, _)| !(*owner == self.rank && *writer == peer));
        self.posted.retain(|write| write.peer != peer);
        self.inner.sever(peer, cause);
    }

    fn poll(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<()> {
        let now = Instant::now();
        while self.posted.front().is_some_and(|write| write.due <= now) {
            self.posted.pop_front().into_iter().for_each(|write| self.perform(write));
        }
        let next = self.posted.front().map_or(wait, |write| write.due.saturating_duration_since(now).min(wait));
        self.inner.poll(next, events)?;
        for event in events {
            if let Event::Lost { peer, .. } | Event::Departed { peer } = event {
                let gone = *peer;
                self.posted.retain(|write| write.peer != gone);
            }
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }

    fn close(&mut self, deadline: Duration) {
        self.posted.clear();
        lock(&self.fabric.open).retain(|(owner, ..)| *owner != self.rank);
        self.inner.close(deadline);
    }
}
