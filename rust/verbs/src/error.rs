//! What can go wrong, in the words of who has to do something about it.

/// Result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// A verb that failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// There is no usable libibverbs.
    #[error("{0}")]
    Library(String),
    /// A call returned an error.
    #[error("{verb} on {place}: {}{hint}", std::io::Error::from_raw_os_error(*errno))]
    Verb {
        /// Its name in C.
        verb: &'static str,
        /// Device, and port where there is one.
        place: String,
        /// What it left there.
        errno: i32,
        /// What to do, if that is known; begins with ": ".
        hint: String,
    },
    /// What was asked for does not exist.
    #[error("{0}")]
    NotFound(String),
}

impl Error {
    /// The verb has just failed and set errno.
    pub(crate) fn last(verb: &'static str, place: impl Into<String>) -> Error {
        Error::code(verb, place, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// The verb has returned this errno, with either sign.
    pub(crate) fn code(verb: &'static str, place: impl Into<String>, errno: i32) -> Error {
        Error::Verb { verb, place: place.into(), errno: errno.abs(), hint: String::new() }
    }

    /// Is there too little of something, such as memory that may be locked, which others may give back?
    pub fn is_shortage(&self) -> bool {
        matches!(self, Error::Verb { errno: libc::ENOMEM | libc::EAGAIN | libc::ENOSPC, .. })
    }

    pub(crate) fn with_hint(self, text: impl FnOnce(i32) -> Option<String>) -> Error {
        match self {
            Error::Verb { verb, place, errno, .. } => Error::Verb {
                verb,
                place,
                errno,
                hint: text(errno).map(|text| format!(": {text}")).unwrap_or_default(),
            },
            other => other,
        }
    }
}

/// `Ok` for 0, else what went wrong.
pub(crate) fn check(rc: i32, verb: &'static str, place: impl FnOnce() -> String) -> Result<()> {
    match rc {
        0 => Ok(()),
        // Some verbs return -1 and set errno, others return the code.
        -1 => Err(Error::last(verb, place())),
        code => Err(Error::code(verb, place(), code)),
    }
}
