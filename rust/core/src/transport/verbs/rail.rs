//! One of the ports that a rank uses at once, with what belongs to its device.

use super::Options;
use super::channel::{Channel, SENDS};
use super::{FRAMES, NEWS};
use crate::error::{Error, Result};
use crate::transport::{LandingKey, Lane};
use mdas_verbs::choose::Choice;
use mdas_verbs::{Capacity, CompletionChannel, CompletionQueue, Context, ProtectionDomain, QueuePair};
use std::collections::HashMap;
use std::sync::Arc;

/// A landing area's number says in its last bits on which rail it is written.
const BITS: u32 = 3;
/// Rails that a rank may have.
pub const MOST: usize = 1 << BITS;
/// From a landing area's number to the next on the same rail.
pub const STEP: u32 = 1 << BITS;

/// The rail on which a peer writes to the landing area of this key.
pub fn of(key: LandingKey) -> usize {
    key.0[1] as usize % MOST
}

pub struct Rail {
    pub choice: Choice,
    pub queue: Arc<CompletionQueue>,
    pub domain: Arc<ProtectionDomain>,
    pub context: Arc<Context>,
    /// Of every queue pair: its peer, and its place among the channels to that.
    pub numbers: HashMap<u32, (usize, usize)>,
}

impl Rail {
    /// Opens all, for so many ranks; the first one carries frames and urgent writes, too.
    pub fn open_all(options: &Options, ranks: usize) -> Result<Vec<Rail>> {
        let count = options.rails.len();
        if !(1..=MOST).contains(&count) {
            return Err(Error::Configuration(format!(
                "verbs: {count} rails; there may be 1 to {MOST} (MDAS_IB_RAILS)"
            )));
        }
        let urgent = |rail| if rail == 0 { SENDS + FRAMES } else { 0 };
        let all = options.rails.iter().enumerate();
        all.map(|(rail, choice)| Rail::open(choice, ranks * (urgent(rail) + SENDS + NEWS))).collect()
    }

    fn open(choice: &Choice, entries: usize) -> Result<Rail> {
        let failed = |error: mdas_verbs::Error| Error::Configuration(format!("verbs: {error}"));
        let context = Context::open(&choice.device).map_err(failed)?;
        let domain = ProtectionDomain::new(&context).map_err(failed)?;
        let (_, most) = context.limits().map_err(failed)?;
        if entries > most {
            return Err(Error::Configuration(format!(
                "verbs: so many ranks need a completion queue of {entries} entries, but {} has at most {most}",
                choice.device
            )));
        }
        let channel = CompletionChannel::new(&context).map_err(failed)?;
        let queue = CompletionQueue::new(&channel, entries).map_err(failed)?;
        Ok(Rail { choice: choice.clone(), queue, domain, context, numbers: HashMap::new() })
    }

    /// A channel to a peer, not connected yet.
    pub fn channel(&self, rail: usize, lane: Lane) -> Result<Channel> {
        let make = || {
            let receives = if lane == Lane::Urgent { FRAMES } else { NEWS };
            let capacity = Capacity { sends: SENDS as u32, receives: receives as u32, inline_bytes: 128 };
            let pair = QueuePair::new(&self.domain, &self.queue, capacity)?;
            pair.initialize(self.choice.port)?;
            Ok(Channel::new(pair, lane, rail))
        };
        make().map_err(|error: mdas_verbs::Error| Error::Configuration(format!("verbs: {error}")))
    }
}
