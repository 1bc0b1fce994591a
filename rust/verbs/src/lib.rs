//! A thin layer over libibverbs, loaded when it is first asked for: one build runs with and without rdma-core.
//!
//! [`sys`] declares what is used of the C interface, in our words; [`load`] finds the library. The owners of
//! its objects hold on to what they were made from ([`Context`] <- [`ProtectionDomain`] <- [`MemoryRegion`] ...), so
//! that whatever is dropped first, libibverbs sees them go in the right order. [`table`] is what devices look like as
//! plain data, [`choose`] picks one of them.

pub mod choose;
mod completion;
mod context;
mod error;
pub mod live;
pub mod load;
mod memory;
mod probe;
mod queue_pair;
pub mod sys;
pub mod table;

pub use completion::{Completion, CompletionChannel, CompletionQueue, Outcome, explain};
pub use context::{AsyncEvent, Context, devices};
pub use error::{Error, Result};
pub use memory::{Access, MemoryRegion, ProtectionDomain};
pub use probe::probe;
pub use queue_pair::{Capacity, Path, QueuePair, Reliability};
