//! `Memory`: memory that Rust owns and Python borrows.

use std::ffi::c_int;

use mdas_core::engine::HeapBytes;
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Alignment: whole pages can be registered with a network card.
const PAGE: usize = 4096;

/// Page-aligned, zeroed memory, for buckets and other buffers that live long. Exports the
/// buffer protocol as `nbytes` unsigned bytes, so that `torch.frombuffer(memory, dtype=...)`
/// and `numpy.frombuffer(memory, dtype=...)` give arrays on it; such an array keeps it alive.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct Memory(HeapBytes);

#[pymethods]
impl Memory {
    #[new]
    fn new(nbytes: usize) -> PyResult<Self> {
        HeapBytes::lasting(nbytes, PAGE)
            .map(Self)
            .ok_or_else(|| PyMemoryError::new_err(format!("cannot allocate {nbytes} bytes")))
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.0.ptr() as usize
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// # Safety
    ///
    /// Called by the interpreter only, with a `view` to fill in.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let bytes = &slf.get().0;
        // An allocation never exceeds isize::MAX bytes.
        let len = bytes.len() as ffi::Py_ssize_t;
        // SAFETY: `view` comes from the interpreter. The memory is `len` bytes, writable, and lives as
        // long as `slf`, to which FillInfo adds the reference that PyBuffer_Release drops. HeapBytes
        // gives out raw pointers only, so that writes through the buffer alias no Rust reference.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), bytes.ptr().cast(), len, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
