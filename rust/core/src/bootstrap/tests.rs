use super::handshake::{Hello, Purpose};
use super::rendezvous::exchange;
use super::wire::Patience;
use super::*;
use crate::error::{Error, Result};
use crate::transport::tcp::{Tcp, TcpOptions};
use crate::transport::{Event, Transport};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);
const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn identity(rank: usize, size: usize) -> Identity {
    Identity { rank, size, job: "job 7".into(), secret: b"secret".to_vec() }
}

fn always() -> bool {
    true
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Runs `rank` on a thread per rank.
fn ranks<T: Send + 'static>(size: usize, run: impl Fn(usize) -> T + Send + Clone + 'static) -> Vec<T> {
    let spawn = |rank| {
        let run = run.clone();
        thread::spawn(move || run(rank))
    };
    let threads: Vec<_> = (0..size).map(spawn).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn listeners(size: usize, identity: impl Fn(usize) -> Identity) -> (Vec<Listener>, Vec<SocketAddr>) {
    let open = |rank| Listener::open(LOCALHOST, None, identity(rank)).unwrap();
    let listeners: Vec<_> = (0..size).map(open).collect();
    let addresses = listeners.iter().map(Listener::address).collect();
    (listeners, addresses)
}

fn meet(listener: Listener, addresses: &[SocketAddr], deadline: Duration) -> Result<Tcp> {
    let (rank, options) = (listener.identity().rank, TcpOptions::default());
    Tcp::new(rank, connect(listener, addresses, "v1", options.bulk_connections, deadline, &always)?, options)
}

fn everybody_talks(mesh: Vec<Tcp>) {
    let size = mesh.len();
    let talk = |(rank, mut tcp): (usize, Tcp)| {
        thread::spawn(move || {
            for peer in (0..size).filter(|peer| *peer != rank) {
                tcp.control(peer, format!("{rank} to {peer}").as_bytes());
            }
            let (mut heard, mut events, start) = (Vec::new(), Vec::new(), Instant::now());
            while heard.len() < size - 1 {
                assert!(start.elapsed() < PATIENCE);
                tcp.poll(Duration::from_millis(100), &mut events).unwrap();
                for event in events.drain(..) {
                    if let Event::Control { peer, frame } = event {
                        assert_eq!(*frame, *format!("{peer} to {rank}").as_bytes());
                        heard.push(peer);
                    }
                }
            }
            tcp.close(PATIENCE);
        })
    };
    let threads: Vec<_> = mesh.into_iter().enumerate().map(talk).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn everybody_gets_all_blobs_in_rank_order() {
    let address = format!("127.0.0.1:{}", free_port());
    let results = ranks(5, move |rank| {
        thread::sleep(Duration::from_millis(60 * (rank as u64 * 3 % 5))); // rank 0 is neither first nor last
        exchange(&identity(rank, 5), &address, format!("blob {rank}").into_bytes(), PATIENCE, &always).unwrap()
    });
    let expected: Vec<Vec<u8>> = (0..5).map(|rank| format!("blob {rank}").into_bytes()).collect();
    assert!(results.iter().all(|blobs| *blobs == expected), "{results:?}");
}

#[test]
fn the_ranks_that_never_came_are_named_everywhere() {
    let address = format!("127.0.0.1:{}", free_port());
    let at = address.clone();
    let results = ranks(3, move |rank| {
        exchange(&identity(rank, 5), &at, vec![], Duration::from_millis(500), &always).unwrap_err().to_string()
    });
    let expected = format!("init: no progress for 0.5 s (timeout 0.5 s): ranks 3, 4 of 5 did not join at {address}");
    assert!(results.iter().all(|error| error.starts_with(&expected)), "{results:?}");
}

#[test]
fn without_rank_0_the_address_is_named() {
    let address = format!("127.0.0.1:{}", free_port());
    let error =
        exchange(&identity(1, 2), &address, vec![], Duration::from_millis(300), &always).unwrap_err().to_string();
    assert!(error.contains(&format!("rank 1 of 2 cannot join rank 0 at {address}")), "{error}");
    assert!(error.contains("refused"), "{error}");
}

#[test]
fn a_second_process_with_the_same_rank_is_told() {
    let address = format!("127.0.0.1:{}", free_port());
    let results = ranks(4, move |i| {
        let rank = [0, 1, 1, 2][i];
        if i == 3 {
            thread::sleep(Duration::from_millis(500)); // both have come by then
        }
        exchange(&identity(rank, 3), &address, vec![], PATIENCE, &always).map_err(|error| error.to_string())
    });
    let errors: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!(
        matches!(errors[..], [error] if error.contains("rank 1 has joined already, from 127.0.0.1:")),
        "{results:?}"
    );
    assert!(results[0].is_ok() && results[3].is_ok());
}

#[test]
fn a_rank_that_is_lost_while_others_are_waited_for_is_named_to_all() {
    let address = format!("127.0.0.1:{}", free_port());
    let results = ranks(3, move |rank| {
        if rank == 1 {
            thread::sleep(Duration::from_secs(1)); // rank 2 has joined by then
        }
        let start = Instant::now();
        let keep_going = || rank != 1 || start.elapsed() < Duration::from_millis(300);
        exchange(&identity(rank, 4), &address, vec![], PATIENCE, &keep_going).unwrap_err()
    });
    assert!(matches!(results[1], Error::Closed(_)), "{results:?}");
    for error in [&results[0], &results[2]] {
        assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error:?}");
        assert!(error.to_string().contains("hung up"), "{error}");
    }
}

#[test]
fn a_secret_on_some_ranks_only_is_suspected() {
    let address = format!("127.0.0.1:{}", free_port());
    let results = ranks(2, move |rank| {
        let identity = Identity { job: ["job 7/card", "job 7/secret"][rank].into(), ..identity(rank, 2) };
        let patience = Duration::from_secs([2, 4][rank]);
        exchange(&identity, &address, vec![], patience, &always).unwrap_err().to_string()
    });
    assert!(results[0].contains("rank 1 of 2 did not join") && results[0].contains("MDAS_SECRET"), "{results:?}");
    assert!(results[1].contains("is MDAS_SECRET set on all ranks"), "{results:?}");
}

#[test]
fn different_world_sizes_fail_on_both_sides() {
    let address = format!("127.0.0.1:{}", free_port());
    let results =
        ranks(2, move |rank| exchange(&identity(rank, 2 + rank), &address, vec![], PATIENCE, &always).unwrap_err());
    for error in &results {
        assert!(matches!(error, Error::Configuration(_)), "{error:?}");
        assert!(error.to_string().contains("was started with world size 3, rank 0 with world size 2"), "{error}");
    }
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = exchange(&identity(0, 2), &address.to_string(), vec![], PATIENCE, &always).unwrap_err().to_string();
    assert!(error.contains(&address.to_string()) && error.contains("in use"), "{error}");
    let port = address.port();
    let error = Listener::open(LOCALHOST, Some((port, port)), identity(0, 2)).err().unwrap().to_string();
    assert!(error.contains(&format!("127.0.0.1, ports {port} to {port}")) && error.contains("in use"), "{error}");
}

#[test]
fn a_wrong_secret_is_refused_and_the_others_go_on() {
    let address = format!("127.0.0.1:{}", free_port());
    let results = ranks(3, move |i| {
        let rank = [0, 1, 1][i];
        let mut identity = identity(rank, 2);
        if i == 1 {
            identity.secret = b"guess".to_vec();
        } else if i == 2 {
            thread::sleep(Duration::from_millis(300));
        }
        exchange(&identity, &address, vec![i as u8], PATIENCE, &always).map_err(|error| error.to_string())
    });
    let error = results[1].as_ref().unwrap_err();
    assert!(error.contains("different job secrets: MDAS_SECRET must be the same"), "{error}");
    assert_eq!(results[0], Ok(vec![vec![0], vec![2]]));
    assert_eq!(results[0], results[2]);
}

#[test]
fn a_mesh_of_four_ranks() {
    let (listeners, addresses) = listeners(4, |rank| identity(rank, 4));
    let meet = |listener| {
        let addresses = addresses.clone();
        thread::spawn(move || meet(listener, &addresses, PATIENCE).unwrap())
    };
    let threads: Vec<_> = listeners.into_iter().map(meet).collect();
    everybody_talks(threads.into_iter().map(|thread| thread.join().unwrap()).collect());
}

#[test]
fn a_mesh_over_ipv6() {
    let v6 = IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]);
    if TcpListener::bind((v6, 0)).is_err() {
        return; // a host without IPv6
    }
    let open = |rank| Listener::open(v6, None, identity(rank, 2)).unwrap();
    let (a, b) = (open(0), open(1));
    let addresses = [a.address(), b.address()];
    let other = thread::spawn(move || meet(b, &addresses, PATIENCE).unwrap());
    everybody_talks(vec![meet(a, &addresses, PATIENCE).unwrap(), other.join().unwrap()]);
}

#[test]
fn missing_ranks_of_a_mesh_are_named_with_their_addresses() {
    let (mut listeners, addresses) = listeners(3, |rank| identity(rank, 3));
    let error = meet(listeners.remove(1), &addresses, Duration::from_millis(500)).err().unwrap().to_string();
    assert!(error.contains("rank 1 has no connection with ranks 0, 2 of 3"), "{error}");
    assert!(error.contains(&format!("rank 0 at {}: no answer", addresses[0])), "{error}");
    assert!(error.contains(&format!("rank 2 at {}: it has not dialed us", addresses[2])), "{error}");
}

#[test]
fn a_rank_that_died_before_the_mesh_is_named_at_once_by_all() {
    for dead in 0..3 {
        let (mut listeners, addresses) = listeners(3, |rank| identity(rank, 3));
        drop(listeners.remove(dead));
        let meet = |listener| {
            let addresses = addresses.clone();
            thread::spawn(move || meet(listener, &addresses, PATIENCE).err().unwrap())
        };
        let start = Instant::now();
        let threads: Vec<_> = listeners.into_iter().map(meet).collect();
        for error in threads.into_iter().map(|thread| thread.join().unwrap()) {
            // Who gives up early is gone for the others.
            assert!(matches!(error, Error::PeerLost { .. }), "{error:?}");
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }
}

#[test]
fn a_rank_that_dies_within_the_mesh_is_named() {
    // Rank 2 dials ranks 0 and 1, of which rank 0 has not come to `connect`; then it is interrupted.
    let (mut listeners, addresses) = listeners(3, |rank| identity(rank, 3));
    let (third, second) = (listeners.pop().unwrap(), listeners.pop().unwrap());
    let there = addresses.clone();
    let start = Instant::now();
    let keep_going = move || start.elapsed() < Duration::from_millis(700);
    let dying = thread::spawn(move || connect(third, &there, "v1", 2, PATIENCE, &keep_going).err().unwrap());
    let error = connect(second, &addresses, "v1", 2, PATIENCE, &always).err().unwrap();
    assert!(matches!(error, Error::PeerLost { peer: 2, .. }), "{error:?}");
    assert!(error.to_string().contains("hung up"), "{error}");
    assert!(matches!(dying.join().unwrap(), Error::Closed(_)));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn different_configurations_fail_on_both_sides() {
    let (mut listeners, addresses) = listeners(2, |rank| identity(rank, 2));
    let there = addresses.clone();
    let second = listeners.pop().unwrap();
    let other = thread::spawn(move || connect(second, &there, "v2", 2, PATIENCE, &always).err());
    let ours = meet(listeners.pop().unwrap(), &addresses, PATIENCE).err().unwrap().to_string();
    for error in [ours, other.join().unwrap().unwrap().to_string()] {
        assert!(error.contains("v2 bulk_connections=2") && error.contains("v1 bulk_connections=2"), "{error}");
    }
}

#[test]
fn an_interrupt_ends_every_wait_within_a_second() {
    let start = Instant::now();
    let keep_going = || start.elapsed() < Duration::from_millis(200);
    let address = format!("127.0.0.1:{}", free_port());
    for rank in 0..2 {
        let result = exchange(&identity(rank, 2), &address, vec![], PATIENCE, &keep_going);
        assert!(matches!(result, Err(Error::Closed(_))), "{result:?}");
    }
    let (mut listeners, addresses) = listeners(2, |rank| identity(rank, 2));
    for _ in 0..2 {
        let listener = listeners.pop().unwrap();
        let result = connect(listener, &addresses, "", 2, PATIENCE, &keep_going);
        assert!(matches!(result, Err(Error::Closed(_))), "{:?}", result.err());
    }
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

/// Reads until the other side hangs up; what it said, and after how long.
fn until_closed(stream: &mut TcpStream) -> (Vec<u8>, Duration) {
    let start = Instant::now();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut heard = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => heard.extend_from_slice(&buffer[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break, // unread bytes of ours
            Err(error) => panic!("{error}"),
        }
    }
    (heard, start.elapsed())
}

#[test]
fn strangers_are_hung_up_on_and_the_job_goes_on() {
    let version_9 = [&b"mdasjoin\x09\0\0\0"[..], &[0; 64]].concat();
    let job_of_others = [&b"mdasjoin\x01\0\0\0"[..], &[0; 64]].concat();
    let strangers: [(&str, Vec<u8>); 7] = [
        ("http", b"GET / HTTP/1.1\r\nHost: example.org\r\nUser-Agent: scanner\r\n\r\n".to_vec()),
        ("zeros", vec![0; 100_000]),
        ("a length of 2^63", (1u64 << 63).to_le_bytes().to_vec()),
        ("tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".to_vec()),
        ("ssh", b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()),
        ("another version", version_9),
        ("another job", job_of_others),
    ];
    let (mut listeners, addresses) = listeners(2, |rank| identity(rank, 2));
    for (name, bytes) in &strangers {
        let mut stream = TcpStream::connect(addresses[0]).unwrap();
        let _ = stream.write_all(bytes); // it may hang up in the middle
        let (heard, waited) = until_closed(&mut stream);
        assert!(waited < Duration::from_secs(4), "{name}: noticed only by the deadline");
        assert!(heard.is_empty() || *name == "another version", "{name}: {heard:?}");
    }
    let silent = TcpStream::connect(addresses[0]).unwrap();
    let first = listeners.remove(0);
    let second = listeners.remove(0);
    let there = addresses.clone();
    let other = thread::spawn(move || meet(second, &there, PATIENCE).unwrap());
    everybody_talks(vec![meet(first, &addresses, PATIENCE).unwrap(), other.join().unwrap()]);
    drop(silent);
}

#[test]
fn who_is_slow_is_hung_up_on_however_it_trickles() {
    let listener = Listener::open(LOCALHOST, None, identity(0, 2)).unwrap();
    let mut stream = TcpStream::connect(listener.address()).unwrap();
    let start = Instant::now();
    for byte in b"mdasjoin\x01\0\0\0".iter().chain(std::iter::repeat(&0)) {
        if stream.write_all(&[*byte]).is_err() {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "it is still listened to");
        thread::sleep(Duration::from_millis(250));
    }
    assert!(start.elapsed() > Duration::from_secs(4), "{:?}", start.elapsed());
}

#[test]
fn lengths_are_capped_after_the_handshake_too() {
    let listener = Listener::open(LOCALHOST, None, identity(0, 2)).unwrap();
    let mut stream = TcpStream::connect(listener.address()).unwrap();
    let patience = Patience { deadline: Instant::now() + PATIENCE, keep_going: &always };
    let payload = vec![0; handshake::MAX_HELLO_BYTES];
    let hello = Hello { rank: 1, size: 2, purpose: Purpose::Urgent, index: 0, configuration: String::new(), payload };
    let _ = handshake::introduce(&stream, &identity(1, 2), &hello, &patience); // it hangs up while we still send
    until_closed(&mut stream);
    assert!(listener.next(Duration::from_millis(50)).is_none());
}
