//! Completion queues, and the channel that wakes who waits for them.

use crate::context::Context;
use crate::error::{Error, Result, check};
use crate::live::{Counted, Kind};
use crate::memory::warn;
use crate::sys;
use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// Becomes readable when an armed queue gets a completion.
pub struct CompletionChannel {
    raw: NonNull<sys::CompChannel>,
    context: Arc<Context>,
    _counted: Counted,
}

/// Where completions of sends and receives arrive.
pub struct CompletionQueue {
    pub(crate) raw: NonNull<sys::Cq>,
    /// What wakes who waits.
    pub channel: Arc<CompletionChannel>,
    _counted: Counted,
}

// SAFETY: libibverbs' objects may be used from any thread.
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}
// SAFETY: as above.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

/// A work request that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// As posted.
    pub id: u64,
    /// Number of the queue pair.
    pub queue_pair: u32,
    /// How it ended.
    pub outcome: Outcome,
}

/// How a work request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// A send or write has been acknowledged by the peer's device.
    Sent,
    /// A message of `bytes` is in the receive buffer.
    Received {
        /// Length.
        bytes: u32,
        /// The number that came with it.
        immediate: u32,
    },
    /// The peer has written `bytes` to memory of ours; the receive was used up for the news.
    Written {
        /// Length.
        bytes: u32,
        /// The number that came with it.
        immediate: u32,
    },
    /// It failed, or was flushed after another failed.
    Failed {
        /// `enum ibv_wc_status`.
        status: i32,
        /// The vendor's code.
        vendor: u32,
    },
}

impl CompletionChannel {
    /// A new one, which never blocks.
    pub fn new(context: &Arc<Context>) -> Result<Arc<CompletionChannel>> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.ibv_create_comp_channel)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_create_comp_channel", &context.name))?;
        let _counted = Counted::new(Kind::Completion);
        let channel = CompletionChannel { raw, context: context.clone(), _counted };
        crate::context::never_block(channel.descriptor())?;
        Ok(Arc::new(channel))
    }

    /// For poll, epoll.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the channel is.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: made by ibv_create_comp_channel, given back once; its queues hold an Arc of it.
        let rc = unsafe { (self.context.library.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
        warn(rc, "ibv_destroy_comp_channel", &self.context.name);
    }
}

impl CompletionQueue {
    /// A queue for at least `entries` completions.
    pub fn new(channel: &Arc<CompletionChannel>, entries: usize) -> Result<Arc<CompletionQueue>> {
        let context = &channel.context;
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        // SAFETY: context and channel are open; vector 0 always exists.
        let raw = unsafe {
            let no_pointer_of_ours = std::ptr::null_mut();
            let (device, channel) = (context.raw.as_ptr(), channel.raw.as_ptr());
            (context.library.ibv_create_cq)(device, entries, no_pointer_of_ours, channel, 0)
        };
        let place = || format!("{}, {entries} entries", context.name);
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_create_cq", place()))?;
        Ok(Arc::new(CompletionQueue { raw, channel: channel.clone(), _counted: Counted::new(Kind::Completion) }))
    }

    fn context(&self) -> &Context {
        &self.channel.context
    }

    /// Appends what is complete, at most `most` completions; returns how many.
    pub fn poll(&self, most: usize, completions: &mut Vec<Completion>) -> Result<usize> {
        const BATCH: usize = 16;
        let mut taken = 0;
        while taken < most {
            let mut buffer = [sys::Wc::default(); BATCH];
            let room = BATCH.min(most - taken);
            // SAFETY: the queue is live, and so is its context's table of calls; the buffer has room.
            let count = unsafe {
                let Some(poll) = self.context().raw.as_ref().ops.poll_cq else {
                    return Err(self.missing("ibv_poll_cq"));
                };
                poll(self.raw.as_ptr(), room as i32, buffer.as_mut_ptr())
            };
            let Ok(count) = usize::try_from(count) else {
                return Err(Error::code("ibv_poll_cq", &self.context().name, count));
            };
            completions.extend(buffer.iter().take(count).map(Completion::from));
            taken += count;
            if count < room {
                break;
            }
        }
        Ok(taken)
    }

    /// The next completion makes the channel readable. One that came before may not: poll once more.
    pub fn arm(&self) -> Result<()> {
        // SAFETY: as for `poll`.
        let rc = unsafe {
            let Some(arm) = self.context().raw.as_ref().ops.req_notify_cq else {
                return Err(self.missing("ibv_req_notify_cq"));
            };
            arm(self.raw.as_ptr(), 0)
        };
        check(rc, "ibv_req_notify_cq", || self.context().name.clone())
    }

    /// Takes the events off the channel, which then is no longer readable.
    pub fn acknowledge(&self) -> Result<()> {
        let library = self.context().library;
        let (mut queue, mut pointer) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is open, and does not block; both pointers are ours to fill in.
        while unsafe { (library.ibv_get_cq_event)(self.channel.raw.as_ptr(), &raw mut queue, &raw mut pointer) } == 0 {
            // SAFETY: the queue that the event names is alive: it is the only one of this channel.
            unsafe { (library.ibv_ack_cq_events)(queue, 1) };
        }
        match std::io::Error::last_os_error() {
            again if again.kind() == std::io::ErrorKind::WouldBlock => Ok(()),
            other => Err(Error::code("ibv_get_cq_event", &self.context().name, other.raw_os_error().unwrap_or(0))),
        }
    }

    fn missing(&self, verb: &'static str) -> Error {
        Error::code(verb, &self.context().name, libc::EOPNOTSUPP)
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: made by ibv_create_cq, given back once; its queue pairs hold an Arc of it. All events are acknowledged
        // as soon as they are taken.
        let rc = unsafe { (self.context().library.ibv_destroy_cq)(self.raw.as_ptr()) };
        warn(rc, "ibv_destroy_cq", &self.context().name);
    }
}

impl From<&sys::Wc> for Completion {
    fn from(wc: &sys::Wc) -> Completion {
        let immediate = u32::from_be(wc.imm_data);
        let outcome = match (wc.status, wc.opcode) {
            (sys::WC_SUCCESS, sys::WC_RECV) => Outcome::Received { bytes: wc.byte_len, immediate },
            (sys::WC_SUCCESS, sys::WC_RECV_RDMA_WITH_IMM) => Outcome::Written { bytes: wc.byte_len, immediate },
            (sys::WC_SUCCESS, _) => Outcome::Sent,
            (status, _) => Outcome::Failed { status, vendor: wc.vendor_err },
        };
        Completion { id: wc.wr_id, queue_pair: wc.qp_num, outcome }
    }
}

/// A failed status in words, with what usually is behind it.
pub fn explain(status: i32) -> String {
    let words = match crate::load::library() {
        // SAFETY: a static string, for any status.
        Ok(library) => unsafe {
            let text = (library.ibv_wc_status_str)(status);
            if text.is_null() {
                format!("status {status}")
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        },
        Err(_) => format!("status {status}"),
    };
    let hint = match status {
        sys::WC_RETRY_EXC_ERR => {
            "the peer's device does not answer: its process or host is gone, its port is down, or the GIDs of the two ports \
             do not reach each other (MDAS_IB_GID_INDEX; firewall for UDP port 4791)"
        }
        sys::WC_RNR_RETRY_EXC_ERR => "the peer takes nothing more in",
        sys::WC_REM_ACCESS_ERR => "the peer's memory is not registered any more",
        sys::WC_LOC_PROT_ERR => "memory of this process is not registered any more",
        _ => return words,
    };
    format!("{words}: {hint}")
}
