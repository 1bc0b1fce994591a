//! How many objects of libibverbs there are in this process: what is left after a shutdown is a leak.

use std::sync::atomic::{AtomicUsize, Ordering};

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident $name:literal),*) => {
        /// What is counted.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Kind { $($(#[$doc])* $kind),* }
        /// All kinds, with their names.
        pub const KINDS: &[(Kind, &str)] = &[$((Kind::$kind, $name)),*];
    };
}

kinds! {
    /// Opened devices.
    Context "contexts",
    /// Protection domains.
    ProtectionDomain "protection_domains",
    /// Memory regions.
    MemoryRegion "memory_regions",
    /// Completion channels and queues.
    Completion "completion_queues",
    /// Queue pairs.
    QueuePair "queue_pairs"
}

static LIVE: [AtomicUsize; KINDS.len()] = [const { AtomicUsize::new(0) }; KINDS.len()];

/// Counts one object as long as it exists.
#[derive(Debug)]
pub(crate) struct Counted(Kind);

impl Counted {
    pub(crate) fn new(kind: Kind) -> Counted {
        LIVE[kind as usize].fetch_add(1, Ordering::Relaxed);
        Counted(kind)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        LIVE[self.0 as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

/// Objects of this kind that exist now.
pub fn count(kind: Kind) -> usize {
    LIVE[kind as usize].load(Ordering::Relaxed)
}
