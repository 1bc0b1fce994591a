//! Groups that break, and operations that are left before they are through.
//!
//! An operation that is given up may have landing areas that peers are writing to, and writes that the device is reading
//! from. Where the transport can discard late bytes and forget writes, that is over at once. Where it cannot, the
//! operation keeps its memory and its handle stays unfinished, until nobody can touch that memory any more: each rank
//! that has broken a group makes no more writes in it, and tells the others how many it has made (`Stopped`); when so
//! many have arrived from a peer, the other landing areas for it are free.

use super::{Driver, Exec};
use crate::engine::call::GroupId;
use crate::engine::protocol::{Frame, OpKey, Reason};
use crate::error::Error;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// A peer that was asked something, for a warning or a deadline, and has given no sign of life for so long afterwards is
/// not waited for.
const SILENCE: Duration = Duration::from_secs(1);
/// Any other peer may take so long for the next write of an operation that is being left to end. More than a device waits
/// before it sends a lost packet again.
const GRACE: Duration = Duration::from_secs(3);

/// An operation that has failed, but whose memory may still be in use.
pub struct Leaving {
    exec: Exec,
    error: Error,
    since: Instant,
}

impl Driver {
    /// All operations of the group end with `error`; the first error stands. `tell`: the other ranks, too.
    pub(super) fn break_group(&mut self, id: GroupId, error: &Error, tell: bool) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.broken.is_some() {
            return;
        }
        group.broken = Some(error.clone());
        let (ranks, since) = (group.ranks.clone(), Instant::now());
        let mut unstarted = Vec::new();
        for lane in &mut group.lanes {
            for mut exec in lane.active.drain(..) {
                exec.stop(&mut self.wires);
                self.leaving.push(Leaving { exec, error: error.clone(), since });
            }
            unstarted.extend(lane.queued.drain(..).map(|order| order.work));
        }
        self.discard_early(id);
        for &peer in ranks.iter().filter(|&&peer| peer != self.config.rank) {
            if tell {
                self.wires.say(peer, &Frame::Abort { group: id, reason: Reason::new(error, self.config.rank) });
            }
            self.wires.say_stopped(id, peer);
        }
        for work in unstarted {
            work.finish(Err(error.clone()));
        }
        self.settle();
    }

    /// All groups end with `error`.
    pub(super) fn break_all(&mut self, error: &Error, tell: bool) {
        self.failed.get_or_insert_with(|| error.clone());
        let ids: Vec<_> = self.groups.keys().copied().collect();
        for id in ids {
            self.break_group(id, error, tell);
        }
    }

    /// `peer` says that the group is broken. One that is not made yet will be so from the start, and those who wait to be
    /// written to in it hear that they need not.
    pub(super) fn aborted(&mut self, peer: usize, id: GroupId, error: Error) {
        if self.groups.contains_key(&id) {
            return self.break_group(id, &error, false);
        }
        self.stillborn.entry(id).or_insert(error);
        for peer in self.discard_early(id).into_iter().chain([peer]).collect::<BTreeSet<_>>() {
            self.wires.say_stopped(id, peer);
        }
    }

    /// Nobody will read what came for the group before its operations were called. Returns whom it came from.
    fn discard_early(&mut self, id: GroupId) -> Vec<usize> {
        let unread: Vec<OpKey> = self.early.keys().filter(|key| key.group == id).copied().collect();
        let frames: Vec<_> = unread.iter().filter_map(|key| self.early.remove(key)).flatten().collect();
        frames.iter().for_each(|(peer, frame)| self.discard(*peer, frame));
        frames.into_iter().map(|(peer, _)| peer).collect()
    }

    /// Finishes the operations that nobody can touch any more.
    pub(super) fn settle(&mut self) {
        let wires = &mut self.wires;
        let (over, rest) = std::mem::take(&mut self.leaving).into_iter().partition(|left| wires.release(left.exec.key));
        self.leaving = rest;
        for Leaving { exec, error, .. } in over {
            let work = exec.work.clone();
            exec.retire(&mut self.wires);
            work.finish(Err(error));
        }
    }

    /// The transport is closed: nobody touches anything any more.
    pub(super) fn finish_leaving(&mut self) {
        for Leaving { exec, error, .. } in self.leaving.drain(..) {
            let work = exec.work.clone();
            drop(exec);
            work.finish(Err(error));
        }
    }

    /// Part of an operation that is being left has ended.
    pub(super) fn left_a_little(&mut self, op: OpKey, peer: usize) {
        if self.leaving.iter().any(|left| left.exec.key == op) {
            self.wires.peers[peer].moved = Some(Instant::now());
        }
    }

    /// Ends the connections with peers that take too long to let go of memory.
    pub(super) fn lose_patience(&mut self, now: Instant) {
        let mut late = BTreeMap::new();
        for Leaving { exec, since, .. } in &self.leaving {
            for peer in self.wires.holders(exec.key) {
                let state = &self.wires.peers[peer];
                let still = now.duration_since(state.moved.map_or(*since, |moved| moved.max(*since)));
                let silent = state.asked.is_some_and(|asked| now.duration_since(asked) > SILENCE);
                if state.gone.is_none() && (still > GRACE || silent) {
                    late.entry(peer).or_insert_with(|| (exec.describe(), still));
                }
            }
        }
        for (peer, (operation, still)) in late {
            let cause = format!(
                "it has not let go of the memory of an operation that was given up {:.1} s ago ({operation})",
                still.as_secs_f64()
            );
            log::warn!("rank {peer}: {cause}; the connection with it is ended");
            self.wires.transport.sever(peer, &cause);
        }
    }
}
