//! Two lanes over TCP, without the engine: bulk round a ring of ranks, 8-byte round trips between
//! ranks 0 and 1 beside it, and one plain TCP stream in the same run to compare with.
//!
//! ```text
//! cargo build --release --example tcp_lanes
//! python bench/netns.py --hosts 2 -- target/release/examples/tcp_lanes [seconds] [pace|free] [bulk connections]
//! ```

use mdas_core::bootstrap::{self, Identity, Listener, local_address_towards, rendezvous};
use mdas_core::transport::tcp::{Pace, Tcp, TcpOptions};
use mdas_core::transport::{Event, LandingKey, Lane, RawSpan, Transport, WriteId};
use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

const PATIENCE: Duration = Duration::from_secs(30);
/// Chunks that are granted ahead.
const WINDOW: usize = 4;
/// Pause between two round trips.
const PAUSE: Duration = Duration::from_millis(3);
/// Left out of the figures: the time in which the rate is found.
const WARM_UP: Duration = Duration::from_millis(500);

fn main() -> Outcome<()> {
    let number = |name: &str| -> Outcome<usize> { Ok(std::env::var(name)?.parse()?) };
    let (rank, size) = (number("RANK")?, number("WORLD_SIZE")?);
    let meeting = format!("{}:{}", std::env::var("MASTER_ADDR")?, std::env::var("MASTER_PORT")?);
    let arguments: Vec<String> = std::env::args().collect();
    let argument = |i: usize| arguments.get(i).map(String::as_str);
    let length = Duration::from_secs_f64(argument(1).unwrap_or("5").parse()?);
    let options = TcpOptions {
        pace: if argument(2) == Some("free") { Pace::Free } else { Pace::Measured },
        bulk_connections: argument(3).unwrap_or("2").parse()?,
        ..TcpOptions::default()
    };
    let identity = Identity { rank, size, job: "lanes".into(), secret: b"lanes".to_vec() };
    let listener = Listener::open(local_address_towards(&meeting)?, None, identity.clone())?;
    let plain = TcpListener::bind((listener.address().ip(), 0))?;
    let blob = format!("{} {}", listener.address(), plain.local_addr()?);
    let blobs = rendezvous::exchange(&identity, &meeting, blob.into_bytes(), PATIENCE, &|| true)?;
    let mut addresses = Vec::new();
    let mut plain_addresses: Vec<SocketAddr> = Vec::new();
    for blob in &blobs {
        let blob = String::from_utf8_lossy(blob);
        let (mesh, plain) = blob.split_once(' ').ok_or("a blob without a space")?;
        addresses.push(mesh.parse()?);
        plain_addresses.push(plain.parse()?);
    }
    let mut tcp = Tcp::new(
        rank,
        bootstrap::connect(listener, &addresses, "lanes", options.bulk_connections, PATIENCE, &|| true)?,
        options,
    )?;

    let mut plain_goodput = 0.0;
    if rank == 0 {
        let mut stream = TcpStream::connect(plain_addresses[1])?;
        let start = Instant::now();
        let block = vec![1; 256 << 10];
        while start.elapsed() < length.min(Duration::from_secs(3)) {
            stream.write_all(&block)?;
        }
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer)?;
        plain_goodput = f64::from_le_bytes(answer);
    } else if rank == 1 {
        let (mut stream, _) = plain.accept()?;
        let mut block = vec![0; 256 << 10];
        let (mut bytes, mut start, begin) = (0usize, None, Instant::now());
        loop {
            let n = stream.read(&mut block)?;
            if n == 0 {
                break;
            }
            if begin.elapsed() > WARM_UP {
                start.get_or_insert_with(Instant::now);
                bytes += n;
            }
        }
        let seconds = start.ok_or("the plain stream was too short")?.elapsed().as_secs_f64();
        stream.write_all(&(bytes as f64 / seconds).to_le_bytes())?;
    }
    let early = start_together(&mut tcp, rank, size)?;
    lanes(&mut tcp, rank, size, length, plain_goodput, early)?;
    tcp.close(PATIENCE);
    Ok(())
}

/// Waits for rank 0's word; returns what faster ranks have said meanwhile.
fn start_together(tcp: &mut Tcp, rank: usize, size: usize) -> Outcome<Vec<Event>> {
    let (begin, mut events) = (Instant::now(), Vec::new());
    if rank == 0 {
        (1..size).for_each(|peer| tcp.control(peer, b"start"));
        return Ok(events);
    }
    let is_start = |event: &Event| matches!(event, Event::Control { peer: 0, frame } if **frame == *b"start");
    while begin.elapsed() < PATIENCE {
        tcp.poll(Duration::from_millis(100), &mut events)?;
        if let Some(i) = events.iter().position(is_start) {
            events.remove(i);
            return Ok(events);
        }
    }
    Err("rank 0 does not start".into())
}

fn encode(key: LandingKey) -> Vec<u8> {
    [b"G".to_vec(), key.0[0].to_le_bytes().to_vec(), key.0[1].to_le_bytes().to_vec()].concat()
}

fn decode(frame: &[u8]) -> Outcome<LandingKey> {
    Ok(LandingKey([u64::from_le_bytes(frame[1..9].try_into()?), u64::from_le_bytes(frame[9..17].try_into()?)]))
}

fn lanes(tcp: &mut Tcp, rank: usize, size: usize, length: Duration, plain: f64, mut events: Vec<Event>) -> Outcome<()> {
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let chunk = tcp.chunk_bytes(Lane::Bulk);
    let mut source = vec![1u8; chunk];
    let source = RawSpan { ptr: source.as_mut_ptr(), len: chunk };
    let mut landings = vec![vec![0u8; chunk]; WINDOW];
    let mut whose = std::collections::HashMap::new();
    let mut grant =
        |tcp: &mut Tcp, whose: &mut std::collections::HashMap<LandingKey, usize>, i: usize| -> Outcome<()> {
            let landing = RawSpan { ptr: landings[i].as_mut_ptr(), len: chunk };
            let key = tcp.expose(previous, Lane::Bulk, landing)?;
            whose.insert(key, i);
            tcp.control(previous, &encode(key));
            Ok(())
        };
    (0..WINDOW).try_for_each(|i| grant(tcp, &mut whose, i))?;
    let (mut measured, mut received) = (None, 0);
    let mut begin = None;
    let (mut trips, mut pinged, mut due) = (Vec::new(), None, Instant::now());
    let mut gone = 0;
    let mut over = false;
    let patience = Instant::now();
    while !over && gone == 0 {
        if patience.elapsed() > length + PATIENCE {
            return Err("no end".into());
        }
        if rank == 0 && pinged.is_none() && Instant::now() >= due {
            pinged = Some(Instant::now());
            tcp.control(1, b"ping");
        }
        tcp.poll(Duration::from_millis(1), &mut events)?;
        for event in events.drain(..) {
            match event {
                Event::Control { frame, peer } => match &frame[..] {
                    b"ping" => tcp.control(peer, b"pong"),
                    b"pong" => {
                        let now = Instant::now();
                        if let (Some(sent), true) = (pinged.take(), measured.is_some()) {
                            trips.push(now - sent);
                        }
                        due = now + PAUSE;
                    }
                    grant => tcp.write(next, Lane::Bulk, decode(grant)?, source, WriteId(0)),
                },
                Event::Arrived { key, .. } => {
                    let now = Instant::now();
                    let begin = *begin.get_or_insert(now);
                    match measured {
                        None if now - begin > WARM_UP => measured = Some(now),
                        None => {}
                        Some(_) => received += chunk,
                    }
                    over |= now - begin > length;
                    let i = whose.remove(&key).ok_or("an unknown landing area")?;
                    grant(tcp, &mut whose, i)?;
                }
                Event::Sent { .. } => {}
                Event::Departed { .. } => gone += 1,
                Event::Lost { peer, cause } => return Err(format!("lost rank {peer}: {cause}").into()),
            }
        }
    }
    tcp.cancel(&|_| true);
    whose.keys().for_each(|key| tcp.withdraw(previous, *key));
    let seconds = measured.ok_or("too short")?.elapsed().as_secs_f64();
    let goodput = received as f64 / seconds;
    let mut line = format!("rank {rank}: bulk received {:7.2} MB/s", goodput / 1e6);
    if rank == 0 {
        trips.sort();
        let at = |q: f64| trips.get(((trips.len() as f64 - 1.0) * q) as usize).map_or(0, Duration::as_micros);
        let (median, p90, p99) = (at(0.5), at(0.9), at(0.99));
        let percent = 100.0 * goodput / plain;
        line += &format!(
            "  {percent:5.1} % of a plain stream ({:.2} MB/s)  round trip us: median {median} p90 {p90} p99 {p99} n {}",
            plain / 1e6,
            trips.len()
        );
    }
    println!("{line}");
    Ok(())
}
