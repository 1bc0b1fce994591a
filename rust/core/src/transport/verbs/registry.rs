//! The memory that the device knows.

use crate::transport::{Keeper, RawSpan};
use mdas_verbs::{Access, MemoryRegion, ProtectionDomain, Result};
use std::sync::Arc;

struct Entry {
    region: MemoryRegion,
    /// Registered as long as one of them lives: afterwards the addresses may belong to other memory.
    keepers: Vec<Keeper>,
}

/// Registrations, each as long as somebody keeps its memory.
pub struct Registry {
    domain: Arc<ProtectionDomain>,
    access: Access,
    entries: Vec<Entry>,
}

impl Registry {
    pub fn new(domain: Arc<ProtectionDomain>, relaxed_ordering: bool) -> Registry {
        Registry { domain, access: Access { remote_write: true, relaxed_ordering }, entries: Vec::new() }
    }

    pub fn register(&mut self, memory: RawSpan, keeper: Keeper) -> Result<()> {
        self.entries.retain_mut(|entry| {
            entry.keepers.retain(|keeper| keeper.strong_count() > 0);
            !entry.keepers.is_empty()
        });
        let (address, length) = (memory.ptr as usize, memory.len);
        if let Some(entry) = self.entries.iter_mut().rev().find(|entry| entry.region.covers(address, length)) {
            if !entry.keepers.iter().any(|known| known.ptr_eq(&keeper)) {
                entry.keepers.push(keeper);
            }
            return Ok(());
        }
        // SAFETY: peers get a key only with a grant (`expose`), for memory that its owner leaves to the transport until
        // the message has arrived; requests of ours name it under `Transport::write`'s contract. All accesses of ours are
        // through raw pointers.
        let region = unsafe { MemoryRegion::register(&self.domain, memory.ptr, memory.len, self.access)? };
        // From now on this one is found for all of it, also by those who rely on a part that was registered before.
        let mut keepers = vec![keeper];
        for entry in &self.entries {
            if entry.region.overlaps(address, length) {
                keepers.extend(entry.keepers.iter().cloned());
            }
        }
        self.entries.push(Entry { region, keepers });
        Ok(())
    }

    /// Keys of the latest region that holds all of this memory: (for us, for peers).
    pub fn keys(&self, memory: RawSpan) -> Option<(u32, u32)> {
        let holds = |entry: &&Entry| entry.region.covers(memory.ptr as usize, memory.len);
        self.entries.iter().rev().find(holds).map(|entry| (entry.region.lkey(), entry.region.rkey()))
    }

    /// When this returns, neither peers nor our own requests reach this memory any more.
    pub fn revoke(&mut self, memory: RawSpan) {
        self.entries.retain(|entry| !entry.region.overlaps(memory.ptr as usize, memory.len));
    }
}
