//! One queue pair, what is posted on it, and what waits for room.

use super::CREDIT;
use super::frames::Frames;
use crate::transport::{Lane, WriteId};
use mdas_verbs::sys::Sge;
use mdas_verbs::{QueuePair, Result};
use std::collections::VecDeque;

/// Requests posted on one queue pair at a time.
pub const SENDS: usize = 64;
/// Of so many inline sends one asks for its completion, which tells of all before it.
const SIGNAL: usize = 8;
/// Marks ids of receives.
pub const RECEIVE: u64 = 1 << 63;
/// The immediate of a goodbye; others say how many frames the sender has taken in.
pub const GOODBYE: u32 = 1 << 31;

/// To be posted.
pub enum Request {
    /// A control frame.
    Frame(Box<[u8]>),
    /// A write of `piece` to the peer's `to`.
    Write { id: WriteId, piece: Sge, to: (u64, u32), immediate: u32 },
    /// Nothing comes after it.
    Goodbye,
}

/// Posted, in this order.
#[derive(Clone, Copy)]
enum Posted {
    Inline,
    Frame { buffer: usize },
    Write { id: WriteId },
}

/// What a completion has ended.
pub enum Ended {
    Write(WriteId),
    Other,
}

pub struct Channel {
    pub pair: QueuePair,
    pub lane: Lane,
    pub rail: usize,
    waiting: VecDeque<Request>,
    posted: VecDeque<Posted>,
    /// Id of the first of `posted`.
    first: u64,
    silent: usize,
    /// Frames that the peer has room for; without a limit on a channel that carries none.
    pub credit: u32,
    /// Frames taken in that the peer has not been told of.
    pub owed: u32,
    /// The peer has said goodbye on it.
    pub goodbye: bool,
}

impl Channel {
    pub fn new(pair: QueuePair, lane: Lane, rail: usize) -> Channel {
        Channel {
            pair,
            lane,
            rail,
            waiting: VecDeque::new(),
            posted: VecDeque::new(),
            first: 0,
            silent: 0,
            credit: if lane == Lane::Urgent { CREDIT } else { u32::MAX },
            owed: 0,
            goodbye: false,
        }
    }

    pub fn push(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// Is nothing left to be sent, or to be acknowledged?
    pub fn idle(&self) -> bool {
        self.waiting.is_empty() && self.posted.iter().all(|posted| matches!(posted, Posted::Inline))
    }

    /// Drops writes that wait and are not posted, and adds them to `dropped`.
    pub fn drop_waiting(&mut self, which: impl Fn(WriteId) -> bool, dropped: &mut Vec<WriteId>) {
        self.waiting.retain(|request| match request {
            Request::Write { id, .. } if which(*id) => {
                dropped.push(*id);
                false
            }
            _ => true,
        });
    }

    /// Posts what there is room for.
    pub fn pump(&mut self, frames: &mut Frames) -> Result<()> {
        while self.posted.len() < SENDS {
            let Some(request) = self.waiting.pop_front() else { return Ok(()) };
            let next = self.first + self.posted.len() as u64;
            match request {
                Request::Frame(bytes) => {
                    let inline = bytes.len() <= self.pair.inline_bytes;
                    let room = if self.credit == 0 || inline { None } else { frames.fill(&bytes) };
                    if self.credit == 0 || !(inline || room.is_some()) {
                        self.waiting.push_front(Request::Frame(bytes));
                        return Ok(());
                    }
                    if let Some((buffer, piece)) = room {
                        self.posted.push_back(Posted::Frame { buffer });
                        self.silent = 0;
                        // SAFETY: the buffer is this request's until its completion gives it back.
                        unsafe { self.pair.send(next, piece, self.owed)? };
                    } else {
                        let signalled = self.signalled();
                        self.posted.push_back(Posted::Inline);
                        self.pair.send_inline(next, &bytes, self.owed, signalled)?;
                    }
                    (self.owed, self.credit) = (0, self.credit - 1);
                }
                Request::Write { id, piece, to, immediate } => {
                    self.posted.push_back(Posted::Write { id });
                    self.silent = 0;
                    // SAFETY: the source lives until `Sent`, or until the queue pair is gone (contract of
                    // `Transport::write`): `cancel` names only what is not posted.
                    unsafe { self.pair.write(next, piece, immediate, to)? };
                }
                Request::Goodbye => {
                    // Waited for when closing, unlike other inline sends.
                    self.posted.push_back(Posted::Frame { buffer: Frames::NONE });
                    self.pair.send_inline(next, &[], GOODBYE, true)?;
                }
            }
        }
        Ok(())
    }

    /// Tells the peer of the frames taken in, if it may be waiting to hear of them.
    pub fn return_credit(&mut self, at_least: u32) -> Result<()> {
        if self.owed >= at_least && self.posted.len() < SENDS {
            let next = self.first + self.posted.len() as u64;
            let signalled = self.signalled();
            self.pair.send_inline(next, &[], self.owed, signalled)?;
            self.posted.push_back(Posted::Inline);
            self.owed = 0;
        }
        Ok(())
    }

    fn signalled(&mut self) -> bool {
        self.silent += 1;
        let full = self.posted.len() + 1 >= SENDS;
        if self.silent >= SIGNAL || full {
            self.silent = 0;
        }
        self.silent == 0
    }

    /// The request `id` is over, and so are those before it.
    pub fn finish(&mut self, id: u64, frames: &mut Frames, mut ended: impl FnMut(Ended)) {
        while self.first <= id {
            let Some(posted) = self.posted.pop_front() else { return };
            self.first += 1;
            ended(match posted {
                Posted::Write { id } => Ended::Write(id),
                Posted::Frame { buffer } => {
                    frames.give_back(buffer);
                    Ended::Other
                }
                Posted::Inline => Ended::Other,
            });
        }
    }

    /// The buffers of frames that will never be acknowledged; the queue pair is gone.
    pub fn abandon(mut self, frames: &mut Frames) {
        drop(self.pair);
        for posted in self.posted.drain(..) {
            if let Posted::Frame { buffer } = posted {
                frames.give_back(buffer);
            }
        }
    }
}
