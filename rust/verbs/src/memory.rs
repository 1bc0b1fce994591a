//! Protection domains and memory regions.

use crate::context::Context;
use crate::error::{Error, Result};
use crate::live::{Counted, Kind};
use crate::sys;
use std::ptr::NonNull;
use std::sync::Arc;

/// What memory regions and queue pairs that work together share.
pub struct ProtectionDomain {
    pub(crate) raw: NonNull<sys::Pd>,
    /// Of which device.
    pub context: Arc<Context>,
    _counted: Counted,
}

// SAFETY: libibverbs' objects may be used from any thread, by its documentation.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

/// Who may do what with a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access {
    /// Peers write there.
    pub remote_write: bool,
    /// The device may make writes visible in any order, all of them before the completion: faster on some hosts.
    pub relaxed_ordering: bool,
}

/// Memory that the device knows.
pub struct MemoryRegion {
    raw: NonNull<sys::Mr>,
    domain: Arc<ProtectionDomain>,
    _counted: Counted,
}

// SAFETY: as for ProtectionDomain.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl ProtectionDomain {
    /// A new one.
    pub fn new(context: &Arc<Context>) -> Result<Arc<ProtectionDomain>> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.ibv_alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::last("ibv_alloc_pd", &context.name))?;
        let _counted = Counted::new(Kind::ProtectionDomain);
        Ok(Arc::new(ProtectionDomain { raw, context: context.clone(), _counted }))
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: made by ibv_alloc_pd, given back once; what was made from it holds an Arc of it, and so is gone.
        let rc = unsafe { (self.context.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
        warn(rc, "ibv_dealloc_pd", &self.context.name);
    }
}

impl MemoryRegion {
    /// Registers `length` bytes from `address` on.
    ///
    /// # Errors
    /// For memory that may not be locked the error says how much may, and how much was wanted.
    ///
    /// # Safety
    /// Until it is dropped, or the device is closed, whoever learns its key may write to that memory if
    /// `access.remote_write`, as may receives and local operations that name it: nobody may hold a reference to what is
    /// written meanwhile. The memory need not outlive the region: its pages stay.
    pub unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        address: *mut u8,
        length: usize,
        access: Access,
    ) -> Result<MemoryRegion> {
        let context = &domain.context;
        // SAFETY: the kernel checks that the range is mapped; what happens with it is the caller's to answer for.
        let raw = unsafe {
            let at = address as u64;
            (context.library.ibv_reg_mr_iova2)(domain.raw.as_ptr(), address.cast(), length, at, flags(access))
        };
        let Some(raw) = NonNull::new(raw) else {
            let error = Error::last("ibv_reg_mr", format!("{}, {length} bytes", context.name));
            let read_only =
                "the device can reach memory only if it may be written, and this is mapped for reading only";
            return Err(error.with_hint(|errno| match errno {
                libc::EFAULT => Some(read_only.into()),
                errno => memlock_hint(errno, length),
            }));
        };
        let _counted = Counted::new(Kind::MemoryRegion);
        Ok(MemoryRegion { raw, domain: domain.clone(), _counted })
    }

    /// Registers memory of another device (a GPU's, say), which that exports as a DMA-buf: `length` bytes from `offset`
    /// of it on, which peers and work requests address from `address` on.
    ///
    /// # Errors
    /// Also where libibverbs is older than 34, or the driver cannot.
    ///
    /// # Safety
    /// As [`MemoryRegion::register`]; the exporter keeps the memory as long as the descriptor is open, which the kernel
    /// holds on to.
    pub unsafe fn register_dmabuf(
        domain: &Arc<ProtectionDomain>,
        descriptor: std::os::fd::BorrowedFd<'_>,
        offset: u64,
        address: usize,
        length: usize,
        access: Access,
    ) -> Result<MemoryRegion> {
        use std::os::fd::AsRawFd;
        let context = &domain.context;
        let Some(call) = context.library.ibv_reg_dmabuf_mr else {
            return Err(Error::Library(
                "this libibverbs has no ibv_reg_dmabuf_mr: rdma-core 34 or newer is needed".into(),
            ));
        };
        let fd = descriptor.as_raw_fd();
        // SAFETY: the descriptor is open; the rest is the caller's to answer for.
        let raw = unsafe { call(domain.raw.as_ptr(), offset, length, address as u64, fd, flags(access) as i32) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            Error::last("ibv_reg_dmabuf_mr", &context.name).with_hint(|errno| {
                (errno == libc::EOPNOTSUPP).then(|| "the device's driver cannot reach other devices' memory".into())
            })
        })?;
        let _counted = Counted::new(Kind::MemoryRegion);
        Ok(MemoryRegion { raw, domain: domain.clone(), _counted })
    }

    /// Key for this host's work requests.
    pub fn lkey(&self) -> u32 {
        // SAFETY: a live region.
        unsafe { self.raw.as_ref() }.lkey
    }

    /// Key for peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: a live region.
        unsafe { self.raw.as_ref() }.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let context = &self.domain.context;
        // SAFETY: made by ibv_reg_mr, given back once. Requests that still name it fail, and do not touch the memory.
        let rc = unsafe { (context.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        warn(rc, "ibv_dereg_mr", &context.name);
    }
}

fn flags(access: Access) -> libc::c_uint {
    let mut flags = sys::ACCESS_LOCAL_WRITE;
    if access.remote_write {
        flags |= sys::ACCESS_REMOTE_WRITE;
    }
    if access.relaxed_ordering {
        flags |= sys::ACCESS_RELAXED_ORDERING;
    }
    flags as libc::c_uint
}

/// A destructor has nobody to return an error to.
pub(crate) fn warn(rc: i32, verb: &'static str, place: &str) {
    if let Err(error) = crate::error::check(rc, verb, || place.into()) {
        log::warn!("{error}");
    }
}

fn memlock_hint(errno: i32, wanted: usize) -> Option<String> {
    if errno != libc::ENOMEM && errno != libc::EPERM && errno != libc::EAGAIN {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a struct of ours to fill in.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (rc == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then(|| {
        format!(
            "this process may lock {} KiB of memory (ulimit -l), and this buffer alone needs {} KiB: raise memlock in \
             /etc/security/limits.conf, or LimitMEMLOCK= of the service (slurmd) that starts it",
            limit.rlim_cur / 1024,
            wanted.div_ceil(1024)
        )
    })
}
