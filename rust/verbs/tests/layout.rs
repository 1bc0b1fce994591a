//! What we say of libibverbs' structures is what its headers say: a C program prints it.

use mdas_verbs::sys;
use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::{offset_of, size_of};
use std::process::{Command, Stdio};

/// (what to print in C, what it must be).
fn expectations() -> Vec<(String, usize)> {
    let mut all = Vec::new();
    macro_rules! layout {
        ($ours:ident = $theirs:literal, $whole:literal, $($field:ident as $c:literal),*) => {
            if $whole {
                all.push((format!("sizeof({})", $theirs), size_of::<sys::$ours>()));
            }
            $(all.push((format!("offsetof({}, {})", $theirs, $c), offset_of!(sys::$ours, $field)));)*
        };
    }
    layout!(Device = "struct ibv_device", true, node_type as "node_type", transport_type as "transport_type",
        name as "name", dev_name as "dev_name", dev_path as "dev_path", ibdev_path as "ibdev_path");
    layout!(ContextOps = "struct ibv_context_ops", true, poll_cq as "poll_cq", req_notify_cq as "req_notify_cq",
        post_send as "post_send", post_recv as "post_recv");
    layout!(Context = "struct ibv_context", false, device as "device", ops as "ops", async_fd as "async_fd",
        num_comp_vectors as "num_comp_vectors");
    layout!(DeviceAttr = "struct ibv_device_attr", true, fw_ver as "fw_ver", node_guid as "node_guid",
        max_qp_wr as "max_qp_wr", max_cqe as "max_cqe", phys_port_cnt as "phys_port_cnt");
    layout!(PortAttr = "struct ibv_port_attr", true, state as "state", max_mtu as "max_mtu", active_mtu as "active_mtu",
        gid_tbl_len as "gid_tbl_len", port_cap_flags as "port_cap_flags", max_msg_sz as "max_msg_sz", lid as "lid",
        sm_lid as "sm_lid", link_layer as "link_layer", flags as "flags");
    layout!(GidEntry = "struct ibv_gid_entry", true, gid as "gid", gid_index as "gid_index", port_num as "port_num",
        gid_type as "gid_type", ndev_ifindex as "ndev_ifindex");
    layout!(Mr = "struct ibv_mr", true, lkey as "lkey", rkey as "rkey");
    layout!(CompChannel = "struct ibv_comp_channel", false, fd as "fd");
    layout!(Cq = "struct ibv_cq", false, context as "context");
    layout!(Qp = "struct ibv_qp", false, context as "context", qp_num as "qp_num");
    layout!(Wc = "struct ibv_wc", true, wr_id as "wr_id", status as "status", opcode as "opcode",
        vendor_err as "vendor_err", byte_len as "byte_len", imm_data as "imm_data", qp_num as "qp_num",
        wc_flags as "wc_flags");
    layout!(Sge = "struct ibv_sge", true, addr as "addr", length as "length", lkey as "lkey");
    layout!(SendWr = "struct ibv_send_wr", true, wr_id as "wr_id", next as "next", sg_list as "sg_list",
        num_sge as "num_sge", opcode as "opcode", send_flags as "send_flags", imm_data as "imm_data",
        remote_addr as "wr.rdma.remote_addr", rkey as "wr.rdma.rkey");
    layout!(RecvWr = "struct ibv_recv_wr", true, wr_id as "wr_id", next as "next", sg_list as "sg_list",
        num_sge as "num_sge");
    layout!(QpCap = "struct ibv_qp_cap", true, max_send_wr as "max_send_wr", max_recv_wr as "max_recv_wr",
        max_send_sge as "max_send_sge", max_recv_sge as "max_recv_sge", max_inline_data as "max_inline_data");
    layout!(QpInitAttr = "struct ibv_qp_init_attr", true, qp_context as "qp_context", send_cq as "send_cq",
        recv_cq as "recv_cq", srq as "srq", cap as "cap", qp_type as "qp_type", sq_sig_all as "sq_sig_all");
    layout!(GlobalRoute = "struct ibv_global_route", true, dgid as "dgid", flow_label as "flow_label",
        sgid_index as "sgid_index", hop_limit as "hop_limit", traffic_class as "traffic_class");
    layout!(AhAttr = "struct ibv_ah_attr", true, grh as "grh", dlid as "dlid", sl as "sl", is_global as "is_global",
        port_num as "port_num");
    layout!(QpAttr = "struct ibv_qp_attr", true, qp_state as "qp_state", path_mtu as "path_mtu", rq_psn as "rq_psn",
        sq_psn as "sq_psn", dest_qp_num as "dest_qp_num", qp_access_flags as "qp_access_flags", ah_attr as "ah_attr",
        max_rd_atomic as "max_rd_atomic", max_dest_rd_atomic as "max_dest_rd_atomic", min_rnr_timer as "min_rnr_timer",
        port_num as "port_num", timeout as "timeout", retry_cnt as "retry_cnt", rnr_retry as "rnr_retry");
    layout!(AsyncEvent = "struct ibv_async_event", true, element as "element", event_type as "event_type");
    all.extend(sys::CONSTANTS.iter().map(|(name, value)| ((*name).to_owned(), *value as usize)));
    all
}

#[test]
fn everything_is_as_the_headers_say() {
    let expected = expectations();
    assert!(expected.len() > 150, "only {} values", expected.len());
    let mut source = String::from("#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\n");
    // Of the private header, whose values the kernel gives in sysfs in words and `ibv_gid_entry` as numbers.
    source.push_str("int main(void) {\n");
    for (expression, _) in &expected {
        writeln!(source, "printf(\"%lld\\n\", (long long)({expression}));").expect("a string");
    }
    source.push_str("return 0; }\n");
    let folder = std::env::temp_dir().join(format!("mdas-layout-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the program");
    let program = folder.join("layout");
    let mut compiler = Command::new("cc")
        .args(["-x", "c", "-", "-o"])
        .arg(&program)
        .stdin(Stdio::piped())
        .spawn()
        .expect("a C compiler (cc)");
    compiler.stdin.take().expect("a pipe").write_all(source.as_bytes()).expect("to the compiler");
    let compiled = compiler.wait().expect("the compiler's end");
    let printed = compiled.success().then(|| Command::new(&program).output());
    std::fs::remove_dir_all(&folder).expect("the folder");
    let printed =
        printed.expect("this needs the headers of libibverbs (Debian: libibverbs-dev; make setup installs it)");
    let printed = String::from_utf8(printed.expect("the program").stdout).expect("numbers");
    let found: Vec<usize> = printed.lines().map(|line| line.parse().expect("a number")).collect();
    assert_eq!(found.len(), expected.len());
    let wrong: Vec<String> = expected
        .iter()
        .zip(&found)
        .filter(|((_, ours), theirs)| ours != *theirs)
        .map(|((what, ours), theirs)| format!("{what} is {theirs}, not {ours}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
