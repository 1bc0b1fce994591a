//! What is used of libibverbs' C interface (`infiniband/verbs.h`), for 64-bit Linux.
//!
//! Sizes, offsets and values are compared with Debian's headers by `tests/layout.rs`. Structures that the library
//! makes and we only look into end after the last field that is read here; they are never made by us.

use libc::{c_char, c_int, c_uint, c_void};

/// A GID: 16 bytes in network order.
pub type Gid = [u8; 16];

/// `struct ibv_device`.
#[repr(C)]
pub struct Device {
    pub(crate) ops: [*mut c_void; 2],
    /// `enum ibv_node_type`.
    pub node_type: c_int,
    /// `enum ibv_transport_type`.
    pub transport_type: c_int,
    /// Of the kernel's device.
    pub name: [c_char; 64],
    /// Of the character device.
    pub dev_name: [c_char; 64],
    /// In sysfs.
    pub dev_path: [c_char; 256],
    /// In sysfs.
    pub ibdev_path: [c_char; 256],
}

/// `struct ibv_context_ops`: the calls that the header makes through the context.
#[repr(C)]
pub struct ContextOps {
    pub(crate) before_poll: [*mut c_void; 11],
    /// `ibv_poll_cq`.
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    /// `ibv_req_notify_cq`.
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    pub(crate) between: [*mut c_void; 12],
    /// `ibv_post_send`.
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    /// `ibv_post_recv`.
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    pub(crate) after: [*mut c_void; 5],
}

/// `struct ibv_context`.
#[repr(C)]
pub struct Context {
    /// Of which device.
    pub device: *mut Device,
    /// Calls.
    pub ops: ContextOps,
    pub(crate) cmd_fd: c_int,
    /// Readable when there is an asynchronous event.
    pub async_fd: c_int,
    /// Completion vectors.
    pub num_comp_vectors: c_int,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttr {
    /// Firmware version.
    pub fw_ver: [c_char; 64],
    /// In network order.
    pub node_guid: u64,
    /// In network order.
    pub sys_image_guid: u64,
    /// Bytes.
    pub max_mr_size: u64,
    /// Page sizes.
    pub page_size_cap: u64,
    /// Vendor.
    pub vendor_id: u32,
    /// Part.
    pub vendor_part_id: u32,
    /// Version.
    pub hw_ver: u32,
    /// Queue pairs.
    pub max_qp: c_int,
    /// Work requests of a queue.
    pub max_qp_wr: c_int,
    /// Flags.
    pub device_cap_flags: c_uint,
    /// Elements of a list.
    pub max_sge: c_int,
    /// Elements of a list for reads.
    pub max_sge_rd: c_int,
    /// Completion queues.
    pub max_cq: c_int,
    /// Entries of a completion queue.
    pub max_cqe: c_int,
    pub(crate) rest: [c_int; 22],
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    /// Ports.
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct PortAttr {
    /// `enum ibv_port_state`.
    pub state: c_int,
    /// `enum ibv_mtu`.
    pub max_mtu: c_int,
    /// `enum ibv_mtu`.
    pub active_mtu: c_int,
    /// Entries of the GID table.
    pub gid_tbl_len: c_int,
    /// Flags.
    pub port_cap_flags: u32,
    /// Bytes.
    pub max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    /// Local identifier.
    pub lid: u16,
    /// Of the subnet manager.
    pub sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    /// `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// `IBV_QPF_*`.
    pub flags: u8,
    pub(crate) port_cap_flags2: u16,
}

/// `struct ibv_gid_entry`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GidEntry {
    /// The GID.
    pub gid: Gid,
    /// Its index.
    pub gid_index: u32,
    /// Its port.
    pub port_num: u32,
    /// `enum ibv_gid_type`.
    pub gid_type: u32,
    /// Its network interface.
    pub ndev_ifindex: u32,
}

/// `struct ibv_pd`.
#[repr(C)]
pub struct Pd {
    pub(crate) _private: [u8; 0],
}

/// `struct ibv_mr`.
#[repr(C)]
pub struct Mr {
    pub(crate) context: *mut Context,
    pub(crate) pd: *mut Pd,
    pub(crate) addr: *mut c_void,
    pub(crate) length: usize,
    pub(crate) handle: u32,
    /// Key for local use.
    pub lkey: u32,
    /// Key for peers.
    pub rkey: u32,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub struct CompChannel {
    pub(crate) context: *mut Context,
    /// Readable when there is an event.
    pub fd: c_int,
}

/// `struct ibv_cq`.
#[repr(C)]
pub struct Cq {
    /// Whose.
    pub context: *mut Context,
}

/// `struct ibv_qp`.
#[repr(C)]
pub struct Qp {
    /// Whose.
    pub context: *mut Context,
    pub(crate) qp_context: *mut c_void,
    pub(crate) pd: *mut Pd,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut c_void,
    pub(crate) handle: u32,
    /// Its number.
    pub qp_num: u32,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Wc {
    /// As posted.
    pub wr_id: u64,
    /// `enum ibv_wc_status`.
    pub status: c_int,
    /// `enum ibv_wc_opcode`; undefined unless successful.
    pub opcode: c_int,
    /// The vendor's word.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// In network order.
    pub imm_data: u32,
    /// Which queue pair.
    pub qp_num: u32,
    pub(crate) src_qp: u32,
    /// `IBV_WC_*` flags.
    pub wc_flags: c_uint,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Sge {
    /// Address.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

/// `struct ibv_send_wr`, with the variant for RDMA of its union.
#[repr(C)]
pub struct SendWr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next one of a list.
    pub next: *mut SendWr,
    /// What.
    pub sg_list: *mut Sge,
    /// Elements of it.
    pub num_sge: c_int,
    /// `IBV_WR_*`.
    pub opcode: c_int,
    /// `IBV_SEND_*`.
    pub send_flags: c_uint,
    /// In network order.
    pub imm_data: u32,
    /// Where.
    pub remote_addr: u64,
    /// Key of that.
    pub rkey: u32,
    pub(crate) rest: [u64; 9],
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub struct RecvWr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next one of a list.
    pub next: *mut RecvWr,
    /// Where to.
    pub sg_list: *mut Sge,
    /// Elements of it.
    pub num_sge: c_int,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpCap {
    /// Requests of the send queue.
    pub max_send_wr: u32,
    /// Requests of the receive queue.
    pub max_recv_wr: u32,
    /// Elements of a list.
    pub max_send_sge: u32,
    /// Elements of a list.
    pub max_recv_sge: u32,
    /// Bytes.
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub struct QpInitAttr {
    /// Ours.
    pub qp_context: *mut c_void,
    /// Where completions of sends go.
    pub send_cq: *mut Cq,
    /// Where completions of receives go.
    pub recv_cq: *mut Cq,
    /// None.
    pub srq: *mut c_void,
    /// What is asked for, and then what there is.
    pub cap: QpCap,
    /// `IBV_QPT_*`.
    pub qp_type: c_int,
    /// Whether all sends are signalled.
    pub sq_sig_all: c_int,
}

/// `struct ibv_global_route`. (A GID is two 64-bit numbers in C, too.)
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub struct GlobalRoute {
    /// Destination.
    pub dgid: Gid,
    /// Flow.
    pub flow_label: u32,
    /// Source.
    pub sgid_index: u8,
    /// Hops.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AhAttr {
    /// Global route.
    pub grh: GlobalRoute,
    /// Destination's LID.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Path bits.
    pub src_path_bits: u8,
    /// Rate.
    pub static_rate: u8,
    /// Is there a global route header?
    pub is_global: u8,
    /// Our port.
    pub port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpAttr {
    /// `IBV_QPS_*`.
    pub qp_state: c_int,
    pub(crate) cur_qp_state: c_int,
    /// `IBV_MTU_*`.
    pub path_mtu: c_int,
    pub(crate) path_mig_state: c_int,
    pub(crate) qkey: u32,
    /// First packet that we expect.
    pub rq_psn: u32,
    /// First packet that we send.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub dest_qp_num: u32,
    /// `IBV_ACCESS_*`.
    pub qp_access_flags: c_uint,
    pub(crate) cap: QpCap,
    /// The way to the peer.
    pub ah_attr: AhAttr,
    pub(crate) alt_ah_attr: AhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    /// Reads that we have under way.
    pub max_rd_atomic: u8,
    /// Reads that the peer has.
    pub max_dest_rd_atomic: u8,
    /// Code of the time that a sender waits when we have no receive posted.
    pub min_rnr_timer: u8,
    /// Port.
    pub port_num: u8,
    /// 4.096 us * 2^timeout.
    pub timeout: u8,
    /// Retries.
    pub retry_cnt: u8,
    /// Retries while the receiver is not ready; 7: for ever.
    pub rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// `struct ibv_async_event`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AsyncEvent {
    /// A queue pair, a port's number, ..., by type.
    pub element: *mut c_void,
    /// `IBV_EVENT_*`.
    pub event_type: c_int,
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: c_int = $value;)*
        /// All constants by their C names, for the comparison with the headers.
        pub const CONSTANTS: &[(&str, c_int)] = &[$((concat!("IBV_", stringify!($name)), $name)),*];
    };
}

constants! {
    /// Queue pair state.
    QPS_INIT = 1;
    /// Queue pair state.
    QPS_RTR = 2;
    /// Queue pair state.
    QPS_RTS = 3;
    /// Queue pair state.
    QPS_ERR = 6;
    /// Reliable connection.
    QPT_RC = 2;
    /// Attribute.
    QP_STATE = 1 << 0;
    /// Attribute.
    QP_ACCESS_FLAGS = 1 << 3;
    /// Attribute.
    QP_PKEY_INDEX = 1 << 4;
    /// Attribute.
    QP_PORT = 1 << 5;
    /// Attribute.
    QP_AV = 1 << 7;
    /// Attribute.
    QP_PATH_MTU = 1 << 8;
    /// Attribute.
    QP_TIMEOUT = 1 << 9;
    /// Attribute.
    QP_RETRY_CNT = 1 << 10;
    /// Attribute.
    QP_RNR_RETRY = 1 << 11;
    /// Attribute.
    QP_RQ_PSN = 1 << 12;
    /// Attribute.
    QP_MAX_QP_RD_ATOMIC = 1 << 13;
    /// Attribute.
    QP_MIN_RNR_TIMER = 1 << 15;
    /// Attribute.
    QP_SQ_PSN = 1 << 16;
    /// Attribute.
    QP_MAX_DEST_RD_ATOMIC = 1 << 17;
    /// Attribute.
    QP_DEST_QPN = 1 << 20;
    /// The kernel copies registered pages for a forked child.
    FORK_UNNEEDED = 2;
    /// Access.
    ACCESS_LOCAL_WRITE = 1;
    /// Access.
    ACCESS_REMOTE_WRITE = 1 << 1;
    /// Access: writes may become visible in any order, all before the completion.
    ACCESS_RELAXED_ORDERING = 1 << 20;
    /// Operation.
    WR_RDMA_WRITE_WITH_IMM = 1;
    /// Operation.
    WR_SEND_WITH_IMM = 3;
    /// Flag.
    SEND_SIGNALED = 1 << 1;
    /// Flag.
    SEND_INLINE = 1 << 3;
    /// Status.
    WC_SUCCESS = 0;
    /// Status.
    WC_LOC_PROT_ERR = 4;
    /// Status.
    WC_WR_FLUSH_ERR = 5;
    /// Status.
    WC_REM_ACCESS_ERR = 10;
    /// Status.
    WC_REM_OP_ERR = 11;
    /// Status.
    WC_RETRY_EXC_ERR = 12;
    /// Status.
    WC_RNR_RETRY_EXC_ERR = 13;
    /// What was completed.
    WC_SEND = 0;
    /// What was completed.
    WC_RDMA_WRITE = 1;
    /// What was completed.
    WC_RECV = 1 << 7;
    /// What was completed.
    WC_RECV_RDMA_WITH_IMM = (1 << 7) + 1;
    /// State of a port.
    PORT_NOP = 0;
    /// State of a port.
    PORT_DOWN = 1;
    /// State of a port.
    PORT_INIT = 2;
    /// State of a port.
    PORT_ARMED = 3;
    /// State of a port.
    PORT_ACTIVE = 4;
    /// State of a port.
    PORT_ACTIVE_DEFER = 5;
    /// Link layer.
    LINK_LAYER_INFINIBAND = 1;
    /// Link layer.
    LINK_LAYER_ETHERNET = 2;
    /// Flag of a port.
    QPF_GRH_REQUIRED = 1;
    /// Type of a GID.
    GID_TYPE_IB = 0;
    /// Type of a GID.
    GID_TYPE_ROCE_V1 = 1;
    /// Type of a GID.
    GID_TYPE_ROCE_V2 = 2;
    /// Transport.
    TRANSPORT_IB = 0;
    /// Transport.
    TRANSPORT_IWARP = 1;
    /// MTU code.
    MTU_256 = 1;
    /// MTU code.
    MTU_4096 = 5;
    /// Event.
    EVENT_CQ_ERR = 0;
    /// Event.
    EVENT_QP_FATAL = 1;
    /// Event.
    EVENT_QP_REQ_ERR = 2;
    /// Event.
    EVENT_QP_ACCESS_ERR = 3;
    /// Event.
    EVENT_QP_LAST_WQE_REACHED = 16;
    /// Event.
    EVENT_DEVICE_FATAL = 8;
    /// Event.
    EVENT_PORT_ACTIVE = 9;
    /// Event.
    EVENT_PORT_ERR = 10;
}
