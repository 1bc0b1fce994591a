//! How fast bulk may go to a peer, so that the queues of the network stay short.
//!
//! Loss-based congestion control fills whatever queue the bottleneck has, and everything that
//! shares it waits: tens of milliseconds in a switch. Here the delays tell how long the queue
//! is, and the kernel paces the connection just below the rate that the link turns out to have, and below
//! that while there is a queue. Every few seconds the rate climbs until a queue shows, so that more is found
//! where there is more. A peer without a queue is left alone.
//!
//! The queue that we see may be another's: the other direction's, or a busy machine's delay. But our own
//! queue shrinks when we send less. If a long queue stays, we try that; if it does not help, the queue
//! is not ours, and only what comes on top of it counts.

use std::collections::VecDeque;
use std::time::Duration;

/// Between two samples.
pub const INTERVAL: Duration = Duration::from_millis(4);

/// A queue of this length (seconds), ...
const ENGAGE: f64 = 0.7e-3;
/// ... so many samples in a row, makes us look after it. (A busy machine delays single packets, too.)
const PERSISTENT: u32 = 4;
/// What is used of the link's rate.
const CRUISE: f64 = 0.997;
/// A shorter queue is none: clocks and processes are never exact.
const NONE: f64 = 0.2e-3;
/// Lower rate per queue, as part of the link's rate per second of queue. The queue answers to the rate
/// after about 20 ms, the samples' age; the product of both must be well below 1.
const GAIN: f64 = 30.0;
/// Least rate, as part of the link's.
const LEAST: f64 = 0.5;
/// Beyond this length, ...
const LONG: f64 = 1.0e-3;
/// ... for this time (seconds), we try whether it is ours.
const PATIENCE: f64 = 0.05;
/// While we try, the rate is below the link's by this part at least, ...
const TRY: f64 = 0.1;
/// ... and such that the queue is gone after this time (seconds).
const DRAIN_TIME: f64 = 0.015;
/// A trial has succeeded when the queue is this short (seconds), ...
const SHORT: f64 = 0.5e-3;
/// ... and has failed when it is not down to this part of its peak after this time (seconds).
const CHECK: f64 = 0.05;
const SHRUNK: f64 = 0.85;
/// After this time (seconds) without a queue the rate climbs, ...
const HOLD: f64 = 2.0;
/// ... by this part of the link's, then twice as much every `EAGER` seconds, as long as we use it.
const GROWTH: f64 = 0.01;
const EAGER: f64 = 0.06;
const MAX_GROWTH: f64 = 0.25;
/// If we do not use it, we look again after this time (seconds).
const RETRY: f64 = 0.1;
/// After this time (seconds) of climbing without a queue there is no limit any more.
const CALM: f64 = 1.5;
/// How fast the trust in the link's rate falls while there is a queue: part per second and second of queue.
/// And how far.
const DOUBT: f64 = 50.0;
const LEAST_TRUST: f64 = 0.97;
/// A link that passes on less than this part of what we send in a trial is slower than we thought.
const PASSED: f64 = 0.95;
/// Samples over which the delivered rate is taken; long, since a queue that empties looks like a higher rate.
const WINDOW: usize = 48;
/// Enough while there is no queue.
const SHORT_WINDOW: usize = 12;
/// The best delivered rate is remembered for one to two times this long (seconds).
const MEMORY: f64 = 5.0;

/// What is seen of the connections to a peer at one time.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Time in seconds, from any origin.
    pub at: f64,
    /// Length of the queue, in seconds.
    pub queue: f64,
    /// Bytes confirmed so far.
    pub acked: u64,
    /// Was there something to send?
    pub busy: bool,
    /// Did the kernel have more than it might send?
    pub limited: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Phase {
    /// No limit.
    Free,
    /// About the link's rate; since when the queue is long, and when the climb begins or began.
    Steady { long: Option<f64>, climb: f64 },
    /// Well below the link's rate, to see whether the queue is ours; since when, and its longest since then.
    Trial { since: f64, peak: f64 },
}

/// The controller of one peer: a pure function of its samples.
#[derive(Debug, Clone)]
pub struct Pacer {
    phase: Phase,
    rate: f64,
    /// Samples in a row with a long queue, while free.
    seen: u32,
    /// Samples in a row in which the rate kept us from sending more.
    limited: usize,
    /// The part of the queue that is not ours.
    foreign: f64,
    /// Latest samples (time, acked) without a gap, oldest first.
    recent: VecDeque<(f64, u64)>,
    /// Best delivered rate of this period and of the one before, and when this one began.
    best: [f64; 2],
    period: f64,
    /// How much of the best rate we believe that the link has.
    trust: f64,
}

impl Default for Pacer {
    fn default() -> Self {
        Pacer {
            phase: Phase::Free,
            rate: f64::INFINITY,
            seen: 0,
            limited: 0,
            foreign: 0.0,
            recent: VecDeque::new(),
            best: [0.0; 2],
            period: 0.0,
            trust: 1.0,
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
        let at = sample.at;
        let passed = self.recent.back().map_or(0.0, |(last, _)| at - last);
        self.foreign = self.foreign.min(sample.queue);
        let queue = sample.queue - self.foreign;
        self.remember(sample);
        self.limited = if sample.limited { self.limited + 1 } else { 0 };
        if !sample.busy {
            return;
        }
        match self.phase {
            Phase::Free => {
                self.seen = if queue > ENGAGE { self.seen + 1 } else { 0 };
                if self.seen >= PERSISTENT && self.link() > 0.0 {
                    self.attempt(at, queue);
                }
            }
            Phase::Steady { long, climb } => self.steer(at, passed, queue, long, climb),
            Phase::Trial { .. } if queue < SHORT => self.settle(at),
            Phase::Trial { since, peak } if at - since < CHECK || queue < SHRUNK * peak => {
                self.phase = Phase::Trial { since, peak: peak.max(queue) };
            }
            Phase::Trial { .. } => {
                let latest = self.latest(SHORT_WINDOW);
                if latest > PASSED * self.rate {
                    self.foreign = sample.queue;
                } else if latest > 0.0 {
                    // The link does not even pass on what we send: there is our queue.
                    (self.best, self.trust) = ([latest, 0.0], 1.0);
                }
                self.settle(at);
            }
        }
    }

    fn settle(&mut self, at: f64) {
        (self.phase, self.rate) = (Phase::Steady { long: None, climb: at + RETRY }, CRUISE * self.link());
    }

    /// Keeps the queue short.
    fn steer(&mut self, at: f64, passed: f64, queue: f64, long: Option<f64>, climb: f64) {
        let long = if queue > LONG { long.or(Some(at)) } else { None };
        if long.is_some_and(|since| at - since > PATIENCE) {
            self.attempt(at, queue);
            return;
        }
        let mut growth = 0.0;
        let mut begins = climb;
        if at >= climb {
            let risen = at - climb > 2.0 * EAGER;
            if queue > LONG {
                // So soon it cannot be the climb's.
                begins = at + if risen { HOLD } else { RETRY };
            } else if self.limited < SHORT_WINDOW {
                begins = at + RETRY;
            } else if at - climb > CALM {
                (self.phase, self.rate, self.seen) = (Phase::Free, f64::INFINITY, 0);
                return;
            } else {
                growth = GROWTH * ((at - climb) / EAGER).exp2();
            }
        }
        self.phase = Phase::Steady { long, climb: begins };
        let excess = (queue - NONE).max(0.0);
        self.trust = (self.trust * (1.0 - DOUBT * excess * passed.min(PATIENCE))).max(LEAST_TRUST);
        self.rate = (CRUISE + (growth - GAIN * excess).clamp(LEAST - CRUISE, MAX_GROWTH)) * self.link();
    }

    fn attempt(&mut self, at: f64, queue: f64) {
        self.phase = Phase::Trial { since: at, peak: queue };
        self.rate = (1.0 - (queue / DRAIN_TIME).clamp(TRY, 1.0 - LEAST)) * self.link();
    }

    /// The link's rate, or our share of it, as far as we know: the best of late, if we can trust it.
    fn link(&self) -> f64 {
        self.trust * self.best[0].max(self.best[1])
    }

    /// The rate over the latest `samples`; 0 if there are not so many.
    fn latest(&self, samples: usize) -> f64 {
        let Some(first) = self.recent.len().checked_sub(samples + 1) else { return 0.0 };
        match (self.recent.get(first), self.recent.back()) {
            (Some((first, before)), Some((last, acked))) if last > first => (acked - before) as f64 / (last - first),
            _ => 0.0,
        }
    }

    fn remember(&mut self, sample: Sample) {
        let gap = 4.0 * INTERVAL.as_secs_f64();
        if !sample.busy || self.recent.back().is_some_and(|(at, _)| sample.at - at > gap) {
            self.recent.clear();
        }
        self.recent.push_back((sample.at, sample.acked));
        if self.recent.len() > WINDOW + 1 {
            self.recent.pop_front();
        }
        if sample.at - self.period > MEMORY && self.best[0] > 0.0 {
            self.best = [0.0, self.best[0]];
            self.period = sample.at;
        }
        let grows = match self.phase {
            Phase::Free => true,
            Phase::Steady { climb, .. } => sample.at > climb,
            Phase::Trial { .. } => false,
        };
        let delivered = self.latest(if grows { SHORT_WINDOW } else { WINDOW });
        if delivered > self.link() {
            self.trust = 1.0;
        }
        self.best[0] = self.best[0].max(delivered);
    }
}

#[cfg(test)]
mod tests;
