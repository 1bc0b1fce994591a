//! Groups that break while data is in flight, over a transport that can neither call a write back nor discard one.

use super::device::{Device, Fabric, devices};
use super::*;
use crate::engine::protocol::{Frame, Reason};
use crate::transport::{Event, LandingKey, RawSpan, Transport, WriteId};

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
