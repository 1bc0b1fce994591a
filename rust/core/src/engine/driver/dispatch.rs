//! What arrives: events of the transport, and the frames of other engines.

use super::{Driver, Exec, Fingerprint};
use crate::engine::call::GroupId;
use crate::engine::protocol::{Frame, OpKey};
use crate::engine::wires::Gone;
use crate::error::Error;
use crate::transport::Event;

impl Driver {
    /// One event of the transport.
    pub(super) fn handle(&mut self, event: Event) {
        match event {
            Event::Control { peer, frame } => {
                self.wires.heard(peer);
                match Frame::decode(&frame) {
                    Some(frame) => self.dispatch(peer, frame),
                    None => self.gone(
                        peer,
                        Gone::Lost("it sent a frame that makes no sense; do all ranks run the same version?".into()),
                    ),
                }
            }
            Event::Arrived { peer, key } => {
                self.wires.heard(peer);
                if let Some((op, index)) = self.wires.landed(peer, key) {
                    match self.exec(op) {
                        Some((exec, _)) => exec.landed(peer, index),
                        None => self.left_a_little(op, peer),
                    }
                    self.touched.push(op);
                }
            }
            Event::Sent { id } => {
                if let Some((op, peer)) = self.wires.sent(id) {
                    match self.exec(op) {
                        Some((exec, _)) => exec.sent(id),
                        None => self.left_a_little(op, peer),
                    }
                    self.touched.push(op);
                }
            }
            Event::Departed { peer } => self.gone(peer, Gone::Departed),
            Event::Lost { peer, cause } => self.gone(peer, Gone::Lost(cause)),
        }
    }

    fn dispatch(&mut self, peer: usize, frame: Frame) {
        match frame {
            Frame::Grant { op, .. } | Frame::Inline { op, .. } => self.arrive(op, peer, frame),
            Frame::Credit { bytes } => self.wires.credit(peer, bytes),
            Frame::Abort { group, reason } => self.aborted(peer, group, reason.into_error(peer)),
            Frame::Stopped { group, writes } => self.wires.stopped(group, peer, writes),
            Frame::Query { op } => {
                let called = self.groups.get(&op.group).map_or(0, |group| group.lanes[op.lane as usize].called);
                self.wires.say(peer, &Frame::Answer { op, called });
            }
            Frame::Answer { op, called } => {
                if let Some((exec, _)) = self.exec(op) {
                    exec.inquiry.answers.insert(peer, called);
                }
            }
        }
    }

    /// A frame for an operation that may be running, waiting, over, or not called yet.
    fn arrive(&mut self, op: OpKey, peer: usize, frame: Frame) {
        let known = self.groups.get(&op.group).and_then(|group| {
            if group.broken.is_some() {
                return None;
            }
            let lane = &group.lanes[op.lane as usize];
            let active = lane.active.iter().find(|exec| exec.key == op).map(|exec| exec.fingerprint);
            let queued = || lane.queued.iter().find(|order| order.key == op).map(|order| order.fingerprint());
            let finished = || lane.finished.iter().find(|(seq, _)| *seq == op.seq).map(|(_, fingerprint)| *fingerprint);
            active.map(|f| (f, true)).or_else(|| queued().or_else(finished).map(|f| (f, false)))
        });
        let clash = known.and_then(|(ours, _)| Some((ours, clash(ours, &frame)?)));
        match known {
            _ if clash.is_some() => {
                if let Some((ours, theirs)) = clash {
                    self.mismatch(op, ours, peer, theirs);
                }
            }
            Some((_, true)) => {
                self.deliver(peer, frame);
                self.touched.push(op);
            }
            // A broken group reads nothing more.
            None if self.groups.get(&op.group).is_some_and(|group| group.broken.is_some()) => {
                self.discard(peer, &frame)
            }
            // It may wait to be written to: it does not know how many others there are in the group, nor do we.
            None if self.stillborn.contains_key(&op.group) => {
                self.discard(peer, &frame);
                self.wires.say_stopped(op.group, peer);
            }
            // All others keep it for the call that will come.
            _ => self.early.entry(op).or_default().push((peer, frame)),
        }
    }

    /// Nobody will read this frame: its credit goes back.
    pub(super) fn discard(&mut self, peer: usize, frame: &Frame) {
        if let Frame::Inline { payload, .. } = frame {
            self.wires.consumed(peer, payload.len() + INLINE_HEADER);
        }
    }

    /// Hands a frame to its running operation.
    pub(super) fn deliver(&mut self, peer: usize, frame: Frame) {
        let rank = self.config.rank;
        let result = match frame {
            Frame::Grant { op, index, key, bytes, .. } => match self.exec(op) {
                Some((exec, wires)) => exec
                    .granted(peer, index, key, bytes, wires)
                    .map_err(|error| (op, error.given_up(exec.describe(), rank))),
                None => Ok(()),
            },
            Frame::Inline { op, index, payload, .. } => {
                let cost = payload.len() + INLINE_HEADER;
                self.wires.counters.bytes_received += payload.len() as u64;
                if let Some((exec, _)) = self.exec(op) {
                    exec.inlined(peer, index, payload, cost);
                }
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err((op, error)) = result {
            self.break_group(op.group, &error, true);
        }
    }

    pub(super) fn mismatch(&mut self, op: OpKey, ours: Fingerprint, peer: usize, theirs: Fingerprint) {
        let error = Error::Mismatch {
            operation: format!("operation {op}"),
            rank: self.config.rank,
            ours: ours.against(&theirs),
            peer,
            theirs: theirs.against(&ours),
        };
        self.break_group(op.group, &error, true);
    }

    fn gone(&mut self, peer: usize, gone: Gone) {
        let state = &mut self.wires.peers[peer];
        if state.gone.is_some() {
            return;
        }
        let lost = match &gone {
            Gone::Lost(cause) => Some(cause.clone()),
            Gone::Departed => None,
        };
        state.gone = Some(gone);
        let hit: Vec<GroupId> =
            self.groups.iter().filter(|(_, group)| group.ranks.contains(&peer)).map(|(id, _)| *id).collect();
        for id in hit {
            match &lost {
                Some(cause) => {
                    let operation = self.groups[&id]
                        .lanes
                        .iter()
                        .flat_map(|lane| &lane.active)
                        .next()
                        .map_or_else(|| "between operations".into(), Exec::describe);
                    let error = Error::PeerLost { operation, peer, cause: cause.clone() };
                    self.break_group(id, &error, true);
                }
                // The others may still have sent all that is needed.
                None => {
                    let keys = self.groups[&id].lanes.iter().flat_map(|lane| lane.active.iter().map(|exec| exec.key));
                    self.touched.extend(keys);
                }
            }
        }
    }
}

/// Bytes of an inline frame besides its payload.
const INLINE_HEADER: usize = 1 + 13 + 23 + 4;

/// Does the frame's call differ from ours?
pub(super) fn clash(ours: Fingerprint, frame: &Frame) -> Option<Fingerprint> {
    match frame {
        Frame::Grant { call, .. } | Frame::Inline { call, .. } if *call != ours => Some(*call),
        _ => None,
    }
}
