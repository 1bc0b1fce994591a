//! How fast bulk may go to a peer, so that the queues of the network stay short.
//!
//! Loss-based congestion control fills whatever queue the bottleneck has, and everything that
//! shares it waits: tens of milliseconds in a switch. Here the delays tell how long the queue
//! is, and the kernel paces the connection a little below or above the rate that the link turns out
//! to have: up until a queue of a millisecond shows, down until it is gone, and so on. A peer
//! without a queue is left alone.
//!
//! The queue that we see may be another's: the other direction's, or a busy machine's delay. But our own
//! queue shrinks when we send less. If it does not, it was not ours, and we go on a little faster than
//! before, until it is.

use std::collections::VecDeque;
use std::time::Duration;

/// Between two samples.
pub const INTERVAL: Duration = Duration::from_millis(4);

/// A queue of this length (seconds) makes us look after it, ...
const ENGAGE: f64 = 1.0e-3;
/// ... from then on this length is too long, ...
const LONG: f64 = 0.7e-3;
/// ... and this one short enough.
const SHORT: f64 = 0.3e-3;
/// So many samples in a row with a long queue make us look after it: at first, and once we do. (A
/// machine that is busy otherwise delays single packets, too.)
const PERSISTENT: u32 = 4;
const REPEATED: u32 = 2;
/// While the queue drains, the rate is below the link's by this part at least and at most, ...
const DRAIN: [f64; 2] = [0.12, 0.5];
/// ... in between such that the queue is gone after this time (seconds).
const DRAIN_TIME: f64 = 0.015;
/// Rate after the queue has drained.
const RESUME: f64 = 0.985;
/// How much the rate typically grows from the first sign of a queue until it counts as long.
const OVERSHOOT: f64 = 0.05;
/// Growth of the rate per second while there is no queue; doubles every `EAGER` seconds without one.
const GROWTH: f64 = 0.3;
const EAGER: f64 = 0.08;
/// Most that it grows between two samples.
const MAX_GROWTH: f64 = 0.25;
/// After a drain, the smoothed round trip may still show the old queue for this long (seconds).
const SETTLE: f64 = 0.02;
/// A queue that has not shrunk to this part of its peak after this time (seconds) is not ours: it is the
/// other direction's, or a busy machine's. Then the rate is this multiple of what it was before, but at
/// most that of the link's: so it rises until the queue is ours.
const CHECK: f64 = 0.05;
const SHRUNK: f64 = 0.85;
const BOOST: f64 = 1.03;
const CAP: f64 = 1.08;
/// A queue beyond this length (seconds) is certainly one, and not a delay on this machine.
const DEEP: f64 = 5.0e-3;
/// So many drains in a row that left it deep mean that the queue is not ours; then we leave it for `TRUCE` seconds.
const VAIN: u32 = 3;
const TRUCE: f64 = 2.0;
/// The rate stays within this multiple of what the link is known to do: it may be used only in part.
const HEADROOM: f64 = 1.5;
/// A rate that is used to this part has proved itself.
const USED: f64 = 0.9;
/// After this time (seconds) without a long queue there is no limit any more.
const CALM: f64 = 3.0;
/// Samples over which the delivered rate is taken; long, since a queue that empties looks like a higher rate.
const WINDOW: usize = 48;
/// Enough while the queue only grows.
const SHORT_WINDOW: usize = 12;
/// The best delivered rate is remembered for one to two times this long (seconds).
const MEMORY: f64 = 1.0;

/// What is seen of the connections to a peer at one time.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Time in seconds, from any origin.
    pub at: f64,
    /// Length of the queue, in seconds.
    pub queue: f64,
    /// Bytes confirmed so far.
    pub acked: u64,
    /// Was there always something to send since the sample before?
    pub busy: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// No limit; not looked at before this time.
    Free { from: f64 },
    /// Below the link's rate; the longest queue since then, and the rate before.
    Drain { since: f64, peak: f64, from: f64 },
    /// Growing.
    Climb { since: f64 },
}

/// The controller of one peer: a pure function of its samples.
#[derive(Debug, Clone)]
pub struct Pacer {
    phase: Phase,
    rate: f64,
    /// Samples in a row with a long queue.
    long: u32,
    /// Drains in a row that did not help.
    vain: u32,
    /// Drains in a row that did not shorten a short queue.
    foreign: u32,
    /// Latest samples (time, acked) without a gap, oldest first.
    recent: VecDeque<(f64, u64)>,
    /// Best delivered rate of this period and of the one before, and when this one began.
    best: [f64; 2],
    period: f64,
    /// Latest rate at which there was no queue.
    good: f64,
}

impl Default for Pacer {
    fn default() -> Self {
        Pacer {
            phase: Phase::Free { from: 0.0 },
            rate: f64::INFINITY,
            long: 0,
            vain: 0,
            foreign: 0,
            recent: VecDeque::new(),
            best: [0.0; 2],
            period: 0.0,
            good: 0.0,
        }
    }
}

impl Pacer {
    /// Bytes per second; infinity: no limit.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// Takes a sample in.
    pub fn update(&mut self, sample: Sample) {
        let Sample { at, queue, .. } = sample;
        let passed = self.recent.back().map_or(0.0, |(last, _)| at - last);
        self.remember(sample);
        if !sample.busy {
            return;
        }
        let long = if matches!(self.phase, Phase::Free { .. }) { ENGAGE } else { LONG };
        self.long = if queue > long { self.long + 1 } else { 0 };
        match self.phase {
            Phase::Free { from } => {
                if self.long >= PERSISTENT && at >= from && self.link() > 0.0 {
                    self.drain(at, queue);
                }
            }
            Phase::Drain { .. } if queue < SHORT => {
                (self.vain, self.foreign) = (0, 0);
                self.climb(at, self.rate.max(RESUME * self.link()));
            }
            Phase::Drain { since, peak, from } if at - since < CHECK || queue < SHRUNK * peak => {
                self.phase = Phase::Drain { since, peak: peak.max(queue), from };
            }
            Phase::Drain { from, .. } => {
                // Either it is not ours, or we do not know the link: what was delivered is all we know.
                self.forget();
                if queue < DEEP {
                    (self.vain, self.foreign) = (0, self.foreign + 1);
                    self.climb(at, (BOOST * from).min(CAP * self.link()));
                } else {
                    self.vain += 1;
                    if self.vain < VAIN { self.drain(at, queue) } else { self.free(at + TRUCE) }
                }
            }
            Phase::Climb { since } => {
                if self.long >= REPEATED && at - since > SETTLE {
                    self.drain(at, queue);
                } else {
                    if queue < SHORT && self.latest(SHORT_WINDOW) > USED * self.rate {
                        self.good = self.rate;
                    }
                    let growth = GROWTH * ((at - since) / EAGER).exp2();
                    self.rate *= 1.0 + (growth * passed).min(MAX_GROWTH);
                    self.rate = self.rate.min(HEADROOM * self.link());
                    if at - since > CALM {
                        self.free(at);
                    }
                }
            }
        }
    }

    fn drain(&mut self, at: f64, queue: f64) {
        let least = DRAIN[0] / f64::from(1 + self.foreign.min(1));
        self.phase = Phase::Drain { since: at, peak: queue, from: self.rate.min(CAP * self.link()) };
        self.rate = (1.0 - (queue / DRAIN_TIME).clamp(least, DRAIN[1])) * self.link();
    }

    fn climb(&mut self, at: f64, rate: f64) {
        self.rate = rate;
        self.phase = Phase::Climb { since: at };
    }

    fn free(&mut self, from: f64) {
        self.rate = f64::INFINITY;
        self.vain = 0;
        self.phase = Phase::Free { from };
    }

    /// The link's rate, or our share of it, as far as we know. What was delivered is too little if this
    /// machine was too busy to send.
    fn link(&self) -> f64 {
        self.delivered().max((1.0 - OVERSHOOT) * self.good)
    }

    /// The best rate of late.
    fn delivered(&self) -> f64 {
        self.best[0].max(self.best[1])
    }

    /// The rate over the latest `samples`; 0 if there are not so many.
    fn latest(&self, samples: usize) -> f64 {
        let Some(first) = self.recent.len().checked_sub(samples + 1) else { return 0.0 };
        match (self.recent.get(first), self.recent.back()) {
            (Some((first, before)), Some((last, acked))) if last > first => (acked - before) as f64 / (last - first),
            _ => 0.0,
        }
    }

    fn forget(&mut self) {
        let latest = self.latest(SHORT_WINDOW);
        if latest > 0.0 {
            self.good = 0.0;
            self.best = [latest, 0.0];
            self.recent.drain(..self.recent.len() - SHORT_WINDOW);
        }
    }

    fn remember(&mut self, sample: Sample) {
        let gap = 4.0 * INTERVAL.as_secs_f64();
        if !sample.busy || self.recent.back().is_some_and(|(at, _)| sample.at - at > gap) {
            self.recent.clear();
        }
        if sample.at - self.period > MEMORY && self.best[0] > 0.0 {
            self.best = [0.0, self.best[0]];
            self.period = sample.at;
        }
        self.recent.push_back((sample.at, sample.acked));
        if self.recent.len() > WINDOW + 1 {
            self.recent.pop_front();
        }
        let grows = matches!(self.phase, Phase::Free { .. }) || sample.queue > DEEP;
        self.best[0] = self.best[0].max(self.latest(if grows { SHORT_WINDOW } else { WINDOW }));
    }
}

#[cfg(test)]
mod tests;
