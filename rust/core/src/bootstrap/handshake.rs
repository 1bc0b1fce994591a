//! Who is at the other end? Every connection starts with this exchange.
//!
//! ```text
//! dialer   -> magic, version, job digest, nonce            (76 bytes)
//! acceptor -> magic, version, job digest, nonce
//! dialer   -> HMAC-SHA256(secret, "dialer" + both greetings)
//! acceptor -> HMAC-SHA256(secret, "acceptor" + both greetings)
//! dialer   -> hello: rank, size, purpose, configuration, payload
//! acceptor -> answer: accepted, or why not
//! ```
//!
//! Nothing before the two proofs has a length of the other side's choosing. The secret itself and
//! anything that would help to guess a strong one never travel; the payload later is not encrypted.

use super::wire::{Patience, Trouble};
use crate::error::Error;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;
use std::net::TcpStream;

/// Changed whenever two builds would not understand each other on the wire.
pub const PROTOCOL_VERSION: u32 = 1;

/// A job meets as "NAME/secret", where rank 0 hands out a secret, then as "NAME/card". Who has a secret of its own
/// begins with the second step.
const STEPS: [&str; 2] = ["secret", "card"];

const MAGIC: [u8; 8] = *b"mdasjoin";
const GREETING_BYTES: usize = 8 + 4 + 32 + 32;

/// Longest message before the other side is known to belong to the job and to have its place in it.
pub const MAX_HELLO_BYTES: usize = 1 << 20;

/// Who a process is within its job.
#[derive(Clone)]
pub struct Identity {
    /// World rank.
    pub rank: usize,
    /// World size.
    pub size: usize,
    /// Names the job: connections from other jobs are refused.
    pub job: String,
    /// Known to all ranks of the job, and to nobody else.
    pub secret: Vec<u8>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity(rank {} of {}, job {:?})", self.rank, self.size, self.job)
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Purpose {
    /// The exchange of blobs at rank 0.
    Rendezvous = 0,
    /// The urgent connection of the mesh.
    Urgent = 1,
    /// A bulk connection of the mesh.
    Bulk = 2,
}

/// What a dialer says about itself once both sides have proved that they know the secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// World rank.
    pub rank: usize,
    /// World size.
    pub size: usize,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Which of the bulk connections.
    pub index: usize,
    /// Settings that must be equal on all ranks, in words.
    pub configuration: String,
    /// Rendezvous: the blob.
    pub payload: Vec<u8>,
}

impl Hello {
    /// On the wire: rank, size, index as u32, purpose u8, length of the configuration u32, configuration, payload.
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for number in [self.rank, self.size, self.index] {
            bytes.extend((number as u32).to_le_bytes());
        }
        bytes.push(self.purpose as u8);
        bytes.extend((self.configuration.len() as u32).to_le_bytes());
        bytes.extend(self.configuration.as_bytes());
        bytes.extend(&self.payload);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Hello> {
        let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
        let purpose = match bytes.get(12)? {
            0 => Purpose::Rendezvous,
            1 => Purpose::Urgent,
            2 => Purpose::Bulk,
            _ => return None,
        };
        let (configuration, payload) = bytes.get(17..)?.split_at_checked(number(13)?)?;
        Some(Hello {
            rank: number(0)?,
            size: number(4)?,
            index: number(8)?,
            purpose,
            configuration: String::from_utf8(configuration.to_vec()).ok()?,
            payload: payload.to_vec(),
        })
    }
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Try again: the other process may not be there yet, or be another one than we look for.
    #[error("{0}")]
    Transient(String),
    /// Try again: the other side hung up.
    #[error("the connection was closed")]
    Closed,
    /// Try again: a quick rank comes for the next step while rank 0 still ends the one before.
    #[error("it is at another step of joining our job: is MDAS_SECRET set on all ranks, or on none?")]
    OtherStep,
    /// It will not get better.
    #[error(transparent)]
    Fatal(#[from] Error),
    /// The caller gave up.
    #[error("interrupted")]
    Interrupted,
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Interrupted => Failure::Interrupted,
            Trouble::Closed => Failure::Closed,
            trouble => Failure::Transient(trouble.to_string()),
        }
    }
}

/// The name of a job without the step of joining.
fn base(job: &str) -> &str {
    match job.rsplit_once('/') {
        Some((base, step)) if STEPS.contains(&step) => base,
        _ => job,
    }
}

fn greeting(job: &str) -> Result<[u8; GREETING_BYTES], Failure> {
    let mut greeting = [0; GREETING_BYTES];
    greeting[..8].copy_from_slice(&MAGIC);
    greeting[8..12].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    greeting[12..44].copy_from_slice(&Sha256::digest(job.as_bytes()));
    let random = |cause| Error::system("init: reading random bytes", cause);
    getrandom::fill(&mut greeting[44..]).map_err(random)?;
    Ok(greeting)
}

/// Reads the other side's greeting; the magic first, so that strangers are noticed at once.
fn read_greeting(stream: &TcpStream, job: &str, patience: &Patience) -> Result<[u8; GREETING_BYTES], Failure> {
    let mut greeting = [0; GREETING_BYTES];
    patience.read(stream, &mut greeting[..8])?;
    if greeting[..8] != MAGIC {
        let start = greeting[..8].escape_ascii();
        return Err(Failure::Transient(format!("it does not speak mdas's protocol (it sent \"{start}\")")));
    }
    patience.read(stream, &mut greeting[8..12])?;
    let version = u32::from_le_bytes([greeting[8], greeting[9], greeting[10], greeting[11]]);
    if version != PROTOCOL_VERSION {
        return Err(Failure::Fatal(Error::Configuration(format!(
            "protocol version {version} there, {PROTOCOL_VERSION} here: install the same version of mdas on all nodes"
        ))));
    }
    patience.read(stream, &mut greeting[12..])?;
    if greeting[12..44] != Sha256::digest(job.as_bytes())[..] {
        if STEPS.iter().any(|step| greeting[12..44] == Sha256::digest(format!("{}/{step}", base(job)).as_bytes())[..]) {
            return Err(Failure::OtherStep);
        }
        return Err(Failure::Transient(format!("it belongs to another job than ours ({job:?})")));
    }
    Ok(greeting)
}

fn proof(secret: &[u8], role: &str, greetings: [&[u8]; 2]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.update(role.as_bytes());
    greetings.iter().for_each(|greeting| mac.update(greeting));
    mac
}

/// The accepting side, up to the dialer's hello; an [`Answer`] is due.
pub fn receive(stream: &TcpStream, identity: &Identity, patience: &Patience) -> Result<Hello, Failure> {
    let theirs = match read_greeting(stream, &identity.job, patience) {
        Err(failure @ (Failure::Fatal(_) | Failure::OtherStep)) => {
            // Another version, or step: tell it ours, so that it can say so, too.
            patience.write(stream, &greeting(&identity.job)?)?;
            return Err(failure);
        }
        greeting => greeting?,
    };
    let ours = greeting(&identity.job)?;
    patience.write(stream, &ours)?;
    let mut given = [0; 32];
    patience.read(stream, &mut given)?;
    let greetings = [&theirs[..], &ours[..]];
    if proof(&identity.secret, "dialer", greetings).verify_slice(&given).is_err() {
        return Err(Failure::Transient("it does not know the job's secret".into()));
    }
    patience.write(stream, &proof(&identity.secret, "acceptor", greetings).finalize().into_bytes())?;
    let hello = patience.read_block(stream, MAX_HELLO_BYTES)?;
    Hello::decode(&hello).ok_or_else(|| Failure::Transient("its hello makes no sense".into()))
}

/// What becomes of a dialer after its hello.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It is in.
    Accepted,
    /// It is turned away for this reason.
    Refused(String),
    /// It waited in vain for others.
    Late(String),
    /// This rank was lost while others were waited for, and how.
    Lost(usize, String),
}

impl Answer {
    /// Tells the dialer.
    pub fn send(&self, stream: &TcpStream, patience: &Patience) -> Result<(), Trouble> {
        let bytes = match self {
            Answer::Accepted => vec![0],
            Answer::Refused(why) => [&[1], why.as_bytes()].concat(),
            Answer::Late(who) => [&[2], who.as_bytes()].concat(),
            Answer::Lost(rank, cause) => [&[3], &(*rank as u32).to_le_bytes()[..], cause.as_bytes()].concat(),
        };
        patience.write_block(stream, &bytes)
    }

    /// Waits for it, after [`introduce`].
    pub fn receive(stream: &TcpStream, patience: &Patience) -> Result<Answer, Trouble> {
        let bytes = patience.read_block(stream, MAX_HELLO_BYTES)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(match &bytes[..] {
            [0] => Answer::Accepted,
            [2, who @ ..] => Answer::Late(text(who)),
            [1, why @ ..] => Answer::Refused(text(why)),
            [3, a, b, c, d, cause @ ..] => Answer::Lost(u32::from_le_bytes([*a, *b, *c, *d]) as usize, text(cause)),
            _ => Answer::Refused(format!("an answer that makes no sense: {}", bytes.escape_ascii())),
        })
    }
}

/// The dialing side, up to the hello; then comes an [`Answer`].
pub fn introduce(stream: &TcpStream, identity: &Identity, hello: &Hello, patience: &Patience) -> Result<(), Failure> {
    let ours = greeting(&identity.job)?;
    patience.write(stream, &ours)?;
    let theirs = read_greeting(stream, &identity.job, patience)?;
    let greetings = [&ours[..], &theirs[..]];
    patience.write(stream, &proof(&identity.secret, "dialer", greetings).finalize().into_bytes())?;
    let mut given = [0; 32];
    let wrong_secret = || {
        let advice = "MDAS_SECRET must be the same on all ranks";
        Failure::Fatal(Error::Configuration(format!("the two sides have different job secrets: {advice}")))
    };
    match patience.read(stream, &mut given) {
        // It knows our job, and hangs up on our proof.
        Err(Trouble::Closed) => return Err(wrong_secret()),
        result => result?,
    }
    if proof(&identity.secret, "acceptor", greetings).verify_slice(&given).is_err() {
        return Err(wrong_secret());
    }
    Ok(patience.write_block(stream, &hello.encode())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hellos_survive_the_wire(rank in 0usize..5000, index in 0usize..9, text in ".{0,40}", payload: Vec<u8>) {
            let hello = Hello { rank, size: 5000, purpose: Purpose::Bulk, index, configuration: text, payload };
            prop_assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        }

        #[test]
        fn garbage_is_no_hello_and_no_panic(bytes: Vec<u8>) {
            if let Some(hello) = Hello::decode(&bytes) {
                prop_assert_eq!(hello.encode(), bytes);
            }
        }
    }

    #[test]
    fn an_identity_does_not_show_its_secret() {
        let identity = Identity { rank: 1, size: 2, job: "j".into(), secret: b"hunter2".to_vec() };
        assert_eq!(format!("{identity:?}"), r#"Identity(rank 1 of 2, job "j")"#);
    }
}
