//! What this host is called, and which addresses it has.

use crate::error::{Error, Result};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

/// Equal on two ranks exactly if they share a kernel and a network namespace.
pub fn host_identity() -> Result<String> {
    let read = |path: &str| {
        let text = std::fs::read_to_string(path);
        text.map(|text| text.trim().to_string()).map_err(|cause| Error::system(format!("init: reading {path}"), cause))
    };
    let boot = read("/proc/sys/kernel/random/boot_id")?;
    let hostname = read("/proc/sys/kernel/hostname")?;
    let network = std::fs::read_link("/proc/self/ns/net")
        .map_err(|cause| Error::system("init: reading /proc/self/ns/net", cause))?;
    Ok(format!("{hostname}/{boot}/{}", network.display()))
}

/// The local address from which packets to `address` ("host:port") leave. Sends nothing.
pub fn local_address_towards(address: &str) -> Result<IpAddr> {
    let what = || format!("init: looking for a way to {address}");
    let targets = address.to_socket_addrs().map_err(|cause| Error::system(what(), cause))?;
    let mut result = Err(std::io::Error::other("the name has no address"));
    for target in targets {
        result = route(target);
        if result.is_ok() {
            break;
        }
    }
    result.map_err(|cause| Error::system(what(), cause))
}

fn route(target: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = if target.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// An address of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// "eth0", ...
    pub name: String,
    /// One of its addresses.
    pub address: IpAddr,
    /// Is it up?
    pub up: bool,
}

/// All addresses of all interfaces, in the kernel's order.
pub fn interfaces() -> Result<Vec<Interface>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: on success the call stores the head of a list in `first`, which we free below, once.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(Error::system("init: listing the network interfaces", std::io::Error::last_os_error()));
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: `next` is null or an element of the list, which stays unchanged until it is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: `ifa_addr` is null or points to a socket address of this element.
        let Some(address) = (unsafe { address(entry.ifa_addr) }) else { continue };
        // SAFETY: `ifa_name` is a string that ends with a zero byte and lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        found.push(Interface { name, address, up: entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0 });
    }
    // SAFETY: `first` came from getifaddrs, and nothing refers to the list any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// # Safety
/// `address` is null or points to a socket address as long as its family says.
unsafe fn address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by the contract; every socket address begins with its family.
    let family = i32::from(unsafe { address.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: by the contract, an AF_INET address is a sockaddr_in; unaligned, since nothing is promised about that.
            let inet = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(inet.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: by the contract, an AF_INET6 address is a sockaddr_in6.
            let inet = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(inet.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found() {
        let localhost = IpAddr::from([127, 0, 0, 1]);
        let all = interfaces().unwrap();
        assert!(
            all.iter().any(|interface| interface.address == localhost && interface.up && interface.name == "lo"),
            "{all:?}"
        );
        assert_eq!(local_address_towards("127.0.0.1:9").unwrap(), localhost);
    }

    #[test]
    fn a_host_is_itself() {
        let identity = host_identity().unwrap();
        assert_eq!(identity, host_identity().unwrap());
        assert!(identity.contains("/net:["), "{identity}");
    }
}
