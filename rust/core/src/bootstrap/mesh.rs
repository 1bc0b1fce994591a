//! The mesh: every rank connected with every other.
//!
//! Rank i dials every rank below it; who is dialed knows from the hello which connection it is. Everybody listened before
//! the addresses were handed out, and listens until all its connections are made: a rank that refuses one that is still
//! missing is gone.

use super::handshake::{self, Answer, Failure, Hello, Identity, Purpose};
use super::listener::{Listener, Visitor};
use super::rendezvous::{hung_up, interrupted, lost, name};
use super::wire::{Patience, SLICE, Trouble};
use crate::error::{Error, Result};
use crate::transport::tcp::Streams;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Ranks that are dialed at the same time.
const DIALERS: usize = 8;

/// Connecting and greeting: if it takes longer, try again.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Who has not dialed us after so long is looked for, one rank at a time.
const LOOK_AFTER: Duration = Duration::from_secs(1);

/// What the dialers report.
enum Report {
    Connected {
        peer: usize,
        slot: usize,
        stream: TcpStream,
    },
    /// It will be tried again.
    Failing {
        peer: usize,
        cause: String,
    },
    Fatal(Error),
}

/// Connects this rank with all others: `addresses[r]` is where rank r's [`Listener`] is.
///
/// `configuration` says in words what must be equal on all ranks. `keep_going` is asked at least
/// every 100 ms, from this thread; false ends the wait with [`Error::Closed`]. The listener is closed.
///
/// # Errors
/// [`Error::Timeout`] names the ranks that are missing and why, [`Error::PeerLost`] one that is gone,
/// [`Error::Configuration`] what differs.
pub fn connect(
    listener: Listener,
    addresses: &[SocketAddr],
    configuration: &str,
    bulk_connections: usize,
    deadline: Duration,
    keep_going: &dyn Fn() -> bool,
) -> Result<Vec<Option<Streams>>> {
    let identity = listener.identity().clone();
    let Identity { rank, size, .. } = identity;
    if addresses.len() != size || rank >= size {
        let addresses = addresses.len();
        return Err(Error::Invalid(format!("init: rank {rank} of {size} with {addresses} addresses")));
    }
    let configuration = format!("{configuration} bulk_connections={bulk_connections}");
    let slots = 1 + bulk_connections;
    let patience = Patience { deadline: Instant::now() + deadline, keep_going };
    let stopped = AtomicBool::new(false);
    let next = AtomicUsize::new(0);
    let dialing =
        Dialing { identity: &identity, addresses, source: listener.address(), configuration: &configuration, slots };
    let (reports, inbox) = channel();
    let mut mesh = Mesh::new(rank, size, slots);

    thread::scope(|scope| -> Result<()> {
        for _ in 0..DIALERS.min(rank) {
            let (reports, dialing, stopped, next) = (reports.clone(), &dialing, &stopped, &next);
            let deadline = patience.deadline;
            scope.spawn(move || {
                let keep_going = || !stopped.load(Ordering::Relaxed);
                let patience = Patience { deadline, keep_going: &keep_going };
                for peer in
                    std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed)).take_while(|peer| *peer < rank)
                {
                    dialing.all_of(peer, &patience, &reports);
                }
            });
        }
        let result = mesh.fill(&listener, &configuration, addresses, deadline, &patience, &inbox);
        stopped.store(true, Ordering::Relaxed);
        result
    })?;
    drop(listener);
    Ok(mesh.streams())
}

struct Dialing<'a> {
    identity: &'a Identity,
    addresses: &'a [SocketAddr],
    source: SocketAddr,
    configuration: &'a str,
    slots: usize,
}

impl Dialing<'_> {
    fn all_of(&self, peer: usize, patience: &Patience, reports: &Sender<Report>) {
        for slot in 0..self.slots {
            let report = loop {
                match self.once(peer, slot, patience) {
                    Ok(stream) => break Report::Connected { peer, slot, stream },
                    Err(Failure::Interrupted) => return,
                    Err(Failure::Fatal(error)) => break Report::Fatal(error),
                    Err(failure @ (Failure::Transient(_) | Failure::Closed | Failure::OtherStep)) => {
                        let cause = failure.to_string();
                        let _ = reports.send(Report::Failing { peer, cause }); // nobody listens: it is over
                        if patience.pause(SLICE).is_err() {
                            return;
                        }
                    }
                }
            };
            let over = matches!(report, Report::Fatal(_));
            if reports.send(report).is_err() || over {
                return;
            }
        }
    }

    fn once(&self, peer: usize, slot: usize, patience: &Patience) -> std::result::Result<TcpStream, Failure> {
        let (rank, address) = (self.identity.rank, self.addresses[peer]);
        let hello = Hello {
            rank,
            size: self.identity.size,
            purpose: if slot == 0 { Purpose::Urgent } else { Purpose::Bulk },
            index: slot.saturating_sub(1),
            configuration: self.configuration.into(),
            payload: (peer as u32).to_le_bytes().to_vec(),
        };
        let attempt = patience.at_most(ATTEMPT);
        let stream = attempt.dial(address, Some(self.source.ip())).map_err(|trouble| match refused(&trouble) {
            true => Failure::Fatal(gone(peer, address)),
            false => trouble.into(),
        })?;
        handshake::introduce(&stream, self.identity, &hello, &attempt).map_err(|failure| match failure {
            Failure::Fatal(Error::Configuration(message)) => {
                Error::Configuration(format!("init: rank {rank} and rank {peer} at {address}: {message}")).into()
            }
            failure => failure,
        })?;
        // The peer answers when it, too, has come to `connect`.
        match Answer::receive(&stream, patience)? {
            Answer::Accepted => Ok(stream),
            Answer::Refused(why) | Answer::Late(why) | Answer::Lost(_, why) => {
                Err(Error::Configuration(format!("init: rank {peer} at {address}: {why}")).into())
            }
        }
    }
}

/// Nobody listens there.
fn refused(trouble: &Trouble) -> bool {
    matches!(trouble, Trouble::Failed(cause) if cause.kind() == ErrorKind::ConnectionRefused)
}

fn gone(peer: usize, address: SocketAddr) -> Error {
    let causes = "its process has ended or given up (its own output says why), or a firewall rejects the port \
                  (MDAS_PORT_RANGE=first-last keeps to ports that it lets through)";
    lost(peer, format!("connection refused at {address}: {causes}"))
}

/// The connections so far.
struct Mesh {
    rank: usize,
    /// Per rank: the urgent connection, then the bulk ones.
    table: Vec<Vec<Option<TcpStream>>>,
    missing: usize,
    /// Per rank: why it is not here yet.
    causes: Vec<Option<String>>,
}

impl Mesh {
    fn new(rank: usize, size: usize, slots: usize) -> Mesh {
        let row = || (0..slots).map(|_| None).collect();
        let table = (0..size).map(|_| row()).collect();
        Mesh { rank, table, missing: (size - 1) * slots, causes: vec![None; size] }
    }

    fn fill(
        &mut self,
        listener: &Listener,
        configuration: &str,
        addresses: &[SocketAddr],
        deadline: Duration,
        patience: &Patience,
        inbox: &std::sync::mpsc::Receiver<Report>,
    ) -> Result<()> {
        let start = Instant::now();
        let mut looked_for = self.rank;
        while self.missing > 0 {
            match patience.slice() {
                Ok(_) => {}
                Err(Trouble::Interrupted) => return Err(interrupted()),
                Err(_) => {
                    return Err(Error::Timeout {
                        operation: "init".into(),
                        waited: deadline,
                        timeout: deadline,
                        detail: self.who_is_missing(addresses),
                    });
                }
            }
            // Two sources and no select: short waits at the one, all that is there from the other.
            if let Some(visitor) = listener.next(Duration::from_millis(if self.rank == 0 { 100 } else { 2 })) {
                self.visit(visitor, configuration, patience)?;
            }
            for report in inbox.try_iter() {
                match report {
                    Report::Connected { peer, slot, stream } => {
                        self.table[peer][slot] = Some(stream);
                        self.missing -= 1;
                    }
                    Report::Failing { peer, cause } => self.causes[peer] = Some(cause),
                    Report::Fatal(error) => return Err(error),
                }
            }
            if let Some(peer) = (0..self.table.len()).find(|peer| self.table[*peer][0].as_ref().is_some_and(hung_up)) {
                let cause = "it was connected while others were waited for, and hung up";
                return Err(lost(peer, format!("{cause} (at {})", addresses[peer])));
            }
            if start.elapsed() > LOOK_AFTER {
                looked_for = self.look_for(looked_for, listener.address().ip(), addresses, patience)?;
            }
        }
        Ok(())
    }

    /// Is the next rank after `last` that has not dialed us still there? Returns which one was looked for.
    fn look_for(&self, last: usize, source: IpAddr, addresses: &[SocketAddr], patience: &Patience) -> Result<usize> {
        let silent = |peer: &usize| self.table[*peer].iter().all(Option::is_none);
        let mut ranks = (last + 1..self.table.len()).chain(self.rank + 1..=last);
        let Some(peer) = ranks.find(silent) else { return Ok(last) };
        match patience.at_most(SLICE).dial(addresses[peer], Some(source)) {
            Err(trouble) if refused(&trouble) => Err(gone(peer, addresses[peer])),
            // It listens, or its host does not answer: its own dialing, or the deadline, tells.
            _ => Ok(peer),
        }
    }

    /// Somebody of our job dials us.
    fn visit(&mut self, visitor: Visitor, configuration: &str, patience: &Patience) -> Result<()> {
        let Visitor { stream, remote, hello } = visitor;
        let (rank, size) = (self.rank, self.table.len());
        let slot = match hello.purpose {
            Purpose::Urgent => Some(0),
            Purpose::Bulk => Some(1 + hello.index),
            Purpose::Rendezvous => None,
        };
        let answering = patience.at_most(ATTEMPT);
        let peer = hello.rank;
        if (hello.size, hello.configuration.as_str()) != (size, configuration) {
            let why = format!(
                "rank {peer} at {remote} was started with world size {} and {:?}, rank {rank} with world size {size} and {configuration:?}",
                hello.size, hello.configuration
            );
            if let Err(trouble) = Answer::Refused(why.clone()).send(&stream, &answering) {
                log::warn!("telling rank {peer} at {remote}: {trouble}");
            }
            return Err(Error::Configuration(format!("init: {why}")));
        }
        let meant = hello.payload == (rank as u32).to_le_bytes();
        let free = slot.and_then(|slot| self.table.get_mut(peer)?.get_mut(slot)).filter(|place| place.is_none());
        match free {
            Some(place) if meant && peer > rank => match Answer::Accepted.send(&stream, &answering) {
                Ok(()) => {
                    *place = Some(stream);
                    self.missing -= 1;
                }
                Err(trouble) => self.causes[peer] = Some(trouble.to_string()), // it dials again
            },
            _ => {
                let (purpose, index) = (hello.purpose, hello.index);
                let why =
                    format!("no place for rank {peer} from {remote} ({purpose:?} {index}) at rank {rank} of {size}");
                log::warn!("{why}");
                if let Err(trouble) = Answer::Refused(why).send(&stream, &answering) {
                    log::warn!("telling rank {peer} at {remote}: {trouble}");
                }
            }
        }
        Ok(())
    }

    fn who_is_missing(&self, addresses: &[SocketAddr]) -> String {
        let absent = |rank: &usize| *rank != self.rank && self.table[*rank].iter().any(Option::is_none);
        let absent: Vec<usize> = (0..self.table.len()).filter(absent).collect();
        let because = |rank: &usize| {
            let cause = match &self.causes[*rank] {
                Some(cause) => cause.as_str(),
                None if *rank > self.rank => "it has not dialed us",
                None => "no answer",
            };
            format!("rank {rank} at {}: {cause}", addresses[*rank])
        };
        let details: Vec<String> = absent.iter().map(because).collect();
        let who = name(&absent, self.table.len());
        format!(
            "rank {} has no connection with {who} ({}); does a firewall stand between the hosts (MDAS_PORT_RANGE=first-last keeps to ports that it lets through)?",
            self.rank,
            details.join("; ")
        )
    }

    fn streams(self) -> Vec<Option<Streams>> {
        let complete = |row: Vec<Option<TcpStream>>| {
            let mut row = row.into_iter().flatten();
            Some(Streams { urgent: row.next()?, bulk: row.collect() })
        };
        self.table.into_iter().map(complete).collect()
    }
}
