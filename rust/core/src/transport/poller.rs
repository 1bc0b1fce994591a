//! Readiness of sockets, and a way to end the wait for it.

use crate::transport::Wake;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

const WAKER: u64 = u64::MAX;

/// Keeps nothing open: handles of a job that is over may still hold it.
struct EventFd(Weak<OwnedFd>);

impl Wake for EventFd {
    fn wake(&self) {
        if let Some(waker) = self.0.upgrade() {
            // It can fail only when the counter is full: then the wake-up is pending already.
            let _ = rustix::io::write(&*waker, &1u64.to_ne_bytes());
        }
    }
}

/// What became possible on a socket since it last was impossible (edge-triggered).
#[derive(Debug, Clone, Copy)]
pub struct Ready {
    pub index: usize,
    pub readable: bool,
    pub writable: bool,
    /// The peer has sent its end of the stream, or the connection failed.
    pub hangup: bool,
}

/// An epoll instance with a waker in it.
pub struct Poller {
    epoll: OwnedFd,
    waker: Arc<OwnedFd>,
}

impl Poller {
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKER), EventFlags::IN)?;
        Ok(Poller { epoll, waker: Arc::new(waker) })
    }

    pub fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(EventFd(Arc::downgrade(&self.waker)))
    }

    /// Closing the socket removes it again.
    pub fn add(&self, socket: impl AsFd, index: usize) -> io::Result<()> {
        let interest = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        Ok(epoll::add(&self.epoll, socket, EventData::new_u64(index as u64), interest)?)
    }

    /// Ends a wait as long as another poller has something.
    pub fn watch(&self, signal: impl AsFd, index: usize) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, signal, EventData::new_u64(index as u64), EventFlags::IN)?)
    }

    /// Readable when there is something to wait for no longer.
    pub fn signal(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Waits up to `timeout`; returns whether the waker was used.
    pub fn wait(&self, timeout: Duration, mut ready: impl FnMut(Ready)) -> io::Result<bool> {
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
        let mut buffer = [const { MaybeUninit::uninit() }; 64];
        let happened = match epoll::wait(&self.epoll, &mut buffer, Some(&timeout)) {
            Ok((happened, _)) => happened,
            Err(Errno::INTR) => &mut [],
            Err(errno) => return Err(errno.into()),
        };
        let mut woken = false;
        for event in happened {
            let (flags, data) = (event.flags, event.data);
            if data.u64() == WAKER {
                let mut count = [0; 8];
                woken = rustix::io::read(&*self.waker, &mut count).is_ok();
                continue;
            }
            let failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
            ready(Ready {
                index: data.u64() as usize,
                readable: failed || flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                writable: failed || flags.contains(EventFlags::OUT),
                hangup: failed || flags.contains(EventFlags::RDHUP),
            });
        }
        Ok(woken)
    }
}
