//! The memory that the devices know.

use super::kept::{Kept, Limits};
use crate::transport::{Keeper, RawSpan};
use mdas_verbs::{Access, MemoryRegion, ProtectionDomain, Result};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Of others' memory: enough for a loop over many arrays, and little beside what a host has.
const CACHED: Limits = Limits { count: 256, bytes: 2 << 30 };

/// Registrations, each as long as somebody keeps its memory.
pub struct Registry {
    /// By rail.
    domains: Vec<Arc<ProtectionDomain>>,
    access: Access,
    kept: Kept<MemoryRegion>,
}

impl Registry {
    pub fn new(domains: Vec<Arc<ProtectionDomain>>, relaxed_ordering: bool) -> Registry {
        // Where registered pages are taken away from forked children, they are not kept registered for nothing.
        let shared = domains.iter().all(|domain| domain.context.children_get_copies());
        let limits = if shared { CACHED } else { Limits { count: 0, bytes: 0 } };
        Registry { domains, access: Access { remote_write: true, relaxed_ordering }, kept: Kept::new(limits) }
    }

    /// Returns whether anything had to be done.
    pub fn register(&mut self, memory: RawSpan, keeper: Keeper) -> Result<bool> {
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
    ) -> Result<bool> {
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
    ) -> Result<bool> {
        if self.kept.has(memory, &keeper) {
            return Ok(false);
        }
        self.kept.tidy();
        let on_every_rail =
            || self.domains.iter().map(|domain| make(domain, self.access)).collect::<Result<Vec<MemoryRegion>>>();
        let regions = match on_every_rail() {
            // What is kept in case it is needed again counts towards the memory that may be locked.
            Err(error) if error.is_shortage() && self.kept.give_up_idle() => on_every_rail()?,
            made => made?,
        };
        self.kept.add(memory, keeper, regions);
        Ok(true)
    }

    /// Keys of the latest region that holds all of this memory: (for us, for peers).
    pub fn keys(&self, memory: RawSpan, rail: usize) -> Option<(u32, u32)> {
        self.kept.latest(memory, rail).map(|region| (region.lkey(), region.rkey()))
    }

    /// Deregisters what nobody keeps any more.
    pub fn tidy(&mut self) {
        self.kept.tidy();
    }

    /// Forgets everything; nothing is posted any more.
    pub fn clear(&mut self) {
        self.kept.clear();
    }
}
