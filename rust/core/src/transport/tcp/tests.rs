use super::*;
use std::collections::HashMap;
use std::net::TcpListener;
use std::thread;

const PATIENCE: Duration = Duration::from_secs(30);

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let dialed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (dialed, listener.accept().unwrap().0)
}

/// The streams of every rank of a full mesh.
fn streams(size: usize, bulk: usize) -> Vec<Vec<Option<Streams>>> {
    let mut all: Vec<Vec<Option<Streams>>> = (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for (low, high) in (0..size).flat_map(|high| (0..high).map(move |low| (low, high))) {
        let urgent = pair();
        let (a, b) = (0..bulk).map(|_| pair()).unzip();
        all[low][high] = Some(Streams { urgent: urgent.0, bulk: a });
        all[high][low] = Some(Streams { urgent: urgent.1, bulk: b });
    }
    all
}

fn mesh(size: usize) -> Vec<Tcp> {
    let options = TcpOptions::default();
    let streams = streams(size, options.bulk_connections);
    streams.into_iter().enumerate().map(|(rank, s)| Tcp::new(rank, s, options.clone()).unwrap()).collect()
}

fn span(memory: &mut [u8]) -> RawSpan {
    RawSpan { ptr: memory.as_mut_ptr(), len: memory.len() }
}

/// Polls all transports until `done` holds of all events so far (with the rank that saw them).
fn drive(mesh: &mut [&mut Tcp], mut done: impl FnMut(&[(usize, Event)]) -> bool) -> Vec<(usize, Event)> {
    let (start, mut seen, mut events) = (Instant::now(), Vec::new(), Vec::new());
    while !done(&seen) {
        assert!(start.elapsed() < PATIENCE, "stuck after {seen:?}");
        for tcp in &mut *mesh {
            tcp.poll(Duration::from_millis(1), &mut events).unwrap();
            seen.extend(events.drain(..).map(|event| (tcp.rank, event)));
        }
    }
    seen
}

fn key_bytes(key: LandingKey) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&key.0[0].to_le_bytes());
    bytes[8..].copy_from_slice(&key.0[1].to_le_bytes());
    bytes
}

fn key_of(frame: &[u8]) -> LandingKey {
    let word = |at: usize| u64::from_le_bytes(frame[at..at + 8].try_into().unwrap());
    LandingKey([word(0), word(8)])
}

/// Three ranks as threads: each offers 40 landings to each peer and fills theirs, on both lanes.
#[test]
fn three_ranks_write_into_each_other() {
    const ROUNDS: usize = 40;
    let ranks: Vec<_> = mesh(3)
        .into_iter()
        .map(|mut tcp| {
            thread::spawn(move || {
                let rank = tcp.rank;
                let length = |i: usize| 1 + i * 7919 % 300_000;
                let mut landings: Vec<Vec<u8>> = Vec::new();
                let mut whose = HashMap::new();
                for peer in (0..3).filter(|peer| *peer != rank) {
                    for i in 0..ROUNDS {
                        landings.push(vec![0; length(i)]);
                        let lane = if i % 2 == 0 { Lane::Bulk } else { Lane::Urgent };
                        let landing = span(landings.last_mut().unwrap());
                        let key = tcp.expose(peer, lane, landing).unwrap();
                        whose.insert(key, (landings.len() - 1, peer, i));
                        tcp.control(peer, &key_bytes(key));
                    }
                }
                let mut sources: Vec<Vec<u8>> = Vec::new();
                let (mut grants, mut arrived, mut sent) = ([0; 3], 0, 0);
                let (start, mut events) = (Instant::now(), Vec::new());
                while arrived < 2 * ROUNDS || sent < 2 * ROUNDS {
                    assert!(start.elapsed() < PATIENCE);
                    tcp.poll(Duration::from_millis(50), &mut events).unwrap();
                    for event in events.drain(..) {
                        match event {
                            Event::Control { peer, frame } => {
                                let i = grants[peer];
                                grants[peer] += 1;
                                sources.push(vec![(16 * rank + i % 16) as u8; length(i)]);
                                let lane = if i % 2 == 0 { Lane::Bulk } else { Lane::Urgent };
                                let source = span(sources.last_mut().unwrap());
                                tcp.write(peer, lane, key_of(&frame), source, WriteId(i as u64));
                            }
                            Event::Arrived { peer, key } => {
                                let (landing, from, i) = whose.remove(&key).unwrap();
                                assert_eq!(from, peer);
                                assert!(landings[landing].iter().all(|byte| *byte == (16 * peer + i % 16) as u8));
                                arrived += 1;
                            }
                            Event::Sent { .. } => sent += 1,
                            Event::Departed { .. } => {} // the peer had all it needed
                            event => panic!("{event:?}"),
                        }
                    }
                }
                let start = Instant::now();
                tcp.close(PATIENCE);
                assert!(start.elapsed() < PATIENCE / 3, "nobody answered the goodbyes");
            })
        })
        .collect();
    for rank in ranks {
        rank.join().unwrap();
    }
}

#[test]
fn a_hundred_megabytes_in_one_write() {
    let mut mesh = mesh(2);
    let [a, b] = &mut mesh[..] else { unreachable!() };
    let mut source: Vec<u8> = (0..100_000_000u32).map(|i| (i % 251) as u8).collect();
    let mut landing = vec![0; source.len()];
    let key = b.expose(0, Lane::Bulk, span(&mut landing)).unwrap();
    a.write(1, Lane::Bulk, key, span(&mut source), WriteId(5));
    let seen = drive(&mut [a, b], |seen| seen.len() == 2);
    assert!(matches!(seen[0], (0, Event::Sent { id: WriteId(5) })), "{seen:?}");
    assert!(matches!(seen[1], (1, Event::Arrived { peer: 0, .. })), "{seen:?}");
    assert!(source == landing);
}

#[test]
fn control_frames_keep_their_order_and_do_not_wait_for_bulk() {
    let mut mesh = mesh(2);
    let [a, b] = &mut mesh[..] else { unreachable!() };
    let (mut source, mut landing) = (vec![1; 64 << 20], vec![0; 64 << 20]);
    let key = b.expose(0, Lane::Bulk, span(&mut landing)).unwrap();
    a.write(1, Lane::Bulk, key, span(&mut source), WriteId(0));
    for i in 0..100u8 {
        a.control(1, &vec![i; usize::from(i) * 80]);
    }
    let seen = drive(&mut [a, b], |seen| seen.iter().any(|(_, event)| matches!(event, Event::Arrived { .. })));
    let frames: Vec<_> = seen.iter().filter(|(_, e)| matches!(e, Event::Control { .. })).collect();
    assert_eq!(frames.len(), 100);
    for (i, (rank, event)) in frames.into_iter().enumerate() {
        assert!(
            matches!(event, Event::Control { peer: 0, frame } if **frame == vec![i as u8; i * 80]),
            "{i}: {event:?}"
        );
        assert_eq!(*rank, 1);
    }
    assert!(matches!(seen.last(), Some((1, Event::Arrived { .. }))), "bulk came before the urgent frames");
}

#[test]
fn withdrawn_areas_are_not_written_and_the_connection_goes_on() {
    let mut mesh = mesh(2);
    let [a, b] = &mut mesh[..] else { unreachable!() };
    let (mut source, mut landing) = (vec![7; 8 << 20], vec![0; 8 << 20]);
    let key = b.expose(0, Lane::Bulk, span(&mut landing)).unwrap();
    a.write(1, Lane::Bulk, key, span(&mut source), WriteId(1));
    let start = Instant::now();
    let first = landing.as_ptr();
    // SAFETY: `landing` is alive; volatile, since the transport writes to it behind the compiler's back.
    while unsafe { first.read_volatile() } == 0 {
        assert!(start.elapsed() < PATIENCE);
        assert!(drive(&mut [&mut *a, &mut *b], |_| true).is_empty());
        a.poll(Duration::ZERO, &mut Vec::new()).unwrap();
        b.poll(Duration::ZERO, &mut Vec::new()).unwrap();
    }
    b.withdraw(0, key);
    let before = landing.clone();
    let next = b.expose(0, Lane::Bulk, span(&mut landing[..3])).unwrap();
    a.write(1, Lane::Bulk, next, span(&mut source[..3]), WriteId(2));
    let seen = drive(&mut [a, b], |seen| seen.iter().filter(|(_, e)| matches!(e, Event::Sent { .. })).count() == 2);
    drive(&mut [a, b], |s| s.len() + seen.iter().filter(|(_, e)| matches!(e, Event::Arrived { .. })).count() >= 1);
    assert_eq!(landing[..3], [7; 3]);
    assert!(landing[3..] == before[3..]);
}

#[test]
fn a_cancelled_write_is_not_reported_and_breaks_nothing() {
    let mut mesh = mesh(2);
    let [a, b] = &mut mesh[..] else { unreachable!() };
    let (mut source, mut landing) = (vec![7; 32 << 20], vec![0; 32 << 20]);
    let keys: Vec<_> =
        (0..4).map(|i| b.expose(0, Lane::Bulk, span(&mut landing[i << 23..][..8 << 20])).unwrap()).collect();
    for (i, key) in keys.iter().enumerate() {
        a.write(1, Lane::Bulk, *key, span(&mut source[i << 23..][..8 << 20]), WriteId(i as u64));
    }
    a.poll(Duration::ZERO, &mut Vec::new()).unwrap();
    a.cancel(&|id| id.0 < 4);
    drop(source); // not read any more
    let mut word = *b"goodbye!";
    let mut last = [0; 8];
    let key = b.expose(0, Lane::Bulk, span(&mut last)).unwrap();
    a.write(1, Lane::Bulk, key, span(&mut word), WriteId(9));
    let is_last = |event: &Event| matches!(event, Event::Arrived { key: arrived, .. } if *arrived == key);
    let seen = drive(&mut [a, b], |seen| seen.iter().any(|(_, event)| is_last(event)));
    for (_, event) in &seen {
        assert!(matches!(event, Event::Sent { id: WriteId(9) } | Event::Arrived { .. }), "{event:?}");
    }
    assert_eq!(&last, b"goodbye!");
}

#[test]
fn a_goodbye_comes_after_everything_else() {
    let mut mesh = mesh(2);
    let mut b = mesh.pop().unwrap();
    let mut a = mesh.pop().unwrap();
    let mut landing = vec![0; 16 << 20];
    let key = b.expose(0, Lane::Bulk, span(&mut landing)).unwrap();
    let leaver = thread::spawn(move || {
        let mut source = vec![3; 16 << 20];
        a.write(1, Lane::Bulk, key, span(&mut source), WriteId(0));
        a.control(1, b"last words");
        let start = Instant::now();
        a.close(PATIENCE);
        start.elapsed()
    });
    b.control(0, &[0; 100]); // the leaver does not care any more
    let seen = drive(&mut [&mut b], |seen| seen.iter().any(|(_, event)| matches!(event, Event::Departed { .. })));
    assert!(seen.iter().any(|(_, e)| matches!(e, Event::Control { frame, .. } if **frame == *b"last words")));
    assert!(seen.iter().any(|(_, e)| matches!(e, Event::Arrived { .. })));
    assert!(matches!(seen.last(), Some((1, Event::Departed { peer: 0 }))), "{seen:?}");
    assert!(landing.iter().all(|byte| *byte == 3));
    assert!(leaver.join().unwrap() < PATIENCE / 3, "the leaver waited in vain for our answer");
    b.control(0, b"dropped");
    let mut events = Vec::new();
    b.poll(Duration::from_millis(20), &mut events).unwrap();
    assert!(events.is_empty(), "{events:?}");
    assert!(b.connections.iter().all(Option::is_none));
}

#[test]
fn both_may_leave_at_once() {
    let ranks: Vec<_> = mesh(3).into_iter().map(|mut tcp| thread::spawn(move || tcp.close(PATIENCE))).collect();
    let start = Instant::now();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
    assert!(start.elapsed() < PATIENCE / 3);
}

#[test]
fn a_peer_that_vanishes_is_lost_once() {
    let mut mesh = mesh(3);
    let dead = mesh.remove(1);
    let mut source = vec![0; 8 << 20];
    mesh[0].write(1, Lane::Bulk, LandingKey([1, 1]), span(&mut source), WriteId(0));
    drop(dead);
    let [a, c] = &mut mesh[..] else { unreachable!() };
    a.control(2, b"alive");
    let seen = drive(&mut [&mut *a, &mut *c], |seen| seen.len() == 3);
    for rank in [0, 2] {
        let lost = |e: &&(usize, Event)| {
            e.0 == rank && matches!(&e.1, Event::Lost { peer: 1, cause } if cause.contains("connection"))
        };
        assert_eq!(seen.iter().filter(lost).count(), 1, "{seen:?}");
    }
    assert!(seen.iter().any(|(rank, e)| *rank == 2 && matches!(e, Event::Control { peer: 0, .. })));
    a.control(1, b"dropped");
    a.write(1, Lane::Bulk, LandingKey([1, 1]), span(&mut source), WriteId(0));
    let mut events = Vec::new();
    a.poll(Duration::from_millis(20), &mut events).unwrap();
    assert!(events.is_empty(), "{events:?}");
}

#[test]
fn a_peer_that_breaks_the_protocol_is_lost() {
    use std::io::Write;
    let data = |length: u64, key| frame::Header { kind: frame::Kind::Data, length, key }.encode().to_vec();
    let cases: [(Vec<u8>, &str); 5] = [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n".to_vec(), "no such frame"),
        (data(1 << 63, LandingKey([1, 1])), "9223372036854775808 bytes for landing area 1, which it was not offered"),
        (
            frame::Header { kind: frame::Kind::Control, length: 1 << 63, key: LandingKey([0; 2]) }.encode().to_vec(),
            "at most 8192",
        ),
        ([frame::Header::GOODBYE.encode().to_vec(), vec![1]].concat(), "bytes after a goodbye"),
        (data(8, LandingKey([0; 2]))[..20].to_vec(), "connection closed"),
    ];
    for (bytes, expected) in cases {
        for lane in 0..2 {
            let mut both = streams(2, 1);
            let mut peer = both.remove(1).remove(0).unwrap();
            let mut tcp = Tcp::new(0, both.remove(0), TcpOptions::default()).unwrap();
            let stream = if lane == 0 { &mut peer.urgent } else { &mut peer.bulk[0] };
            stream.write_all(&bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let seen = drive(&mut [&mut tcp], |seen| !seen.is_empty());
            assert!(matches!(&seen[..], [(0, Event::Lost { peer: 1, cause })] if cause.contains(expected)), "{seen:?}");
        }
    }
}

#[test]
fn a_write_of_the_wrong_length_is_refused() {
    let mut mesh = mesh(2);
    let [a, b] = &mut mesh[..] else { unreachable!() };
    let (mut source, mut landing) = ([1; 9], [0; 8]);
    let key = b.expose(0, Lane::Urgent, span(&mut landing)).unwrap();
    a.write(1, Lane::Urgent, key, span(&mut source), WriteId(0));
    let lost = |(rank, e): &(usize, Event)| {
        *rank == 1 && matches!(e, Event::Lost { cause, .. } if cause.contains("9 bytes for landing area 1 of 8"))
    };
    drive(&mut [a, b], |seen| seen.iter().any(lost));
    assert_eq!(landing, [0; 8]);
}

#[test]
fn the_waker_ends_a_poll() {
    let mut mesh = mesh(2);
    let waker = mesh[0].waker();
    let start = Instant::now();
    let helper = thread::spawn(move || {
        thread::sleep(Duration::from_millis(50));
        waker.wake();
    });
    mesh[0].poll(PATIENCE, &mut Vec::new()).unwrap();
    assert!(start.elapsed() < PATIENCE / 3);
    helper.join().unwrap();
    let start = Instant::now();
    mesh[0].poll(Duration::from_millis(30), &mut Vec::new()).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30), "a wake-up was counted twice");
}

#[test]
fn a_transport_that_never_answers_is_left_at_the_deadline() {
    let mut mesh = mesh(2);
    let start = Instant::now();
    mesh[0].close(Duration::from_millis(100));
    let waited = start.elapsed();
    assert!(waited >= Duration::from_millis(100) && waited < PATIENCE / 3, "{waited:?}");
}
