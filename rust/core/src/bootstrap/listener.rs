//! Accepts connections and lets in only those that prove that they belong to the job.

use super::handshake::{self, Failure, Hello, Identity};
use super::wire::Patience;
use crate::error::{Error, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A stranger may keep us busy this long.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// A quick rank may be a step of joining ahead of us for as long as this; for longer, and something is wrong.
const AHEAD: Duration = Duration::from_secs(2);

/// Handshakes at the same time; further connections wait in the kernel's queue.
const PENDING: usize = 64;

/// A process of the job that has introduced itself and waits for an answer.
#[derive(Debug)]
pub struct Visitor {
    /// The connection.
    pub stream: TcpStream,
    /// Where it comes from.
    pub remote: SocketAddr,
    /// What it said.
    pub hello: Hello,
}

/// A listening socket with its thread. Closed when dropped.
pub struct Listener {
    identity: Identity,
    address: SocketAddr,
    socket: Arc<TcpListener>,
    stopped: Arc<AtomicBool>,
    visitors: Receiver<Visitor>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Listens at `ip`, on a port of the range (inclusive; `None`: any free port).
    pub fn open(ip: IpAddr, port_range: Option<(u16, u16)>, identity: Identity) -> Result<Listener> {
        let (first, last) = port_range.unwrap_or((0, 0));
        let count = u32::from(last.saturating_sub(first)) + 1;
        let mut result = Err(std::io::Error::other("an empty range of ports"));
        // Ranks of one node start at different ports, so that they rarely collide.
        for k in 0..if first <= last { count } else { 0 } {
            let port = first + ((identity.rank as u32 + k) % count) as u16;
            result = TcpListener::bind((ip, port));
            if result.is_ok() {
                break;
            }
        }
        let (place, hint) = match port_range {
            Some(_) => (format!("{ip}, ports {first} to {last}"), "; a wider MDAS_PORT_RANGE? one port per rank"),
            None => (ip.to_string(), ""),
        };
        let socket =
            result.map_err(|cause| Error::system(format!("init: listening at {place}"), format!("{cause}{hint}")))?;
        Listener::start(socket, identity)
    }

    /// Listens at exactly this port; at all addresses of the host unless `host` is a loopback address.
    pub fn open_at(host: &str, port: u16, identity: Identity) -> Result<Listener> {
        let any: Vec<IpAddr> = match host.parse::<IpAddr>() {
            Ok(ip) if ip.is_loopback() => vec![ip],
            Ok(IpAddr::V4(_)) => vec![Ipv4Addr::UNSPECIFIED.into()],
            // An IPv6 socket takes IPv4 connections as well, where the host has IPv6 at all.
            _ => vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()],
        };
        let mut result = Err(std::io::Error::other("no address"));
        for ip in any {
            result = TcpListener::bind((ip, port));
            match &result {
                Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
                Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {}
                _ => break,
            }
        }
        let hint = "another job on this host? set another MASTER_PORT";
        let socket = result.map_err(|cause| match cause.raw_os_error() {
            Some(libc::EADDRINUSE) => {
                Error::system(format!("init: listening at {host}:{port}"), format!("{cause}; {hint}"))
            }
            _ => Error::system(format!("init: listening at {host}:{port}"), cause),
        })?;
        Listener::start(socket, identity)
    }

    fn start(socket: TcpListener, identity: Identity) -> Result<Listener> {
        let system = |cause| Error::system("init: listening", cause);
        let address = socket.local_addr().map_err(system)?;
        let (socket, stopped) = (Arc::new(socket), Arc::new(AtomicBool::new(false)));
        let (send, visitors) = channel();
        let thread = {
            let (socket, stopped, identity) = (socket.clone(), stopped.clone(), Arc::new(identity.clone()));
            let run = move || accept_loop(&socket, &stopped, &identity, &send);
            thread::Builder::new().name("mdas-listener".into()).spawn(run).map_err(system)?
        };
        Ok(Listener { identity, address, socket, stopped, visitors, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Who listens.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The next process of the job, if one comes within `wait`.
    pub fn next(&self, wait: Duration) -> Option<Visitor> {
        self.visitors.recv_timeout(wait).ok()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        // Wakes the thread out of accept(2).
        let woken = socket2::SockRef::from(&*self.socket).shutdown(Shutdown::Both);
        if let (Some(thread), Ok(())) = (self.thread.take(), woken) {
            let _ = thread.join(); // it has logged what went wrong
        }
    }
}

/// Counts running handshakes, and those that failed.
#[derive(Default)]
struct Gate {
    running: Mutex<usize>,
    left: Condvar,
    refused: AtomicU64,
    /// Since when ranks come that are at another step of joining.
    out_of_step: OnceLock<Instant>,
}

impl Gate {
    fn enter(&self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        while *running >= PENDING {
            running = self.left.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
        *running += 1;
    }

    fn leave(&self) {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.left.notify_one();
    }

    /// How loud to be about it. Other ranks look in to see whether we are there, and are a step ahead for a moment: that
    /// is nothing. The first strangers at the door are worth a warning each, then the 32nd, the 64th, ...: a port scan
    /// must not fill the log.
    fn level(&self, failure: &Failure) -> log::Level {
        let patient = || self.out_of_step.get_or_init(Instant::now).elapsed() < AHEAD;
        if matches!(failure, Failure::Closed) || (matches!(failure, Failure::OtherStep) && patient()) {
            return log::Level::Debug;
        }
        let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if refused <= 16 || refused.is_power_of_two() { log::Level::Warn } else { log::Level::Debug }
    }
}

fn accept_loop(socket: &TcpListener, stopped: &Arc<AtomicBool>, identity: &Arc<Identity>, visitors: &Sender<Visitor>) {
    let gate = Arc::new(Gate::default());
    while !stopped.load(Ordering::Acquire) {
        let (stream, remote) = match socket.accept() {
            Ok(accepted) => accepted,
            Err(_) if stopped.load(Ordering::Acquire) => return,
            Err(error) => {
                log::warn!("accepting connections: {error}");
                thread::sleep(Duration::from_millis(50)); // out of file descriptors, perhaps: not in a tight loop
                continue;
            }
        };
        gate.enter();
        let shared = (gate.clone(), stopped.clone(), identity.clone(), visitors.clone());
        let greet = move || {
            let (gate, stopped, identity, visitors) = shared;
            let keep_going = || !stopped.load(Ordering::Acquire);
            let patience = Patience { deadline: Instant::now() + HANDSHAKE, keep_going: &keep_going };
            match handshake::receive(&stream, &identity, &patience) {
                // Nobody listens any more when the receiver is gone: the visitor finds its connection closed.
                Ok(hello) => drop(visitors.send(Visitor { stream, remote, hello })),
                Err(Failure::Interrupted) => {}
                Err(failure) => {
                    log::log!(
                        gate.level(&failure),
                        "rank {}: closed a connection from {remote}: {failure}",
                        identity.rank
                    );
                }
            }
            gate.leave();
        };
        if let Err(error) = thread::Builder::new().name("mdas-handshake".into()).spawn(greet) {
            gate.leave();
            log::warn!("rank {}: no thread to talk to {remote}: {error}", identity.rank);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_a_step_ahead_is_nothing_to_warn_of_unless_it_stays_there() {
        let stranger = Failure::Transient("it does not speak mdas's protocol".into());
        let gate = Gate::default();
        assert_eq!(gate.level(&Failure::Closed), log::Level::Debug);
        assert_eq!(gate.level(&Failure::OtherStep), log::Level::Debug);
        assert_eq!(gate.level(&stranger), log::Level::Warn);

        let since = Instant::now().checked_sub(AHEAD).expect("the machine has been up for longer");
        let gate = Gate { out_of_step: since.into(), ..Gate::default() };
        assert_eq!(gate.level(&Failure::OtherStep), log::Level::Warn);
        assert_eq!(gate.level(&Failure::Closed), log::Level::Debug);
    }
}
