//! `Memory`: memory that Rust owns and Python borrows.

use std::ffi::c_int;

use memmap2::MmapMut;
use pyo3::exceptions::{PyMemoryError, PyOverflowError};
use pyo3::ffi;
use pyo3::prelude::*;

/// Page-aligned, zeroed memory, for buckets and other buffers that live long. Exports the
/// buffer protocol as `nbytes` unsigned bytes, so that `torch.frombuffer(memory, dtype=...)`
/// and `numpy.frombuffer(memory, dtype=...)` give arrays on it; such an array keeps it alive.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct Memory {
    map: MmapMut,
    len: isize,
}

#[pymethods]
impl Memory {
    #[new]
    fn new(nbytes: usize) -> PyResult<Self> {
        let len = isize::try_from(nbytes).map_err(|_| PyOverflowError::new_err("nbytes is too large"))?;
        // The kernel has no empty mappings.
        let map = MmapMut::map_anon(nbytes.max(1))
            .map_err(|cause| PyMemoryError::new_err(format!("cannot map {nbytes} bytes: {cause}")))?;
        Ok(Self { map, len })
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.len.unsigned_abs()
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.map.as_ptr() as usize
    }

    fn __len__(&self) -> usize {
        self.len.unsigned_abs()
    }

    /// # Safety
    ///
    /// Called by the interpreter only, with a `view` to fill in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (start, len) = (slf.get().map.as_ptr(), slf.get().len);
        // SAFETY: `view` comes from the interpreter. The mapping is `len` bytes or more, writable, and
        // lives as long as `slf`, to which FillInfo adds the reference that PyBuffer_Release drops.
        // Rust never forms a reference to the bytes after construction, so writes through the buffer
        // alias nothing.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast_mut().cast(), len, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
