//! Groups that break while data is in flight, over a transport that can neither call a write back nor discard one.

use super::*;
use crate::engine::protocol::{Frame, Reason};
use crate::transport::loopback::Loopback;
use crate::transport::{Event, Keeper, LandingKey, RawSpan, Transport, Wake, WriteId};
use std::collections::{HashSet, VecDeque};

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
struct Fabric {
    /// Areas that may be written to: owner, writer, key.
    open: Mutex<HashSet<(usize, usize, LandingKey)>>,
    /// Writes to anything else, and why connections were ended.
    faults: Mutex<Vec<String>>,
}

impl Fabric {
    fn faults(&self) -> Vec<String> {
        lock(&self.faults).clone()
    }
}

/// One rank's device: every write takes its time, and one to what is not exposed costs the connection.
struct Device {
    inner: Loopback,
    rank: usize,
    delay: Duration,
    posted: VecDeque<Write>,
    fabric: Arc<Fabric>,
    /// No memory larger than this can be registered.
    limit: usize,
}

fn devices(size: usize, delay: Duration) -> (Vec<Device>, Arc<Fabric>) {
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

    fn register(&mut self, memory: RawSpan, _keeper: Keeper) -> Result<()> {
        if memory.len > self.limit {
            return Err(Error::system("registering memory", format!("{} bytes are too many", memory.len)));
        }
        Ok(())
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

fn start(devices: Vec<Device>, timeout: Duration) -> Vec<Arc<Engine>> {
    let size = devices.len();
    let start = |device: Device| {
        let config = EngineConfig { timeout, ..EngineConfig::new(device.rank, size) };
        Engine::start(Box::new(device), config).unwrap()
    };
    devices.into_iter().map(start).collect()
}

/// An operation in flight, with memory that is marked when it has failed: nobody may write there then.
struct Flight {
    work: Work,
    memory: Arc<HeapBytes>,
}

const MARK: u8 = 0xa5;

impl Flight {
    fn start(engine: &Engine, group: GroupId, count: usize) -> Result<Flight> {
        let (buffer, memory) = region(&vec![1f32; count]);
        let call =
            Call { group, blocking: false, ..call(engine, Collective::Allreduce(ReduceOp::Sum), DType::F32, count) };
        Ok(Flight { work: engine.submit(call, buffer.clone(), buffer)?, memory })
    }

    fn fail(&self) -> Error {
        let error = wait(&self.work).unwrap_err();
        // SAFETY: the operation is over, so that the memory is the test's alone; that is what is tested.
        unsafe { self.memory.ptr().write_bytes(MARK, self.memory.len()) };
        error
    }

    fn untouched(&self) -> bool {
        values::<u8>(&self.memory).iter().all(|byte| *byte == MARK)
    }
}

/// What broke the group: a call that comes after the news is told so.
fn root(error: &Error) -> &Error {
    if let Error::Broken { cause, .. } = error { cause } else { error }
}

fn sum(engine: &Engine, group: GroupId, count: usize) -> Result<Vec<f32>> {
    let flight = Flight::start(engine, group, count)?;
    wait(&flight.work)?;
    Ok(values(&flight.memory))
}

#[test]
fn a_mismatch_while_data_is_in_flight_costs_no_connection() {
    for size in [2, 3] {
        let (devices, fabric) = devices(size, Duration::from_micros(300));
        let engines = start(devices, LIMIT);
        ranks(&engines, |engine| {
            let all: Vec<usize> = (0..size).collect();
            let other = engine.new_group(all.clone(), "other").unwrap();
            let mut flights = Vec::new();
            for round in 0..30 {
                let group = engine.new_group(all.clone(), "broken").unwrap();
                let large = [40_000, 100_000, 5_000][round % 3];
                // All call the same at first; the last one then calls something else, sooner or later.
                let odd = 2_000 + 1_000 * usize::from(engine.rank() == size - 1);
                let before = flights.len();
                flights.push(Flight::start(engine, group, large).unwrap());
                std::thread::sleep(Duration::from_micros(700 * (round % 7 * (1 + engine.rank())) as u64));
                flights.extend(Flight::start(engine, group, odd)); // refused if the news is here already
                let errors: Vec<Error> = flights[before..]
                    .iter()
                    .filter_map(|flight| match wait(&flight.work) {
                        Ok(()) => {
                            // SAFETY: as in `fail`: it has ended, well.
                            unsafe { flight.memory.ptr().write_bytes(MARK, flight.memory.len()) };
                            None
                        }
                        Err(_) => Some(flight.fail()),
                    })
                    .collect();
                for error in &errors {
                    let cause = root(error);
                    assert!(matches!(cause, Error::Mismatch { .. }), "{error}");
                }
                for group in [other, engine.world()] {
                    let found = sum(engine, group, 20_000);
                    assert!(found.unwrap().iter().all(|v| *v == size as f32), "round {round}");
                }
            }
            assert!(flights.iter().all(Flight::untouched));
        });
        assert_eq!(fabric.faults(), [""; 0]);
    }
}

#[test]
fn a_rank_that_has_not_made_the_group_yet_lets_go_at_once_and_finds_it_broken() {
    let (devices, fabric) = devices(3, Duration::from_micros(100));
    let engines = start(devices, Duration::from_millis(400));
    let told = std::sync::Barrier::new(3);
    ranks(&engines, |engine| {
        let late = engine.rank() == 2;
        let group = (!late).then(|| engine.new_group(vec![0, 1, 2], "late").unwrap());
        let flight = group.map(|group| Flight::start(engine, group, 100_000).unwrap());
        let error = flight.as_ref().map(Flight::fail);
        told.wait();
        let group = group.unwrap_or_else(|| engine.new_group(vec![0, 1, 2], "late").unwrap());
        let error = error.unwrap_or_else(|| sum(engine, group, 100_000).unwrap_err());
        let cause = root(&error);
        assert!(
            matches!(cause, Error::Timeout { .. }) && error.to_string().contains("rank 2 has not called"),
            "{error}"
        );
        assert!(sum(engine, engine.world(), 50_000).unwrap().iter().all(|v| *v == 3.0));
        assert!(flight.is_none_or(|flight| flight.untouched()));
    });
    assert_eq!(fabric.faults(), [""; 0]);
}

#[test]
fn the_others_go_on_without_a_rank_that_is_lost() {
    let (mut devices, fabric) = devices(3, Duration::from_micros(300));
    let victim = devices.remove(2);
    let engines: Vec<_> = (devices.into_iter().enumerate())
        .map(|(rank, device)| Engine::start(Box::new(device), EngineConfig::new(rank, 3)).unwrap())
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(victim);
        });
        ranks(&engines, |engine| {
            let pair = engine.new_group(vec![0, 1], "").unwrap();
            let flight = Flight::start(engine, engine.world(), 200_000).unwrap();
            let error = flight.fail();
            assert!(matches!(error, Error::PeerLost { peer: 2, .. }), "{error}");
            for _ in 0..10 {
                assert!(sum(engine, pair, 50_000).unwrap().iter().all(|v| *v == 2.0));
            }
            assert!(flight.untouched());
        });
    });
    assert_eq!(fabric.faults(), [""; 0]);
}

/// Rank 0's engine, and rank 1 by hand, which takes part in nothing.
fn with_a_peer_by_hand(timeout: Duration) -> (Arc<Engine>, Device, Arc<Fabric>) {
    let (mut devices, fabric) = devices(2, Duration::ZERO);
    let peer = devices.remove(1);
    let config = EngineConfig { timeout, ..EngineConfig::new(0, 2) };
    let engine = Engine::start(Box::new(devices.remove(0)), config).unwrap();
    (engine, peer, fabric)
}

/// The frames that come within so long.
fn heard(device: &mut Device, within: Duration) -> Vec<Frame> {
    let (start, mut events) = (Instant::now(), Vec::new());
    while start.elapsed() < within {
        device.poll(Duration::from_millis(5), &mut events).unwrap();
    }
    let frame = |event| match event {
        Event::Control { frame, .. } => Frame::decode(&frame),
        _ => None,
    };
    events.into_iter().filter_map(frame).collect()
}

/// Waits until an operation has begun: where it may be written to, and how much.
fn granted(device: &mut Device) -> Vec<(LandingKey, usize)> {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < LIMIT, "no operation begins");
        let grant = |frame| match frame {
            Frame::Grant { key, bytes, .. } => Some((key, bytes as usize)),
            _ => None,
        };
        let grants: Vec<_> = heard(device, Duration::from_millis(100)).into_iter().filter_map(grant).collect();
        if !grants.is_empty() {
            return grants;
        }
    }
}

#[test]
fn a_silent_peer_is_not_waited_for_longer_than_a_second() {
    let (engine, _peer, fabric) = with_a_peer_by_hand(Duration::from_secs(2));
    let start = Instant::now();
    let flight = Flight::start(&engine, engine.world(), 100_000).unwrap();
    let error = flight.fail();
    assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let faults = fabric.faults();
    assert!(
        faults.len() == 1 && faults[0].contains("rank 0 ends the connection with rank 1: it has not let go"),
        "{faults:?}"
    );
    assert!(flight.untouched());
}

#[test]
fn a_peer_that_answers_but_does_not_let_go_is_lost_in_the_end() {
    let (engine, mut peer, fabric) = with_a_peer_by_hand(LIMIT);
    let flight = Flight::start(&engine, engine.world(), 100_000).unwrap();
    granted(&mut peer);
    let reason = Reason::new(
        &Error::Timeout {
            operation: "something".into(),
            waited: LIMIT,
            timeout: LIMIT,
            detail: "nothing moves".into(),
        },
        1,
    );
    peer.control(0, &Frame::Abort { group: engine.world(), reason }.encode());
    let frames = heard(&mut peer, Duration::from_millis(1500));
    assert!(frames.contains(&Frame::Stopped { group: engine.world(), writes: 0 }), "{frames:?}");
    assert!(!flight.work.done(), "its memory may be written to yet");
    let error = flight.fail();
    assert!(error.to_string().contains("nothing moves (reported by rank 1)"), "{error}");
    assert_eq!(fabric.faults().len(), 1);
}

#[test]
fn what_was_written_is_waited_for_and_what_was_not_is_not() {
    let (engine, mut peer, fabric) = with_a_peer_by_hand(LIMIT);
    let flight = Flight::start(&engine, engine.world(), 100_000).unwrap();
    let group = engine.world();
    let grants = granted(&mut peer);
    assert!(grants.len() > 2);
    let (source, _memory) = region(&vec![7u8; grants[0].1]);
    let reason = Reason::new(&Error::system("something", "else"), 1);
    peer.control(0, &Frame::Abort { group, reason }.encode());
    peer.control(0, &Frame::Stopped { group, writes: 2 }.encode());
    for (index, (key, len)) in grants[..2].iter().enumerate() {
        heard(&mut peer, Duration::from_millis(300));
        assert!(!flight.work.done(), "{index} of 2 writes have come");
        peer.write(0, Lane::Bulk, *key, RawSpan { ptr: source.ptr, len: *len }, WriteId(index as u64));
    }
    heard(&mut peer, Duration::from_millis(100));
    let error = flight.fail();
    assert_eq!(error.to_string(), "all operations: rank 1 gave it up: something: else");
    assert_eq!(fabric.faults(), [""; 0]);
    assert!(lock(&fabric.open).is_empty());
}

#[test]
fn shutdown_ends_what_is_being_left() {
    let (engine, mut peer, fabric) = with_a_peer_by_hand(LIMIT);
    let flight = Flight::start(&engine, engine.world(), 100_000).unwrap();
    granted(&mut peer);
    let reason = Reason::new(&Error::system("something", "else"), 1);
    peer.control(0, &Frame::Abort { group: engine.world(), reason }.encode());
    heard(&mut peer, Duration::from_millis(300));
    assert!(!flight.work.done());
    engine.shutdown(Duration::from_millis(200));
    assert!(flight.work.done());
    flight.fail();
    assert_eq!(fabric.faults(), [""; 0]);
    assert!(lock(&fabric.open).is_empty());
}

#[test]
fn a_rank_that_cannot_go_on_says_so_to_all_and_is_not_lost() {
    let (mut devices, fabric) = devices(3, Duration::from_micros(100));
    devices[1].limit = 100_000;
    let engines = start(devices, LIMIT);
    let errors = ranks(&engines, |engine| {
        let group = engine.new_group(vec![0, 1, 2], "large").unwrap();
        let error = sum(engine, group, 100_000).unwrap_err();
        assert!(sum(engine, engine.world(), 500).unwrap().iter().all(|v| *v == 3.0));
        error
    });
    for error in errors {
        let Error::GivenUp { operation, rank: 1, cause } = root(&error) else { panic!("{error}") };
        assert!(operation.contains("allreduce(sum, 100000 x float32) #0 on the bulk lane"), "{error}");
        assert!(cause.contains("registering memory: 400000 bytes are too many"), "{error}");
        assert_eq!(error.scope(), crate::error::Scope::Group);
    }
    assert_eq!(fabric.faults(), [""; 0]);
}
