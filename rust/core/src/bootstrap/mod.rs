//! How the ranks of a job find each other: a listener that lets in only those who know the job's
//! secret, a rendezvous at rank 0, and the mesh of connections that becomes the TCP transport.

mod handshake;
mod host;
mod listener;
mod mesh;
pub mod rendezvous;
pub(crate) mod wire;

pub use handshake::{Identity, PROTOCOL_VERSION};
pub use host::{Interface, host_identity, interfaces, local_address_towards};
pub use listener::Listener;
pub use mesh::connect;

#[cfg(test)]
mod tests;
