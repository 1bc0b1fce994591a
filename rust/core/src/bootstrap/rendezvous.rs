//! The first meeting, where no store of a launcher is at hand: everybody sends a blob to rank 0
//! and gets all blobs.

use super::handshake::{self, Answer, Failure, Hello, Identity, Purpose};
use super::listener::{Listener, Visitor};
use super::wire::{Patience, SLICE, Trouble};
use crate::error::{Error, Result};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Largest blob, in bytes.
pub const MAX_BLOB_BYTES: usize = 64 << 10;

/// Beyond its own deadline a rank waits this long for rank 0 to say who is missing.
const GRACE: Duration = Duration::from_secs(2);

/// Connecting and greeting: if it takes longer, try again.
const ATTEMPT: Duration = Duration::from_secs(5);

/// The blobs of all ranks, in the order of ranks. Rank 0 serves at `address` ("host:port").
///
/// `keep_going` is asked at least every 100 ms, from this thread; false ends the wait with [`Error::Closed`].
pub fn exchange(
    identity: &Identity,
    address: &str,
    blob: Vec<u8>,
    deadline: Duration,
    keep_going: &dyn Fn() -> bool,
) -> Result<Vec<Vec<u8>>> {
    let Identity { rank, size, .. } = *identity;
    if rank >= size || blob.len() > MAX_BLOB_BYTES {
        let length = blob.len();
        return Err(Error::Invalid(format!(
            "init: rank {rank} of {size} with a blob of {length} bytes (at most {MAX_BLOB_BYTES})"
        )));
    }
    if size == 1 {
        return Ok(vec![blob]);
    }
    let (host, port) = split(address)?;
    let patience = Patience { deadline: Instant::now() + deadline, keep_going };
    if rank == 0 {
        let listener = Listener::open_at(host, port, identity.clone())?;
        serve(&listener, address, blob, deadline, &patience)
    } else {
        let hello =
            Hello { rank, size, purpose: Purpose::Rendezvous, index: 0, configuration: String::new(), payload: blob };
        join(identity, address, &hello, deadline, &patience)
    }
}

fn split(address: &str) -> Result<(&str, u16)> {
    let parts = address.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) =
        parts.ok_or_else(|| Error::Configuration(format!("init: {address:?} is not of the form host:port")))?;
    Ok((host.trim_start_matches('[').trim_end_matches(']'), port))
}

pub(super) fn interrupted() -> Error {
    Error::Closed("init: interrupted while waiting for the other ranks".into())
}

/// "ranks 3, 5 of 8", "rank 3 of 8"
pub(super) fn name(ranks: &[usize], size: usize) -> String {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("rank{} {} of {size}", if ranks.len() == 1 { "" } else { "s" }, list.join(", "))
}

fn serve(
    listener: &Listener,
    address: &str,
    blob: Vec<u8>,
    deadline: Duration,
    patience: &Patience,
) -> Result<Vec<Vec<u8>>> {
    let size = listener.identity().size;
    let mut joined: Vec<Option<Visitor>> = (0..size).map(|_| None).collect();
    let mut missing = size - 1;
    let failure = loop {
        if missing == 0 {
            break None;
        }
        let slice = match patience.slice() {
            Ok(slice) => slice,
            Err(Trouble::Interrupted) => break Some((interrupted(), Answer::Refused("rank 0 was interrupted".into()))),
            Err(_) => {
                let absent: Vec<usize> = (1..size).filter(|rank| joined[*rank].is_none()).collect();
                let who = format!(
                    "{} did not join at {address}; are all processes started, with the same MASTER_ADDR, MASTER_PORT and MDAS_SECRET, and can their hosts reach this one?",
                    name(&absent, size)
                );
                break Some((late(who.clone(), deadline), Answer::Late(who)));
            }
        };
        if let Some(gone) = joined.iter().flatten().find(|visitor| hung_up(&visitor.stream)) {
            let (rank, cause) = (gone.hello.rank, format!("it joined from {}, and hung up", gone.remote));
            joined[rank] = None;
            break Some((lost(rank, cause.clone()), Answer::Lost(rank, cause)));
        }
        let Some(visitor) = listener.next(slice) else { continue };
        let Hello { rank, size: theirs, purpose, .. } = visitor.hello;
        let remote = visitor.remote;
        if theirs != size {
            let why =
                format!("rank {rank} at {remote} was started with world size {theirs}, rank 0 with world size {size}");
            turn_away(&visitor, &Answer::Refused(why.clone()));
            break Some((Error::Configuration(format!("init: {why}")), Answer::Refused(why)));
        } else if purpose != Purpose::Rendezvous || rank == 0 || rank >= size {
            let why = format!("there is no place for rank {rank} of {size} from {remote} at the rendezvous");
            log::warn!("{why}");
            turn_away(&visitor, &Answer::Refused(why));
        } else if let Some(Visitor { remote: first, .. }) = &joined[rank] {
            let why = format!("rank {rank} has joined already, from {first}: {remote} was started with the same rank");
            log::warn!("{why}");
            turn_away(&visitor, &Answer::Refused(why));
        } else {
            joined[rank] = Some(visitor);
            missing -= 1;
        }
    };
    if let Some((error, answer)) = failure {
        joined.iter().flatten().for_each(|visitor| turn_away(visitor, &answer));
        return Err(error);
    }
    let mut blobs = vec![blob];
    blobs.extend(joined.iter_mut().flatten().map(|visitor| std::mem::take(&mut visitor.hello.payload)));
    let sending = Patience { deadline: Instant::now() + ATTEMPT, ..*patience };
    let mut visitors = joined.iter().flatten();
    while let Some(Visitor { stream, remote, hello }) = visitors.next() {
        let sent = Answer::Accepted
            .send(stream, &sending)
            .and_then(|()| blobs.iter().try_for_each(|blob| sending.write_block(stream, blob)));
        if let Err(trouble) = sent {
            let cause = format!("{trouble} (at {remote})");
            visitors.for_each(|visitor| turn_away(visitor, &Answer::Lost(hello.rank, cause.clone())));
            return Err(lost(hello.rank, cause));
        }
    }
    Ok(blobs)
}

fn late(who: String, deadline: Duration) -> Error {
    Error::Timeout { operation: "init".into(), waited: deadline, timeout: deadline, detail: who }
}

pub(super) fn lost(peer: usize, cause: String) -> Error {
    Error::PeerLost { operation: "init".into(), peer, cause }
}

/// Has the other side ended without a word? Who waits for us says nothing; whoever leaves in good order says goodbye.
pub(super) fn hung_up(stream: &TcpStream) -> bool {
    match recv(stream, &mut [0], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, heard)) => heard == 0,
        Err(errno) => !matches!(errno, Errno::AGAIN | Errno::INTR),
    }
}

fn turn_away(visitor: &Visitor, answer: &Answer) {
    // Also after an interrupt: the others shall not wait for us.
    let patience = Patience { deadline: Instant::now() + SLICE, keep_going: &|| true };
    if let Err(trouble) = answer.send(&visitor.stream, &patience) {
        log::warn!("telling rank {} at {}: {trouble}", visitor.hello.rank, visitor.remote);
    }
}

fn join(
    identity: &Identity,
    address: &str,
    hello: &Hello,
    deadline: Duration,
    patience: &Patience,
) -> Result<Vec<Vec<u8>>> {
    let (rank, size) = (identity.rank, identity.size);
    let mut pause = Duration::from_millis(20);
    let mut hint = "is rank 0 started, and is MASTER_ADDR the address of its host?";
    let stream = loop {
        let attempt = patience.at_most(ATTEMPT);
        let result = connect(address, &attempt).and_then(|stream| {
            handshake::introduce(&stream, identity, hello, &attempt)?;
            Ok(stream)
        });
        let cause = match result {
            Ok(stream) => break stream,
            Err(Failure::Interrupted) => return Err(interrupted()),
            Err(Failure::Fatal(Error::Configuration(message))) => {
                return Err(Error::Configuration(format!("init: rank {rank} and rank 0 at {address}: {message}")));
            }
            Err(Failure::Fatal(error)) => return Err(error),
            Err(failure @ (Failure::Transient(_) | Failure::Closed | Failure::OtherStep)) => failure.to_string(),
        };
        log::debug!("rank {rank}: joining at {address}: {cause}");
        if cause.contains("MDAS_SECRET") {
            // Worth more than what the last attempt says, when rank 0 has given up.
            hint = "is MDAS_SECRET set on all ranks, or on none?";
        }
        match patience.pause(pause) {
            Ok(()) => pause = (pause * 2).min(Duration::from_secs(1)),
            Err(Trouble::Interrupted) => return Err(interrupted()),
            Err(_) => {
                return Err(late(
                    format!("rank {rank} of {size} cannot join rank 0 at {address}: {cause}; {hint}"),
                    deadline,
                ));
            }
        }
    };
    let patience = Patience { deadline: patience.deadline + GRACE, ..*patience };
    let trouble = match Answer::receive(&stream, &patience) {
        Ok(Answer::Accepted) => match (0..size).map(|_| patience.read_block(&stream, MAX_BLOB_BYTES)).collect() {
            Ok(blobs) => return Ok(blobs),
            Err(trouble) => trouble,
        },
        Ok(Answer::Refused(why)) => return Err(Error::Configuration(format!("init: rank 0 at {address}: {why}"))),
        Ok(Answer::Late(who)) => return Err(late(who, deadline)),
        Ok(Answer::Lost(peer, cause)) => return Err(lost(peer, format!("{cause}, says rank 0"))),
        Err(trouble) => trouble,
    };
    Err(match trouble {
        Trouble::Interrupted => interrupted(),
        Trouble::Late => {
            late(format!("rank {rank} has joined rank 0 at {address}, but not all of the {size} ranks have"), deadline)
        }
        trouble => lost(0, format!("{trouble} (at {address})")),
    })
}

fn connect(address: &str, patience: &Patience) -> std::result::Result<TcpStream, Failure> {
    let (host, port) = split(address)?;
    let transient = |cause: std::io::Error| Failure::Transient(cause.to_string());
    let candidates: Vec<SocketAddr> = (host, port).to_socket_addrs().map_err(transient)?.collect();
    let mut failure = Failure::Transient(format!("{host} has no address"));
    for candidate in candidates {
        match patience.dial(candidate, None) {
            Ok(stream) => return Ok(stream),
            Err(trouble) => failure = trouble.into(),
        }
    }
    Err(failure)
}
