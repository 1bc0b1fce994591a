//! The landing areas of one transport: the only place from which memory is written.

use super::frame::Sink;
use super::transit::Transit;
use crate::transport::{Event, LandingKey, RawSpan};
use std::collections::HashMap;

struct Landing {
    peer: usize,
    length: usize,
    /// `None` once withdrawn: what comes is discarded.
    memory: Option<RawSpan>,
    /// A data frame for it has begun, on some connection.
    begun: bool,
}

/// All exposed areas, and the withdrawn ones whose bytes may still come.
pub struct Landings {
    /// Sets the keys of this process apart from those of an earlier one, or of a stranger.
    token: u64,
    next: u64,
    open: HashMap<u64, Landing>,
}

impl Landings {
    pub fn new(token: u64) -> Self {
        Landings { token, next: 1, open: HashMap::new() }
    }

    pub fn expose(&mut self, peer: usize, memory: RawSpan) -> LandingKey {
        let number = self.next;
        self.next += 1;
        self.open.insert(number, Landing { peer, length: memory.len, memory: Some(memory), begun: false });
        LandingKey([number, self.token])
    }

    pub fn withdraw(&mut self, peer: usize, key: LandingKey) {
        if let Some(landing) = self.get(peer, key) {
            landing.memory = None;
        }
    }

    /// Nothing comes from this peer any more.
    pub fn forget(&mut self, peer: usize) {
        self.open.retain(|_, landing| landing.peer != peer);
    }

    /// Where byte `offset` of an open data frame belongs; `None`: discard it.
    pub fn place(&mut self, peer: usize, key: LandingKey, offset: usize) -> Option<*mut u8> {
        let memory = self.get(peer, key)?.memory?;
        debug_assert!(offset <= memory.len);
        Some(memory.ptr.wrapping_add(offset))
    }

    fn get(&mut self, peer: usize, key: LandingKey) -> Option<&mut Landing> {
        if key.0[1] != self.token {
            return None;
        }
        self.open.get_mut(&key.0[0]).filter(|landing| landing.peer == peer)
    }
}

/// Takes what one connection of `peer` delivers.
pub struct Arrivals<'a> {
    pub peer: usize,
    pub landings: &'a mut Landings,
    pub events: &'a mut Vec<Event>,
    pub transit: &'a mut Transit,
}

impl Sink for Arrivals<'_> {
    fn control(&mut self, frame: Box<[u8]>) {
        self.events.push(Event::Control { peer: self.peer, frame });
    }

    fn open(&mut self, key: LandingKey, length: u64) -> Result<(), String> {
        let Some(landing) = self.landings.get(self.peer, key) else {
            return Err(format!(
                "protocol error: {length} bytes for landing area {}, which it was not offered",
                key.0[0]
            ));
        };
        if landing.begun {
            return Err(format!("protocol error: landing area {} was written twice", key.0[0]));
        }
        if length != landing.length as u64 {
            let expected = landing.length;
            return Err(format!("protocol error: {length} bytes for landing area {} of {expected}", key.0[0]));
        }
        landing.begun = true;
        Ok(())
    }

    fn data(&mut self, key: LandingKey, offset: usize, bytes: &[u8]) {
        if let Some(place) = self.landings.place(self.peer, key, offset) {
            // SAFETY: `place` lies in an exposed landing, which whoever exposed it keeps alive and
            // leaves to us until `Arrived` or `withdraw` (contract of `Transport::expose`), and a
            // withdrawn one has no place. `open` compared the frame's length with the landing's, and
            // the decoder never passes more than the frame's length: `offset + bytes.len()` is within.
            // `bytes` is the connection's own buffer, which cannot overlap it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        }
    }

    fn complete(&mut self, key: LandingKey) {
        if let Some(landing) = self.landings.open.remove(&key.0[0])
            && landing.memory.is_some()
        {
            self.events.push(Event::Arrived { peer: self.peer, key });
        }
    }

    fn probe(&mut self, sent: u64) {
        self.transit.asked(sent);
    }

    fn echo(&mut self, delay: i64) {
        self.transit.answered(delay);
    }

    fn goodbye(&mut self) {} // the decoder remembers it
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals<'a>(landings: &'a mut Landings, events: &'a mut Vec<Event>, transit: &'a mut Transit) -> Arrivals<'a> {
        Arrivals { peer: 3, landings, events, transit }
    }

    #[test]
    fn only_what_was_exposed_can_be_written() {
        let mut memory = [0u8; 4];
        let (mut landings, mut events) = (Landings::new(99), Vec::new());
        let transit = &mut Transit::new(std::time::Instant::now());
        let span = RawSpan { ptr: memory.as_mut_ptr(), len: 4 };
        let key = landings.expose(3, span);
        let foreign = landings.expose(2, span);
        let mut sink = arrivals(&mut landings, &mut events, transit);
        let refused = |result: Result<(), String>| result.unwrap_err();
        assert!(refused(sink.open(LandingKey([7, 99]), 4)).contains("not offered"));
        assert!(refused(sink.open(LandingKey([key.0[0], 98]), 4)).contains("not offered"));
        assert!(refused(sink.open(foreign, 4)).contains("not offered"));
        assert!(refused(sink.open(key, 5)).contains("5 bytes for landing area 1 of 4"));
        sink.open(key, 4).unwrap();
        assert!(refused(sink.open(key, 4)).contains("twice"));
        sink.data(key, 0, &[1, 2, 3]);
        sink.data(key, 3, &[4]);
        sink.complete(key);
        assert!(refused(sink.open(key, 4)).contains("not offered"));
        assert!(matches!(events[..], [Event::Arrived { peer: 3, key: arrived }] if arrived == key));
        assert_eq!(memory, [1, 2, 3, 4]);
    }

    #[test]
    fn a_withdrawn_landing_is_not_touched() {
        let mut memory = [0u8; 4];
        let (mut landings, mut events) = (Landings::new(99), Vec::new());
        let transit = &mut Transit::new(std::time::Instant::now());
        let key = landings.expose(3, RawSpan { ptr: memory.as_mut_ptr(), len: 4 });
        arrivals(&mut landings, &mut events, transit).open(key, 4).unwrap();
        arrivals(&mut landings, &mut events, transit).data(key, 0, &[1, 2]);
        landings.withdraw(3, key);
        arrivals(&mut landings, &mut events, transit).data(key, 2, &[3, 4]);
        arrivals(&mut landings, &mut events, transit).complete(key);
        assert!(events.is_empty());
        assert_eq!(memory, [1, 2, 0, 0]);
        assert!(landings.open.is_empty());
    }
}
