use super::*;

/// One end of the link: its pacer, and the queue before the link in its direction.
#[derive(Default)]
struct Side {
    /// Of the link in this direction, in bytes per second.
    capacity: f64,
    pacer: Pacer,
    queue: f64,
    acked: f64,
    /// The queue as it is seen: smoothed.
    seen: f64,
}

/// Two hosts and a link in each direction. The queues are seen smoothed as the kernel does, plus noise;
/// each its own, or (`mixed`: before the first echo) both their sum.
struct Wire {
    sides: [Side; 2],
    mixed: bool,
    /// A process is late now and then, which looks like a queue.
    late: bool,
    now: f64,
    noise: u32,
}

/// What a stretch of time came to: per direction the share of the capacity that was used, and the
/// mean of the two queues together, in seconds.
#[derive(Debug)]
struct Outcome {
    used: [f64; 2],
    queue: f64,
}

const STEP: f64 = 0.5e-3;
const DEEPEST: f64 = 50e-3;

impl Wire {
    fn new(capacity: [f64; 2]) -> Wire {
        let sides = capacity.map(|capacity| Side { capacity, ..Side::default() });
        Wire { sides, mixed: false, late: false, now: 0.0, noise: 1 }
    }

    fn run(&mut self, seconds: f64, busy: [bool; 2]) -> Outcome {
        let before = [self.sides[0].acked, self.sides[1].acked];
        let steps = (seconds / STEP) as u32;
        let mut sum = 0.0;
        for step in 0..steps {
            for (side, busy) in self.sides.iter_mut().zip(busy) {
                // Without a limit, TCP fills the queue; with one, it sends at that rate.
                let offered = if busy { side.pacer.rate().min(2.0 * side.capacity) * STEP } else { 0.0 };
                let passed = (side.queue + offered).min(side.capacity * STEP);
                side.queue = (side.queue + offered - passed).min(DEEPEST * side.capacity);
                side.acked += passed;
            }
            let total: f64 = self.sides.iter().map(|side| side.queue / side.capacity).sum();
            sum += total;
            self.now += STEP;
            self.noise = self.noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let noise = f64::from(self.noise >> 16) / 65536.0 * 0.1e-3;
            for (side, busy) in self.sides.iter_mut().zip(busy) {
                let own = side.queue / side.capacity;
                side.seen += (if self.mixed { total } else { own } - side.seen) / 8.0;
                if step % 8 == 0 {
                    let late = if self.late && step / 8 % 25 < 4 { 0.9e-3 } else { 0.0 };
                    let queue = side.seen + noise + late;
                    let sample = Sample { at: self.now, queue, acked: side.acked as u64, busy, limited: busy };
                    side.pacer.update(sample);
                }
            }
        }
        let used = [0, 1].map(|i| (self.sides[i].acked - before[i]) / (seconds * self.sides[i].capacity));
        Outcome { used, queue: sum / f64::from(steps) }
    }

    fn set_capacity(&mut self, capacity: f64) {
        self.sides.iter_mut().for_each(|side| side.capacity = capacity);
    }
}

const BOTH: [bool; 2] = [true, true];

#[test]
fn one_direction_is_full_and_its_queue_short() {
    for capacity in [12.5e6, 125e6, 1250e6] {
        let mut wire = Wire::new([capacity, capacity]);
        wire.run(1.0, [true, false]);
        let outcome = wire.run(5.0, [true, false]);
        assert!(outcome.used[0] > 0.98 && outcome.queue < 1.0e-3, "{capacity}: {outcome:?}");
    }
}

#[test]
fn both_directions_are_full_even_if_each_sees_both_queues() {
    let capacities = [[125e6, 125e6], [125e6, 119e6], [125e6, 40e6]];
    for (capacity, mixed) in capacities.into_iter().flat_map(|capacity| [(capacity, false), (capacity, true)]) {
        let mut wire = Wire { mixed, ..Wire::new(capacity) };
        wire.run(2.0, BOTH);
        let outcome = wire.run(5.0, BOTH);
        assert!(outcome.used.iter().all(|used| *used > 0.97), "{capacity:?} {mixed}: {outcome:?}");
        assert!(outcome.queue < if mixed { 1.2e-3 } else { 2.0e-3 }, "{capacity:?} {mixed}: {outcome:?}");
    }
}

#[test]
fn a_link_without_a_queue_is_never_limited() {
    let mut pacer = Pacer::default();
    for i in 0..5000u32 {
        let queue = if i % 50 < 3 { 5e-3 } else { 0.2e-3 }; // now and then the machine is busy
        let at = f64::from(i) * 4e-3;
        pacer.update(Sample { at, queue, acked: u64::from(i) * 20_000_000, busy: true, limited: true });
        assert_eq!(pacer.rate(), f64::INFINITY);
    }
}

#[test]
fn more_capacity_is_found_soon_and_less_at_once() {
    for late in [false, true] {
        let mut wire = Wire { late, ..Wire::new([125e6, 125e6]) };
        wire.run(2.0, BOTH);
        wire.set_capacity(500e6);
        wire.run(3.0, BOTH);
        let outcome = wire.run(2.0, BOTH);
        assert!(outcome.used[0] > 0.93, "after growth, late: {late}: {outcome:?}");
        wire.set_capacity(125e6);
        wire.run(1.0, BOTH);
        let outcome = wire.run(2.0, BOTH);
        assert!(outcome.used[0] > 0.97 && outcome.queue < 4e-3, "after the cut, late: {late}: {outcome:?}");
    }
}

#[test]
fn a_pause_does_not_make_it_start_over() {
    let mut wire = Wire::new([125e6, 125e6]);
    wire.run(2.0, BOTH);
    for _ in 0..10 {
        wire.run(0.1, [false, false]);
        let outcome = wire.run(0.1, BOTH);
        assert!(outcome.queue < 2e-3 && outcome.used[0] > 0.93, "{outcome:?}");
    }
}

#[test]
fn a_queue_that_is_not_ours_is_left_alone() {
    let mut pacer = Pacer::default();
    let (mut acked, mut starved) = (0.0, 0);
    for i in 0..2500u32 {
        let rate = pacer.rate().min(60e6); // our share beside a greedy stranger
        acked += rate * 4e-3;
        starved += u32::from(rate < 0.85 * 60e6);
        pacer.update(Sample { at: f64::from(i) * 4e-3, queue: 20e-3, acked: acked as u64, busy: true, limited: true });
    }
    assert!(starved < 250, "{starved} of 2500 samples below 85 % of its share");
}
