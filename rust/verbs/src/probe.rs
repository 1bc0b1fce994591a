//! Whether a device can be used at all, before a job relies on it.

use crate::{Access, Context, MemoryRegion, ProtectionDomain, Result};

/// Opens the device and registers `bytes` of memory with it, and gives everything back.
///
/// # Errors
/// What would fail in a job, too: no access to the device, too little memory that may be locked, ...
pub fn probe(device: &str, bytes: usize) -> Result<()> {
    let domain = ProtectionDomain::new(&Context::open(device)?)?;
    let mut memory = vec![0_u8; bytes];
    // SAFETY: nobody sends to, or reads from, memory that no queue pair and no work request names; the region is dropped
    // here, before the memory.
    let region = unsafe { MemoryRegion::register(&domain, memory.as_mut_ptr(), bytes, Access::default())? };
    drop(region);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_exist_is_an_error() {
        let error = probe("no such device", 4096).unwrap_err().to_string();
        assert!(error.contains("no such device") || error.contains("ibv"), "{error}");
    }
}
