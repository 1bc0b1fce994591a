//! `Work`: the handle of an operation in flight.

use std::time::{Duration, Instant};

use mdas_core::engine;
use pyo3::prelude::*;

use crate::errors;
use crate::process::Home;

/// Longest time without looking for signals: Ctrl-C works while waiting.
const SLICE: Duration = Duration::from_millis(100);

/// An operation in flight. Dropping it does not stop the operation, nor release its memory early.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct Work {
    work: engine::Work,
    home: Home,
}

impl Work {
    pub(crate) fn new(work: engine::Work, home: Home) -> Self {
        Self { work, home }
    }
}

#[pymethods]
impl Work {
    /// Is it over, well or badly? Never waits.
    fn done(&self) -> bool {
        self.work.done()
    }

    /// Waits until it is over. The GIL is released meanwhile, and signals are served.
    ///
    /// With a `timeout` in seconds that passes first: CollectiveTimeoutError, and the operation stays
    /// in flight, as it does after an exception from a signal handler (KeyboardInterrupt). Without one,
    /// the operation's own deadline ends the wait. Raises what the operation failed with.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.home.check(py)?;
        let started = Instant::now();
        let timeout = timeout.map(|seconds| errors::patience(py, "timeout", seconds)).transpose()?;
        loop {
            let left = timeout.map_or(SLICE, |timeout| timeout.saturating_sub(started.elapsed()).min(SLICE));
            match py.detach(|| self.work.wait(left)) {
                Ok(true) => return Ok(()),
                Ok(false) => py.check_signals()?,
                Err(error) => return Err(errors::to_python(py, &error)),
            }
            if let Some(timeout) = timeout
                && started.elapsed() >= timeout
            {
                return Err(errors::wait_is_over(py, timeout));
            }
        }
    }

    /// (submitted, started, finished) on the clock of `time.monotonic_ns()`; None while in flight.
    fn times(&self) -> Option<(u64, u64, u64)> {
        self.work.times().map(|times| (times.submitted, times.started, times.finished))
    }
}
