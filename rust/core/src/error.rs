//! One error type for the whole core. Every variant says how far it reaches
//! (see [`Error::scope`]) and names the operation, the ranks and the cause.

use std::time::Duration;

/// Result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// The largest thing that an error breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Only the call that raised it; nothing was sent.
    Operation,
    /// The group of ranks: its later operations fail with the same cause.
    Group,
    /// The process's place in the job: nothing works until a new `init`.
    Job,
}

/// What can go wrong.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// A call whose arguments make no sense; refused before anything was sent.
    #[error("{0}")]
    Invalid(String),
    /// The environment or the configuration does not allow what was asked for.
    #[error("{0}")]
    Configuration(String),
    /// Two ranks called different operations at the same point of a group's order.
    #[error(
        "{operation}: rank {rank} called {ours}, but rank {peer} called {theirs} (same group, same sequence number; every rank must call the same operations in the same order)"
    )]
    Mismatch {
        /// Operation with group, lane and sequence number.
        operation: String,
        /// The rank that noticed.
        rank: usize,
        /// What that rank called.
        ours: String,
        /// The other rank.
        peer: usize,
        /// What the other rank called.
        theirs: String,
    },
    /// A rank died, left, or stopped answering while an operation needed it.
    #[error("{operation}: lost rank {peer}: {cause}")]
    PeerLost {
        /// Operation with group, lane and sequence number, or "init".
        operation: String,
        /// World rank that is gone.
        peer: usize,
        /// errno, "connection closed", "no sign of life for 12.0 s", ...
        cause: String,
    },
    /// Everybody is alive, but somebody did not come in time.
    #[error("{operation}: no progress for {:.1} s (timeout {:.1} s): {detail}", .waited.as_secs_f64(), .timeout.as_secs_f64())]
    Timeout {
        /// Operation with group, lane and sequence number.
        operation: String,
        /// Time without progress.
        waited: Duration,
        /// The deadline that applied.
        timeout: Duration,
        /// Which ranks are late.
        detail: String,
    },
    /// A rank, this one or another, could not go on with an operation, for a reason of its own.
    #[error("{operation}: rank {rank} gave it up: {cause}")]
    GivenUp {
        /// Operation with group, lane and sequence number.
        operation: String,
        /// World rank that gave up.
        rank: usize,
        /// What went wrong there.
        cause: String,
    },
    /// The group was already broken by an earlier error.
    #[error("{operation}: the group is unusable since an earlier error: {cause}")]
    Broken {
        /// Operation with group, lane and sequence number.
        operation: String,
        /// The earlier error, in words.
        cause: Box<Error>,
    },
    /// `shutdown` has been called, or the process is a forked child.
    #[error("{0}")]
    Closed(String),
    /// The operating system refused something that we cannot go on without.
    #[error("{what}: {cause}")]
    System {
        /// What was tried, with address and port where there is one.
        what: String,
        /// errno in words.
        cause: String,
    },
}

impl Error {
    /// How far this error reaches.
    pub fn scope(&self) -> Scope {
        match self {
            Error::Invalid(_) => Scope::Operation,
            Error::Mismatch { .. }
            | Error::PeerLost { .. }
            | Error::Timeout { .. }
            | Error::GivenUp { .. }
            | Error::Broken { .. } => Scope::Group,
            Error::Configuration(_) | Error::Closed(_) | Error::System { .. } => Scope::Job,
        }
    }

    /// What is told to all ranks of a group that this error breaks: a reason that lies with `rank` alone is put together
    /// with the operation and the rank.
    pub fn given_up(self, operation: String, rank: usize) -> Self {
        match self {
            Error::Invalid(_) | Error::Configuration(_) | Error::Closed(_) | Error::System { .. } => {
                Error::GivenUp { operation, rank, cause: self.to_string() }
            }
            told => told,
        }
    }

    /// An I/O error with what was tried.
    pub fn system(what: impl Into<String>, cause: impl std::fmt::Display) -> Self {
        Error::System { what: what.into(), cause: cause.to_string() }
    }
}
