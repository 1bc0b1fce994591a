//! What a host's RDMA devices look like, as plain data: read from libibverbs and sysfs by `context`, judged by
//! `choose`, printed by `mdas doctor`. Nothing in here calls anything.

use std::fmt;
use std::net::Ipv6Addr;

/// One RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// "mlx5_0", "rxe0", ...
    pub name: String,
    /// What it speaks on the wire.
    pub protocol: Protocol,
    /// Node GUID, in the order of its bytes on the wire.
    pub guid: u64,
    /// Firmware's version, "" where the device has none to tell.
    pub firmware: String,
    /// NUMA node that it is attached to; `None` where sysfs does not know (it says -1, or the device is virtual).
    pub numa_node: Option<u32>,
    /// Its place in sysfs, from the host bridge to the device: `pci0000:3a/0000:3a:00.0/0000:3b:00.0`.
    /// `None` for one that is not on a PCI bus, such as Soft-RoCE.
    pub pci_path: Option<String>,
    /// In the order of their numbers.
    pub ports: Vec<Port>,
    /// Why it cannot be opened, or asked for what it has: then there are no ports either.
    pub fault: Option<String>,
}

/// What a device speaks (`ibv_transport_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// InfiniBand, or RoCE: InfiniBand's packets over Ethernet.
    InfiniBand,
    /// RDMA over TCP. Its connections are made by another library (librdmacm) only.
    Iwarp,
    /// Something of a vendor's own, without the connections that mdas needs.
    Other,
}

/// One port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// From 1 on.
    pub number: u8,
    /// Only an active one carries data.
    pub state: PortState,
    /// What its packets travel in.
    pub link_layer: LinkLayer,
    /// Local identifier that the subnet manager gave it; 0 for none, as on Ethernet.
    pub lid: u16,
    /// LID of the subnet manager; 0 for none, as on Ethernet.
    pub sm_lid: u16,
    /// Does the port insist on a global route header (`IBV_QPF_GRH_REQUIRED`)? Always so on Ethernet, whether the
    /// flag is set or not.
    pub grh_required: bool,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096.
    pub active_mtu: u32,
    /// Largest message in bytes.
    pub max_msg_size: u32,
    /// Speed in Mbit/s as sysfs tells it (`rate`); 0 where it does not.
    pub mbit_per_s: u32,
    /// The entries of its GID table that are in use, in the order of their indices.
    pub gids: Vec<Gid>,
}

/// State of a port (`ibv_port_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// No change of state: the driver does not say.
    Unknown,
    /// No cable, or the other end is off, or the interface is down.
    Down,
    /// The link is up, but no subnet manager has configured it.
    Init,
    /// A subnet manager is at it.
    Armed,
    /// It carries data.
    Active,
    /// It was active, and its link is failing.
    ActiveDefer,
}

/// What a port's packets travel in (`link_layer`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// A fabric with LIDs and a subnet manager. Also what drivers mean that do not say.
    InfiniBand,
    /// RoCE.
    Ethernet,
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gid {
    /// Its index in the table.
    pub index: u32,
    /// The 16 bytes, in the order in which they travel.
    pub bytes: [u8; 16],
    /// What packets from it look like.
    pub kind: GidKind,
    /// The network interface that it belongs to, on Ethernet.
    pub interface: Option<String>,
}

/// Type of a GID (`ibv_gid_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// InfiniBand's packets right in Ethernet frames: within one Ethernet only.
    RoceV1,
    /// InfiniBand's packets in UDP.
    RoceV2,
}

impl Device {
    /// One of which nothing but its name is known.
    pub fn faulty(name: String, fault: String) -> Device {
        Device {
            name,
            protocol: Protocol::Other,
            guid: 0,
            firmware: String::new(),
            numa_node: None,
            pci_path: None,
            ports: Vec::new(),
            fault: Some(fault),
        }
    }
}

impl Gid {
    /// The 16 bytes as what they are an address of. An IPv4 address is mapped: `::ffff:10.0.0.1`.
    pub fn address(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.bytes)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Protocol::InfiniBand => "InfiniBand",
            Protocol::Iwarp => "iWARP",
            Protocol::Other => "a vendor's own",
        })
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PortState::Unknown => "unknown",
            PortState::Down => "down",
            PortState::Init => "initializing",
            PortState::Armed => "armed",
            PortState::Active => "active",
            PortState::ActiveDefer => "failing",
        })
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LinkLayer::InfiniBand => "InfiniBand",
            LinkLayer::Ethernet => "Ethernet",
        })
    }
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            GidKind::InfiniBand => "InfiniBand",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::RoceV2 => "RoCE v2",
        })
    }
}
