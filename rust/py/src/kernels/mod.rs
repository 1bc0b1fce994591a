//! Vector math on addresses: `tensor.data_ptr()` and numbers of float32 elements.
//!
//! Who passes an address promises that so many elements lie there, and that no other thread touches them
//! until the call returns. What can be checked is: alignment, and that written memory overlaps nothing else.
//! Everything runs without the GIL.

mod optimize;
mod sketch;
mod stats;

use mdas_core::error::Error;
use mdas_kernels::Level;
use pyo3::prelude::*;

use crate::errors;

pub(crate) use optimize::{Adam, Sgd, Update, fused_update};
pub(crate) use sketch::{expand, orthonormalize, times, transposed_times};
pub(crate) use stats::{copy_sqnorm, dot, sqdist, sqnorm};

/// Why a call was refused.
type Refused = String;

/// Runs `body` without the GIL.
fn detached<T: Send>(py: Python<'_>, body: impl FnOnce() -> Result<T, Refused> + Send) -> PyResult<T> {
    py.detach(body).map_err(|message| errors::to_python(py, &Error::Invalid(message)))
}

/// Float32 elements somewhere in memory.
#[derive(Clone, Copy)]
struct Area {
    name: &'static str,
    address: usize,
    count: usize,
}

impl Area {
    fn new(name: &'static str, address: usize, count: usize) -> Self {
        Self { name, address, count }
    }

    /// First byte and first byte behind; None if there is no such memory.
    fn bytes(self) -> Option<(usize, usize)> {
        let plausible = self.address != 0 && self.address.is_multiple_of(align_of::<f32>());
        let end = self.address.checked_add(self.count.checked_mul(size_of::<f32>())?)?;
        (plausible && end <= isize::MAX as usize).then_some((self.address, end))
    }

    /// # Safety
    ///
    /// [`check`] has passed, the elements are there, and nobody writes to them during `'a`.
    unsafe fn read<'a>(self) -> &'a [f32] {
        if self.count == 0 {
            return &[];
        }
        // SAFETY: see above; the address is aligned and not null.
        unsafe { std::slice::from_raw_parts(self.address as *const f32, self.count) }
    }

    /// # Safety
    ///
    /// [`check`] has passed, the elements are there, and nobody else touches them during `'a`.
    unsafe fn write<'a>(self) -> &'a mut [f32] {
        if self.count == 0 {
            return &mut [];
        }
        // SAFETY: see above; the address is aligned and not null.
        unsafe { std::slice::from_raw_parts_mut(self.address as *mut f32, self.count) }
    }
}

/// Refuses addresses that cannot be right, and written memory that overlaps anything else.
fn check(written: &[Area], read: &[Area]) -> Result<(), Refused> {
    let areas: Vec<Area> = written.iter().chain(read).copied().filter(|area| area.count > 0).collect();
    for area in &areas {
        if area.bytes().is_none() {
            let Area { name, address, count } = area;
            return Err(format!("{name} at {address:#x} is not the address of {count} float32 elements"));
        }
    }
    for (i, a) in written.iter().enumerate() {
        for b in written[i + 1..].iter().chain(read) {
            if let (Some((start, end)), Some((from, to))) = (a.bytes(), b.bytes())
                && start < to
                && from < end
                && a.count > 0
                && b.count > 0
            {
                return Err(format!("{} overlaps {}, and is written to", a.name, b.name));
            }
        }
    }
    Ok(())
}

/// The vector instructions that the kernels use on this machine.
#[pyfunction]
pub(crate) fn cpu_level() -> &'static str {
    Level::best().name()
}
