//! Queue pairs find each other over the authenticated streams of the bootstrap.

use super::channel::{Channel, RECEIVE};
use super::frames::Frames;
use super::rail::Rail;
use super::{FRAMES, NEWS, Options};
use crate::bootstrap::wire::{Patience, Trouble};
use crate::error::{Error, Result};
use crate::transport::Lane;
use mdas_verbs::choose::Choice;
use mdas_verbs::{Path, Reliability};
use std::net::{Ipv6Addr, TcpStream};

/// Version of what is sent here; the number of cards comes next.
const MAGIC: [u8; 8] = *b"mdas ib2";
const BYTES: usize = 2 * 4 + 16 + 2 + 4 + 1;
const READY: [u8; 1] = *b"r";

/// What a rank tells a peer of a queue pair for that peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    number: u32,
    /// Number of the first packet from it.
    packet: u32,
    gid: [u8; 16],
    lid: u16,
    mtu: u32,
    grh_required: bool,
}

impl Card {
    /// A new one, with a packet number of its own.
    fn new(channel: &Channel, rails: &[Rail]) -> Result<Card> {
        let Choice { gid, lid, mtu, grh_required, .. } = rails[channel.rail].choice;
        let random = getrandom::u32().map_err(|cause| Error::system("verbs: reading random bytes", cause))?;
        Ok(Card { number: channel.pair.number(), packet: random & 0xff_ffff, gid, lid, mtu, grh_required })
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.packet.to_le_bytes());
        bytes.extend(self.gid);
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend(self.mtu.to_le_bytes());
        bytes.push(u8::from(self.grh_required));
        bytes
    }

    fn decode(bytes: &[u8; BYTES]) -> Option<Card> {
        let mut rest = bytes.as_slice();
        let mut take = |count: usize| {
            let (head, tail) = rest.split_at(count);
            rest = tail;
            head
        };
        let number = u32::from_le_bytes(take(4).try_into().ok()?);
        let packet = u32::from_le_bytes(take(4).try_into().ok()?);
        let gid = take(16).try_into().ok()?;
        let lid = u16::from_le_bytes(take(2).try_into().ok()?);
        let mtu = u32::from_le_bytes(take(4).try_into().ok()?);
        let grh_required = take(1) == [1];
        let sane = mtu.is_power_of_two() && (256..=4096).contains(&mtu);
        sane.then_some(Card { number, packet, gid, lid, mtu, grh_required })
    }
}

/// The channels to every peer, not connected yet: the urgent one, then one per rail.
pub fn channels(rails: &[Rail], streams: &[Option<TcpStream>]) -> Result<Vec<Vec<Channel>>> {
    let places = || [(0, Lane::Urgent)].into_iter().chain((0..rails.len()).map(|rail| (rail, Lane::Bulk)));
    let make = |stream: &Option<TcpStream>| match stream {
        Some(_) => places().map(|(rail, lane)| rails[rail].channel(rail, lane)).collect(),
        None => Ok(Vec::new()),
    };
    streams.iter().map(make).collect()
}

/// Connects all channels with those of the peers.
pub fn connect(
    rank: usize,
    streams: &[Option<TcpStream>],
    channels: &[Vec<Channel>],
    rails: &[Rail],
    frames: &Frames,
    options: &Options,
    patience: &Patience<'_>,
) -> Result<()> {
    let failed = |peer: usize, trouble: Trouble| match trouble {
        Trouble::Interrupted => Error::Closed("init was interrupted".into()),
        trouble => {
            Error::Configuration(format!("init: rank {rank} connects its queue pairs with rank {peer}: {trouble}"))
        }
    };
    let pairs = || streams.iter().enumerate().filter_map(|(peer, stream)| Some((peer, stream.as_ref()?)));
    let mut ours = vec![Vec::new(); streams.len()];
    for (peer, stream) in pairs() {
        ours[peer] = channels[peer].iter().map(|channel| Card::new(channel, rails)).collect::<Result<_>>()?;
        let mut bytes = MAGIC.to_vec();
        bytes.push(ours[peer].len() as u8);
        bytes.extend(ours[peer].iter().flat_map(Card::encode));
        patience.write(stream, &bytes).map_err(|trouble| failed(peer, trouble))?;
    }
    for (peer, stream) in pairs() {
        let strange = || {
            Error::Configuration(format!(
                "init: rank {peer} does not talk of queue pairs as rank {rank} does: do both run the same version?"
            ))
        };
        let mut head = [0; MAGIC.len() + 1];
        patience.read(stream, &mut head).map_err(|trouble| failed(peer, trouble))?;
        if head[..MAGIC.len()] != MAGIC || usize::from(head[MAGIC.len()]) != channels[peer].len() {
            return Err(strange());
        }
        for (channel, ours) in channels[peer].iter().zip(&ours[peer]) {
            let mut bytes = [0; BYTES];
            patience.read(stream, &mut bytes).map_err(|trouble| failed(peer, trouble))?;
            let theirs = Card::decode(&bytes).ok_or_else(strange)?;
            let choice = &rails[channel.rail].choice;
            let reliability = Reliability { timeout: options.timeout, retries: options.retry_count };
            post_receives(channel, peer, frames)
                .and_then(|()| channel.pair.connect(&path(choice, options, ours, &theirs), reliability))
                .map_err(|error| {
                    let (ours, theirs) = (Ipv6Addr::from(ours.gid), Ipv6Addr::from(theirs.gid));
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
fn post_receives(channel: &Channel, peer: usize, frames: &Frames) -> mdas_verbs::Result<()> {
    for index in 0..if channel.lane == Lane::Urgent { FRAMES } else { NEWS } {
        let buffer = (channel.lane == Lane::Urgent).then_some(peer * FRAMES + index);
        let id = RECEIVE | buffer.unwrap_or(0) as u64;
        // SAFETY: the buffer is posted nowhere else, and its block outlives the queue pair.
        unsafe { channel.pair.receive(id, buffer.map(|buffer| frames.piece(buffer)))? };
    }
    Ok(())
}

fn path(choice: &Choice, options: &Options, ours: &Card, theirs: &Card) -> Path {
    let far = Choice { gid: theirs.gid, lid: theirs.lid, grh_required: theirs.grh_required, ..choice.clone() };
    let global = mdas_verbs::choose::global_route(choice, &far);
    Path {
        port: choice.port,
        gid_index: global.then_some(choice.gid_index as u8),
        gid: theirs.gid,
        lid: theirs.lid,
        queue_pair: theirs.number,
        their_packet: theirs.packet,
        our_packet: ours.packet,
        mtu: mdas_verbs::choose::path_mtu(ours.mtu, theirs.mtu),
        traffic_class: options.traffic_class,
        service_level: options.service_level,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_survives_the_way_and_one_without_sense_does_not() {
        let card = Card { number: 17, packet: 0xff_ffff, gid: [7; 16], lid: 3, mtu: 4096, grh_required: true };
        let bytes: [u8; BYTES] = card.encode().try_into().unwrap();
        assert_eq!(Card::decode(&bytes), Some(card));
        for (at, value) in [(BYTES - 2, 9), (BYTES - 4, 0xff)] {
            let mut bytes = bytes;
            bytes[at] = value;
            assert_eq!(Card::decode(&bytes), None);
        }
    }
}
