//! The memory that the devices know.

use crate::transport::{Keeper, RawSpan};
use mdas_verbs::{Access, MemoryRegion, ProtectionDomain, Result};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

struct Entry {
    /// By rail; all of the same memory.
    regions: Vec<MemoryRegion>,
    /// Registered as long as one of them lives: afterwards the addresses may belong to other memory.
    keepers: Vec<Keeper>,
}

/// Registrations, each as long as somebody keeps its memory.
pub struct Registry {
    /// By rail.
    domains: Vec<Arc<ProtectionDomain>>,
    access: Access,
    entries: Vec<Entry>,
}

impl Registry {
    pub fn new(domains: Vec<Arc<ProtectionDomain>>, relaxed_ordering: bool) -> Registry {
        Registry { domains, access: Access { remote_write: true, relaxed_ordering }, entries: Vec::new() }
    }

    pub fn register(&mut self, memory: RawSpan, keeper: Keeper) -> Result<()> {
        self.add(memory, keeper, |domain, access| {
            // SAFETY: peers get a key only with a grant (`expose`), for memory that its owner leaves to the transport
            // until the message has arrived; requests of ours name it under `Transport::write`'s contract. All accesses
            // of ours are through raw pointers.
            unsafe { MemoryRegion::register(domain, memory.ptr, memory.len, access) }
        })
    }

    /// [`Registry::register`] for memory that another device exports as a DMA-buf: `memory` is where peers and our own
    /// requests find what begins at `offset` of it; this process need not be able to look there.
    pub fn register_dmabuf(
        &mut self,
        descriptor: BorrowedFd<'_>,
        offset: u64,
        memory: RawSpan,
        keeper: Keeper,
    ) -> Result<()> {
        self.add(memory, keeper, |domain, access| {
            let address = memory.ptr as usize;
            // SAFETY: as above; and the region reaches nothing but what the descriptor stands for.
            unsafe { MemoryRegion::register_dmabuf(domain, descriptor, offset, address, memory.len, access) }
        })
    }

    fn add(
        &mut self,
        memory: RawSpan,
        keeper: Keeper,
        make: impl Fn(&Arc<ProtectionDomain>, Access) -> Result<MemoryRegion>,
    ) -> Result<()> {
        self.entries.retain_mut(|entry| {
            entry.keepers.retain(|keeper| keeper.strong_count() > 0);
            !entry.keepers.is_empty()
        });
        if let Some(entry) = self.entries.iter_mut().rev().find(|entry| entry.covers(memory)) {
            if !entry.keepers.iter().any(|known| known.ptr_eq(&keeper)) {
                entry.keepers.push(keeper);
            }
            return Ok(());
        }
        let regions = self.domains.iter().map(|domain| make(domain, self.access)).collect::<Result<_>>()?;
        // From now on this one is found for all of it, also by those who rely on a part that was registered before.
        let mut keepers = vec![keeper];
        for entry in &self.entries {
            if entry.overlaps(memory) {
                keepers.extend(entry.keepers.iter().cloned());
            }
        }
        self.entries.push(Entry { regions, keepers });
        Ok(())
    }

    /// Keys of the latest region that holds all of this memory: (for us, for peers).
    pub fn keys(&self, memory: RawSpan, rail: usize) -> Option<(u32, u32)> {
        let entry = self.entries.iter().rev().find(|entry| entry.covers(memory))?;
        entry.regions.get(rail).map(|region| (region.lkey(), region.rkey()))
    }

    /// Forgets everything; nothing is posted any more.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

impl Entry {
    fn covers(&self, memory: RawSpan) -> bool {
        self.regions.iter().any(|region| region.covers(memory.ptr as usize, memory.len))
    }

    fn overlaps(&self, memory: RawSpan) -> bool {
        self.regions.iter().any(|region| region.overlaps(memory.ptr as usize, memory.len))
    }
}
