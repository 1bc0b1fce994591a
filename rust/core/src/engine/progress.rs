//! Who drives: the progress thread, or a caller that waits.
//!
//! The driver belongs to whoever holds its lock. The progress thread sleeps in the transport's poll. A
//! caller that waits says so, which sends the progress thread to the side, and drives by itself: a small
//! message then costs no thread switch. Commands go through a queue of their own, since the lock is held
//! during a poll.

use super::EngineConfig;
use super::call::GroupId;
use super::driver::{Command, Driver};
use crate::error::{Error, Result};
use crate::transport::{Lane, Wake};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// What callers know of a group.
pub(super) struct Membership {
    pub ranks: Arc<[usize]>,
    /// Hash of what it is for.
    pub purpose: u32,
    pub next_seq: [u64; 2],
}

/// Order of calls: sequence numbers are given and commands queued under one lock.
#[derive(Default)]
pub(super) struct Calls {
    pub groups: HashMap<GroupId, Membership>,
    pub queue: Vec<Command>,
}

/// What threads share.
pub struct Shared {
    pub(super) config: Arc<EngineConfig>,
    pub(super) calls: Mutex<Calls>,
    driver: Mutex<Driver>,
    waker: Arc<dyn Wake>,
    /// Callers that wait and want to drive.
    waiting: AtomicUsize,
    /// Operations are in flight (as of the last round).
    busy: AtomicBool,
    /// The progress thread has stepped aside.
    parked: AtomicBool,
    pub(super) closed: AtomicBool,
    changes: Mutex<u64>,
    changed: Condvar,
    park: Mutex<()>,
    unpark: Condvar,
}

/// A panic while a lock was held is a bug that has been reported already; what the lock protects is still
/// sound, since no `unsafe` relies on it being complete.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(driver: Driver, waker: Arc<dyn Wake>, config: Arc<EngineConfig>) -> Arc<Self> {
        Arc::new(Shared {
            config,
            calls: Mutex::default(),
            driver: Mutex::new(driver),
            waker,
            waiting: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            changes: Mutex::new(0),
            changed: Condvar::new(),
            park: Mutex::new(()),
            unpark: Condvar::new(),
        })
    }

    fn try_driver(&self) -> Option<MutexGuard<'_, Driver>> {
        match self.driver.try_lock() {
            Ok(driver) => Some(driver),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn round(&self, driver: &mut Driver, wait: Duration) {
        let commands = std::mem::take(&mut lock(&self.calls).queue);
        driver.round(commands.into_iter(), wait);
        self.busy.store(driver.busy(), Ordering::Release);
    }

    fn announce(&self) {
        *lock(&self.changes) += 1;
        self.changed.notify_all();
    }

    /// After a command was queued: starts it from here if nobody else is driving.
    pub(super) fn kick(&self, caller_waits: bool) {
        match self.try_driver() {
            Some(mut driver) => {
                self.round(&mut driver, Duration::ZERO);
                drop(driver);
                self.announce();
                if !caller_waits && self.busy.load(Ordering::Acquire) {
                    self.resume();
                }
            }
            None => self.waker.wake(),
        }
    }

    /// Brings the progress thread back.
    fn resume(&self) {
        if self.parked.load(Ordering::Acquire) {
            let _guard = lock(&self.park);
            self.unpark.notify_one();
        }
    }

    /// Sends the progress thread to the side, as long as the result lives.
    fn enter(&self) -> Leave<'_> {
        if self.waiting.fetch_add(1, Ordering::AcqRel) == 0 && !self.parked.load(Ordering::Acquire) {
            self.waker.wake();
        }
        Leave(self)
    }

    /// Drives, or watches somebody drive, until `done`, `until`, or a signal.
    pub(super) fn drive_until(&self, until: Instant, done: &dyn Fn() -> bool) {
        let _leave = self.enter();
        loop {
            let seen = *lock(&self.changes);
            if done() {
                return;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if let Some(mut driver) = self.try_driver() {
                // The state may have changed between the check and the lock.
                if !done() {
                    self.round(&mut driver, left.min(Duration::from_millis(50)));
                }
                drop(driver);
                self.announce();
            } else {
                let changes = lock(&self.changes);
                if *changes == seen {
                    let wait = self.changed.wait_timeout(changes, left.min(Duration::from_millis(20)));
                    drop(wait.unwrap_or_else(PoisonError::into_inner));
                }
            }
        }
    }

    /// Body of the progress thread.
    pub(super) fn progress(&self) {
        while !self.closed.load(Ordering::Acquire) {
            if self.waiting.load(Ordering::Acquire) > 0 {
                self.step_aside();
                continue;
            }
            let mut driver = lock(&self.driver);
            self.round(&mut driver, Duration::from_secs(1));
            drop(driver);
            self.announce();
        }
    }

    /// Stays out of the way for a little longer than the caller waits, so that a run of small
    /// operations is not interleaved with thread switches.
    fn step_aside(&self) {
        let guard = lock(&self.park);
        self.parked.store(true, Ordering::Release);
        let nap = Duration::from_millis(if self.waiting.load(Ordering::Acquire) > 0 { 20 } else { 1 });
        let parked = self.unpark.wait_timeout(guard, nap);
        self.parked.store(false, Ordering::Release);
        drop(parked.unwrap_or_else(PoisonError::into_inner));
    }

    /// Lets everything in flight finish, as long as something moves at least every `drain`; then closes.
    pub(super) fn close(&self, drain: Duration, deadline: Duration) {
        let start = Instant::now();
        let settled = || {
            let Some(driver) = self.try_driver() else { return false };
            let moved = driver.last_move().unwrap_or(start).max(start);
            lock(&self.calls).queue.is_empty() && (!driver.busy() || moved.elapsed() > drain)
        };
        while !settled() {
            self.drive_until(Instant::now() + Duration::from_millis(20), &|| !self.busy.load(Ordering::Acquire));
        }
        self.closed.store(true, Ordering::Release);
        self.waker.wake();
        self.resume();
        let mut driver = lock(&self.driver);
        self.round(&mut driver, Duration::ZERO);
        driver.close(&Error::Closed("mdas has been shut down while this operation was in flight".into()), deadline);
        drop(driver);
        self.announce();
    }

    /// Statistics.
    pub(super) fn counters(&self) -> super::wires::Counters {
        // Woken alone, the progress thread would take the lock again before we have it: no lock of the system is fair.
        let _leave = self.enter();
        lock(&self.driver).counters()
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed("mdas has been shut down; call init() again".into()));
        }
        if std::process::id() != self.config.pid {
            return Err(Error::Closed(
                "this is a forked child of a process that has called mdas.init(); mdas works only in the parent (use the spawn start method, or call init() after the fork)".into(),
            ));
        }
        Ok(())
    }
}

/// A caller stops waiting, also by unwinding.
struct Leave<'a>(&'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        let last = self.0.waiting.fetch_sub(1, Ordering::AcqRel) == 1;
        if last && self.0.busy.load(Ordering::Acquire) {
            self.0.resume();
        }
    }
}

/// Lane and sequence number of the next call, and its group's ranks.
pub(super) fn next_call(calls: &mut Calls, group: GroupId, lane: Lane, rank: usize) -> Result<(u64, Arc<[usize]>)> {
    let Some(membership) = calls.groups.get_mut(&group) else {
        return Err(Error::Invalid(format!("group {} does not exist", group.0)));
    };
    if !membership.ranks.contains(&rank) {
        return Err(Error::Invalid(format!(
            "rank {rank} does not belong to group {} (ranks {:?})",
            group.0, membership.ranks
        )));
    }
    let counter = &mut membership.next_seq[lane as usize];
    *counter += 1;
    Ok((*counter - 1, membership.ranks.clone()))
}
