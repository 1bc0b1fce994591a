//! RDMA over libibverbs: what a host has, and which of it a rank uses.

pub mod choose;
pub mod table;
