//! The choice on hosts as they are found in clusters.

use super::*;

const V1: GidKind = GidKind::RoceV1;
const V2: GidKind = GidKind::RoceV2;

fn gid(index: u32, kind: GidKind, address: &str) -> Gid {
    let address: IpAddr = address.parse().unwrap();
    let bytes = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    Gid { index, bytes, kind, interface: (kind != GidKind::InfiniBand).then(|| "eth0".to_string()) }
}

fn ethernet(number: u8, gids: Vec<Gid>) -> Port {
    Port {
        number,
        state: PortState::Active,
        link_layer: LinkLayer::Ethernet,
        lid: 0,
        sm_lid: 0,
        grh_required: false,
        active_mtu: 4096,
        max_msg_size: 1 << 30,
        mbit_per_s: 100_000,
        gids,
    }
}

/// A RoCE port as mlx5 and rxe show it: link-local, then the IPv4 address, each for both versions.
fn roce(address: &str) -> Port {
    let local = "fe80::5054:ff:fe12:3456";
    ethernet(1, vec![gid(0, V1, local), gid(1, V2, local), gid(2, V1, address), gid(3, V2, address)])
}

fn infiniband(number: u8, lid: u16) -> Port {
    let address = format!("fe80::506b:4b03:0:{lid:x}");
    let gids = vec![gid(0, GidKind::InfiniBand, &address)];
    Port { link_layer: LinkLayer::InfiniBand, lid, sm_lid: 1, mbit_per_s: 200_000, ..ethernet(number, gids) }
}

fn device(name: &str, numa_node: Option<u32>, ports: Vec<Port>) -> Device {
    Device {
        name: name.into(),
        protocol: Protocol::InfiniBand,
        guid: 0x506b_4b03_0000_0001,
        firmware: "20.31.1014".into(),
        numa_node,
        pci_path: None,
        ports,
        fault: None,
    }
}

/// What is asked for when nothing is.
fn plain() -> Request {
    Request { route: Some([10, 0, 0, 5].into()), ..Request::default() }
}

/// The only choice, where no more are asked for.
fn only(devices: &[Device], request: &Request) -> Choice {
    let mut choices = choose(devices, request).unwrap();
    assert_eq!(choices.len(), 1);
    choices.remove(0)
}

/// (device, port, GID index).
fn chosen(devices: &[Device], request: &Request) -> (String, u8, u32) {
    let choice = only(devices, request);
    (choice.device, choice.port, choice.gid_index)
}

fn place(device: &str, port: u8, gid_index: u32) -> (String, u8, u32) {
    (device.into(), port, gid_index)
}

/// A node with eight InfiniBand devices and two Ethernet ones for storage, half of each per socket.
fn gpu_node() -> Vec<Device> {
    let mut devices: Vec<Device> = (0..10)
        .map(|n| {
            let port = if n % 5 == 4 { roce(&format!("10.9.0.{n}")) } else { infiniband(1, 100 + n) };
            let mut device = device(&format!("mlx5_{n}"), Some(u32::from(n) / 5), vec![port]);
            device.pci_path = Some(format!("pci0000:{n:x}0/0000:{n:x}0:01.0/0000:{n:x}1:00.0/0000:{n:x}2:10.0"));
            device
        })
        .collect();
    devices.reverse(); // libibverbs promises no order
    devices
}

#[test]
fn soft_roce_in_a_virtual_machine() {
    let rxe = ethernet(1, vec![gid(0, V2, "fe80::5054:ff:fe12:3456"), gid(1, V2, "10.0.0.5")]);
    let choice = only(&[device("rxe0", None, vec![Port { mbit_per_s: 2500, ..rxe }])], &plain());
    let expected = Choice {
        device: "rxe0".into(),
        port: 1,
        gid_index: 1,
        gid: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 5],
        gid_kind: V2,
        link_layer: LinkLayer::Ethernet,
        lid: 0,
        grh_required: true,
        mtu: 4096,
        why: "the only usable port, GID of the address on the route to the peers".into(),
        warnings: vec![],
    };
    assert_eq!(choice, expected);
}

#[test]
fn one_infiniband_device_is_addressed_by_lid() {
    let choice = only(&[device("mlx5_0", Some(0), vec![infiniband(1, 17)])], &plain());
    assert_eq!((choice.link_layer, choice.lid, choice.grh_required), (LinkLayer::InfiniBand, 17, false));
    assert_eq!((choice.gid_index, choice.gid_kind), (0, GidKind::InfiniBand));
    assert_eq!(choice.why, "the only usable port, addressed by LID 17");
    assert!(choice.warnings.is_empty(), "a fabric's default prefix is no link-local address: {:?}", choice.warnings);
}

#[test]
fn the_gid_of_the_route_then_ipv4_then_ipv6_then_link_local() {
    let all = [
        gid(1, V2, "fe80::1"),
        gid(3, V2, "fd00:1::5"),
        gid(5, V2, "192.168.7.5"),
        gid(6, V1, "10.0.0.5"),
        gid(7, V2, "10.0.0.5"),
        gid(9, V2, "2001:db8::5"),
    ];
    let index = |left_out: &[u32], route: Option<&str>| {
        let gids = all.iter().filter(|gid| !left_out.contains(&gid.index)).cloned().collect();
        let request = Request { route: route.map(|route| route.parse().unwrap()), ..Request::default() };
        chosen(&[device("mlx5_0", None, vec![ethernet(1, gids)])], &request).2
    };
    assert_eq!(index(&[], Some("10.0.0.5")), 7);
    assert_eq!(index(&[], Some("192.168.7.5")), 5);
    assert_eq!(index(&[], Some("172.16.0.1")), 5, "the route is over another interface");
    assert_eq!(index(&[], Some("2001:db8::5")), 9);
    assert_eq!(index(&[], None), 5);
    assert_eq!(index(&[5, 7], Some("10.0.0.5")), 3);
    assert_eq!(index(&[3, 5, 7], Some("10.0.0.5")), 9);
    assert_eq!(index(&[3, 5, 7, 9], Some("10.0.0.5")), 1);
}

#[test]
fn without_a_route_the_choice_does_not_speak_of_one() {
    let devices = [device("rxe0", None, vec![roce("10.0.0.5")])];
    let why = |route| only(&devices, &Request { route, ..Request::default() }).why;
    assert_eq!(why(None), "the only usable port, GID of an IPv4 address");
    let elsewhere = "the only usable port, GID of an IPv4 address, not that of the route to the peers";
    assert_eq!(why(Some([127, 0, 0, 1].into())), elsewhere);
}

#[test]
fn a_link_local_gid_comes_with_a_warning() {
    for address in ["fe80::1", "169.254.7.7"] {
        let port = ethernet(1, vec![gid(0, V1, address), gid(1, V2, address)]);
        let choice = only(&[device("mlx5_0", None, vec![port])], &plain());
        assert_eq!(choice.gid_index, 1);
        assert_eq!(choice.warnings.len(), 1);
        assert!(choice.warnings[0].contains("link-local"), "{:?}", choice.warnings);
        assert!(choice.warnings[0].ends_with("give eth0 an IPv4 address"), "{:?}", choice.warnings);
    }
}

#[test]
fn a_port_with_a_routed_address_beats_a_nearer_and_faster_one_without() {
    let stranded = Port { mbit_per_s: 400_000, ..ethernet(1, vec![gid(1, V2, "fe80::1")]) };
    let devices = [device("mlx5_0", Some(0), vec![stranded]), device("mlx5_1", Some(1), vec![roce("10.0.0.5")])];
    assert_eq!(chosen(&devices, &Request { numa_node: Some(0), ..plain() }), place("mlx5_1", 1, 3));
}

#[test]
fn only_roce_v1_is_refused_unless_its_index_is_given() {
    let devices = [device("mlx4_0", None, vec![ethernet(1, vec![gid(0, V1, "fe80::1"), gid(1, V1, "10.0.0.5")])])];
    assert_eq!(
        choose(&devices, &plain()).unwrap_err(),
        "mlx4_0 port 1: it has no GID for RoCE v2, but 0 (RoCE v1, fe80::1), 1 (RoCE v1, ::ffff:10.0.0.5); \
         MDAS_IB_GID_INDEX takes one of them"
    );
    let choice = only(&devices, &Request { gid_index: Some(1), ..plain() });
    assert_eq!((choice.gid_index, choice.gid_kind), (1, V1));
    assert!(choice.warnings[0].contains("RoCE v1, which no router forwards"), "{:?}", choice.warnings);
    assert!(choice.why.ends_with("GID as MDAS_IB_GID_INDEX says"), "{}", choice.why);
}

#[test]
fn a_gid_index_that_does_not_exist_lists_those_that_do() {
    let devices = [device("rxe0", None, vec![ethernet(1, vec![gid(0, V2, "fe80::1"), gid(1, V2, "10.0.0.5")])])];
    assert_eq!(
        choose(&devices, &Request { gid_index: Some(7), ..plain() }).unwrap_err(),
        "rxe0 port 1: MDAS_IB_GID_INDEX=7: its GID table has no such entry, but 0 (RoCE v2, fe80::1), \
         1 (RoCE v2, ::ffff:10.0.0.5)"
    );
}

#[test]
fn every_unusable_port_says_why() {
    let state = |state| Port { state, ..infiniband(1, 0) };
    let speaks = |protocol| Device { protocol, ..device("dev0", None, vec![roce("10.0.0.5")]) };
    let one = |port| device("dev0", None, vec![port]);
    let cases = [
        (one(state(PortState::Down)), "it is down: no cable, or its network interface is down"),
        (one(state(PortState::Init)), "no subnet manager has configured it: is one running?"),
        (one(state(PortState::Armed)), "its state is armed, not active"),
        (one(state(PortState::ActiveDefer)), "its state is failing, not active"),
        (one(state(PortState::Unknown)), "its state is unknown, not active"),
        (one(Port { gids: vec![], ..infiniband(1, 5) }), "its GID table is empty"),
        (one(ethernet(1, vec![])), "its GID table is empty: is its network interface up, and has it an address?"),
        (speaks(Protocol::Iwarp), "it speaks iWARP, and mdas needs InfiniBand or RoCE"),
        (speaks(Protocol::Other), "it has no reliable connections of InfiniBand's kind"),
    ];
    for (device, reason) in cases {
        assert_eq!(choose(&[device], &plain()).unwrap_err(), format!("dev0 port 1: {reason}"));
    }
    assert_eq!(choose(&[], &plain()).unwrap_err(), "this host has no RDMA device");
    let both = [one(state(PortState::Down)), device("dev1", None, vec![ethernet(1, vec![])])];
    let reason = choose(&both, &plain()).unwrap_err();
    assert!(reason.contains("dev0 port 1: it is down") && reason.contains("; dev1 port 1: its GID"), "{reason}");
}

#[test]
fn a_virtual_function_without_lid_is_addressed_by_gid() {
    let choice = only(&[device("mlx5_4", None, vec![infiniband(1, 0)])], &plain());
    assert!(choice.grh_required);
    assert_eq!(choice.why, "the only usable port, without LID, addressed by GID");
}

#[test]
fn the_active_port_of_a_two_port_card() {
    let down = Port { state: PortState::Down, ..ethernet(1, vec![]) };
    let card = device("mlx4_0", Some(0), vec![down, infiniband(2, 9)]);
    assert_eq!(chosen(&[card], &plain()), place("mlx4_0", 2, 0));
}

#[test]
fn both_ports_of_a_card_are_shared_out() {
    let card = [device("mlx4_0", Some(0), vec![infiniband(1, 8), infiniband(2, 9)])];
    let port = |local_rank| only(&card, &Request { local_rank, ..plain() }).port;
    assert_eq!([0, 1, 2, 3].map(port), [1, 2, 1, 2]);
    let second = Request { port: Some(2), ..plain() };
    assert_eq!(chosen(&card, &second), place("mlx4_0", 2, 0));
    assert_eq!(
        choose(&card, &Request { port: Some(3), ..plain() }).unwrap_err(),
        "MDAS_IB_PORT=3: no device has a port 3; this host has mlx4_0 (2 ports)"
    );
}

#[test]
fn a_bond_is_one_device_with_the_bonds_address() {
    let mut bond = roce("10.0.0.5");
    for gid in &mut bond.gids {
        gid.interface = Some("bond0".into());
    }
    let idle = Port { state: PortState::Down, ..ethernet(1, vec![]) };
    let devices = [device("mlx5_2", Some(1), vec![idle]), device("mlx5_bond_0", Some(0), vec![bond])];
    assert_eq!(chosen(&devices, &Request { numa_node: Some(1), ..plain() }), place("mlx5_bond_0", 1, 3));
}

#[test]
fn equal_devices_are_shared_out_in_the_order_of_their_numbers() {
    let devices: Vec<Device> =
        [10, 2, 0, 1].map(|n| device(&format!("mlx5_{n}"), None, vec![roce(&format!("10.0.{n}.5"))])).into();
    let name = |local_rank| only(&devices, &Request { local_rank, ..plain() }).device;
    assert_eq!([0, 1, 2, 3, 4].map(name), ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10", "mlx5_0"]);
    let third = only(&devices, &Request { local_rank: 3, ..plain() });
    assert_eq!(
        third.why,
        "one of 4 equally good ports, for local rank 3, GID of an IPv4 address, not that of the route to the peers"
    );
}

#[test]
fn ranks_of_a_mixed_node_keep_to_infiniband_near_their_socket() {
    let node = gpu_node();
    for (numa_node, expected) in
        [(0, ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]), (1, ["mlx5_5", "mlx5_6", "mlx5_7", "mlx5_8"])]
    {
        let name = |local_rank| {
            let request = Request { local_rank, numa_node: Some(numa_node), ..plain() };
            let choice = only(&node, &request);
            assert_eq!(choice.link_layer, LinkLayer::InfiniBand);
            assert!(choice.why.contains(&format!("on this process's NUMA node {numa_node}")), "{}", choice.why);
            choice.device
        };
        assert_eq!([0, 1, 2, 3].map(name), expected);
    }
    let unbound = |local_rank| only(&node, &Request { local_rank, ..plain() }).device;
    assert_eq!([0, 3, 4, 7].map(unbound), ["mlx5_0", "mlx5_3", "mlx5_5", "mlx5_8"]);
}

#[test]
fn a_gpu_takes_the_device_under_its_own_bridge() {
    let node = gpu_node();
    for (n, local_rank) in [(0, 0), (3, 0), (6, 1), (8, 5)] {
        let gpu_path = Some(format!("pci0000:{n:x}0/0000:{n:x}0:01.0/0000:{n:x}1:00.0/0000:{n:x}3:00.0"));
        // Though the process itself is bound to the other socket.
        let request = Request { gpu_path, local_rank, numa_node: Some(u32::from(n < 5)), ..plain() };
        let choice = only(&node, &request);
        assert_eq!(choice.device, format!("mlx5_{n}"));
        assert!(choice.why.contains("on the GPU's side of the PCI tree"), "{}", choice.why);
    }
    let elsewhere = Some("pci0000:ff/0000:ff:01.0/0000:e1:00.0".to_string());
    let request = Request { gpu_path: elsewhere, numa_node: Some(1), ..plain() };
    assert_eq!(chosen(&node, &request), place("mlx5_5", 1, 0));
}

#[test]
fn same_device_nearest_by_depth_in_the_tree() {
    let at = |name: &str, path: &str| Device {
        pci_path: Some(path.into()),
        ..device(name, Some(0), vec![infiniband(1, 7)])
    };
    let devices = [
        at("mlx5_0", "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:04.0/0000:3d:00.0"),
        at("mlx5_1", "pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:40:00.0"),
        at("mlx5_2", "pci0000:5d/0000:5d:00.0/0000:5e:00.0"),
    ];
    let near = |gpu: &str| {
        let request = Request { gpu_path: Some(gpu.into()), local_rank: 0, ..plain() };
        only(&devices, &request).device
    };
    assert_eq!(near("pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:41:00.0"), "mlx5_1");
    assert_eq!(near("pci0000:3a/0000:3a:02.0/0000:50:00.0"), "mlx5_0");
    assert_eq!(near("pci0000:5d/0000:5d:02.0/0000:60:00.0"), "mlx5_2");
}

#[test]
fn a_nearer_device_wins_over_one_whose_place_is_unknown() {
    let at = |name: &str, numa| device(name, numa, vec![infiniband(1, 7)]);
    let devices = [at("mlx5_0", Some(1)), at("mlx5_1", None), at("mlx5_2", Some(0))];
    let request = Request { numa_node: Some(0), local_rank: 5, ..plain() };
    assert_eq!(chosen(&devices, &request).0, "mlx5_2");
    assert_eq!(chosen(&devices[..2], &request).0, "mlx5_1");
    let far = only(&devices[..1], &request);
    assert!(far.why.contains("on NUMA node 1, while this process runs on 0"), "{}", far.why);
}

#[test]
fn a_much_slower_port_is_the_last_resort_even_if_near() {
    let on_board = device("mlx5_0", Some(0), vec![Port { mbit_per_s: 25_000, ..roce("10.0.0.5") }]);
    let fast = device("mlx5_1", Some(1), vec![Port { mbit_per_s: 200_000, ..roce("10.1.0.5") }]);
    let degraded = device("mlx5_2", Some(0), vec![Port { mbit_per_s: 120_000, ..roce("10.1.1.5") }]);
    let silent = device("mlx5_3", Some(0), vec![Port { mbit_per_s: 0, ..roce("10.1.2.5") }]);
    let request = Request { numa_node: Some(0), ..plain() };
    assert_eq!(chosen(&[on_board.clone(), fast.clone()], &request).0, "mlx5_1");
    assert_eq!(chosen(std::slice::from_ref(&on_board), &request).0, "mlx5_0");
    assert_eq!(chosen(&[fast.clone(), degraded], &request).0, "mlx5_2", "more than half as fast: the nearer one");
    assert_eq!(chosen(&[fast, silent], &request).0, "mlx5_3", "not known to be slow");
}

#[test]
fn names_of_devices() {
    let names = ["mlx5_0", "mlx5_1", "mlx5_10", "mlx5_bond_0", "rxe0"];
    let devices = names.map(|name| device(name, None, vec![roce("10.0.0.5")]));
    let all = |list: &str| {
        let name = |local_rank| only(&devices, &Request { devices: Some(list.into()), local_rank, ..plain() }).device;
        let mut found: Vec<String> = (0..5).map(name).collect();
        found.dedup();
        found.truncate(found.iter().skip(1).position(|name| *name == found[0]).map_or(found.len(), |at| at + 1));
        found
    };
    assert_eq!(all(""), names);
    assert_eq!(all("mlx5_1"), ["mlx5_1", "mlx5_10"]);
    assert_eq!(all("=mlx5_1"), ["mlx5_1"]);
    assert_eq!(all("rxe, =mlx5_0"), ["mlx5_0", "rxe0"]);
    assert_eq!(all("mlx5_bond,mlx4"), ["mlx5_bond_0"]);
    assert_eq!(all("^mlx5"), ["rxe0"]);
    assert_eq!(all("^rxe,=mlx5_1,mlx5_b"), ["mlx5_0", "mlx5_10"]);
    assert_eq!(all("^nothing"), names);
    assert_eq!(all("^"), names);
}

#[test]
fn a_bad_name_lists_the_devices_that_exist() {
    let devices = ["mlx5_10", "mlx5_2"].map(|name| device(name, None, vec![roce("10.0.0.5")]));
    let refused = |list: &str| choose(&devices, &Request { devices: Some(list.into()), ..plain() }).unwrap_err();
    assert_eq!(refused("mlx4_0"), "MDAS_IB_DEVICE=mlx4_0: no device has such a name; this host has mlx5_2, mlx5_10");
    assert_eq!(refused("^mlx"), "MDAS_IB_DEVICE=^mlx: that excludes every device; this host has mlx5_2, mlx5_10");
}

#[test]
fn the_path_mtu_is_the_smaller_one() {
    assert_eq!([path_mtu(4096, 1024), path_mtu(1024, 4096), path_mtu(2048, 2048)], [1024, 1024, 2048]);
}

#[test]
fn global_routes_are_for_ethernet_and_other_subnets() {
    let on = |port: Port| only(&[device("dev0", None, vec![port])], &plain());
    let here = on(infiniband(1, 4));
    assert!(!global_route(&here, &on(infiniband(1, 5))));
    let other_subnet = Port { gids: vec![gid(0, GidKind::InfiniBand, "fec0:1::5")], ..infiniband(1, 5) };
    assert!(global_route(&here, &on(other_subnet)));
    let insists = Port { grh_required: true, ..infiniband(1, 6) };
    assert!(global_route(&here, &on(insists.clone())) && global_route(&on(insists), &here));
    assert!(global_route(&on(roce("10.0.0.5")), &on(roce("10.0.0.6"))));
}

#[test]
fn several_rails_take_equal_ports_in_turn_then_farther_ones() {
    let node = gpu_node();
    let names = |rails, local_rank, numa_node| {
        let choices = choose(&node, &Request { rails, local_rank, numa_node, ..plain() }).unwrap();
        assert!(choices.iter().all(|choice| choice.link_layer == LinkLayer::InfiniBand));
        choices.iter().map(|choice| choice.device.trim_start_matches("mlx5_").into()).collect::<Vec<String>>().join(" ")
    };
    assert_eq!([0, 1, 2, 3, 4].map(|rank| names(2, rank, None)), ["0 1", "2 3", "5 6", "7 8", "0 1"]);
    assert_eq!([0, 1, 2].map(|rank| names(2, rank, Some(1))), ["5 6", "7 8", "5 6"]);
    assert_eq!(names(3, 1, Some(1)), "8 5 6");
    assert_eq!(names(8, 1, Some(1)), "5 6 7 8 0 1 2 3");
    assert_eq!(names(0, 0, None), "0");
    let choices = choose(&node, &Request { rails: 5, numa_node: Some(1), ..plain() }).unwrap();
    assert_eq!(
        choices[4].why,
        "the nearest of 10 usable ports, after those before it, on NUMA node 0, while this process runs on 1, \
         addressed by LID 100"
    );
    let slow = Port { mbit_per_s: 50_000, ..infiniband(1, 9) };
    let devices = [device("mlx5_0", None, vec![infiniband(1, 8)]), device("mlx5_1", None, vec![slow])];
    let choices = choose(&devices, &Request { rails: 2, ..plain() }).unwrap();
    assert_eq!(choices.len(), 1, "a rail that is half as fast would hold the other up");
}

#[test]
fn ports_of_devices_by_name() {
    let two_ports = |name: &str| device(name, None, vec![infiniband(1, 7), infiniband(2, 8)]);
    let devices = [two_ports("mlx5_0"), two_ports("mlx5_1")];
    let asked = |names: &str, port: Option<u8>| {
        let request = Request { devices: Some(names.into()), port, rails: 8, ..plain() };
        choose(&devices, &request).map(|choices| {
            choices.iter().map(|choice| format!("{}:{}", choice.device, choice.port)).collect::<Vec<_>>().join(" ")
        })
    };
    for (names, chosen) in [
        ("mlx5_1:2", "mlx5_1:2"),
        ("mlx5_0:2,=mlx5_1:1", "mlx5_0:2 mlx5_1:1"),
        ("mlx5:1", "mlx5_0:1 mlx5_1:1"),
        ("mlx5_0, mlx5_1:2", "mlx5_0:1 mlx5_0:2 mlx5_1:2"),
        ("^mlx5_0:1", "mlx5_0:2 mlx5_1:1 mlx5_1:2"),
        ("^mlx5_0,mlx5_1:1", "mlx5_1:2"),
    ] {
        assert_eq!(asked(names, None).as_deref(), Ok(chosen), "{names}");
    }
    assert_eq!(asked("mlx5:2", Some(2)).as_deref(), Ok("mlx5_0:2 mlx5_1:2"));
    let has = "this host has mlx5_0 (2 ports), mlx5_1 (2 ports)";
    for (names, error) in [
        ("mlx5_0:3", "no device of such a name has such a port"),
        ("mlx5_0:one", "\"one\" is not the number of a port"),
        ("mlx5_0:0", "\"0\" is not the number of a port"),
        ("mlx4_0:1", "no device has such a name"),
        ("^mlx5:1,mlx5:2", "that excludes every device"),
    ] {
        assert_eq!(asked(names, None), Err(format!("MDAS_IB_DEVICE={names}: {error}; {has}")));
    }
}

#[test]
fn a_device_that_cannot_be_opened_leaves_the_others() {
    let broken = Device::faulty("mlx5_0".into(), "ibv_open_device on mlx5_0: No such device".into());
    let devices = [broken.clone(), device("mlx5_1", None, vec![roce("10.0.0.5")])];
    assert_eq!(chosen(&devices, &plain()), place("mlx5_1", 1, 3));
    assert_eq!(choose(&[broken], &plain()), Err("mlx5_0: ibv_open_device on mlx5_0: No such device".into()));
    let named = |names: &str| Request { devices: Some(names.into()), ..plain() };
    for names in ["mlx5_0", "^mlx5_1"] {
        let refused = choose(&devices, &named(names)).unwrap_err();
        assert_eq!(refused, "mlx5_0: ibv_open_device on mlx5_0: No such device", "{names}");
    }
}
