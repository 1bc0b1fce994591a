//! Which memory is registered, and for how long: bookkeeping alone, without a device.
//!
//! A registration is found again only by a keeper that it was made for, or that came to rely on it: addresses say
//! nothing, since memory may have been freed there and other memory put in its place, which the device does not see.
//! Those for an [`Identity`] outlast the operations that use them; so many and so large ones as there is room for, those
//! used last.

use crate::transport::{Identity, Keeper, RawSpan};
use std::sync::Arc;

/// How much is kept that no operation uses.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub count: usize,
    pub bytes: usize,
}

struct Entry<R> {
    memory: RawSpan,
    /// By rail; all of the same memory.
    regions: Vec<R>,
    /// Registered as long as one of them lives: afterwards the addresses may belong to other memory.
    keepers: Vec<Keeper>,
    /// When it was asked for last.
    used: u64,
}

/// Registrations `R`, each of which is undone by dropping it.
pub struct Kept<R> {
    /// In the order in which they were made.
    entries: Vec<Entry<R>>,
    limits: Limits,
    clock: u64,
}

impl<R> Kept<R> {
    pub fn new(limits: Limits) -> Kept<R> {
        Kept { entries: Vec::new(), limits, clock: 0 }
    }

    /// Is all of this memory registered for this keeper?
    pub fn has(&mut self, memory: RawSpan, keeper: &Keeper) -> bool {
        let own =
            |entry: &&mut Entry<R>| entry.covers(memory) && entry.keepers.iter().any(|known| known.ptr_eq(keeper));
        let Some(entry) = self.entries.iter_mut().rev().find(own) else { return false };
        self.clock += 1;
        entry.used = self.clock;
        true
    }

    /// Registered, by rail.
    pub fn add(&mut self, memory: RawSpan, keeper: Keeper, regions: Vec<R>) {
        // From now on this one is found for all of it, also by those who rely on a part that was registered before.
        let mut keepers = vec![keeper];
        for known in self.entries.iter().filter(|entry| entry.overlaps(memory)).flat_map(|entry| &entry.keepers) {
            if !keepers.iter().any(|keeper| keeper.ptr_eq(known)) {
                keepers.push(known.clone());
            }
        }
        self.clock += 1;
        self.entries.push(Entry { memory, regions, keepers, used: self.clock });
        self.tidy();
    }

    /// Drops what nobody keeps, and what is too much.
    pub fn tidy(&mut self) {
        self.entries.retain_mut(|entry| {
            entry.keepers.retain(|keeper| keeper.strong_count() > 0);
            !entry.keepers.is_empty()
        });
        let mut idle: Vec<(u64, usize)> =
            self.entries.iter().filter(|entry| entry.idle()).map(|entry| (entry.used, entry.memory.len)).collect();
        idle.sort_unstable();
        let (mut count, mut bytes) = (idle.len(), idle.iter().map(|(_, len)| len).sum::<usize>());
        let mut dropped = Vec::new();
        for (used, len) in idle {
            if count <= self.limits.count && bytes <= self.limits.bytes {
                break;
            }
            (count, bytes) = (count - 1, bytes - len);
            dropped.push(used);
        }
        if !dropped.is_empty() {
            self.entries.retain(|entry| !dropped.contains(&entry.used));
        }
    }

    /// Drops all that no operation uses; was there any?
    pub fn give_up_idle(&mut self) -> bool {
        let before = self.entries.len();
        self.entries.retain(|entry| !entry.idle());
        self.entries.len() < before
    }

    /// On this rail, the latest registration that holds all of this memory.
    pub fn latest(&self, memory: RawSpan, rail: usize) -> Option<&R> {
        self.entries.iter().rev().find(|entry| entry.covers(memory))?.regions.get(rail)
    }

    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

impl<R> Entry<R> {
    fn bounds(&self) -> (usize, usize) {
        (self.memory.ptr as usize, self.memory.ptr as usize + self.memory.len)
    }

    fn covers(&self, memory: RawSpan) -> bool {
        let (start, end) = self.bounds();
        start <= memory.ptr as usize && memory.ptr as usize + memory.len <= end
    }

    fn overlaps(&self, memory: RawSpan) -> bool {
        let (start, end) = self.bounds();
        start < memory.ptr as usize + memory.len && (memory.ptr as usize) < end
    }

    /// Kept for the sake of identities only, which no operation holds.
    fn idle(&self) -> bool {
        self.keepers.iter().all(|keeper| {
            // Its maker's, and the one that we have just made.
            keeper.upgrade().is_none_or(|held| held.is::<Identity>() && Arc::strong_count(&held) <= 2)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::any::Any;
    use std::cell::Cell;
    use std::rc::Rc;

    const LIMITS: Limits = Limits { count: 3, bytes: 1000 };

    /// A registration that says when it is gone.
    struct Fake(Rc<Cell<usize>>);

    impl Drop for Fake {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    struct Registry {
        kept: Kept<Fake>,
        live: Rc<Cell<usize>>,
        made: usize,
    }

    impl Registry {
        fn new(limits: Limits) -> Registry {
            Registry { kept: Kept::new(limits), live: Rc::default(), made: 0 }
        }

        /// What an operation does before it starts; returns whether a registration had to be made.
        fn register(&mut self, start: usize, len: usize, keeper: &Keeper) -> bool {
            if self.kept.has(span(start, len), keeper) {
                return false;
            }
            self.kept.tidy();
            self.live.set(self.live.get() + 1);
            self.made += 1;
            self.kept.add(span(start, len), keeper.clone(), vec![Fake(self.live.clone())]);
            true
        }
    }

    fn span(start: usize, len: usize) -> RawSpan {
        RawSpan { ptr: std::ptr::without_provenance_mut(start), len }
    }

    fn keeper<T: Any + Send + Sync>(of: &Arc<T>) -> Keeper {
        let of: Arc<dyn Any + Send + Sync> = of.clone();
        Arc::downgrade(&of)
    }

    #[test]
    fn an_identity_is_registered_once_and_until_it_dies() {
        let mut registry = Registry::new(LIMITS);
        let array = Arc::new(Identity);
        for operation in 0..5 {
            let _held = array.clone();
            assert_eq!(registry.register(4096, 500, &keeper(&array)), operation == 0);
            assert!(!registry.register(4196, 100, &keeper(&array)), "a part of it");
        }
        assert_eq!(registry.live.get(), 1);
        drop(array);
        registry.kept.tidy();
        assert_eq!(registry.live.get(), 0);
        assert!(registry.kept.latest(span(4096, 500), 0).is_none());
    }

    #[test]
    fn other_memory_at_the_same_address_is_registered_anew() {
        let mut registry = Registry::new(LIMITS);
        let (first, second) = (Arc::new(Identity), Arc::new(Identity));
        assert!(registry.register(4096, 500, &keeper(&first)));
        // Also while the first one has not been found dead.
        assert!(registry.register(4096, 500, &keeper(&second)));
        let newest = registry.kept.latest(span(4096, 500), 0).map(std::ptr::from_ref);
        assert_eq!(newest, registry.kept.entries.last().map(|entry| std::ptr::from_ref(&entry.regions[0])));
        let call = Arc::new(());
        assert!(registry.register(4096, 500, &keeper(&call)), "of a single operation");
        assert!(!registry.register(4096, 500, &keeper(&second)));
    }

    #[test]
    fn who_relies_on_a_larger_registration_keeps_it() {
        let mut registry = Registry::new(LIMITS);
        let (small, large) = (Arc::new(()), Arc::new(()));
        registry.register(5000, 100, &keeper(&small));
        registry.register(4096, 4096, &keeper(&large));
        drop(large);
        registry.kept.tidy();
        assert_eq!(
            registry.live.get(),
            2,
            "requests for the small one may have gone out with the key of the large one"
        );
        drop(small);
        registry.kept.tidy();
        assert_eq!(registry.live.get(), 0);
    }

    #[test]
    fn of_what_no_operation_uses_the_latest_used_stay_as_far_as_there_is_room() {
        let mut registry = Registry::new(LIMITS);
        let arrays: Vec<Arc<Identity>> = (0..5).map(|_| Arc::new(Identity)).collect();
        let at = |index: usize| 4096 * (1 + index);
        for (index, array) in arrays.iter().enumerate() {
            let _held = array.clone();
            registry.register(at(index), 100, &keeper(array));
        }
        registry.kept.tidy();
        assert_eq!(registry.live.get(), 3);
        let known: Vec<bool> = (0..5).map(|n| registry.kept.has(span(at(n), 100), &keeper(&arrays[n]))).collect();
        assert_eq!(known, [false, false, true, true, true]);
        // By bytes; what is in use is neither counted nor dropped.
        let (large, running) = (Arc::new(Identity), arrays[2].clone());
        registry.register(1 << 20, 950, &keeper(&large));
        let known: Vec<bool> = (0..5).map(|n| registry.kept.has(span(at(n), 100), &keeper(&arrays[n]))).collect();
        assert_eq!(known, [false, false, true, false, false]);
        assert!(registry.kept.give_up_idle());
        assert_eq!(registry.live.get(), 1);
        drop(running);
        assert!(registry.kept.give_up_idle());
        assert!(!registry.kept.give_up_idle());
        assert_eq!((registry.live.get(), registry.made), (0, 6));
    }

    #[test]
    fn without_room_it_is_kept_for_as_long_as_an_operation_uses_it() {
        let mut registry = Registry::new(Limits { count: 0, bytes: 0 });
        let array = Arc::new(Identity);
        for _ in 0..2 {
            let held = array.clone();
            assert!(registry.register(4096, 500, &keeper(&array)));
            registry.kept.tidy();
            assert_eq!(registry.live.get(), 1);
            drop(held);
            registry.kept.tidy();
            assert_eq!(registry.live.get(), 0);
        }
    }
}
