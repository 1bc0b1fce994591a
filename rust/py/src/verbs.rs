//! What the host's RDMA devices look like, and which of them a rank would use.
#![expect(clippy::too_many_arguments, reason = "what a port has is listed once, and so are keyword arguments")]

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::Ipv6Addr;

use mdas_core::error::Error;
use mdas_core::transport::verbs::Options;
use mdas_verbs::choose::{Choice, Request, choose};
use mdas_verbs::live;
use mdas_verbs::table::{Device, Gid, GidKind, LinkLayer, Port, PortState, Protocol};
use pyo3::prelude::*;

use crate::errors;
use crate::join::ip;

/// An entry of a port's GID table.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "mdas._core")]
#[derive(Clone)]
pub(crate) struct VerbsGid {
    index: u32,
    address: String,
    kind: String,
    interface: Option<String>,
}

/// A port of an RDMA device.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "mdas._core")]
#[derive(Clone)]
pub(crate) struct VerbsPort {
    number: u8,
    state: String,
    link_layer: String,
    lid: u16,
    sm_lid: u16,
    grh_required: bool,
    active_mtu: u32,
    max_msg_size: u32,
    mbit_per_s: u32,
    gids: Vec<VerbsGid>,
}

/// An RDMA device.
#[pyclass(frozen, get_all, new = "from_fields", from_py_object, module = "mdas._core")]
#[derive(Clone)]
pub(crate) struct VerbsDevice {
    name: String,
    protocol: String,
    guid: u64,
    firmware: String,
    numa_node: Option<u32>,
    pci_path: Option<String>,
    ports: Vec<VerbsPort>,
    fault: Option<String>,
}

/// A device, port and GID that a rank uses, and why.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct VerbsChoice {
    choice: Choice,
}

#[pymethods]
impl VerbsChoice {
    #[getter]
    fn device(&self) -> &str {
        &self.choice.device
    }

    #[getter]
    fn port(&self) -> u8 {
        self.choice.port
    }

    #[getter]
    fn gid_index(&self) -> u32 {
        self.choice.gid_index
    }

    #[getter]
    fn gid(&self) -> String {
        Ipv6Addr::from(self.choice.gid).to_string()
    }

    #[getter]
    fn gid_kind(&self) -> String {
        self.choice.gid_kind.to_string()
    }

    #[getter]
    fn lid(&self) -> u16 {
        self.choice.lid
    }

    #[getter]
    fn mtu(&self) -> u32 {
        self.choice.mtu
    }

    /// In words.
    #[getter]
    fn why(&self) -> &str {
        &self.choice.why
    }

    /// What may not work as hoped.
    #[getter]
    fn warnings(&self) -> Vec<String> {
        self.choice.warnings.clone()
    }
}

/// Largest write: long enough for any link, short enough for a pipeline.
const CHUNK_BYTES: usize = 512 << 10;

/// How the transport "verbs" connects.
#[pyclass(frozen, module = "mdas._core")]
#[derive(Clone)]
pub(crate) struct VerbsOptions {
    pub(crate) rails: Vec<Choice>,
    /// A packet is sent again after 4.096 us * 2^timeout without an answer.
    pub(crate) timeout: u8,
    /// How often, before the connection fails.
    pub(crate) retry_count: u8,
    pub(crate) traffic_class: u8,
    pub(crate) service_level: u8,
    pub(crate) relaxed_ordering: bool,
}

#[pymethods]
impl VerbsOptions {
    #[new]
    fn new(
        rails: Vec<PyRef<'_, VerbsChoice>>,
        timeout: u8,
        retry_count: u8,
        traffic_class: u8,
        service_level: u8,
        relaxed_ordering: bool,
    ) -> Self {
        let rails = rails.iter().map(|rail| rail.choice.clone()).collect();
        Self { rails, timeout, retry_count, traffic_class, service_level, relaxed_ordering }
    }
}

const PROTOCOLS: [Protocol; 3] = [Protocol::InfiniBand, Protocol::Iwarp, Protocol::Other];
const STATES: [PortState; 6] =
    [PortState::Unknown, PortState::Down, PortState::Init, PortState::Armed, PortState::Active, PortState::ActiveDefer];
const LINK_LAYERS: [LinkLayer; 2] = [LinkLayer::InfiniBand, LinkLayer::Ethernet];
const KINDS: [GidKind; 3] = [GidKind::InfiniBand, GidKind::RoceV1, GidKind::RoceV2];

/// The one of `all` that is written so.
fn named<T: Display + Copy>(all: &[T], name: &str) -> Result<T, Error> {
    all.iter().copied().find(|one| one.to_string() == name).ok_or_else(|| {
        let known: Vec<String> = all.iter().map(T::to_string).collect();
        Error::Invalid(format!("{name:?} is not one of {}", known.join(", ")))
    })
}

impl From<Gid> for VerbsGid {
    fn from(gid: Gid) -> Self {
        let (address, kind) = (gid.address().to_string(), gid.kind.to_string());
        Self { index: gid.index, address, kind, interface: gid.interface }
    }
}

impl From<Port> for VerbsPort {
    fn from(port: Port) -> Self {
        Self {
            number: port.number,
            state: port.state.to_string(),
            link_layer: port.link_layer.to_string(),
            lid: port.lid,
            sm_lid: port.sm_lid,
            grh_required: port.grh_required,
            active_mtu: port.active_mtu,
            max_msg_size: port.max_msg_size,
            mbit_per_s: port.mbit_per_s,
            gids: port.gids.into_iter().map(VerbsGid::from).collect(),
        }
    }
}

impl From<Device> for VerbsDevice {
    fn from(device: Device) -> Self {
        Self {
            name: device.name,
            protocol: device.protocol.to_string(),
            guid: device.guid,
            firmware: device.firmware,
            numa_node: device.numa_node,
            pci_path: device.pci_path,
            ports: device.ports.into_iter().map(VerbsPort::from).collect(),
            fault: device.fault,
        }
    }
}

impl VerbsGid {
    fn table(&self) -> Result<Gid, Error> {
        let address = self.address.parse::<Ipv6Addr>();
        let address = address.map_err(|_| Error::Invalid(format!("{:?} is not an IPv6 address", self.address)))?;
        let kind = named(&KINDS, &self.kind)?;
        Ok(Gid { index: self.index, bytes: address.octets(), kind, interface: self.interface.clone() })
    }
}

impl VerbsPort {
    fn table(&self) -> Result<Port, Error> {
        Ok(Port {
            number: self.number,
            state: named(&STATES, &self.state)?,
            link_layer: named(&LINK_LAYERS, &self.link_layer)?,
            lid: self.lid,
            sm_lid: self.sm_lid,
            grh_required: self.grh_required,
            active_mtu: self.active_mtu,
            max_msg_size: self.max_msg_size,
            mbit_per_s: self.mbit_per_s,
            gids: self.gids.iter().map(VerbsGid::table).collect::<Result<_, _>>()?,
        })
    }
}

impl VerbsDevice {
    fn table(&self) -> Result<Device, Error> {
        Ok(Device {
            name: self.name.clone(),
            protocol: named(&PROTOCOLS, &self.protocol)?,
            guid: self.guid,
            firmware: self.firmware.clone(),
            numa_node: self.numa_node,
            pci_path: self.pci_path.clone(),
            ports: self.ports.iter().map(VerbsPort::table).collect::<Result<_, _>>()?,
            fault: self.fault.clone(),
        })
    }
}

impl VerbsOptions {
    /// For the transport.
    pub(crate) fn transport(&self) -> Options {
        Options {
            rails: self.rails.clone(),
            timeout: self.timeout,
            retry_count: self.retry_count,
            traffic_class: self.traffic_class,
            service_level: self.service_level,
            relaxed_ordering: self.relaxed_ordering,
            chunk_bytes: CHUNK_BYTES,
        }
    }
}

/// The RDMA devices of this host.
#[pyfunction]
pub(crate) fn verbs_devices(py: Python<'_>) -> PyResult<Vec<VerbsDevice>> {
    let found = py.detach(mdas_verbs::devices);
    let found = found.map_err(|error| errors::to_python(py, &Error::Configuration(error.to_string())))?;
    Ok(found.into_iter().map(VerbsDevice::from).collect())
}

/// Opens a device and registers `nbytes` of memory with it, to see whether a job could.
#[pyfunction]
pub(crate) fn try_verbs(py: Python<'_>, device: &str, nbytes: usize) -> PyResult<()> {
    let tried = py.detach(|| mdas_verbs::probe(device, nbytes));
    tried.map_err(|error| errors::to_python(py, &Error::Configuration(error.to_string())))
}

/// Objects of libibverbs that this process has, by kind: none but between `init` and `shutdown`.
#[pyfunction]
pub(crate) fn verbs_live() -> BTreeMap<&'static str, usize> {
    live::KINDS.iter().map(|&(kind, name)| (name, live::count(kind))).collect()
}

/// Does this process have anything that memory would be registered with?
#[pyfunction]
pub(crate) fn verbs_in_use() -> bool {
    live::count(live::Kind::ProtectionDomain) > 0
}

/// What a rank uses of `devices`, the best first, up to `rails` ports; the settings `wanted`, `port` and `gid_index` are those of MDAS_IB_DEVICE, _PORT and
/// _GID_INDEX, `route` is this host's address on the route to the peers.
#[pyfunction]
#[pyo3(signature = (devices, wanted=None, port=None, gid_index=None, route=None, local_rank=0, numa_node=None, gpu_path=None, rails=1))]
pub(crate) fn choose_verbs(
    py: Python<'_>,
    devices: Vec<VerbsDevice>,
    wanted: Option<String>,
    port: Option<u8>,
    gid_index: Option<u32>,
    route: Option<&str>,
    local_rank: usize,
    numa_node: Option<u32>,
    gpu_path: Option<String>,
    rails: usize,
) -> PyResult<Vec<VerbsChoice>> {
    let chosen = || {
        let route = route.map(ip).transpose()?;
        let request = Request { devices: wanted, port, gid_index, route, local_rank, numa_node, gpu_path, rails };
        let devices = devices.iter().map(VerbsDevice::table).collect::<Result<Vec<_>, _>>()?;
        choose(&devices, &request).map_err(Error::Configuration)
    };
    let chosen = chosen().map_err(|error| errors::to_python(py, &error))?;
    Ok(chosen.into_iter().map(|choice| VerbsChoice { choice }).collect())
}
