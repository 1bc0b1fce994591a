//! Both ends of a connection in one process, on every port that this host has.

use super::*;
use mdas_verbs::choose::{Request as Wanted, choose};
use mdas_verbs::live;
use std::any::Any;
use std::net::TcpListener;

const LIMIT: Duration = Duration::from_secs(60);
const BYTES: usize = 64 << 10;

fn options() -> Options {
    let devices = mdas_verbs::devices().unwrap();
    Options {
        rails: choose(&devices, &Wanted { rails: rail::MOST, ..Wanted::default() }).unwrap(),
        timeout: 14,
        retry_count: 2,
        traffic_class: 0,
        service_level: 0,
        relaxed_ordering: true,
        chunk_bytes: BYTES,
    }
}

/// Ranks 0 and 1.
fn pair(options: &Options) -> [Verbs; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (two, _) = listener.accept().unwrap();
    let connect = |rank, streams| Verbs::connect(rank, streams, options, LIMIT, &|| true).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(0, vec![None, Some(one)]));
        let second = connect(1, vec![Some(two), None]);
        [first.join().unwrap(), second]
    })
}

/// Pages of its own, which stay mapped until the process ends.
struct Memory {
    span: RawSpan,
    owner: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    fn new(len: usize, fill: u8) -> Memory {
        let (protection, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, kind, -1, 0) };
        assert_ne!(ptr, libc::MAP_FAILED);
        // SAFETY: the mapping from above, of which nobody else knows yet.
        unsafe { ptr.cast::<u8>().write_bytes(fill, len) };
        Memory { span: RawSpan { ptr: ptr.cast(), len }, owner: Arc::new(()) }
    }

    fn registered(len: usize, fill: u8, verbs: &mut Verbs) -> Memory {
        let memory = Memory::new(len, fill);
        verbs.register(memory.span, memory.keeper()).unwrap();
        memory
    }

    fn keeper(&self) -> Keeper {
        Arc::downgrade(&self.owner)
    }

    fn part(&self, index: usize, len: usize) -> RawSpan {
        assert!((index + 1) * len <= self.span.len);
        RawSpan { ptr: self.span.ptr.wrapping_add(index * len), len }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: mapped for good and initialized; the tests look only while no write of the device is under way.
        unsafe { std::slice::from_raw_parts(self.span.ptr, self.span.len) }.to_vec()
    }
}

/// Polls until what has happened is enough.
fn until(verbs: &mut Verbs, enough: impl Fn(&[Event]) -> bool) -> Vec<Event> {
    let (start, mut events) = (Instant::now(), Vec::new());
    while !enough(&events) {
        assert!(start.elapsed() < LIMIT, "not within {LIMIT:?}, but {events:?}");
        verbs.poll(Duration::from_millis(20), &mut events).unwrap();
    }
    events
}

/// Why the connection with the other end was lost.
fn loss(verbs: &mut Verbs) -> String {
    let lost = |event: &Event| matches!(event, Event::Lost { .. });
    let events = until(verbs, |events| events.iter().any(lost));
    let causes = events.into_iter().filter_map(|event| match event {
        Event::Lost { cause, .. } => Some(cause),
        _ => None,
    });
    causes.collect::<Vec<_>>().join("; ")
}

/// Both ends write to each other, once over the urgent lane and twice on every rail; then they part.
fn converse([mut one, mut two]: [Verbs; 2]) {
    let lanes: Vec<Lane> = [Lane::Urgent].into_iter().chain((0..2 * one.rails.len()).map(|_| Lane::Bulk)).collect();
    for receiver in 0..2 {
        let (from, to) = if receiver == 0 { (&mut two, &mut one) } else { (&mut one, &mut two) };
        let source = Memory::registered(BYTES, 7, from);
        let target = Memory::registered(lanes.len() * BYTES, 0, to);
        let keys: Vec<LandingKey> = (lanes.iter().enumerate())
            .map(|(index, lane)| to.expose(1 - receiver, *lane, target.part(index, BYTES)).unwrap())
            .collect();
        let rails: Vec<usize> = keys[1..].iter().map(|key| rail::of(*key)).collect();
        assert!((0..from.rails.len()).all(|rail| rails.iter().filter(|one| **one == rail).count() == 2), "{rails:?}");
        from.control(receiver, b"they are under way");
        for (index, (key, lane)) in keys.iter().zip(&lanes).enumerate() {
            from.write(receiver, *lane, *key, source.span, WriteId(index as u64));
        }
        let sent = |event: &&Event| matches!(event, Event::Sent { .. });
        until(from, |events| events.iter().filter(sent).count() == lanes.len());
        let arrived = |event: &&Event| matches!(event, Event::Arrived { peer, key } if *peer == 1 - receiver && keys.contains(key));
        let events = until(to, |events| events.iter().filter(arrived).count() == lanes.len());
        let told = |event: &Event| matches!(event, Event::Control { frame, .. } if **frame == *b"they are under way");
        assert!(events.iter().any(told));
        assert!(target.bytes().iter().all(|byte| *byte == 7));
    }
    one.close(LIMIT);
    until(&mut two, |events| events.iter().any(|event| matches!(event, Event::Departed { peer: 0 })));
    two.close(LIMIT);
}

fn nothing_is_left() {
    for (kind, name) in live::KINDS {
        assert_eq!(live::count(*kind), 0, "{name}");
    }
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma runs them in the laboratory"]
fn writes_arrive_on_every_rail_and_both_sides_hear_of_it() {
    converse(pair(&options()));
    nothing_is_left();
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma runs them in the laboratory"]
fn one_broken_queue_pair_loses_the_peer_on_both_sides_and_a_new_connection_works() {
    let options = options();
    let [mut one, mut two] = pair(&options);
    let (source, target) = (Memory::registered(BYTES, 7, &mut two), Memory::registered(BYTES, 1, &mut one));
    let last = one.rails.len() - 1;
    one.peers[1].next_rail = last;
    let key = one.expose(1, Lane::Bulk, target.span).unwrap();
    one.peers[1].channels[BULK + last].pair.fail().unwrap();
    two.write(0, Lane::Bulk, key, source.span, WriteId(0));
    let device = &options.rails[last].device;
    let cause = loss(&mut two);
    assert!(cause.contains("status 12") && cause.contains(&format!("on {device} port")), "{cause}");
    let cause = loss(&mut one);
    assert!(cause.contains("status 5") && cause.contains(&format!("on {device} port")), "{cause}");
    assert!(target.bytes().iter().all(|byte| *byte == 1));
    drop((one, two));
    nothing_is_left();
    converse(pair(&options));
    nothing_is_left();
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma runs them in the laboratory"]
fn what_is_posted_goes_on_when_it_is_cancelled_and_the_rest_is_forgotten() {
    let [mut one, mut two] = pair(&options());
    let count = 2 * channel::SENDS * one.rails.len();
    let (source, target) = (Memory::registered(BYTES, 7, &mut two), Memory::registered(count * BYTES, 1, &mut one));
    let keys: Vec<LandingKey> =
        (0..count).map(|index| one.expose(1, Lane::Bulk, target.part(index, BYTES)).unwrap()).collect();
    for (index, key) in keys.iter().enumerate() {
        two.write(0, Lane::Bulk, *key, source.span, WriteId(index as u64));
    }
    let forgotten = two.cancel(&|id| id.0 > 0);
    // So many are posted on each rail at once.
    assert_eq!(forgotten.len(), count / 2);
    let made: Vec<usize> = (0..count).filter(|index| !forgotten.contains(&WriteId(*index as u64))).collect();
    let sent = |event: &&Event| matches!(event, Event::Sent { .. });
    let events = until(&mut two, |events| events.iter().filter(sent).count() == made.len());
    assert!(!events.iter().any(|event| matches!(event, Event::Sent { id } if forgotten.contains(id))));
    let arrived = |event: &&Event| matches!(event, Event::Arrived { .. });
    until(&mut one, |events| events.iter().filter(arrived).count() == made.len());
    for (index, part) in target.bytes().chunks(BYTES).enumerate() {
        let byte = if made.contains(&index) { 7 } else { 1 };
        assert!(part.iter().all(|found| *found == byte), "area {index}");
    }
    // What nobody will write to is taken back, and both ends still talk.
    for index in (0..count).filter(|index| !made.contains(index)) {
        one.withdraw(1, keys[index]);
    }
    assert!(one.landings.is_empty());
    converse([one, two]);
    nothing_is_left();
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma runs them in the laboratory"]
fn nobody_writes_after_the_connection_was_severed() {
    for turn in 0..2 {
        let [mut one, mut two] = pair(&options());
        let count = channel::SENDS;
        let (source, target) = (Memory::registered(BYTES, 7, &mut two), Memory::registered(count * BYTES, 1, &mut one));
        let keys: Vec<LandingKey> =
            (0..count).map(|index| one.expose(1, Lane::Bulk, target.part(index, BYTES)).unwrap()).collect();
        for (index, key) in keys.iter().enumerate() {
            two.write(0, Lane::Bulk, *key, source.span, WriteId(index as u64));
        }
        // Once while they are under way to it, and once while they leave.
        let (severed, other) = if turn == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
        let peer = 1 - turn;
        severed.sever(peer, "it took too long");
        let before = target.bytes();
        assert_eq!(loss(severed), "it took too long");
        severed.sever(peer, "again"); // changes nothing
        severed.control(peer, b"nobody hears this");
        loss(other);
        let mut events = Vec::new();
        severed.poll(Duration::from_millis(50), &mut events).unwrap();
        assert!(events.is_empty(), "{events:?}");
        assert!(turn == 1 || target.bytes() == before);
    }
    nothing_is_left();
}

#[test]
#[ignore = "needs an RDMA device: tests/rdma runs them in the laboratory"]
fn ends_with_different_numbers_of_rails_do_not_connect() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (two, _) = listener.accept().unwrap();
    let (mut fewer, mut more) = (options(), options());
    fewer.rails.truncate(1);
    more.rails = vec![fewer.rails[0].clone(); 2];
    let connect = |rank, streams, options: &Options| {
        Verbs::connect(rank, streams, options, LIMIT, &|| true).map(|_| ()).unwrap_err().to_string()
    };
    let errors = std::thread::scope(|scope| {
        let first = scope.spawn(|| connect(0, vec![None, Some(one)], &fewer));
        [connect(1, vec![Some(two), None], &more), first.join().unwrap()]
    });
    assert!(errors.iter().any(|error| error.contains("do both run the same version?")), "{errors:?}");
    nothing_is_left();
}

/// Soft-RoCE cannot; where a driver can, it is told of something that is none.
#[test]
#[ignore = "needs an RDMA device: tests/rdma runs them in the laboratory"]
fn a_dmabuf_that_cannot_be_registered_is_an_error_that_says_why() {
    let [mut one, two] = pair(&options());
    let target = Memory::new(BYTES, 0);
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = one.register_dmabuf(file.as_fd(), 0, target.span, target.keeper()).unwrap_err().to_string();
    assert!(error.contains("registering a DMA-buf: ibv_reg_dmabuf_mr on "), "{error}");
    assert!(!error.contains("rxe") || error.contains("cannot reach other devices' memory"), "{error}");
    assert!(one.expose(1, Lane::Bulk, target.span).is_err());
    drop((one, two));
    nothing_is_left();
}

/// The other end is in Python, over pyverbs (tests/python/rdma/foreign_peer.py): it writes k mod 251, and is written to.
#[test]
#[ignore = "needs an RDMA device and $MDAS_FOREIGN_PEER, a program and its script: tests/rdma runs it in the laboratory"]
fn a_foreign_program_writes_and_is_written_to() {
    let words = std::env::var("MDAS_FOREIGN_PEER").unwrap();
    let mut words = words.split(' ');
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut foreign = std::process::Command::new(words.next().unwrap())
        .args(words)
        .arg(listener.local_addr().unwrap().port().to_string())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept().unwrap();
    let mut options = options();
    options.rails.truncate(1);
    let mut verbs = Verbs::connect(0, vec![None, Some(stream)], &options, LIMIT, &|| true).unwrap();

    let pattern = |modulus: usize| (0..100_000).map(|k| (k % modulus) as u8).collect::<Vec<u8>>();
    let landing = Memory::registered(100_000, 0, &mut verbs);
    let key = verbs.expose(1, Lane::Bulk, landing.span).unwrap();
    verbs.control(1, &key.0.map(u64::to_le_bytes).concat());
    until(&mut verbs, |events| {
        events.iter().any(|event| matches!(event, Event::Arrived { peer: 1, key: k } if *k == key))
    });
    assert!(landing.bytes() == pattern(251));

    let source = Memory::registered(100_000, 0, &mut verbs);
    // SAFETY: this memory is the test's own, and nothing is posted on it yet.
    unsafe { source.span.ptr.copy_from_nonoverlapping(pattern(241).as_ptr(), source.span.len) };
    let mut grant = None;
    let mut events = Vec::new();
    while grant.is_none() {
        verbs.poll(Duration::from_millis(20), &mut events).unwrap();
        grant = events.drain(..).find_map(|event| match event {
            Event::Control { frame, .. } => Some(frame),
            Event::Lost { cause, .. } => panic!("{cause}"),
            _ => None,
        });
    }
    let frame = grant.unwrap();
    let word = |at: usize| u64::from_le_bytes(frame[at..at + 8].try_into().unwrap());
    verbs.write(1, Lane::Bulk, LandingKey([word(0), word(8)]), source.span, WriteId(3));
    until(&mut verbs, |events| events.iter().any(|event| matches!(event, Event::Sent { id: WriteId(3) })));
    assert!(foreign.wait().unwrap().success());
}

#[test]
fn without_rails_there_is_no_connection() {
    let none = Options {
        rails: Vec::new(),
        timeout: 14,
        retry_count: 7,
        traffic_class: 0,
        service_level: 0,
        relaxed_ordering: false,
        chunk_bytes: BYTES,
    };
    let error = Verbs::connect(0, vec![None], &none, LIMIT, &|| true).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("0 rails; there may be 1 to 8"), "{error}");
}
