//! The core of mdas: plans (`collective`), byte movers (`transport`), and the engine that runs
//! the ones over the others. See `ARCHITECTURE.md`.

pub mod bootstrap;
pub mod collective;
pub mod engine;
pub mod error;
pub mod transport;

pub use error::{Error, Result};
