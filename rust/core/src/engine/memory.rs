//! The memory that operations work on, what keeps it in place, and what of it a transport registers.

use crate::transport::{Identity, Keeper, RawSpan};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory of a call, and whatever keeps it alive: released when the operation is over, never earlier.
#[derive(Clone)]
pub struct Region {
    /// First byte; any value if `len` is 0.
    pub ptr: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Dropped by whichever thread finishes the operation.
    pub owner: Option<Arc<dyn Any + Send + Sync>>,
    /// Of memory that stays in place beyond the operation.
    pub identity: Option<Arc<Identity>>,
}

// SAFETY: the owner is Send + Sync and keeps the memory in place; who makes a Region promises that the
// memory stays readable (input) or writable and unshared (output) until the operation is over.
unsafe impl Send for Region {}

impl Region {
    /// No memory, for barriers.
    pub fn empty() -> Self {
        Region { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0, owner: None, identity: None }
    }

    /// Memory that a `Vec` owns; it comes back to life as the `Arc`.
    pub fn of(bytes: Arc<HeapBytes>) -> Self {
        Region { ptr: bytes.ptr(), len: bytes.len(), owner: Some(bytes), identity: None }
    }

    /// What a transport is to register for it, and what is alive as long as that memory: all of the lasting memory that
    /// it lies in, or else just it, for its identity or this operation. `None` where nobody owns it.
    pub fn registrable(&self) -> Option<(RawSpan, Keeper)> {
        let (start, end) = (self.ptr as usize, self.ptr as usize + self.len);
        if let Some((at, (len, token))) = lasting().range(..=start).next_back()
            && end <= at + len
        {
            return Some((RawSpan { ptr: self.ptr.wrapping_sub(start - at), len: *len }, token.clone()));
        }
        let identity = self.identity.clone().map(|identity| identity as Arc<dyn Any + Send + Sync>);
        let keeper = identity.as_ref().or(self.owner.as_ref())?;
        Some((RawSpan { ptr: self.ptr, len: self.len }, Arc::downgrade(keeper)))
    }

    /// Partly overlapping regions would be read after they were written.
    pub fn partly_overlaps(&self, other: &Region) -> bool {
        let (a, b) = (self.ptr as usize, other.ptr as usize);
        self.len > 0 && other.len > 0 && a < b + other.len && b < a + self.len && !(a == b && self.len == other.len)
    }
}

/// 64-byte aligned, zeroed heap memory of a fixed size that the engine may write while handles to it exist.
pub struct HeapBytes {
    ptr: *mut u8,
    layout: std::alloc::Layout,
    len: usize,
    /// Alive as long as the memory: what registrations hang on.
    token: Arc<()>,
}

// SAFETY: HeapBytes gives out a raw pointer only; all accesses go through it, and those who make them
// (engine, tests, Python's buffer protocol) answer for their order.
unsafe impl Send for HeapBytes {}
// SAFETY: as above.
unsafe impl Sync for HeapBytes {}

/// By address: length, and what is alive as long as it is.
type Lasting = BTreeMap<usize, (usize, Keeper)>;

/// Memory that is used by one operation after the other, by address: its registration outlives them.
fn lasting() -> MutexGuard<'static, Lasting> {
    static LASTING: Mutex<Lasting> = Mutex::new(Lasting::new());
    LASTING.lock().unwrap_or_else(PoisonError::into_inner)
}

impl HeapBytes {
    /// As `zeroed`, for memory that many operations will use.
    pub fn lasting(len: usize, align: usize) -> Option<Self> {
        let memory = HeapBytes::zeroed(len, align)?;
        let (span, token) = memory.registrable();
        if len > 0 {
            lasting().insert(span.ptr as usize, (span.len, token));
        }
        Some(memory)
    }

    /// `len` zeroed bytes; `None` if there is not enough memory (or `len` is absurd).
    pub fn zeroed(len: usize, align: usize) -> Option<Self> {
        let layout = std::alloc::Layout::from_size_align(len.max(1), align).ok()?;
        // SAFETY: the layout's size is at least 1.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        (!ptr.is_null()).then(|| HeapBytes { ptr, layout, len, token: Arc::new(()) })
    }

    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// All of it, for a transport, and what is alive as long as it is.
    pub fn registrable(&self) -> (RawSpan, Keeper) {
        let token: Arc<dyn Any + Send + Sync> = self.token.clone();
        (RawSpan { ptr: self.ptr, len: self.len }, Arc::downgrade(&token))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No bytes?
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for HeapBytes {
    fn drop(&mut self) {
        if self.len > 0 {
            lasting().remove(&(self.ptr as usize));
        }
        // Before the addresses can become somebody else's.
        self.token = Arc::default();
        // SAFETY: allocated in `zeroed` with this layout, freed only here.
        unsafe { std::alloc::dealloc(self.ptr, self.layout) };
    }
}
