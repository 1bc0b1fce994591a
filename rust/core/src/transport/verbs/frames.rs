//! Registered buffers for control frames.

use crate::error::{Error, Result};
use crate::transport::MAX_CONTROL_BYTES;
use mdas_verbs::sys::Sge;
use mdas_verbs::{Access, MemoryRegion, ProtectionDomain};
use std::cell::UnsafeCell;
use std::sync::Arc;

/// Buffers of one size in one registered block; some are always posted as receives, the others are for sending.
pub struct Frames {
    /// Dropped before the block.
    region: MemoryRegion,
    /// The device writes to it at any time: there are references to single buffers only, and only while they are ours.
    block: Box<[UnsafeCell<u8>]>,
    free: Vec<usize>,
}

impl Frames {
    /// Stands for no buffer.
    pub const NONE: usize = usize::MAX;

    /// `receives` buffers, numbered from 0 on, and `sends` more.
    pub fn new(domain: &Arc<ProtectionDomain>, receives: usize, sends: usize) -> Result<Frames> {
        let count = receives + sends;
        let block: Box<[UnsafeCell<u8>]> = (0..count * MAX_CONTROL_BYTES).map(|_| UnsafeCell::new(0)).collect();
        let (ptr, access) = (block.as_ptr().cast_mut().cast::<u8>(), Access::default());
        // SAFETY: a box does not move its memory; nobody has a reference into it but `message` and `fill`, for a buffer
        // that is not posted.
        let region = unsafe { MemoryRegion::register(domain, ptr, block.len(), access) };
        let region = region.map_err(|error| Error::Configuration(format!("verbs: {error}")))?;
        Ok(Frames { region, block, free: (receives..count).collect() })
    }

    fn start(&self, buffer: usize) -> *mut u8 {
        self.block[buffer * MAX_CONTROL_BYTES..][..MAX_CONTROL_BYTES].as_ptr().cast_mut().cast()
    }

    /// Where a message may be received.
    pub fn piece(&self, buffer: usize) -> Sge {
        Sge { addr: self.start(buffer) as u64, length: MAX_CONTROL_BYTES as u32, lkey: self.region.lkey() }
    }

    /// Copies what has been received. The buffer is not posted: its completion has been seen.
    pub fn message(&self, buffer: usize, bytes: usize) -> Box<[u8]> {
        // SAFETY: inside the block, as `start` checks, and initialized; the device is done with this buffer.
        unsafe { std::slice::from_raw_parts(self.start(buffer), bytes.min(MAX_CONTROL_BYTES)) }.into()
    }

    /// Copies a frame of at most [`MAX_CONTROL_BYTES`] into a free buffer; `None` if there is none.
    pub fn fill(&mut self, bytes: &[u8]) -> Option<(usize, Sge)> {
        let buffer = self.free.pop()?;
        let length = bytes.len().min(MAX_CONTROL_BYTES);
        // SAFETY: as above; a free buffer is nobody's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start(buffer), length) };
        Some((buffer, Sge { length: length as u32, ..self.piece(buffer) }))
    }

    /// The message in it has been sent.
    pub fn give_back(&mut self, buffer: usize) {
        if buffer != Frames::NONE {
            self.free.push(buffer);
        }
    }
}
