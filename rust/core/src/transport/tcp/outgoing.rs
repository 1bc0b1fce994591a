//! The frames that wait to go out on one connection.

use super::frame::{Header, Kind};
use crate::transport::{LandingKey, RawSpan, WriteId};
use std::collections::VecDeque;

struct Frame {
    /// Header, and the body if it is ours.
    head: Vec<u8>,
    /// The body if it is the caller's.
    source: Option<(RawSpan, WriteId)>,
}

impl Frame {
    fn len(&self) -> usize {
        self.head.len() + self.source.map_or(0, |(source, _)| source.len)
    }
}

/// A queue of frames; the first may be half sent.
#[derive(Default)]
pub struct Outgoing {
    frames: VecDeque<Frame>,
    /// How much of the first frame is sent.
    sent: usize,
    /// Bytes that are not sent yet.
    bytes: usize,
    /// A goodbye is in it, or was: nothing may follow.
    ended: bool,
}

impl Outgoing {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub fn control(&mut self, frame: &[u8]) {
        let header = Header { kind: Kind::Control, length: frame.len() as u64, key: LandingKey([0; 2]) };
        let mut head = header.encode().to_vec();
        head.extend_from_slice(frame);
        self.push(Frame { head, source: None });
    }

    pub fn data(&mut self, key: LandingKey, source: RawSpan, id: WriteId) {
        let header = Header { kind: Kind::Data, length: source.len as u64, key };
        self.push(Frame { head: header.encode().to_vec(), source: Some((source, id)) });
    }

    /// A frame without a body.
    pub fn bare(&mut self, header: Header) {
        self.push(Frame { head: header.encode().to_vec(), source: None });
        self.ended |= header.kind == Kind::Goodbye;
    }

    pub fn clear(&mut self) {
        *self = Outgoing { ended: self.ended, ..Outgoing::default() };
    }

    fn push(&mut self, frame: Frame) {
        if self.ended {
            return;
        }
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }

    /// The next bytes to send: at most `limit` of them, in at most `into.len()` pieces.
    /// Returns the number of pieces and of bytes. The pieces are valid until this queue changes.
    pub fn pieces(&self, limit: usize, into: &mut [libc::iovec]) -> (usize, usize) {
        let (mut count, mut bytes, mut skip) = (0, 0, self.sent);
        let spans = self.frames.iter().flat_map(|frame| {
            let head = (frame.head.as_ptr().cast_mut(), frame.head.len());
            let source = frame.source.map(|(source, _)| (source.ptr, source.len));
            std::iter::once(head).chain(source)
        });
        for (ptr, len) in spans {
            let skipped = skip.min(len);
            skip -= skipped;
            if bytes == limit || count == into.len() {
                break;
            }
            let len = (len - skipped).min(limit - bytes);
            if len == 0 {
                continue;
            }
            into[count] = libc::iovec { iov_base: ptr.wrapping_add(skipped).cast(), iov_len: len };
            count += 1;
            bytes += len;
        }
        (count, bytes)
    }

    /// `n` bytes are sent; calls `done` for every write that is finished by it.
    pub fn advance(&mut self, n: usize, mut done: impl FnMut(WriteId)) {
        self.sent += n;
        self.bytes -= n;
        while let Some(front) = self.frames.front()
            && self.sent >= front.len()
        {
            self.sent -= front.len();
            if let Some((_, id)) = front.source {
                done(id);
            }
            self.frames.pop_front();
        }
    }

    /// Forgets the writes for which `which` holds, and adds them to `forgotten`; a half-sent one goes on from a copy.
    pub fn cancel(&mut self, which: &dyn Fn(WriteId) -> bool, forgotten: &mut Vec<WriteId>) {
        let ours = self.frames.iter().filter_map(|frame| frame.source).map(|(_, id)| id);
        forgotten.extend(ours.filter(|id| which(*id)));
        if let Some(front) = self.frames.front_mut()
            && self.sent > 0
            && let Some((source, id)) = front.source
            && which(id)
        {
            // SAFETY: the caller of `Transport::write` keeps the source alive and unchanged until
            // `Sent` (not reported: the frame is still here) or until `cancel` names it, and we are
            // within `cancel`. `source.len` is the length that it promised.
            front.head.extend_from_slice(unsafe { std::slice::from_raw_parts(source.ptr, source.len) });
            front.source = None;
        }
        self.frames.retain(|frame| !frame.source.is_some_and(|(_, id)| which(id)));
        self.bytes = self.frames.iter().map(Frame::len).sum::<usize>() - self.sent;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(bytes: &mut [u8]) -> RawSpan {
        RawSpan { ptr: bytes.as_mut_ptr(), len: bytes.len() }
    }

    fn read(queue: &Outgoing, limit: usize) -> Vec<u8> {
        let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 4];
        let (count, bytes) = queue.pieces(limit, &mut pieces);
        let mut out = Vec::new();
        for piece in &pieces[..count] {
            // SAFETY: `pieces` are valid until the queue changes, and it is borrowed here.
            out.extend_from_slice(unsafe { std::slice::from_raw_parts(piece.iov_base.cast(), piece.iov_len) });
        }
        assert_eq!(out.len(), bytes);
        out
    }

    #[test]
    fn bytes_come_in_order_whatever_is_accepted() {
        let mut body = [5u8; 40];
        let mut whole = Outgoing::default();
        let fill = |queue: &mut Outgoing, body: &mut [u8]| {
            queue.control(&[1, 2, 3]);
            queue.data(LandingKey([1, 2]), span(body), WriteId(8));
            queue.bare(Header::GOODBYE);
            queue.control(b"nothing may follow");
        };
        fill(&mut whole, &mut body);
        let expected = read(&whole, 1000);
        assert_eq!(expected.len(), whole.bytes());
        for step in [1, 3, 31, 32, 33, 50] {
            let mut queue = Outgoing::default();
            fill(&mut queue, &mut body);
            let (mut out, mut done) = (Vec::new(), Vec::new());
            while !queue.is_empty() {
                let next = read(&queue, step);
                queue.advance(next.len(), |id| done.push(id));
                out.extend(next);
            }
            assert_eq!((out, done, queue.bytes()), (expected.clone(), vec![WriteId(8)], 0), "step {step}");
        }
    }

    #[test]
    fn cancel_completes_only_what_is_half_sent() {
        let (mut first, mut second) = ([1u8; 8], [2u8; 8]);
        let mut queue = Outgoing::default();
        queue.data(LandingKey([1, 0]), span(&mut first), WriteId(1));
        queue.data(LandingKey([2, 0]), span(&mut second), WriteId(2));
        queue.advance(34, |_| panic!("nothing is finished"));
        let mut forgotten = Vec::new();
        queue.cancel(&|_| true, &mut forgotten);
        assert_eq!(forgotten, [WriteId(1), WriteId(2)]);
        first.fill(9); // the copy counts
        assert_eq!(queue.bytes(), 6);
        assert_eq!(read(&queue, 100), [1; 6]);
        queue.advance(6, |_| panic!("a cancelled write is never reported"));
        assert!(queue.is_empty());
    }
}
