//! Bindings of the Rust core: buffers in, handles out, errors mapped; no logic.

mod errors;
mod memory;

use pyo3::prelude::*;

/// The Rust core of mdas. Use it through the package `mdas`.
#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::memory::Memory;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        errors::register(module)
    }
}
