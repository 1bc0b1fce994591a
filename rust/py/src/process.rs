//! A forked child inherits the objects of its parent, but neither its threads nor its place in the job.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::process;

use mdas_core::error::Error;
use pyo3::prelude::*;

use crate::errors;

/// The process in which something was made.
#[derive(Clone, Copy)]
pub(crate) struct Home(u32);

impl Home {
    pub(crate) fn here() -> Self {
        Self(process::id())
    }

    pub(crate) fn is_here(self) -> bool {
        self.0 == process::id()
    }

    /// ClosedError in a forked child, where the locks of the parent's threads may be held forever.
    pub(crate) fn check(self, py: Python<'_>) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        let error = Error::Closed(format!(
            "this process was forked from process {} after mdas.init(), and has no place in its job: \
             use mdas in the parent only, or start the child with the \"spawn\" method and call mdas.init() there",
            self.0
        ));
        Err(errors::to_python(py, &error))
    }
}

/// Dropped only in the process that made it: a forked child must not say goodbye on its parent's connections.
pub(crate) struct AtHome<T> {
    home: Home,
    value: ManuallyDrop<T>,
}

impl<T> AtHome<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { home: Home::here(), value: ManuallyDrop::new(value) }
    }

    pub(crate) fn home(&self) -> Home {
        self.home
    }
}

impl<T> Deref for AtHome<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for AtHome<T> {
    fn drop(&mut self) {
        if self.home.is_here() {
            // SAFETY: dropped here only, once, and never used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// A socket that a forked child has a copy of.
pub(crate) struct Inherited {
    number: RawFd,
    /// Tells it apart from whatever gets the number after it has been closed.
    inode: u64,
}

impl Inherited {
    pub(crate) fn new(socket: BorrowedFd<'_>) -> Option<Self> {
        let number = socket.as_raw_fd();
        Some(Self { number, inode: inode(number)? })
    }

    /// Closes the copy. For a forked child that never uses the socket's owner.
    pub(crate) fn close(&self) {
        if inode(self.number) == Some(self.inode) {
            // SAFETY: it is still the socket, by its inode; its owner is a copy in a forked child, which
            // `AtHome` keeps from ever being used or dropped.
            drop(unsafe { OwnedFd::from_raw_fd(self.number) });
        }
    }
}

fn inode(number: RawFd) -> Option<u64> {
    let link = std::fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}
