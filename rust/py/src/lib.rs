//! Bindings of the Rust core: buffers in, handles out, errors mapped; no logic.

mod engine;
mod errors;
mod join;
mod kernels;
mod logging;
mod memory;
mod process;
mod verbs;
mod view;
mod work;

use pyo3::prelude::*;

/// The Rust core of mdas. Use it through the package `mdas`.
#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use super::engine::{Engine, EngineSettings, loopback_engines};
    #[pymodule_export]
    use super::join::{Listener, host_identity, interfaces, local_address_towards, meet};
    #[pymodule_export]
    use super::kernels::{Adam, Sgd, Update, cpu_level, fused_update};
    #[pymodule_export]
    use super::kernels::{copy_sqnorm, dot, sqdist, sqnorm};
    #[pymodule_export]
    use super::kernels::{expand, orthonormalize, times, transposed_times};
    #[pymodule_export]
    use super::logging::{log, name_tags, start_logging};
    #[pymodule_export]
    use super::memory::Memory;
    #[pymodule_export]
    use super::verbs::{
        VerbsChoice, VerbsDevice, VerbsGid, VerbsOptions, VerbsPort, choose_verbs, try_verbs, verbs_devices,
        verbs_in_use, verbs_live,
    };
    #[pymodule_export]
    use super::view::{Identity, View};
    #[pymodule_export]
    use super::work::Work;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("ALGORITHMS", engine::names_of_algorithms())?;
        errors::register(module)
    }
}
