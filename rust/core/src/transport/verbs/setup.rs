//! Queue pairs find each other over the authenticated streams of the bootstrap.

use super::channel::{Channel, RECEIVE};
use super::frames::Frames;
use super::{FRAMES, NEWS, Options};
use crate::bootstrap::wire::{Patience, Trouble};
use crate::error::{Error, Result};
use crate::transport::Lane;
use mdas_verbs::choose::Choice;
use mdas_verbs::{Capacity, CompletionQueue, Path, ProtectionDomain, QueuePair, Reliability};
use std::net::{Ipv6Addr, TcpStream};
use std::sync::Arc;

/// Version of what is sent here.
const MAGIC: [u8; 8] = *b"mdas ib1";
const BYTES: usize = 8 + 2 * 8 + 16 + 2 + 4 + 1;
const READY: [u8; 1] = *b"r";

/// What a rank tells a peer of its two queue pairs for that peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// By lane: number, and first packet number.
    pairs: [(u32, u32); 2],
    gid: [u8; 16],
    lid: u16,
    mtu: u32,
    grh_required: bool,
}

impl Card {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        for (number, packet) in self.pairs {
            bytes.extend(number.to_le_bytes());
            bytes.extend(packet.to_le_bytes());
        }
        bytes.extend(self.gid);
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend(self.mtu.to_le_bytes());
        bytes.push(u8::from(self.grh_required));
        bytes
    }

    fn decode(bytes: &[u8; BYTES]) -> Option<Card> {
        let mut rest = bytes.strip_prefix(&MAGIC)?;
        let mut take = |count: usize| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            head
        };
        let mut number = || take(4).try_into().map(u32::from_le_bytes).ok();
        let pairs = [(number()?, number()?), (number()?, number()?)];
        let gid = take(16).try_into().ok()?;
        let lid = u16::from_le_bytes(take(2).try_into().ok()?);
        let mtu = u32::from_le_bytes(take(4).try_into().ok()?);
        let grh_required = take(1) == [1];
        (mtu.is_power_of_two() && (256..=4096).contains(&mtu)).then_some(Card { pairs, gid, lid, mtu, grh_required })
    }
}

/// The two channels to a peer, not connected yet.
pub fn channels(
    domain: &Arc<ProtectionDomain>,
    queue: &Arc<CompletionQueue>,
    options: &Options,
) -> Result<[Channel; 2]> {
    let make = |lane: Lane| {
        let receives = if lane == Lane::Urgent { FRAMES } else { NEWS };
        let capacity = Capacity { sends: super::channel::SENDS as u32, receives: receives as u32, inline_bytes: 128 };
        let pair = QueuePair::new(domain, queue, capacity)?;
        pair.initialize(options.choice.port)?;
        Ok(Channel::new(pair, if lane == Lane::Urgent { super::CREDIT } else { u32::MAX }))
    };
    let made = || Ok([make(Lane::Urgent)?, make(Lane::Bulk)?]);
    made().map_err(|error: mdas_verbs::Error| Error::Configuration(format!("verbs: {error}")))
}

/// Connects all channels with those of the peers; `buffers[rank]` are the numbers of the buffers for its frames.
pub fn connect(
    rank: usize,
    streams: &[Option<TcpStream>],
    channels: &mut [Option<[Channel; 2]>],
    frames: &Frames,
    options: &Options,
    patience: &Patience<'_>,
) -> Result<()> {
    let choice = &options.choice;
    let failed = |peer: usize, trouble: Trouble| match trouble {
        Trouble::Interrupted => Error::Closed("init was interrupted".into()),
        trouble => {
            Error::Configuration(format!("init: rank {rank} connects its queue pairs with rank {peer}: {trouble}"))
        }
    };
    let pairs = || streams.iter().enumerate().filter_map(|(peer, stream)| Some((peer, stream.as_ref()?)));
    let mut packets = vec![[0; 2]; streams.len()];
    for (peer, stream) in pairs() {
        let Some(both) = &channels[peer] else { continue };
        let random = getrandom::u64().map_err(|cause| Error::system("verbs: reading random bytes", cause))?;
        packets[peer] = [random as u32 & 0xff_ffff, (random >> 32) as u32 & 0xff_ffff];
        let numbers = [0, 1].map(|lane: usize| (both[lane].pair.number(), packets[peer][lane]));
        let Choice { gid, lid, mtu, grh_required, .. } = *choice;
        let card = Card { pairs: numbers, gid, lid, mtu, grh_required };
        patience.write(stream, &card.encode()).map_err(|trouble| failed(peer, trouble))?;
    }
    for (peer, stream) in pairs() {
        let mut bytes = [0; BYTES];
        patience.read(stream, &mut bytes).map_err(|trouble| failed(peer, trouble))?;
        let card = Card::decode(&bytes).ok_or_else(|| {
            Error::Configuration(format!(
                "init: rank {peer} does not talk of queue pairs as rank {rank} does: do both run the same version?"
            ))
        })?;
        let Some(both) = &mut channels[peer] else { continue };
        for lane in [Lane::Urgent, Lane::Bulk] {
            let channel = &mut both[lane as usize];
            post_receives(channel, lane, peer, frames)
                .and_then(|()| {
                    let path = path(choice, options, &card, lane, packets[peer][lane as usize]);
                    channel.pair.connect(&path, Reliability { timeout: options.timeout, retries: options.retry_count })
                })
                .map_err(|error| {
                    let (ours, theirs) = (Ipv6Addr::from(choice.gid), Ipv6Addr::from(card.gid));
                    Error::Configuration(format!(
                        "init: rank {rank} (GID {ours}) connects with rank {peer} (GID {theirs}): {error}"
                    ))
                })?;
        }
        patience.write(stream, &READY).map_err(|trouble| failed(peer, trouble))?;
    }
    // Nobody sends before its peer is ready to receive.
    for (peer, stream) in pairs() {
        let mut ready = [0];
        patience.read(stream, &mut ready).map_err(|trouble| failed(peer, trouble))?;
    }
    Ok(())
}

/// All receives of a channel: buffers for frames, or none, for the news that something has been written.
fn post_receives(channel: &Channel, lane: Lane, peer: usize, frames: &Frames) -> mdas_verbs::Result<()> {
    for index in 0..if lane == Lane::Urgent { FRAMES } else { NEWS } {
        let buffer = (lane == Lane::Urgent).then_some(peer * FRAMES + index);
        let id = RECEIVE | buffer.unwrap_or(0) as u64;
        // SAFETY: the buffer is posted nowhere else, and its block outlives the queue pair.
        unsafe { channel.pair.receive(id, buffer.map(|buffer| frames.piece(buffer)))? };
    }
    Ok(())
}

fn path(choice: &Choice, options: &Options, card: &Card, lane: Lane, our_packet: u32) -> Path {
    let (queue_pair, their_packet) = card.pairs[lane as usize];
    let theirs = Choice { gid: card.gid, lid: card.lid, grh_required: card.grh_required, ..choice.clone() };
    let global = mdas_verbs::choose::global_route(choice, &theirs);
    Path {
        port: choice.port,
        gid_index: global.then_some(choice.gid_index as u8),
        gid: card.gid,
        lid: card.lid,
        queue_pair,
        their_packet,
        our_packet,
        mtu: mdas_verbs::choose::path_mtu(choice.mtu, card.mtu),
        traffic_class: options.traffic_class,
        service_level: options.service_level,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_survives_the_way_and_another_version_does_not() {
        let card = Card { pairs: [(17, 1), (18, 0xff_ffff)], gid: [7; 16], lid: 3, mtu: 4096, grh_required: true };
        let bytes: [u8; BYTES] = card.encode().try_into().unwrap();
        assert_eq!(Card::decode(&bytes), Some(card));
        for (at, value) in [(7, b'2'), (BYTES - 2, 9), (BYTES - 4, 0xff)] {
            let mut bytes = bytes;
            bytes[at] = value;
            assert_eq!(Card::decode(&bytes), None);
        }
    }
}
