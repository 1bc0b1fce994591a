use super::*;
use crate::transport::tcp::{Streams, Tcp, TcpOptions};
use std::net::{TcpListener, TcpStream};
use std::thread;

const PATIENCE: Duration = Duration::from_secs(30);

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialed, listener.accept().unwrap().0)
}

fn streams() -> (Streams, Streams) {
    let (urgent, bulk) = (pair(), pair());
    (Streams { urgent: urgent.0, bulk: vec![bulk.0] }, Streams { urgent: urgent.1, bulk: vec![bulk.1] })
}

fn tcp(rank: usize, streams: [Option<Streams>; 3]) -> Box<dyn Waitable> {
    Box::new(Tcp::new(rank, streams.into(), TcpOptions::default()).unwrap())
}

/// Rank 0 reaches rank 1 over one transport and rank 2 over another; those two have the other end each.
fn star() -> (Mixed, Box<dyn Waitable>, Box<dyn Waitable>) {
    let (to_one, from_one) = streams();
    let (to_two, from_two) = streams();
    let parts = vec![tcp(0, [None, Some(to_one), None]), tcp(0, [None, None, Some(to_two)])];
    let mixed = Mixed::new(parts, vec![0, 0, 1]).unwrap();
    (mixed, tcp(1, [Some(from_one), None, None]), tcp(2, [Some(from_two), None, None]))
}

fn span(memory: &mut [u8]) -> RawSpan {
    RawSpan { ptr: memory.as_mut_ptr(), len: memory.len() }
}

fn next(transport: &mut dyn Transport) -> Vec<Event> {
    let (start, mut events) = (Instant::now(), Vec::new());
    while events.is_empty() {
        assert!(start.elapsed() < PATIENCE, "nothing came");
        transport.poll(PATIENCE, &mut events).unwrap();
    }
    events
}

fn key_of(events: &[Event]) -> LandingKey {
    let [Event::Control { peer: 0, frame }] = events else { panic!("{events:?}") };
    LandingKey(std::array::from_fn(|word| u64::from_le_bytes(frame[8 * word..][..8].try_into().unwrap())))
}

#[test]
fn every_peer_is_reached_by_its_own_transport_and_all_of_them_wake_a_wait() {
    let (mut hub, one, two) = star();
    let spokes = [one, two].map(|mut spoke| {
        thread::spawn(move || {
            let key = key_of(&next(spoke.as_mut()));
            thread::sleep(Duration::from_millis(50)); // so that the hub has gone to sleep
            let mut source: Vec<u8> = (0..700_000).map(|k| (k % 251) as u8).collect();
            spoke.write(0, Lane::Bulk, key, span(&mut source), WriteId(7));
            assert!(matches!(next(spoke.as_mut())[..], [Event::Sent { id: WriteId(7) }]));
            assert!(matches!(next(spoke.as_mut())[..], [Event::Departed { peer: 0 }]));
        })
    });
    let mut landings = [vec![0; 700_000], vec![0; 700_000]];
    let keys = [1, 2].map(|peer: usize| {
        let key = hub.expose(peer, Lane::Bulk, span(&mut landings[peer - 1])).unwrap();
        hub.control(peer, &key.0.map(u64::to_le_bytes).concat());
        key
    });
    let (start, mut events) = (Instant::now(), Vec::new());
    let arrived = |events: &[Event], peer: usize| {
        events
            .iter()
            .any(|event| matches!(event, Event::Arrived { peer: p, key } if (*p, *key) == (peer, keys[peer - 1])))
    };
    while !(arrived(&events, 1) && arrived(&events, 2)) {
        assert!(start.elapsed() < PATIENCE, "{events:?}");
        hub.poll(PATIENCE, &mut events).unwrap();
    }
    for landing in landings {
        assert!(landing.iter().enumerate().all(|(k, byte)| *byte == (k % 251) as u8));
    }
    hub.close(PATIENCE);
    for spoke in spokes {
        spoke.join().unwrap();
    }
}

#[test]
fn a_waker_ends_a_wait() {
    let (mut hub, _one, _two) = star();
    let waker = hub.waker();
    let thread = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        waker.wake();
    });
    let (start, mut events) = (Instant::now(), Vec::new());
    hub.poll(PATIENCE, &mut events).unwrap();
    assert!(events.is_empty());
    assert!(start.elapsed() < PATIENCE / 3);
    thread.join().unwrap();
    // A wake-up before the wait counts, too.
    hub.waker().wake();
    hub.poll(PATIENCE, &mut events).unwrap();
    assert!(start.elapsed() < PATIENCE / 3);
}

#[test]
fn a_wait_ends_in_time_and_a_peer_that_dies_is_lost() {
    let (mut hub, one, _two) = star();
    let (start, mut events) = (Instant::now(), Vec::new());
    hub.poll(Duration::from_millis(30), &mut events).unwrap();
    assert!(events.is_empty() && start.elapsed() >= Duration::from_millis(30));
    drop(one);
    assert!(matches!(next(&mut hub)[..], [Event::Lost { peer: 1, .. }]));
}

#[test]
fn a_peer_without_a_transport_is_refused() {
    let error = Mixed::new(vec![tcp(0, [None, None, None])], vec![0, 0, 1]).err().unwrap().to_string();
    assert!(error.contains("rank 2 is to be reached by part 1 of 1"), "{error}");
}
