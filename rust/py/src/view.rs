//! `View`: typed, contiguous memory of somebody else, kept alive while it is in use.

use std::sync::Arc;

use mdas_core::engine::Region;
use mdas_core::transport;
use mdas_kernels::DType;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// What keeps the memory in place. A Python object, since whoever lets go of it last may not have the GIL: PyO3 then
/// defers the decrement (and with it the release of the buffer) until some thread holds it.
#[pyclass(frozen)]
struct Keep(#[expect(dead_code, reason = "held for its release")] Kept);

enum Kept {
    /// A buffer export: its object may neither resize nor free the memory before release.
    Buffer(#[expect(dead_code, reason = "held for its release")] PyUntypedBuffer),
    /// An object that owns the memory at an address.
    Owner(#[expect(dead_code, reason = "held for its reference")] Py<PyAny>),
}

/// Of memory that stays where it is as long as some object lives: registered once for all views that are given it
/// (over RDMA), until this object is gone.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct Identity(Arc<transport::Identity>);

#[pymethods]
impl Identity {
    #[new]
    fn new() -> Self {
        Self(Arc::new(transport::Identity))
    }
}

/// Contiguous memory of one element type.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct View {
    address: usize,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) writable: bool,
    /// One for all operations on the view, so that it is registered once as input and output.
    keep: Arc<Py<Keep>>,
    identity: Option<Arc<transport::Identity>>,
}

#[pymethods]
impl View {
    /// The memory of an object with the buffer protocol (numpy array, array.array, bytearray, ...).
    ///
    /// Raises TypeError if it is not contiguous, of an unsupported type, or read-only though `writable`.
    #[staticmethod]
    #[pyo3(signature = (obj, writable, identity=None))]
    fn from_buffer(obj: &Bound<'_, PyAny>, writable: bool, identity: Option<&Bound<'_, Identity>>) -> PyResult<Self> {
        let what = obj.get_type().name()?;
        let buffer = PyUntypedBuffer::get(obj).map_err(|cause| {
            let refused = PyTypeError::new_err(format!(
                "{what} is neither a torch tensor nor does it offer its memory as a buffer ({cause}): \
                 pass a tensor, a numpy array, an array.array, a bytearray or a memoryview"
            ));
            refused.set_cause(obj.py(), Some(cause));
            refused
        })?;
        let format = buffer.format().to_string_lossy();
        let Some(dtype) = dtype_of(&format, buffer.item_size()) else {
            return Err(PyTypeError::new_err(format!(
                "{what} has elements of an unsupported type (buffer format {format:?}): supported are {}",
                supported()
            )));
        };
        if !buffer.is_c_contiguous() {
            return Err(PyTypeError::new_err(format!(
                "{what} of shape {:?} is not contiguous (strides of {:?} bytes): pass a contiguous copy \
                 (numpy.ascontiguousarray) and copy the result back",
                buffer.shape(),
                buffer.strides()
            )));
        }
        if writable && buffer.readonly() {
            return Err(PyTypeError::new_err(format!(
                "{what} is read-only, but the result is to be written to it: pass a writable object, or one as out="
            )));
        }
        let (count, writable) = (buffer.item_count(), !buffer.readonly());
        let address = aligned(buffer.buf_ptr() as usize, count, dtype)?;
        let keep = Arc::new(Py::new(obj.py(), Keep(Kept::Buffer(buffer)))?);
        Ok(Self { address, count, dtype, writable, keep, identity: held(identity) })
    }

    /// `count` elements at an address that `owner` keeps valid and writable, such as a tensor's `data_ptr()`.
    #[staticmethod]
    #[pyo3(signature = (address, count, dtype, owner, identity=None))]
    fn from_address(
        py: Python<'_>,
        address: usize,
        count: usize,
        dtype: &str,
        owner: Py<PyAny>,
        identity: Option<&Bound<'_, Identity>>,
    ) -> PyResult<Self> {
        let dtype = parse_dtype(dtype)?;
        let address = aligned(address, count, dtype)?;
        let keep = Arc::new(Py::new(py, Keep(Kept::Owner(owner)))?);
        Ok(Self { address, count, dtype, writable: true, keep, identity: held(identity) })
    }

    /// Number of elements.
    #[getter]
    fn count(&self) -> usize {
        self.count
    }

    /// Name of the element type, "float32" for example.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// May results be written here?
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }
}

impl View {
    /// The memory for the engine, which holds on to what keeps it in place until the operation is over.
    pub(crate) fn region(&self) -> Region {
        Region {
            ptr: self.address as *mut u8,
            len: self.nbytes(),
            owner: Some(self.keep.clone()),
            identity: self.identity.clone(),
        }
    }
}

fn held(identity: Option<&Bound<'_, Identity>>) -> Option<Arc<transport::Identity>> {
    identity.map(|identity| identity.get().0.clone())
}

/// The element type of a buffer: a `struct` format in native byte order.
fn dtype_of(format: &str, size: usize) -> Option<DType> {
    let foreign = if cfg!(target_endian = "little") { ['>', '!'] } else { ['<', '<'] };
    if format.starts_with(foreign) {
        return None;
    }
    match (format.trim_start_matches(['@', '=', '<', '>', '!']), size) {
        ("f", 4) => Some(DType::F32),
        ("d", 8) => Some(DType::F64),
        ("e", 2) => Some(DType::F16),
        ("i" | "l", 4) => Some(DType::I32),
        ("l" | "q", 8) => Some(DType::I64),
        ("B", 1) => Some(DType::U8),
        ("?", 1) => Some(DType::Bool),
        _ => None,
    }
}

/// An element type by its name.
pub(crate) fn parse_dtype(name: &str) -> PyResult<DType> {
    DType::from_name(name)
        .ok_or_else(|| PyTypeError::new_err(format!("unsupported element type {name}: supported are {}", supported())))
}

fn supported() -> String {
    let names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
    names.join(", ")
}

/// The address; that of an empty array may be anything, and becomes one that a slice may have.
fn aligned(address: usize, count: usize, dtype: DType) -> PyResult<usize> {
    if count == 0 {
        return Ok(dtype.size());
    }
    if address.is_multiple_of(dtype.size()) {
        return Ok(address);
    }
    Err(PyTypeError::new_err(format!(
        "memory at {address:#x} is not aligned to {dtype}'s {} bytes: pass an aligned copy",
        dtype.size()
    )))
}
