//! Handles of operations.

use super::progress::Shared;
use crate::error::Result;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// When things happened, in nanoseconds of CLOCK_MONOTONIC (Python's `time.monotonic_ns`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// The call was made.
    pub submitted: u64,
    /// The engine began with it.
    pub started: u64,
    /// It ended.
    pub finished: u64,
}

/// Now, in nanoseconds of CLOCK_MONOTONIC.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Shared between handle and engine.
pub struct WorkState {
    pub(super) submitted: u64,
    pub(super) started: OnceLock<u64>,
    result: OnceLock<(Result<()>, u64)>,
}

impl WorkState {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(WorkState { submitted: monotonic_ns(), started: OnceLock::new(), result: OnceLock::new() })
    }

    /// The first result stands.
    pub(super) fn finish(&self, result: Result<()>) {
        let _ = self.result.set((result, monotonic_ns()));
    }
}

/// An operation in flight. Dropping it does not stop the operation, and its memory stays owned.
pub struct Work {
    pub(super) state: Arc<WorkState>,
    pub(super) shared: Arc<Shared>,
}

impl Work {
    /// Over, well or badly?
    pub fn done(&self) -> bool {
        self.state.result.get().is_some()
    }

    /// Waits at most `slice`, moving bytes meanwhile. `Ok(true)`: over. `Ok(false)`: not yet. Ends early
    /// when a signal arrives.
    ///
    /// # Errors
    /// Whatever the operation failed with; the same on every call.
    pub fn wait(&self, slice: Duration) -> Result<bool> {
        if self.state.result.get().is_none() {
            self.shared.drive_until(Instant::now() + slice, &|| self.done());
        }
        match self.state.result.get() {
            None => Ok(false),
            Some((Ok(()), _)) => Ok(true),
            Some((Err(error), _)) => Err(error.clone()),
        }
    }

    /// `None` while in flight.
    pub fn times(&self) -> Option<Times> {
        let (_, finished) = self.state.result.get()?;
        let started = *self.state.started.get().unwrap_or(finished);
        Some(Times { submitted: self.state.submitted, started, finished: *finished })
    }
}
