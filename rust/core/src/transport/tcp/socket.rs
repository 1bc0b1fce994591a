//! System calls on connected sockets.

use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

/// A host that vanished is noticed after this long without a sign of life from its kernel.
const SILENCE: Duration = Duration::from_secs(15);

/// Bytes of a bulk connection that may wait in the kernel, beyond those in flight. Enough to bridge
/// the milliseconds until a busy machine runs us again; they delay nobody, since the urgent
/// connection has a queue of its own.
const UNSENT_BYTES: libc::c_int = 2 << 20;

/// Prepares a connected stream for the transport.
pub fn prepare(stream: TcpStream, urgent: bool) -> io::Result<OwnedFd> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let socket = SockRef::from(&stream);
    let keepalive = TcpKeepalive::new().with_time(SILENCE / 3).with_interval(SILENCE / 3).with_retries(2);
    socket.set_tcp_keepalive(&keepalive)?;
    if urgent {
        // Not on bulk connections: a peer that merely computes and does not read (window zero) would
        // count as dead after this time.
        socket.set_tcp_user_timeout(Some(SILENCE))?;
    } else {
        set(&stream, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, &UNSENT_BYTES)?;
    }
    Ok(stream.into())
}

fn set<T: Copy>(socket: &impl AsRawFd, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: `value` is a live T of the length that we pass; the kernel only reads it.
    let rc = unsafe {
        let length = size_of::<T>() as libc::socklen_t;
        libc::setsockopt(socket.as_raw_fd(), level, name, std::ptr::from_ref(value).cast(), length)
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Limits what the kernel sends on this connection, in bytes per second (infinity: no limit). No `fq`
/// queue is needed: TCP paces itself.
pub fn set_pacing_rate(socket: &OwnedFd, bytes_per_second: f64) -> io::Result<()> {
    // An `unsigned long` for the kernel, in which all ones mean no limit: what infinity saturates to.
    set(socket, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, &(bytes_per_second as libc::c_ulong))
}

/// Says that nothing more comes from us.
pub fn shutdown_write(socket: &OwnedFd) -> io::Result<()> {
    SockRef::from(socket).shutdown(std::net::Shutdown::Write)
}

/// Receives into the pieces, in order. `Ok(0)` is the end of the stream.
///
/// # Safety
/// Every piece is writable memory of its length that nobody else uses during the call.
pub unsafe fn receive(socket: &OwnedFd, pieces: &mut [libc::iovec]) -> io::Result<usize> {
    // SAFETY: the caller vouches for the pieces; the kernel writes nothing beyond them.
    let n = unsafe { libc::readv(socket.as_raw_fd(), pieces.as_ptr(), pieces.len() as libc::c_int) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Sends from the pieces, in order. Never raises SIGPIPE.
///
/// # Safety
/// Every piece is readable memory of its length, alive during the call.
pub unsafe fn send(socket: &OwnedFd, pieces: &mut [libc::iovec]) -> io::Result<usize> {
    // SAFETY: all-zero bytes are a valid msghdr (null pointers, lengths of zero).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: `message` points to `pieces`, for which the caller vouches; the kernel only reads them.
    let n = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// The head of Linux's `struct tcp_info`, as far as we use it (complete since Linux 4.9; libc's ends before `pacing_rate`).
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct TcpInfo {
    flags: [u8; 8],
    words: [u32; 24],
    pacing_rate: u64,
    max_pacing_rate: u64,
    /// Bytes that the peer's kernel has confirmed, ever.
    pub bytes_acked: u64,
    bytes_received: u64,
    segments: [u32; 2],
    /// Bytes in the kernel that were never sent.
    pub notsent_bytes: u32,
    /// Smallest round trip of the last minutes, in microseconds.
    pub min_rtt: u32,
}

impl TcpInfo {
    /// Smoothed round trip, in microseconds.
    pub fn rtt(&self) -> u32 {
        self.words[15]
    }
}

/// What the kernel knows about a connection.
pub fn info(socket: &OwnedFd) -> io::Result<TcpInfo> {
    let mut info = TcpInfo::default();
    let mut length = size_of::<TcpInfo>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into `info`, whose fields are all integers.
    let rc = unsafe {
        let into = std::ptr::from_mut(&mut info).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, into, &mut length)
    };
    if rc == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}
