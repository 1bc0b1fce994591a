//! Which devices, ports and GIDs a rank uses: a pure function of what the host has and what was asked for.
//!
//! Ports that cannot carry a connection drop out, each with its reason. Of the others, in this order: those whose peers
//! need not be on the same Ethernet; InfiniBand before Ethernet, so that ranks near different devices of a mixed host
//! still understand each other; not those that are at most half as fast as the fastest; the nearest first. Equally near
//! ones are shared out by local rank.

mod gid;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::net::IpAddr;

use crate::table::{Device, Gid, GidKind, LinkLayer, Port, PortState, Protocol};

/// What a rank knows about itself and was told.
#[derive(Debug, Clone)]
pub struct Request {
    /// `MDAS_IB_DEVICE`: names separated by commas; a name stands for all that begin with it, `=name` for that one
    /// only, `name:port` for that port only; a leading `^` turns the list into exclusions. `None` or "": all devices.
    pub devices: Option<String>,
    /// `MDAS_IB_PORT`: this port only.
    pub port: Option<u8>,
    /// `MDAS_IB_GID_INDEX`: this entry of the GID table.
    pub gid_index: Option<u32>,
    /// This host's address on the route to the peers.
    pub route: Option<IpAddr>,
    /// This rank's place among the job's ranks on this host.
    pub local_rank: usize,
    /// The NUMA node that the process is bound to; `None` if it may run on several.
    pub numa_node: Option<u32>,
    /// Where the process's GPU is, as [`Device::pci_path`].
    pub gpu_path: Option<String>,
    /// `MDAS_IB_RAILS`: ports to use at once, at least one.
    pub rails: usize,
}

impl Default for Request {
    fn default() -> Request {
        Request {
            devices: None,
            port: None,
            gid_index: None,
            route: None,
            local_rank: 0,
            numa_node: None,
            gpu_path: None,
            rails: 1,
        }
    }
}

/// A port that a rank uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Name of the device.
    pub device: String,
    /// Number of its port.
    pub port: u8,
    /// Index of the GID in the port's table.
    pub gid_index: u32,
    /// The GID itself.
    pub gid: [u8; 16],
    /// Its type.
    pub gid_kind: GidKind,
    /// Of the port.
    pub link_layer: LinkLayer,
    /// Of the port; 0 on Ethernet.
    pub lid: u16,
    /// Does every packet from here need a global route header? See [`global_route`].
    pub grh_required: bool,
    /// Path MTU of the port, in bytes.
    pub mtu: u32,
    /// Why this one, in words.
    pub why: String,
    /// What may not work as hoped.
    pub warnings: Vec<String>,
}

/// A port that could be used, and with which GID.
struct Candidate<'a> {
    device: &'a Device,
    port: &'a Port,
    gid: &'a Gid,
}

/// Chooses as many ports as are asked for, or fewer where there are not as many, the best first; or says what is wrong
/// with every port.
pub fn choose(devices: &[Device], request: &Request) -> Result<Vec<Choice>, String> {
    if devices.is_empty() {
        return Err("this host has no RDMA device".into());
    }
    let mut refused = Vec::new();
    let mut candidates = Vec::new();
    for (device, ports) in named(devices, request.devices.as_deref().unwrap_or(""))? {
        refused.extend(device.fault.as_ref().map(|fault| format!("{}: {fault}", device.name)));
        for port in ports {
            if request.port.is_none_or(|number| number == port.number) {
                match usable_gid(device, port, request) {
                    Ok(gid) => candidates.push(Candidate { device, port, gid }),
                    Err(reason) => refused.push(format!("{} port {}: {reason}", device.name, port.number)),
                }
            }
        }
    }
    if candidates.is_empty() && refused.is_empty() {
        let number = request.port.unwrap_or(1);
        return Err(format!("MDAS_IB_PORT={number}: no device has a port {number}; this host has {}", list(devices)));
    }
    let usable = candidates.len();
    keep_least(&mut candidates, |one| gid::link_local(one.gid));
    keep_least(&mut candidates, |one| one.port.link_layer == LinkLayer::Ethernet);
    let fastest = candidates.iter().map(|one| one.port.mbit_per_s).max().unwrap_or(0);
    keep_least(&mut candidates, |one| one.port.mbit_per_s != 0 && one.port.mbit_per_s <= fastest / 2);
    candidates.sort_by_key(|one| (distance(one.device, request), natural(&one.device.name), one.port.number));
    let Some(nearest) = candidates.first().map(|one| distance(one.device, request)) else {
        return Err(refused.join("; "));
    };
    let equal = candidates.partition_point(|one| distance(one.device, request) == nearest);
    candidates[..equal].rotate_left(request.local_rank % equal * request.rails % equal);
    candidates.truncate(request.rails.max(1));
    let rank = |at: usize| match usable {
        1 => "the only usable port".to_string(),
        _ if at >= equal => format!("the nearest of {usable} usable ports, after those before it"),
        _ if equal == 1 => format!("the best of {usable} usable ports"),
        _ => format!("one of {equal} equally good ports, for local rank {}", request.local_rank),
    };
    Ok(candidates.iter().enumerate().map(|(at, one)| choice(one, why(one, rank(at), request))).collect())
}

/// Path MTU between two ports: the smaller of both.
pub fn path_mtu(ours: u32, theirs: u32) -> u32 {
    ours.min(theirs)
}

/// Do packets from `ours` to `theirs` need a global route header? On Ethernet always, on InfiniBand where a port
/// insists, or where the peer is in another subnet (the first eight bytes of a GID), which LIDs do not reach.
pub fn global_route(ours: &Choice, theirs: &Choice) -> bool {
    ours.grh_required || theirs.grh_required || ours.gid[..8] != theirs.gid[..8]
}

/// An entry of `MDAS_IB_DEVICE`.
struct Name<'a> {
    /// The device's, or how it begins.
    device: &'a str,
    whole: bool,
    port: Option<u8>,
}

impl<'a> Name<'a> {
    fn parse(entry: &'a str) -> Result<Name<'a>, String> {
        let (name, port) = match entry.split_once(':') {
            Some((name, port)) => {
                let number = port.parse().ok().filter(|number| *number > 0);
                (name, Some(number.ok_or_else(|| format!("{port:?} is not the number of a port"))?))
            }
            None => (entry, None),
        };
        let (device, whole) = name.strip_prefix('=').map_or((name, false), |name| (name, true));
        Ok(Name { device, whole, port })
    }

    fn matches(&self, device: &Device) -> bool {
        if self.whole { device.name == self.device } else { device.name.starts_with(self.device) }
    }
}

/// The devices that `MDAS_IB_DEVICE` allows, with those of their ports that it does.
fn named<'a>(devices: &'a [Device], list_of_names: &str) -> Result<Vec<(&'a Device, Vec<&'a Port>)>, String> {
    let (wanted, names) = match list_of_names.trim().strip_prefix('^') {
        Some(names) => (false, names),
        None => (true, list_of_names),
    };
    let refuse = |what: &str| format!("MDAS_IB_DEVICE={list_of_names}: {what}; this host has {}", list(devices));
    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(Name::parse);
    let names = names.collect::<Result<Vec<Name<'_>>, String>>().map_err(|what| refuse(&what))?;
    let wanted = wanted && !names.is_empty();
    let listed = |device: &Device, port: Option<u8>| {
        names.iter().any(|name| name.matches(device) && (name.port.is_none() || name.port == port))
    };
    let allowed = devices.iter().filter_map(|device| {
        let ports = device.ports.iter().filter(|port| listed(device, Some(port.number)) == wanted).collect::<Vec<_>>();
        let any = if device.ports.is_empty() { listed(device, None) == wanted } else { !ports.is_empty() };
        any.then_some((device, ports))
    });
    let allowed: Vec<(&Device, Vec<&Port>)> = allowed.collect();
    if allowed.is_empty() {
        let known = devices.iter().any(|device| names.iter().any(|name| name.matches(device)));
        return Err(refuse(match (wanted, known) {
            (true, false) => "no device has such a name",
            (true, true) => "no device of such a name has such a port",
            (false, _) => "that excludes every device",
        }));
    }
    Ok(allowed)
}

/// The GID with which a port can be used, or why it cannot be used.
fn usable_gid<'a>(device: &Device, port: &'a Port, request: &Request) -> Result<&'a Gid, String> {
    match device.protocol {
        Protocol::InfiniBand => {}
        Protocol::Iwarp => return Err("it speaks iWARP, and mdas needs InfiniBand or RoCE".into()),
        Protocol::Other => return Err("it has no reliable connections of InfiniBand's kind".into()),
    }
    match port.state {
        PortState::Active => {}
        PortState::Down => return Err("it is down: no cable, or its network interface is down".into()),
        PortState::Init => return Err("no subnet manager has configured it: is one running?".into()),
        state => return Err(format!("its state is {state}, not active")),
    }
    if let Some(index) = request.gid_index {
        return port.gids.iter().find(|gid| gid.index == index).ok_or_else(|| {
            format!("MDAS_IB_GID_INDEX={index}: its GID table has no such entry, but {}", gid::list(&port.gids))
        });
    }
    match port.link_layer {
        LinkLayer::InfiniBand => port.gids.first().ok_or_else(|| "its GID table is empty".into()),
        LinkLayer::Ethernet => gid::best(&port.gids, request.route),
    }
}

/// Keeps those for which `key` is least.
fn keep_least<K: Ord>(candidates: &mut Vec<Candidate<'_>>, key: impl Fn(&Candidate<'_>) -> K) {
    if let Some(least) = candidates.iter().map(&key).min() {
        candidates.retain(|one| key(one) == least);
    }
}

/// Less is nearer: by what GPU and device share of the PCI tree, then by NUMA node.
fn distance(device: &Device, request: &Request) -> (Reverse<usize>, u8) {
    let numa = match (device.numa_node, request.numa_node) {
        (Some(device), Some(process)) => u8::from(device != process) * 2,
        _ => 1,
    };
    (Reverse(shared_path(device, request)), numa)
}

/// How many bridges a GPU and a device have in common, their host bridge included.
fn shared_path(device: &Device, request: &Request) -> usize {
    let (Some(device), Some(gpu)) = (&device.pci_path, &request.gpu_path) else { return 0 };
    device.split('/').zip(gpu.split('/')).take_while(|(ours, theirs)| ours == theirs).count()
}

/// `mlx5_2` before `mlx5_10`.
fn natural(name: &str) -> (&str, u64) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(0))
}

fn choice(chosen: &Candidate<'_>, why: String) -> Choice {
    let Candidate { device, port, gid } = chosen;
    Choice {
        device: device.name.clone(),
        port: port.number,
        gid_index: gid.index,
        gid: gid.bytes,
        gid_kind: gid.kind,
        link_layer: port.link_layer,
        lid: port.lid,
        // An active port without LID (Ethernet, some virtual functions) is reached by GID only.
        grh_required: port.grh_required || port.lid == 0,
        mtu: port.active_mtu,
        why,
        warnings: gid::warning(gid).into_iter().collect(),
    }
}

/// `rank`: its place among the usable ones.
fn why(chosen: &Candidate<'_>, rank: String, request: &Request) -> String {
    let mut reasons = vec![rank];
    if shared_path(chosen.device, request) > 0 {
        reasons.push("on the GPU's side of the PCI tree".into());
    }
    match (chosen.device.numa_node, request.numa_node) {
        (Some(device), Some(process)) if device == process => {
            reasons.push(format!("on this process's NUMA node {device}"))
        }
        (Some(device), Some(process)) => {
            reasons.push(format!("on NUMA node {device}, while this process runs on {process}"));
        }
        _ => {}
    }
    reasons.push(match (request.gid_index, chosen.port.link_layer) {
        (Some(_), _) => "GID as MDAS_IB_GID_INDEX says".into(),
        (None, LinkLayer::InfiniBand) if chosen.port.lid == 0 => "without LID, addressed by GID".into(),
        (None, LinkLayer::InfiniBand) => format!("addressed by LID {}", chosen.port.lid),
        (None, LinkLayer::Ethernet) => gid::description(chosen.gid, request.route).into(),
    });
    reasons.join(", ")
}

/// The devices with the numbers of their ports, for an error.
fn list(devices: &[Device]) -> String {
    let mut sorted: Vec<&Device> = devices.iter().collect();
    sorted.sort_by_key(|device| natural(&device.name));
    let ports = |device: &Device| match device.ports.len() {
        0 | 1 => String::new(),
        count => format!(" ({count} ports)"),
    };
    sorted.iter().map(|device| format!("{}{}", device.name, ports(device))).collect::<Vec<_>>().join(", ")
}
