//! Devices: the list of them, and an open one.

use crate::error::{Error, Result, check};
use crate::live::{Counted, Kind};
use crate::load::{Library, library};
use crate::memory::warn;
use crate::sys;
use crate::table::{Device, Gid, GidKind, LinkLayer, Port, PortState, Protocol};
use std::ffi::{CStr, c_char};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

/// An open device.
pub struct Context {
    pub(crate) raw: NonNull<sys::Context>,
    pub(crate) library: &'static Library,
    /// "mlx5_0", "rxe0", ...
    pub name: String,
    _counted: Counted,
}

// SAFETY: libibverbs' objects may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What a device reports by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// A port carries data again.
    PortActive(u8),
    /// A port does not carry data any more.
    PortDown(u8),
    /// The queue pair of this number is broken.
    QueuePair(u32),
    /// The device is broken.
    Device,
    /// Of no consequence here; `enum ibv_event_type`.
    Other(i32),
}

/// All devices of this host, by name, with what libibverbs and sysfs tell of them. One that cannot be asked says why.
///
/// # Errors
/// If there is no libibverbs, or the kernel has no list of devices.
pub fn devices() -> Result<Vec<Device>> {
    let library = library().map_err(Error::Library)?;
    let mut found = Vec::new();
    for_each_device(library, |device, name| {
        let described = Context::from_device(library, device, &name).and_then(|context| context.describe(device));
        found.push(described.unwrap_or_else(|error| Device::faulty(name, error.to_string())));
        Ok(true)
    })?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Calls `visit` with every device and its name until it returns false.
fn for_each_device(
    library: &'static Library,
    mut visit: impl FnMut(*mut sys::Device, String) -> Result<bool>,
) -> Result<()> {
    let mut count = 0;
    // SAFETY: a number of ours to fill in.
    let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        let error = Error::last("ibv_get_device_list", "this host");
        return Err(
            error.with_hint(|errno| (errno == libc::ENOSYS).then(|| "the kernel has no RDMA (ib_uverbs)".into()))
        );
    }
    let mut result = Ok(());
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries, which live until it is freed.
        let (device, name) = unsafe {
            let device = *list.add(index);
            (device, text(&(*device).name))
        };
        match visit(device, name) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    // SAFETY: the list from above, freed once. Open contexts hold on to their devices.
    unsafe { (library.ibv_free_device_list)(list) };
    result
}

impl Context {
    /// Opens the device of that name.
    pub fn open(wanted: &str) -> Result<Arc<Context>> {
        let library = library().map_err(Error::Library)?;
        let (mut opened, mut names) = (None, Vec::new());
        for_each_device(library, |device, name| {
            if name == wanted {
                opened = Some(Context::from_device(library, device, &name)?);
                return Ok(false);
            }
            names.push(name);
            Ok(true)
        })?;
        match opened {
            Some(context) => {
                never_block(context.events())?;
                Ok(Arc::new(context))
            }
            None => {
                Err(Error::NotFound(format!("there is no RDMA device {wanted:?}; there are: {}", names.join(", "))))
            }
        }
    }

    fn from_device(library: &'static Library, device: *mut sys::Device, name: &str) -> Result<Context> {
        // SAFETY: a device of a list that is not freed yet.
        let raw = unsafe { (library.ibv_open_device)(device) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            let error = Error::last("ibv_open_device", name);
            error.with_hint(|errno| {
                (errno == libc::EACCES || errno == libc::EPERM).then(|| "no access to /dev/infiniband/uverbs*".into())
            })
        })?;
        Ok(Context { raw, library, name: name.into(), _counted: Counted::new(Kind::Context) })
    }

    fn describe(&self, device: *mut sys::Device) -> Result<Device> {
        // SAFETY: the device of this context, whose list is not freed yet.
        let (path, transport) = unsafe { (text(&(*device).ibdev_path), (*device).transport_type) };
        let path = Path::new(&path);
        let attributes = self.attributes()?;
        let ports = (1..=attributes.phys_port_cnt).map(|number| self.port(number, path)).collect::<Result<_>>()?;
        let sysfs = |file: &str| std::fs::read_to_string(path.join("device").join(file)).ok();
        Ok(Device {
            name: self.name.clone(),
            protocol: match transport {
                sys::TRANSPORT_IB => Protocol::InfiniBand,
                sys::TRANSPORT_IWARP => Protocol::Iwarp,
                _ => Protocol::Other,
            },
            guid: u64::from_be(attributes.node_guid),
            firmware: text(&attributes.fw_ver),
            numa_node: sysfs("numa_node").and_then(|node| node.trim().parse().ok()),
            pci_path: std::fs::canonicalize(path.join("device")).ok().and_then(|path| {
                let path = path.strip_prefix("/sys/devices").ok()?.to_str()?.to_owned();
                path.starts_with("pci").then_some(path)
            }),
            ports,
            fault: None,
        })
    }

    fn attributes(&self) -> Result<sys::DeviceAttr> {
        let mut attributes = std::mem::MaybeUninit::<sys::DeviceAttr>::zeroed();
        // SAFETY: an open context, and a struct of the layout that the library fills in.
        let rc = unsafe { (self.library.ibv_query_device)(self.raw.as_ptr(), attributes.as_mut_ptr()) };
        check(rc, "ibv_query_device", || self.name.clone())?;
        // SAFETY: plain numbers, for which all bits zero are a value, too.
        Ok(unsafe { attributes.assume_init() })
    }

    /// Largest number of requests in a queue of a queue pair, and of entries in a completion queue.
    pub fn limits(&self) -> Result<(usize, usize)> {
        let attributes = self.attributes()?;
        let size = |value: i32| usize::try_from(value).unwrap_or(0);
        Ok((size(attributes.max_qp_wr), size(attributes.max_cqe)))
    }

    fn port(&self, number: u8, path: &Path) -> Result<Port> {
        // The exported function fills in what the oldest headers have, which ends before `flags`.
        let mut attributes = sys::PortAttr::default();
        // SAFETY: an open context, and a struct that is at least as long as the one that is filled in.
        let rc = unsafe { (self.library.ibv_query_port)(self.raw.as_ptr(), number, &raw mut attributes) };
        check(rc, "ibv_query_port", || format!("{} port {number}", self.name))?;
        let rate = std::fs::read_to_string(path.join(format!("ports/{number}/rate"))).ok();
        Ok(Port {
            number,
            state: match attributes.state {
                sys::PORT_DOWN => PortState::Down,
                sys::PORT_INIT => PortState::Init,
                sys::PORT_ARMED => PortState::Armed,
                sys::PORT_ACTIVE => PortState::Active,
                sys::PORT_ACTIVE_DEFER => PortState::ActiveDefer,
                _ => PortState::Unknown,
            },
            link_layer: match i32::from(attributes.link_layer) {
                sys::LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                _ => LinkLayer::InfiniBand,
            },
            lid: attributes.lid,
            sm_lid: attributes.sm_lid,
            grh_required: i32::from(attributes.flags) & sys::QPF_GRH_REQUIRED != 0,
            active_mtu: 128 << attributes.active_mtu.clamp(sys::MTU_256, sys::MTU_4096),
            max_msg_size: attributes.max_msg_sz,
            mbit_per_s: rate.and_then(|rate| mbit(&rate)).unwrap_or(0),
            gids: (0..u32::try_from(attributes.gid_tbl_len).unwrap_or(0))
                .filter_map(|index| self.gid(number, index))
                .collect(),
        })
    }

    /// An entry of the GID table; `None` for one that is not in use.
    fn gid(&self, port: u8, index: u32) -> Option<Gid> {
        let mut entry = sys::GidEntry::default();
        // SAFETY: an open context, and a struct whose size is told.
        let rc = unsafe {
            let size = size_of::<sys::GidEntry>();
            (self.library._ibv_query_gid_ex)(self.raw.as_ptr(), u32::from(port), index, &raw mut entry, 0, size)
        };
        if rc != 0 || entry.gid == [0; 16] {
            return None;
        }
        let kind = match entry.gid_type as i32 {
            sys::GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            sys::GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            _ => GidKind::InfiniBand,
        };
        Some(Gid { index, bytes: entry.gid, kind, interface: interface_name(entry.ndev_ifindex) })
    }

    /// Has a forked child copies of registered pages? With an older kernel it has nothing in their place.
    pub fn children_get_copies(&self) -> bool {
        self.library.copies_for_children
    }

    /// Readable when [`Context::next_event`] has something.
    pub fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as the context is.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().async_fd) }
    }

    /// What the device has reported, if anything. Does not wait.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>> {
        let mut event = sys::AsyncEvent { element: std::ptr::null_mut(), event_type: 0 };
        // SAFETY: an open context whose descriptor does not block, and a struct of ours to fill in.
        if unsafe { (self.library.ibv_get_async_event)(self.raw.as_ptr(), &raw mut event) } != 0 {
            return match std::io::Error::last_os_error() {
                again if again.kind() == std::io::ErrorKind::WouldBlock => Ok(None),
                other => Err(Error::code("ibv_get_async_event", &self.name, other.raw_os_error().unwrap_or(0))),
            };
        }
        let port = || event.element as usize as u8;
        let seen = match event.event_type {
            sys::EVENT_PORT_ACTIVE => AsyncEvent::PortActive(port()),
            sys::EVENT_PORT_ERR => AsyncEvent::PortDown(port()),
            sys::EVENT_QP_FATAL | sys::EVENT_QP_REQ_ERR | sys::EVENT_QP_ACCESS_ERR => {
                // SAFETY: a queue pair is not destroyed before its events are acknowledged, which comes below.
                AsyncEvent::QueuePair(unsafe { (*event.element.cast::<sys::Qp>()).qp_num })
            }
            sys::EVENT_DEVICE_FATAL | sys::EVENT_CQ_ERR => AsyncEvent::Device,
            other => AsyncEvent::Other(other),
        };
        // SAFETY: the event from above, acknowledged once.
        unsafe { (self.library.ibv_ack_async_event)(&raw mut event) };
        Ok(Some(seen))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by ibv_open_device, closed once; what was made from it holds an Arc of it, and so is gone.
        let rc = unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
        warn(rc, "ibv_close_device", &self.name);
    }
}

/// From now on reading from it returns at once.
pub(crate) fn never_block(descriptor: BorrowedFd<'_>) -> Result<()> {
    use std::os::fd::AsRawFd;
    let fd = descriptor.as_raw_fd();
    // SAFETY: flags of an open descriptor.
    let rc = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::fcntl(fd, libc::F_GETFL) | libc::O_NONBLOCK) };
    if rc < 0 { Err(Error::last("fcntl", "a descriptor of libibverbs")) } else { Ok(()) }
}

fn text(characters: &[c_char]) -> String {
    let bytes: Vec<u8> = characters.iter().map(|c| *c as u8).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

fn interface_name(index: u32) -> Option<String> {
    let mut buffer = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the length that the call asks for, and is a string where it succeeds.
    unsafe {
        let name = libc::if_indextoname(index, buffer.as_mut_ptr());
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// sysfs says "100 Gb/sec (4X EDR)".
fn mbit(rate: &str) -> Option<u32> {
    let gigabits: f64 = rate.split_whitespace().next()?.parse().ok()?;
    Some((gigabits * 1000.0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_as_sysfs_writes_them() {
        assert_eq!(mbit("100 Gb/sec (4X EDR)\n"), Some(100_000));
        assert_eq!(mbit("2.5 Gb/sec (1X SDR)"), Some(2_500));
        assert_eq!(mbit(""), None);
    }

    #[test]
    fn without_a_device_there_is_an_empty_list_or_an_error_that_says_why() {
        match devices() {
            Ok(devices) => assert!(devices.iter().all(|device| !device.name.is_empty())),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        let error = Context::open("no such device").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("no such device") || error.contains("ibv"), "{error}");
    }
}
