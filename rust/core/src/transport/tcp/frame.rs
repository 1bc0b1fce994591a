//! Frames on a TCP connection: a fixed header, then a body of the length that it names.
//!
//! Reading is a pure state machine ([`Decoder`]) over whatever pieces the socket delivers, so that
//! it can be tested without sockets. The bodies of data frames may bypass it: [`Decoder::direct`]
//! says where the next bytes belong, the caller reads them there and tells [`Decoder::advance`].

use crate::transport::{LandingKey, MAX_CONTROL_BYTES};

/// Length of a header on the wire.
pub const HEADER_BYTES: usize = 32;

/// Follows the kind in every header: a stream that is one byte off is noticed at the next frame.
const MARK: [u8; 3] = *b"mds";

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Body: a control frame of the layer above.
    Control = 1,
    /// Body: bytes for the landing area that the key names.
    Data = 2,
    /// No body: nothing more comes on this connection.
    Goodbye = 3,
    /// No body; key: the sender's clock. Answered by an echo at once.
    Probe = 4,
    /// No body; key: the probe's, and how much later the answerer's clock was (two's complement).
    Echo = 5,
}

/// A header: kind u8, mark `mds`, four zero bytes, length u64, key 2 x u64; little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// Length of the body in bytes.
    pub length: u64,
    /// Landing area of a data frame; times of a probe or echo, in nanoseconds; else zero.
    pub key: LandingKey,
}

impl Header {
    /// A goodbye.
    pub const GOODBYE: Header = Header { kind: Kind::Goodbye, length: 0, key: LandingKey([0; 2]) };

    /// The header's bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1..4].copy_from_slice(&MARK);
        bytes[8..16].copy_from_slice(&self.length.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.key.0[0].to_le_bytes());
        bytes[24..32].copy_from_slice(&self.key.0[1].to_le_bytes());
        bytes
    }

    /// Reads a header; the error says what is wrong with it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, String> {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let kind = match bytes[0] {
            1 => Kind::Control,
            2 => Kind::Data,
            3 => Kind::Goodbye,
            4 => Kind::Probe,
            5 => Kind::Echo,
            _ => return Err(format!("protocol error: no such frame: {:02x?}", &bytes[..8])),
        };
        if bytes[1..4] != MARK || bytes[4..8] != [0; 4] {
            return Err(format!("protocol error: not a frame header: {:02x?}", &bytes[..8]));
        }
        let header = Header { kind, length: word(8), key: LandingKey([word(16), word(24)]) };
        match kind {
            Kind::Control if header.length > MAX_CONTROL_BYTES as u64 => {
                Err(format!("protocol error: a control frame of {} bytes (at most {MAX_CONTROL_BYTES})", header.length))
            }
            Kind::Goodbye | Kind::Probe | Kind::Echo if header.length > 0 => {
                Err(format!("protocol error: {} bytes after a {kind:?}", header.length))
            }
            _ => Ok(header),
        }
    }
}

/// Where decoded frames go.
pub trait Sink {
    /// A whole control frame.
    fn control(&mut self, frame: Box<[u8]>);
    /// A data frame of `length` bytes begins; the error ends the connection.
    fn open(&mut self, key: LandingKey, length: u64) -> Result<(), String>;
    /// Bytes of an open data frame, at `offset` of its body.
    fn data(&mut self, key: LandingKey, offset: usize, bytes: &[u8]);
    /// The open data frame is complete.
    fn complete(&mut self, key: LandingKey);
    /// The peer asks how long its frames are under way.
    fn probe(&mut self, sent: u64);
    /// The answer to a probe of ours.
    fn echo(&mut self, delay: i64);
    /// Nothing more comes on this connection.
    fn goodbye(&mut self);
}

struct Body {
    kind: Kind,
    key: LandingKey,
    length: usize,
    received: usize,
}

/// The reading end of one connection.
#[derive(Default)]
pub struct Decoder {
    header: [u8; HEADER_BYTES],
    have: usize,
    body: Option<Body>,
    control: Vec<u8>,
    ended: bool,
}

impl Decoder {
    /// Has a goodbye been read?
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Takes the next bytes of the stream. After an error the stream is unusable.
    pub fn feed(&mut self, mut bytes: &[u8], sink: &mut dyn Sink) -> Result<(), String> {
        while !bytes.is_empty() {
            if self.ended {
                return Err("protocol error: bytes after a goodbye".into());
            }
            let used = match &mut self.body {
                None => {
                    let n = bytes.len().min(HEADER_BYTES - self.have);
                    self.header[self.have..self.have + n].copy_from_slice(&bytes[..n]);
                    self.have += n;
                    if self.have == HEADER_BYTES {
                        self.begin(sink)?;
                    }
                    n
                }
                Some(body) => {
                    let n = bytes.len().min(body.length - body.received);
                    match body.kind {
                        Kind::Data => sink.data(body.key, body.received, &bytes[..n]),
                        _ => self.control.extend_from_slice(&bytes[..n]),
                    }
                    self.advance(n, sink);
                    n
                }
            };
            bytes = &bytes[used..];
        }
        Ok(())
    }

    /// Within a data frame: its key, how much of its body is here, and how much is to come (at least 1).
    pub fn direct(&self) -> Option<(LandingKey, usize, usize)> {
        let body = self.body.as_ref().filter(|body| body.kind == Kind::Data)?;
        Some((body.key, body.received, body.length - body.received))
    }

    /// `n` more bytes of the body are in place; at most what [`Decoder::direct`] said.
    pub fn advance(&mut self, n: usize, sink: &mut dyn Sink) {
        let Some(body) = &mut self.body else { return };
        body.received += n;
        debug_assert!(body.received <= body.length);
        if body.received == body.length {
            match body.kind {
                Kind::Data => sink.complete(body.key),
                _ => sink.control(std::mem::take(&mut self.control).into_boxed_slice()),
            }
            self.body = None;
        }
    }

    fn begin(&mut self, sink: &mut dyn Sink) -> Result<(), String> {
        let header = Header::decode(&self.header)?;
        self.have = 0;
        match header.kind {
            Kind::Goodbye => {
                self.ended = true;
                sink.goodbye();
                return Ok(());
            }
            Kind::Probe => {
                sink.probe(header.key.0[0]);
                return Ok(());
            }
            Kind::Echo => {
                sink.echo(header.key.0[1].cast_signed());
                return Ok(());
            }
            Kind::Data => sink.open(header.key, header.length)?,
            Kind::Control => {}
        }
        let length = usize::try_from(header.length).map_err(|_| format!("protocol error: {} bytes", header.length))?;
        if header.kind == Kind::Control {
            self.control.reserve_exact(length); // at most MAX_CONTROL_BYTES: `decode` checked it
        }
        self.body = Some(Body { kind: header.kind, key: header.key, length, received: 0 });
        self.advance(0, sink); // a body of no bytes is complete already
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, PartialEq)]
    enum Seen {
        Control(Vec<u8>),
        Open(u64, u64),
        Complete(u64, Vec<u8>),
        Probe(u64),
        Echo(i64),
        Goodbye,
    }

    #[derive(Default)]
    struct Log {
        seen: Vec<Seen>,
        data: Vec<u8>,
    }

    impl Sink for Log {
        fn control(&mut self, frame: Box<[u8]>) {
            self.seen.push(Seen::Control(frame.into_vec()));
        }
        fn open(&mut self, key: LandingKey, length: u64) -> Result<(), String> {
            if length > 1 << 20 {
                return Err("too long".into());
            }
            self.seen.push(Seen::Open(key.0[0], length));
            Ok(())
        }
        fn data(&mut self, _: LandingKey, offset: usize, bytes: &[u8]) {
            assert_eq!(offset, self.data.len());
            self.data.extend_from_slice(bytes);
        }
        fn complete(&mut self, key: LandingKey) {
            self.seen.push(Seen::Complete(key.0[0], std::mem::take(&mut self.data)));
        }
        fn probe(&mut self, sent: u64) {
            self.seen.push(Seen::Probe(sent));
        }
        fn echo(&mut self, delay: i64) {
            self.seen.push(Seen::Echo(delay));
        }
        fn goodbye(&mut self) {
            self.seen.push(Seen::Goodbye);
        }
    }

    fn wire(frames: &[(bool, Vec<u8>)]) -> (Vec<u8>, Vec<Seen>) {
        let (mut bytes, mut expected) = (Vec::new(), Vec::new());
        for (i, (data, body)) in frames.iter().enumerate() {
            let (kind, key) = if *data { (Kind::Data, [i as u64, 7]) } else { (Kind::Control, [0, 0]) };
            bytes.extend(Header { kind, length: body.len() as u64, key: LandingKey(key) }.encode());
            bytes.extend(body);
            if *data {
                expected.push(Seen::Open(i as u64, body.len() as u64));
                expected.push(Seen::Complete(i as u64, body.clone()));
            } else {
                expected.push(Seen::Control(body.clone()));
            }
        }
        for (kind, seen) in
            [(Kind::Probe, Seen::Probe(9)), (Kind::Echo, Seen::Echo(-5)), (Kind::Goodbye, Seen::Goodbye)]
        {
            let key = LandingKey(if kind == Kind::Goodbye { [0, 0] } else { [9, (-5i64).cast_unsigned()] });
            bytes.extend(Header { kind, length: 0, key }.encode());
            expected.push(seen);
        }
        (bytes, expected)
    }

    #[test]
    fn a_header_on_the_wire() {
        let header = Header { kind: Kind::Data, length: 0x0102, key: LandingKey([3, 4]) };
        let mut expected = [0u8; HEADER_BYTES];
        expected[..4].copy_from_slice(b"\x02mds");
        (expected[8], expected[9], expected[16], expected[24]) = (2, 1, 3, 4);
        assert_eq!(header.encode(), expected);
        assert_eq!(Header::decode(&expected), Ok(header));
    }

    #[test]
    fn bad_headers_are_refused() {
        let good = Header { kind: Kind::Control, length: 8, key: LandingKey([0; 2]) };
        let mutated = |change: &dyn Fn(&mut [u8; HEADER_BYTES])| {
            let mut bytes = good.encode();
            change(&mut bytes);
            Header::decode(&bytes).unwrap_err()
        };
        assert!(mutated(&|b| b[0] = 9).contains("no such frame"));
        assert!(mutated(&|b| b[1] = b'x').contains("not a frame header"));
        assert!(mutated(&|b| b[7] = 1).contains("not a frame header"));
        assert!(mutated(&|b| b[15] = 0x80).contains("9223372036854775816 bytes (at most 8192)"));
        assert!(mutated(&|b| b[0] = 3).contains("8 bytes after a Goodbye"));
        let mut decoder = Decoder::default();
        let mut log = Log::default();
        let mut bytes = Header::GOODBYE.encode().to_vec();
        bytes.push(0);
        assert!(decoder.feed(&bytes, &mut log).unwrap_err().contains("after a goodbye"));
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_frames(
            frames in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..200)), 0..12),
            cuts in prop::collection::vec(1usize..90, 1..60),
            direct in any::<bool>(),
        ) {
            let (bytes, expected) = wire(&frames);
            let (mut decoder, mut log, mut at) = (Decoder::default(), Log::default(), 0);
            for cut in cuts.iter().cycle() {
                if at == bytes.len() { break; }
                let mut piece = &bytes[at..(at + cut).min(bytes.len())];
                at += piece.len();
                if let (true, Some((key, offset, remaining))) = (direct, decoder.direct()) {
                    let n = piece.len().min(remaining);
                    log.data(key, offset, &piece[..n]);
                    decoder.advance(n, &mut log);
                    piece = &piece[n..];
                }
                decoder.feed(piece, &mut log).unwrap();
            }
            prop_assert_eq!(log.seen, expected);
            prop_assert!(decoder.ended());
        }

        #[test]
        fn garbage_never_panics(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..20),
            kind in 0u8..5,
            length in any::<u64>(),
        ) {
            let mut header = Header { kind: Kind::Data, length, key: LandingKey([1, 2]) }.encode();
            header[0] = kind;
            let (mut decoder, mut log) = (Decoder::default(), Log::default());
            let mut result = decoder.feed(&header, &mut log);
            for piece in &pieces {
                if result.is_err() { break; }
                result = decoder.feed(piece, &mut log);
            }
            prop_assert!(decoder.control.capacity() <= MAX_CONTROL_BYTES);
        }
    }
}
