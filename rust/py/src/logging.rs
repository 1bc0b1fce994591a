//! The core's log goes to stderr, never through Python: its threads must not wait for the GIL.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use env_logger::Builder;
use mdas_core::error::Error;
use pyo3::prelude::*;

use crate::errors;

/// Stands in every line.
static RANK: AtomicUsize = AtomicUsize::new(0);

/// Writes the core's log to stderr as `mdas[rank] LEVEL message`. `filter` as in the crate `env_logger`:
/// "error", "warn", "info", "debug", "trace", or e.g. "warn,mdas_core::engine=debug". The first call
/// decides about the filter; later ones only change the rank.
#[pyfunction]
pub(crate) fn start_logging(rank: usize, filter: &str) {
    RANK.store(rank, Ordering::Relaxed);
    let started = Builder::new()
        .parse_filters(filter)
        .format(|line, record| {
            writeln!(line, "mdas[{}] {} {}", RANK.load(Ordering::Relaxed), record.level(), record.args())
        })
        .try_init();
    // Err: a logger is there already.
    drop(started);
}

/// Errors and warnings call the tags from `first` to `last` by `words`, where `{}` stands for the distance from `first`.
#[pyfunction]
pub(crate) fn name_tags(first: u32, last: u32, words: &str) {
    mdas_core::engine::name_tags(first..=last, words);
}

/// Writes a line of the package's own to that log, as from the module `mdas::init`.
#[pyfunction]
pub(crate) fn log(py: Python<'_>, level: &str, message: &str) -> PyResult<()> {
    let level: ::log::Level = level.parse().map_err(|_| {
        errors::to_python(py, &Error::Invalid(format!("{level:?} is not one of error, warn, info, debug, trace")))
    })?;
    // Whoever reads stderr may be slow.
    py.detach(|| ::log::log!(target: "mdas::init", level, "{message}"));
    Ok(())
}
