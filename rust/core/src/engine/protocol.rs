//! Control frames between engines. Little endian, fixed fields first; decoding never trusts a length.
//!
//! - `Grant`: "write message `index` of this operation here". Carries the receiver's whole call.
//! - `Inline`: a message short enough to need no grant; its sender spends credit, which the receiver
//!   returns with `Credit` once the message has been consumed.
//! - `Abort`: the group is broken; everybody raises the same error.
//! - `Stopped`: no more writes are made in a broken group. How many there were tells when the last has arrived.
//! - `Query` / `Answer`: how far are you? Asked before a warning and before a deadline.

use super::call::{Fingerprint, GroupId};
use crate::error::Error;
use crate::transport::{LandingKey, Lane};
use std::time::Duration;

/// One operation: its group, its lane, its number in the lane's order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpKey {
    /// Group.
    pub group: GroupId,
    /// Lane.
    pub lane: Lane,
    /// Counts from 0 in each lane of each group.
    pub seq: u64,
}

impl std::fmt::Display for OpKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lane = if self.lane == Lane::Urgent { "urgent" } else { "bulk" };
        write!(f, "#{} on the {lane} lane of ", self.seq)?;
        if self.group.0 == 0 { write!(f, "the world") } else { write!(f, "group {:08x}", self.group.0) }
    }
}

/// Everything that engines say to each other.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame {
    /// Permission to write one message.
    Grant {
        /// Operation.
        op: OpKey,
        /// The granting rank's call.
        call: Fingerprint,
        /// Message number from the grant's receiver to its sender.
        index: u32,
        /// Where to write.
        key: LandingKey,
        /// How much.
        bytes: u64,
    },
    /// A short message.
    Inline {
        /// Operation.
        op: OpKey,
        /// The sender's call.
        call: Fingerprint,
        /// Message number.
        index: u32,
        /// Data.
        payload: Vec<u8>,
    },
    /// Room for this many more inline bytes.
    Credit {
        /// Bytes, headers counted.
        bytes: u32,
    },
    /// The group is broken.
    Abort {
        /// Group.
        group: GroupId,
        /// Why; not comparable, so boxed as words and kind.
        reason: Reason,
    },
    /// The group is broken, and the sender's last write in it has been made.
    Stopped {
        /// Group.
        group: GroupId,
        /// Writes to the frame's receiver since the group was made.
        writes: u64,
    },
    /// How far are you?
    Query {
        /// Operation that the asker waits for.
        op: OpKey,
    },
    /// This far.
    Answer {
        /// Operation asked about.
        op: OpKey,
        /// Operations that this rank has called in that lane of that group so far.
        called: u64,
    },
}

/// An error that travels.
#[derive(Debug, Clone, PartialEq)]
pub struct Reason {
    /// 0 mismatch, 1 peer lost, 2 timeout, 3 given up.
    pub kind: u8,
    /// Rank that called something else, or is lost.
    pub peer: u32,
    /// Rank that noticed a mismatch, or that gave up.
    pub rank: u32,
    /// Milliseconds waited and allowed (timeouts).
    pub millis: (u64, u64),
    /// operation, ours, theirs / cause.
    pub texts: [String; 3],
}

impl Reason {
    /// What `own_rank` tells the others of an error.
    pub fn new(error: &Error, own_rank: usize) -> Self {
        let reason = |kind, peer: usize, rank: usize, texts: [&str; 3]| Reason {
            kind,
            peer: peer as u32,
            rank: rank as u32,
            millis: (0, 0),
            texts: texts.map(str::to_owned),
        };
        match error {
            Error::Mismatch { operation, rank, ours, peer, theirs } => {
                reason(0, *peer, *rank, [operation, ours, theirs])
            }
            Error::PeerLost { operation, peer, cause } => reason(1, *peer, 0, [operation, cause, ""]),
            Error::Timeout { operation, waited, timeout, detail } => Reason {
                millis: (waited.as_millis() as u64, timeout.as_millis() as u64),
                ..reason(2, 0, 0, [operation, detail, ""])
            },
            Error::GivenUp { operation, rank, cause } => reason(3, 0, *rank, [operation, cause, ""]),
            Error::Broken { cause, .. } => Reason::new(cause, own_rank),
            // What `Error::given_up` has put together with its operation is one of the above.
            Error::Invalid(_) | Error::Configuration(_) | Error::Closed(_) | Error::System { .. } => {
                reason(3, 0, own_rank, ["all operations", &error.to_string(), ""])
            }
        }
    }

    /// The error that the receiver raises.
    pub fn into_error(self, from: usize) -> Error {
        let [operation, first, second] = self.texts;
        match self.kind {
            0 => Error::Mismatch {
                operation,
                rank: self.rank as usize,
                ours: first,
                peer: self.peer as usize,
                theirs: second,
            },
            1 => Error::PeerLost {
                operation,
                peer: self.peer as usize,
                cause: format!("{first} (reported by rank {from})"),
            },
            2 => Error::Timeout {
                operation,
                waited: Duration::from_millis(self.millis.0),
                timeout: Duration::from_millis(self.millis.1),
                detail: format!("{first} (reported by rank {from})"),
            },
            _ => Error::GivenUp { operation, rank: self.rank as usize, cause: first },
        }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }
    fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }
    fn op(&mut self, op: OpKey) {
        self.u32(op.group.0);
        self.u8(op.lane as u8);
        self.u64(op.seq);
    }
    fn call(&mut self, call: &Fingerprint) {
        self.u8(call.op);
        self.u8(call.reduce);
        self.u8(call.dtype);
        self.u32(call.root);
        self.u32(call.tag);
        self.u32(call.members);
        self.u64(call.count);
    }
    /// Texts are cut so that a frame always fits.
    fn text(&mut self, text: &str) {
        let mut end = text.len().min(2000);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.u32(end as u32);
        self.0.extend_from_slice(&text.as_bytes()[..end]);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }
    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|b| b[0])
    }
    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    fn op(&mut self) -> Option<OpKey> {
        let group = GroupId(self.u32()?);
        let lane = match self.u8()? {
            0 => Lane::Urgent,
            1 => Lane::Bulk,
            _ => return None,
        };
        Some(OpKey { group, lane, seq: self.u64()? })
    }
    fn call(&mut self) -> Option<Fingerprint> {
        Some(Fingerprint {
            op: self.u8()?,
            reduce: self.u8()?,
            dtype: self.u8()?,
            root: self.u32()?,
            tag: self.u32()?,
            members: self.u32()?,
            count: self.u64()?,
        })
    }
    fn text(&mut self) -> Option<String> {
        let len = self.u32()? as usize;
        Some(String::from_utf8_lossy(self.bytes(len)?).into_owned())
    }
}

impl Frame {
    /// Bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(64));
        match self {
            Frame::Grant { op, call, index, key, bytes } => {
                w.u8(0);
                w.op(*op);
                w.call(call);
                w.u32(*index);
                w.u64(key.0[0]);
                w.u64(key.0[1]);
                w.u64(*bytes);
            }
            Frame::Inline { op, call, index, payload } => {
                w.u8(1);
                w.op(*op);
                w.call(call);
                w.u32(*index);
                w.0.extend_from_slice(payload);
            }
            Frame::Credit { bytes } => {
                w.u8(2);
                w.u32(*bytes);
            }
            Frame::Abort { group, reason } => {
                w.u8(3);
                w.u32(group.0);
                w.u8(reason.kind);
                w.u32(reason.peer);
                w.u32(reason.rank);
                w.u64(reason.millis.0);
                w.u64(reason.millis.1);
                reason.texts.iter().for_each(|text| w.text(text));
            }
            Frame::Query { op } => {
                w.u8(4);
                w.op(*op);
            }
            Frame::Answer { op, called } => {
                w.u8(5);
                w.op(*op);
                w.u64(*called);
            }
            Frame::Stopped { group, writes } => {
                w.u8(6);
                w.u32(group.0);
                w.u64(*writes);
            }
        }
        w.0
    }

    /// `None` if the bytes are not a frame.
    pub fn decode(bytes: &[u8]) -> Option<Frame> {
        let mut r = Reader(bytes);
        let frame = match r.u8()? {
            0 => Frame::Grant {
                op: r.op()?,
                call: r.call()?,
                index: r.u32()?,
                key: LandingKey([r.u64()?, r.u64()?]),
                bytes: r.u64()?,
            },
            1 => {
                let (op, call, index) = (r.op()?, r.call()?, r.u32()?);
                Frame::Inline { op, call, index, payload: std::mem::take(&mut r.0).to_vec() }
            }
            2 => Frame::Credit { bytes: r.u32()? },
            3 => Frame::Abort {
                group: GroupId(r.u32()?),
                reason: Reason {
                    kind: r.u8()?,
                    peer: r.u32()?,
                    rank: r.u32()?,
                    millis: (r.u64()?, r.u64()?),
                    texts: [r.text()?, r.text()?, r.text()?],
                },
            },
            4 => Frame::Query { op: r.op()? },
            5 => Frame::Answer { op: r.op()?, called: r.u64()? },
            6 => Frame::Stopped { group: GroupId(r.u32()?), writes: r.u64()? },
            _ => return None,
        };
        r.0.is_empty().then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn op() -> impl Strategy<Value = OpKey> {
        (any::<u32>(), any::<bool>(), any::<u64>()).prop_map(|(group, bulk, seq)| OpKey {
            group: GroupId(group),
            lane: if bulk { Lane::Bulk } else { Lane::Urgent },
            seq,
        })
    }

    fn call() -> impl Strategy<Value = Fingerprint> {
        any::<(u8, u8, u8, u32, u32, u32, u64)>().prop_map(|(op, reduce, dtype, root, tag, members, count)| {
            Fingerprint { op, reduce, dtype, root, tag, members, count }
        })
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let reason = (any::<(u8, u32, u32, u64, u64)>(), any::<[String; 3]>())
            .prop_map(|((kind, peer, rank, a, b), texts)| Reason { kind, peer, rank, millis: (a, b), texts });
        prop_oneof![
            (op(), call(), any::<(u32, [u64; 2], u64)>()).prop_map(|(op, call, (index, key, bytes))| Frame::Grant {
                op,
                call,
                index,
                key: LandingKey(key),
                bytes
            }),
            (op(), call(), any::<(u32, Vec<u8>)>()).prop_map(|(op, call, (index, payload))| Frame::Inline {
                op,
                call,
                index,
                payload
            }),
            any::<u32>().prop_map(|bytes| Frame::Credit { bytes }),
            (any::<u32>(), reason).prop_map(|(group, reason)| Frame::Abort { group: GroupId(group), reason }),
            op().prop_map(|op| Frame::Query { op }),
            (op(), any::<u64>()).prop_map(|(op, called)| Frame::Answer { op, called }),
            any::<(u32, u64)>().prop_map(|(group, writes)| Frame::Stopped { group: GroupId(group), writes }),
        ]
    }

    #[test]
    fn an_error_names_the_same_operation_rank_and_cause_at_the_other_end() {
        let operation = || "allreduce(sum, 9 x float32) #3".to_owned();
        let (waited, timeout) = (Duration::from_millis(1500), Duration::from_millis(1200));
        let told = |error: &Error| Reason::new(error, 4).into_error(4).to_string();
        for error in [
            Error::Mismatch { operation: operation(), rank: 4, ours: "this".into(), peer: 2, theirs: "that".into() },
            Error::GivenUp { operation: operation(), rank: 1, cause: "no memory".into() },
        ] {
            assert_eq!(told(&error), error.to_string());
        }
        for error in [
            Error::PeerLost { operation: operation(), peer: 2, cause: "connection closed".into() },
            Error::Timeout { operation: operation(), waited, timeout, detail: "rank 2 is late".into() },
        ] {
            assert_eq!(told(&error), format!("{error} (reported by rank 4)"));
            let broken = Error::Broken { operation: "another".into(), cause: Box::new(error.clone()) };
            assert_eq!(told(&broken), told(&error));
        }
        // A reason that lies with one rank is no sign that this rank is lost, whatever it is.
        for error in [
            Error::Invalid("not registered".into()),
            Error::Configuration("too few".into()),
            Error::Closed("over".into()),
            Error::system("ibv_reg_mr", "cannot allocate memory"),
        ] {
            let given_up = error.clone().given_up(operation(), 4);
            assert_eq!(given_up.to_string(), format!("{}: rank 4 gave it up: {error}", operation()));
            assert_eq!(told(&given_up), given_up.to_string());
            assert_eq!(told(&error), format!("all operations: rank 4 gave it up: {error}"));
        }
    }

    proptest! {
        #[test]
        fn every_frame_survives_the_wire(frame in frame()) {
            prop_assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }

        #[test]
        fn garbage_and_truncation_never_panic(bytes in any::<Vec<u8>>(), frame in frame(), cut in any::<prop::sample::Index>()) {
            let _ = Frame::decode(&bytes);
            let whole = frame.encode();
            let cut = cut.index(whole.len());
            // An inline frame has no length of its own: cutting its payload yields a shorter payload.
            if !matches!(frame, Frame::Inline { .. }) {
                prop_assert_eq!(Frame::decode(&whole[..cut]), None);
            }
        }
    }
}
