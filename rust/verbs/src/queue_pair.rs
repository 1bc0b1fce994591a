//! Reliable connections.

use crate::completion::CompletionQueue;
use crate::error::{Error, Result, check};
use crate::live::{Counted, Kind};
use crate::memory::{ProtectionDomain, warn};
use crate::sys;
use std::ptr::NonNull;
use std::sync::Arc;

/// One end of a reliable connection.
pub struct QueuePair {
    raw: NonNull<sys::Qp>,
    domain: Arc<ProtectionDomain>,
    _completions: Arc<CompletionQueue>,
    /// Longest message that may be sent inline, in bytes.
    pub inline_bytes: usize,
    _counted: Counted,
}

// SAFETY: libibverbs' objects may be used from any thread.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

/// How much a queue pair holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Sends and writes posted at a time.
    pub sends: u32,
    /// Receives posted at a time.
    pub receives: u32,
    /// Bytes of an inline message.
    pub inline_bytes: u32,
}

/// The way to the peer's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// Our port.
    pub port: u8,
    /// Our entry of its GID table; `None`: no global route header, the LID suffices.
    pub gid_index: Option<u8>,
    /// The peer's GID.
    pub gid: sys::Gid,
    /// The peer's LID; 0 on Ethernet.
    pub lid: u16,
    /// The peer's queue pair.
    pub queue_pair: u32,
    /// The first packet number that the peer sends.
    pub their_packet: u32,
    /// The first packet number that we send.
    pub our_packet: u32,
    /// Bytes: 256, 512, 1024, 2048 or 4096.
    pub mtu: u32,
    /// Traffic class (RoCE: type of service).
    pub traffic_class: u8,
    /// Service level.
    pub service_level: u8,
}

/// When a connection is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reliability {
    /// A packet is sent again after 4.096 us * 2^timeout, ...
    pub timeout: u8,
    /// ... so many times, at most 7.
    pub retries: u8,
}

/// After 0.64 ms a message is tried again for which the receiver had no room.
const RECEIVER_NOT_READY: u8 = 14;
/// For ever: a receiver without room is slow, not gone.
const FOR_EVER: u8 = 7;

impl QueuePair {
    /// A queue pair that is not connected yet.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        capacity: Capacity,
    ) -> Result<QueuePair> {
        let queue = completions.raw.as_ptr();
        let mut attributes = sys::QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: queue,
            recv_cq: queue,
            srq: std::ptr::null_mut(),
            cap: sys::QpCap {
                max_send_wr: capacity.sends,
                max_recv_wr: capacity.receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: capacity.inline_bytes,
            },
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        let context = &domain.context;
        // SAFETY: domain and queue are live, and of the same device.
        let raw = unsafe { (context.library.ibv_create_qp)(domain.raw.as_ptr(), &raw mut attributes) };
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::last("ibv_create_qp", format!("{}, {capacity:?}", context.name)))?;
        Ok(QueuePair {
            raw,
            domain: domain.clone(),
            _completions: completions.clone(),
            inline_bytes: attributes.cap.max_inline_data as usize,
            _counted: Counted::new(Kind::QueuePair),
        })
    }

    /// Its number, unique on the device.
    pub fn number(&self) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { self.raw.as_ref() }.qp_num
    }

    fn modify(&self, mut attributes: sys::QpAttr, mask: i32, step: &str) -> Result<()> {
        let context = &self.domain.context;
        // SAFETY: a live queue pair, and a struct of ours that is only read.
        let rc = unsafe { (context.library.ibv_modify_qp)(self.raw.as_ptr(), &raw mut attributes, mask) };
        check(rc, "ibv_modify_qp", || format!("{} queue pair {} ({step})", context.name, self.number())).map_err(
            |error| {
                error.with_hint(|errno| {
                    let gid = matches!(errno, libc::EINVAL | libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT);
                    (gid && step == "ready to receive").then(|| {
                        "the peer's GID cannot be reached from the chosen one: look at both in `mdas doctor`, and set \
                     MDAS_IB_GID_INDEX"
                            .into()
                    })
                })
            },
        )
    }

    /// From now on receives may be posted.
    pub fn initialize(&self, port: u8) -> Result<()> {
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            port_num: port,
            qp_access_flags: sys::ACCESS_REMOTE_WRITE as u32,
            ..Default::default()
        };
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        self.modify(attributes, mask, "initialize")
    }

    /// Connects with the peer's queue pair, which does the same. From now on sends may be posted.
    pub fn connect(&self, path: &Path, reliability: Reliability) -> Result<()> {
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_RTR,
            // 256 is code 1, and every further one twice as long.
            path_mtu: path.mtu.ilog2() as i32 - 7,
            dest_qp_num: path.queue_pair,
            rq_psn: path.their_packet,
            max_dest_rd_atomic: 1,
            min_rnr_timer: RECEIVER_NOT_READY,
            ah_attr: sys::AhAttr {
                grh: sys::GlobalRoute {
                    dgid: path.gid,
                    sgid_index: path.gid_index.unwrap_or(0),
                    hop_limit: 255,
                    traffic_class: path.traffic_class,
                    ..Default::default()
                },
                dlid: path.lid,
                sl: path.service_level,
                is_global: u8::from(path.gid_index.is_some()),
                port_num: path.port,
                ..Default::default()
            },
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER;
        self.modify(attributes, mask, "ready to receive")?;
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_RTS,
            sq_psn: path.our_packet,
            timeout: reliability.timeout,
            retry_cnt: reliability.retries,
            rnr_retry: FOR_EVER,
            max_rd_atomic: 1,
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_SQ_PSN
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY
            | sys::QP_MAX_QP_RD_ATOMIC;
        self.modify(attributes, mask, "ready to send")
    }

    /// Ends the connection: what is posted is flushed, and nothing more is taken from the peer.
    pub fn fail(&self) -> Result<()> {
        self.modify(sys::QpAttr { qp_state: sys::QPS_ERR, ..Default::default() }, sys::QP_STATE, "error")
    }

    /// Sends a message that is copied at once, at most [`QueuePair::inline_bytes`] long.
    pub fn send_inline(&self, id: u64, message: &[u8], immediate: u32, signalled: bool) -> Result<()> {
        assert!(message.len() <= self.inline_bytes, "{} bytes inline", message.len());
        let piece = sys::Sge { addr: message.as_ptr() as u64, length: message.len() as u32, lkey: 0 };
        let flags = sys::SEND_INLINE | if signalled { sys::SEND_SIGNALED } else { 0 };
        // SAFETY: inline data is copied before the call returns.
        unsafe { self.post(id, sys::WR_SEND_WITH_IMM, piece, flags, immediate, (0, 0)) }
    }

    /// Sends a message from registered memory; always signalled.
    ///
    /// # Safety
    /// The bytes are readable and not changed until the completion.
    pub unsafe fn send(&self, id: u64, piece: sys::Sge, immediate: u32) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.post(id, sys::WR_SEND_WITH_IMM, piece, sys::SEND_SIGNALED, immediate, (0, 0)) }
    }

    /// Writes registered memory to the peer's `(address, rkey)`, and tells it `immediate`; always signalled.
    ///
    /// # Safety
    /// As [`QueuePair::send`]. That the peer wants to be written to there is what the key stands for.
    pub unsafe fn write(&self, id: u64, piece: sys::Sge, immediate: u32, to: (u64, u32)) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.post(id, sys::WR_RDMA_WRITE_WITH_IMM, piece, sys::SEND_SIGNALED, immediate, to) }
    }

    /// # Safety
    /// As [`QueuePair::send`], but for inline data.
    unsafe fn post(
        &self,
        id: u64,
        opcode: i32,
        mut piece: sys::Sge,
        flags: i32,
        immediate: u32,
        to: (u64, u32),
    ) -> Result<()> {
        let mut request = sys::SendWr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: &raw mut piece,
            num_sge: i32::from(piece.length > 0),
            opcode,
            send_flags: flags as u32,
            imm_data: immediate.to_be(),
            remote_addr: to.0,
            rkey: to.1,
            rest: [0; 9],
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: queue pair and context are live; request and list are read before the call returns.
        let rc = unsafe {
            match self.raw.as_ref().context.as_ref().and_then(|context| context.ops.post_send) {
                Some(post) => post(self.raw.as_ptr(), &raw mut request, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        check(rc, "ibv_post_send", || format!("{} queue pair {}", self.domain.context.name, self.number()))
    }

    /// Gives the next message that comes `piece` to lie in (none, for writes with an immediate).
    ///
    /// # Safety
    /// The memory is writable, and nobody looks at it, until the completion, or until the queue pair is gone.
    pub unsafe fn receive(&self, id: u64, piece: Option<sys::Sge>) -> Result<()> {
        let mut list = piece.unwrap_or_default();
        let mut request = sys::RecvWr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: &raw mut list,
            num_sge: i32::from(piece.is_some()),
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: as in `post`.
        let rc = unsafe {
            match self.raw.as_ref().context.as_ref().and_then(|context| context.ops.post_recv) {
                Some(post) => post(self.raw.as_ptr(), &raw mut request, &raw mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        check(rc, "ibv_post_recv", || format!("{} queue pair {}", self.domain.context.name, self.number()))
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by ibv_create_qp, given back once. Afterwards the device neither reads nor writes for it.
        let rc = unsafe { (self.domain.context.library.ibv_destroy_qp)(self.raw.as_ptr()) };
        warn(rc, "ibv_destroy_qp", &self.domain.context.name);
    }
}
