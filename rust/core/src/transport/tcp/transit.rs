//! How long frames are under way to a peer: the queue in our direction alone.
//!
//! A round trip contains the queues of both directions. A probe carries our clock, its echo tells
//! what the peer's clock showed beyond it. That difference contains the unknown offset of the clocks,
//! but beyond its smallest value of late it is the queue, plus what the peer's process was late to look.

use super::frame::{Header, Kind};
use crate::transport::LandingKey;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The shortest of so many delays counts: a process that was late once is not a queue.
const RECENT: usize = 4;
/// The smallest value is remembered for one to two times this long: clocks drift.
const MEMORY: Duration = Duration::from_secs(4);

/// Probes and echoes of one connection.
#[derive(Debug)]
pub struct Transit {
    clock: Instant,
    /// The latest probe of the peer that awaits its echo, and its delay.
    due: Option<(u64, i64)>,
    recent: VecDeque<i64>,
    /// Smallest value of this period and of the one before, and when this one began.
    smallest: [i64; 2],
    period: Instant,
}

impl Transit {
    pub fn new(clock: Instant) -> Transit {
        Transit { clock, due: None, recent: VecDeque::new(), smallest: [i64::MAX; 2], period: clock }
    }

    fn now(&self) -> i64 {
        // Nanoseconds of a process: 292 years fit.
        self.clock.elapsed().as_nanos() as i64
    }

    /// A probe to send.
    pub fn probe(&self) -> Header {
        Header { kind: Kind::Probe, length: 0, key: LandingKey([self.now().cast_unsigned(), 0]) }
    }

    /// A probe has come.
    pub fn asked(&mut self, sent: u64) {
        self.due = Some((sent, self.now().wrapping_sub(sent.cast_signed())));
    }

    /// The echo to send, if one is due.
    pub fn echo(&mut self) -> Option<Header> {
        let (sent, delay) = self.due.take()?;
        Some(Header { kind: Kind::Echo, length: 0, key: LandingKey([sent, delay.cast_unsigned()]) })
    }

    /// An echo has come.
    pub fn answered(&mut self, delay: i64) {
        if self.period.elapsed() > MEMORY {
            self.smallest = [i64::MAX, self.smallest[0]];
            self.period = Instant::now();
        }
        self.smallest[0] = self.smallest[0].min(delay);
        self.recent.push_back(delay);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    /// The queue in our direction, in seconds, if it is known.
    pub fn queue(&self) -> Option<f64> {
        let latest = *self.recent.iter().min()?;
        Some(latest.saturating_sub(self.smallest[0].min(self.smallest[1])) as f64 * 1e-9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_the_clocks_does_not_matter() {
        for offset in [0i64, 7_000_000_000, -7_000_000_000] {
            let mut transit = Transit::new(Instant::now());
            assert_eq!(transit.queue(), None);
            transit.answered(offset + 100_000);
            assert_eq!(transit.queue(), Some(0.0));
            for late in [900_000, 5_000_000, 800_000, 850_000] {
                transit.answered(offset + late);
            }
            assert_eq!(transit.queue(), Some(700_000.0 * 1e-9));
        }
    }

    #[test]
    fn a_stranger_cannot_break_the_arithmetic() {
        let mut transit = Transit::new(Instant::now());
        transit.asked(u64::MAX);
        transit.asked(1 << 63);
        assert!(transit.echo().is_some() && transit.echo().is_none());
        transit.answered(i64::MIN);
        transit.answered(i64::MAX);
        assert!(transit.queue().is_some_and(|queue| queue >= 0.0));
    }
}
