//! Blocking sockets with one deadline for a whole exchange, and an eye on the caller's interrupt.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, Socket, Type};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How often an interrupt is looked for.
pub const SLICE: Duration = Duration::from_millis(100);

/// Until when to wait, and whether to go on at all.
#[derive(Clone, Copy)]
pub struct Patience<'a> {
    /// End of the whole exchange.
    pub deadline: Instant,
    /// Asked at least every 100 ms; false: give up.
    pub keep_going: &'a dyn Fn() -> bool,
}

/// Why an exchange ended early.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// The caller does not want to go on.
    #[error("interrupted")]
    Interrupted,
    /// The deadline is over.
    #[error("no answer in time")]
    Late,
    /// The other side ended the stream.
    #[error("the connection was closed")]
    Closed,
    /// The socket failed.
    #[error("{0}")]
    Failed(#[from] io::Error),
}

impl Patience<'_> {
    /// The next slice of waiting.
    pub fn slice(&self) -> Result<Duration, Trouble> {
        if !(self.keep_going)() {
            return Err(Trouble::Interrupted);
        }
        let rest = self.deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() { Err(Trouble::Late) } else { Ok(rest.min(SLICE)) }
    }

    /// The same, but over after `limit` at the latest.
    pub fn at_most(self, limit: Duration) -> Self {
        Patience { deadline: self.deadline.min(Instant::now() + limit), ..self }
    }

    /// Does nothing for a while.
    pub fn pause(&self, length: Duration) -> Result<(), Trouble> {
        let until = Instant::now() + length;
        loop {
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Ok(());
            }
            std::thread::sleep(self.slice()?.min(rest));
        }
    }

    /// Fills `into`.
    pub fn read(&self, mut stream: &TcpStream, mut into: &mut [u8]) -> Result<(), Trouble> {
        while !into.is_empty() {
            stream.set_read_timeout(Some(self.slice()?))?;
            match stream.read(into) {
                Ok(0) => return Err(Trouble::Closed),
                Ok(n) => into = &mut into[n..],
                Err(error) => ignore_timeout(error)?,
            }
        }
        Ok(())
    }

    /// Sends all of `bytes`.
    pub fn write(&self, mut stream: &TcpStream, mut bytes: &[u8]) -> Result<(), Trouble> {
        while !bytes.is_empty() {
            stream.set_write_timeout(Some(self.slice()?))?;
            match stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(error) => ignore_timeout(error)?,
            }
        }
        Ok(())
    }

    /// Sends a length and the bytes.
    pub fn write_block(&self, stream: &TcpStream, bytes: &[u8]) -> Result<(), Trouble> {
        self.write(stream, &(bytes.len() as u64).to_le_bytes())?;
        self.write(stream, bytes)
    }

    /// Reads a length and that many bytes; more than `most` is refused before memory is taken.
    pub fn read_block(&self, stream: &TcpStream, most: usize) -> Result<Vec<u8>, Trouble> {
        let mut length = [0; 8];
        self.read(stream, &mut length)?;
        let length = u64::from_le_bytes(length);
        if length > most as u64 {
            let message = format!("a message of {length} bytes (at most {most})");
            return Err(io::Error::new(ErrorKind::InvalidData, message).into());
        }
        let mut bytes = vec![0; length as usize];
        self.read(stream, &mut bytes)?;
        Ok(bytes)
    }

    /// Connects, from `source` if that is possible.
    pub fn dial(&self, to: SocketAddr, source: Option<IpAddr>) -> Result<TcpStream, Trouble> {
        let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
        if let Some(source) = source.filter(|ip| ip.is_ipv4() == to.is_ipv4() && !ip.is_unspecified()) {
            socket.bind(&SocketAddr::new(source, 0).into())?;
        }
        socket.set_nonblocking(true)?;
        match socket.connect(&to.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => loop {
                let slice = Timespec { tv_sec: 0, tv_nsec: self.slice()?.subsec_nanos().into() };
                match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&slice)) {
                    Ok(0) | Err(rustix::io::Errno::INTR) => {}
                    Ok(_) => break,
                    Err(errno) => return Err(io::Error::from(errno).into()),
                }
            },
            Err(error) => return Err(error.into()),
        }
        if let Some(error) = socket.take_error()? {
            return Err(error.into());
        }
        socket.set_nonblocking(false)?;
        socket.set_tcp_nodelay(true)?;
        Ok(socket.into())
    }
}

fn ignore_timeout(error: io::Error) -> Result<(), Trouble> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        _ => Err(error.into()),
    }
}
