//! What is asked for: one collective over one group, and the memory that it works on.

use super::tags::Named;
use crate::collective::Collective;
use crate::transport::Lane;
use mdas_kernels::{DType, ReduceOp};
use std::fmt;
use std::time::Duration;

/// A group of ranks, by number. The world is group 0; any other number follows from the set of its ranks, from its
/// purpose, and from how many groups with the same of both were made before, so that only the members need to agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// One collective call.
#[derive(Debug, Clone)]
pub struct Call {
    /// Whose ranks take part.
    pub group: GroupId,
    /// Which lane it travels on; order holds within a lane.
    pub lane: Lane,
    /// What to do.
    pub op: Collective,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements: of the whole vector (allreduce, broadcast), or of one rank's share (allgather, reduce_scatter).
    pub count: usize,
    /// Caller's mark (bucket and step, say), compared between ranks.
    pub tag: u32,
    /// Longest time without progress; the engine's default if none.
    pub timeout: Option<Duration>,
    /// The caller will wait at once: no need to wake the progress thread.
    pub blocking: bool,
}

impl Call {
    /// The reduction; collectives without one never combine, so any will do for them.
    pub fn reduce_op(&self) -> ReduceOp {
        match self.op {
            Collective::Allreduce(op) | Collective::ReduceScatter(op) => op,
            Collective::Broadcast { .. } | Collective::Allgather | Collective::Barrier => ReduceOp::Max,
        }
    }

    /// The part that must be equal on all ranks; `members` stands for the group's ranks in order.
    pub fn fingerprint(&self, members: u32) -> Fingerprint {
        let (op, reduce, root) = match self.op {
            Collective::Allreduce(reduce) => (0, reduce as u8, 0),
            Collective::Broadcast { root } => (1, 0, root as u32),
            Collective::Allgather => (2, 0, 0),
            Collective::ReduceScatter(reduce) => (3, reduce as u8, 0),
            Collective::Barrier => (4, 0, 0),
        };
        Fingerprint { op, reduce, dtype: self.dtype as u8, root, tag: self.tag, members, count: self.count as u64 }
    }
}

/// Travels in every message header: what the sender believes that this operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// Collective, by number.
    pub op: u8,
    /// Reduction, by number (0 where there is none).
    pub reduce: u8,
    /// Element type, by number.
    pub dtype: u8,
    /// Root of a broadcast.
    pub root: u32,
    /// Caller's mark.
    pub tag: u32,
    /// Hash of the group's ranks, in order.
    pub members: u32,
    /// Elements.
    pub count: u64,
}

impl Fingerprint {
    /// In words, with what the words alone would not show to differ from `other`.
    pub fn against(&self, other: &Fingerprint) -> String {
        let differs = self.members != other.members;
        let note = if differs {
            format!(" in a group of other ranks or another order (mark {:08x})", self.members)
        } else {
            String::new()
        };
        format!("{self}{note}")
    }
}

/// A hash of ranks that is the same on every machine (FNV-1a, folded to 32 bits).
pub(super) fn hash_ranks(ranks: &[usize], salt: u64) -> u32 {
    let words = std::iter::once(salt).chain(ranks.iter().map(|&rank| rank as u64));
    fnv1a(words.flat_map(u64::to_le_bytes))
}

/// The same for what a group is for; 0 if it is for nothing in particular.
pub(super) fn hash_purpose(purpose: &str) -> u32 {
    if purpose.is_empty() { 0 } else { fnv1a(purpose.bytes()) }
}

fn fnv1a(bytes: impl Iterator<Item = u8>) -> u32 {
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    (hash >> 32) as u32 ^ hash as u32
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reduce = ReduceOp::from_code(self.reduce).map_or("?", ReduceOp::name);
        let dtype = DType::from_code(self.dtype).map_or("?", DType::name);
        match self.op {
            0 => write!(f, "allreduce({reduce}")?,
            1 => write!(f, "broadcast(root {}", self.root)?,
            2 => write!(f, "allgather(")?,
            3 => write!(f, "reduce_scatter({reduce}")?,
            4 => return write!(f, "barrier()"),
            other => return write!(f, "unknown operation {other}"),
        }
        let comma = if self.op == 2 { "" } else { ", " };
        write!(f, "{comma}{} x {dtype}", self.count)?;
        if self.tag != 0 {
            write!(f, ", {}", Named(self.tag))?;
        }
        write!(f, ")")
    }
}
