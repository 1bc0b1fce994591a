//! Which entry of a RoCE port's GID table reaches the peers.

use std::net::{IpAddr, Ipv6Addr};

use crate::table::{Gid, GidKind};

/// What a GID is an address of, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    /// The very address that this host has on the route to the peers.
    Route,
    /// An IPv4 address.
    Ipv4,
    /// An IPv6 address that is routed.
    Ipv6,
    /// One that means something on its own Ethernet only.
    LinkLocal,
}

fn class(gid: &Gid, route: Option<IpAddr>) -> Class {
    let address = gid.address();
    let route = route.map(|route| match route {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    });
    if link_local(gid) {
        Class::LinkLocal
    } else if route == Some(address) {
        Class::Route
    } else if address.to_ipv4_mapped().is_some() {
        Class::Ipv4
    } else {
        Class::Ipv6
    }
}

/// Does it reach peers on the same Ethernet only? An InfiniBand GID never counts as such, although those of a fabric
/// without an assigned prefix begin as link-local addresses do.
pub(super) fn link_local(gid: &Gid) -> bool {
    let address: Ipv6Addr = gid.address();
    match gid.kind {
        GidKind::InfiniBand => false,
        GidKind::RoceV1 => true,
        GidKind::RoceV2 => {
            address.is_unicast_link_local() || address.to_ipv4_mapped().is_some_and(|v4| v4.is_link_local())
        }
    }
}

/// The best RoCE v2 entry: the address of the route, other IPv4 addresses, global IPv6 ones, link-local ones; among
/// equals the one of the least index.
pub(super) fn best(gids: &[Gid], route: Option<IpAddr>) -> Result<&Gid, String> {
    let version_2 = gids.iter().filter(|gid| gid.kind == GidKind::RoceV2);
    version_2.min_by_key(|gid| (class(gid, route), gid.index)).ok_or_else(|| {
        if gids.is_empty() {
            "its GID table is empty: is its network interface up, and has it an address?".into()
        } else {
            format!("it has no GID for RoCE v2, but {}; MDAS_IB_GID_INDEX takes one of them", list(gids))
        }
    })
}

/// What a RoCE GID is, for the choice's `why`.
pub(super) fn description(gid: &Gid, route: Option<IpAddr>) -> &'static str {
    match class(gid, route) {
        Class::Route => "GID of the address on the route to the peers",
        Class::Ipv4 if route.is_some() => "GID of an IPv4 address, not that of the route to the peers",
        Class::Ipv4 => "GID of an IPv4 address",
        Class::Ipv6 => "GID of a routed IPv6 address",
        Class::LinkLocal => "GID of a link-local address",
    }
}

/// What may not work as hoped with this GID.
pub(super) fn warning(gid: &Gid) -> Option<String> {
    link_local(gid).then(|| {
        let interface = gid.interface.as_deref().unwrap_or("its network interface");
        let (index, kind, address) = (gid.index, gid.kind, gid.address());
        match kind {
            GidKind::RoceV1 => format!("GID {index} ({address}) is for RoCE v1, which no router forwards"),
            _ => format!(
                "GID {index} ({address}) is link-local and reaches only peers on the same Ethernet: give {interface} \
                 an IPv4 address"
            ),
        }
    })
}

/// Entries of a table in words.
pub(super) fn list(gids: &[Gid]) -> String {
    if gids.is_empty() {
        return "none at all".into();
    }
    gids.iter().map(|gid| format!("{} ({}, {})", gid.index, gid.kind, gid.address())).collect::<Vec<_>>().join(", ")
}
