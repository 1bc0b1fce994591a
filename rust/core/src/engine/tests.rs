//! Ranks as threads over the loopback transport.

use super::*;
use crate::transport::{Lane, loopback};
use mdas_kernels::{DType, ReduceOp};
use std::collections::HashMap;
use std::time::Instant;

mod breaking;
mod device;

const LIMIT: Duration = Duration::from_secs(30);

fn engines(size: usize, timeout: Duration) -> Vec<Arc<Engine>> {
    loopback::mesh(size)
        .into_iter()
        .enumerate()
        .map(|(rank, transport)| {
            let config = EngineConfig { timeout, ..EngineConfig::new(rank, size) };
            Engine::start(Box::new(transport), config).unwrap()
        })
        .collect()
}

/// Runs `body` as every rank, each in a thread, and returns what they return.
fn ranks<T: Send>(engines: &[Arc<Engine>], body: impl Fn(&Engine) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = engines.iter().map(|engine| scope.spawn(move || body(engine))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn region<T: Copy>(values: &[T]) -> (Region, Arc<HeapBytes>) {
    let bytes = Arc::new(HeapBytes::zeroed(size_of_val(values), 64).unwrap());
    // SAFETY: fresh memory of exactly that size.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), bytes.ptr(), bytes.len()) };
    (Region::of(bytes.clone()), bytes)
}

fn values<T: Copy>(bytes: &HeapBytes) -> Vec<T> {
    // SAFETY: written by `region` or by a finished operation as values of T.
    unsafe { std::slice::from_raw_parts(bytes.ptr().cast::<T>(), bytes.len() / size_of::<T>()) }.to_vec()
}

fn call(engine: &Engine, op: Collective, dtype: DType, count: usize) -> Call {
    Call { group: engine.world(), lane: Lane::Bulk, op, dtype, count, tag: 0, timeout: None, blocking: true }
}

fn wait(work: &Work) -> Result<()> {
    let start = Instant::now();
    while !work.wait(Duration::from_millis(100))? {
        assert!(start.elapsed() < LIMIT, "hangs");
    }
    Ok(())
}

fn allreduce(engine: &Engine, input: &[f32], op: ReduceOp) -> Result<Vec<f32>> {
    let (input, _) = region(input);
    let (output, memory) = region(&vec![0f32; input.len / 4]);
    let work = engine.submit(call(engine, Collective::Allreduce(op), DType::F32, input.len / 4), input, output)?;
    wait(&work)?;
    Ok(values(&memory))
}

#[test]
fn every_collective_gives_the_right_values_for_many_sizes_and_lengths() {
    for size in [1, 2, 3, 4, 7] {
        let engines = engines(size, LIMIT);
        for count in [0, 1, 3, 1000, 70_001, 300_000] {
            let inputs: Vec<Vec<f32>> =
                (0..size).map(|r| (0..count).map(|i| (r * 10 + i % 7) as f32).collect()).collect();
            let sum: Vec<f32> = (0..count).map(|i| inputs.iter().map(|v| v[i]).sum()).collect();
            let results = ranks(&engines, |engine| allreduce(engine, &inputs[engine.rank()], ReduceOp::Sum).unwrap());
            assert!(results.iter().all(|r| *r == sum), "allreduce {size} x {count}");
            let average: Vec<f32> = sum.iter().map(|v| v / size as f32).collect();
            let results =
                ranks(&engines, |engine| allreduce(engine, &inputs[engine.rank()], ReduceOp::Average).unwrap());
            assert!(results.iter().all(|r| *r == average), "average {size} x {count}");

            let gathered = ranks(&engines, |engine| {
                let (input, _) = region(&inputs[engine.rank()]);
                let (output, memory) = region(&vec![0f32; count * size]);
                let work =
                    engine.submit(call(engine, Collective::Allgather, DType::F32, count), input, output).unwrap();
                wait(&work).unwrap();
                values::<f32>(&memory)
            });
            assert!(gathered.iter().all(|g| *g == inputs.concat()), "allgather {size} x {count}");

            let scattered = ranks(&engines, |engine| {
                let (input, _) = region(&inputs[engine.rank()].repeat(size));
                let (output, memory) = region(&vec![0f32; count]);
                let op = Collective::ReduceScatter(ReduceOp::Max);
                wait(&engine.submit(call(engine, op, DType::F32, count), input, output).unwrap()).unwrap();
                values::<f32>(&memory)
            });
            let max: Vec<f32> = (0..count).map(|i| inputs.iter().map(|v| v[i]).fold(f32::MIN, f32::max)).collect();
            assert!(scattered.iter().all(|s| *s == max), "reduce_scatter {size} x {count}");

            let root = size - 1;
            let received = ranks(&engines, |engine| {
                let (buffer, memory) = region(&inputs[engine.rank()]);
                let op = Collective::Broadcast { root };
                wait(&engine.submit(call(engine, op, DType::F32, count), buffer.clone(), buffer).unwrap()).unwrap();
                values::<f32>(&memory)
            });
            assert!(received.iter().all(|r| *r == inputs[root]), "broadcast {size} x {count}");
        }
        ranks(&engines, |engine| engine.shutdown(LIMIT));
    }
}

#[test]
fn many_operations_in_flight_on_both_lanes_keep_their_order() {
    let engines = engines(3, LIMIT);
    ranks(&engines, |engine| {
        let started: Vec<_> = (0..200usize)
            .map(|i| {
                let count = [1, 5000, 90_000][i % 3];
                let (buffer, memory) = region(&vec![(i + engine.rank()) as i64; count]);
                let mut call = call(engine, Collective::Allreduce(ReduceOp::Sum), DType::I64, count);
                call.lane = if i % 2 == 0 { Lane::Bulk } else { Lane::Urgent };
                call.blocking = false;
                (i, engine.submit(call, buffer.clone(), buffer).unwrap(), memory)
            })
            .collect();
        for (i, work, memory) in started.iter().rev() {
            wait(work).unwrap();
            assert!(values::<i64>(memory).iter().all(|&v| v == 3 * *i as i64 + 3));
            assert!(work.times().is_some_and(|t| t.submitted <= t.started && t.started <= t.finished));
        }
    });
}

#[test]
fn sixteen_bit_sums_are_rounded_once() {
    let engines = engines(4, LIMIT);
    for count in [7, 50_000] {
        // 1 + 3 * 2^-9 is not representable in bfloat16 step by step: rounding each partial sum would lose all of it.
        let results = ranks(&engines, |engine| {
            let value = if engine.rank() == 0 { 0x3f80u16 } else { 0x3b00 };
            let (buffer, memory) = region(&vec![value; count]);
            let op = Collective::Allreduce(ReduceOp::Sum);
            wait(&engine.submit(call(engine, op, DType::BF16, count), buffer.clone(), buffer).unwrap()).unwrap();
            values::<u16>(&memory)
        });
        let exact = 1.0f32 + 3.0 * f32::from_bits(0x3b00 << 16);
        let expected = ((exact.to_bits() + 0x7fff + ((exact.to_bits() >> 16) & 1)) >> 16) as u16;
        assert_ne!(expected, 0x3f80);
        assert!(results.iter().flatten().all(|&v| v == expected));
    }
}

#[test]
fn different_calls_raise_a_mismatch_on_both_sides_and_name_both() {
    for (other_op, other_dtype, other_count) in [
        (Collective::Allreduce(ReduceOp::Sum), DType::F32, 8),
        (Collective::Allreduce(ReduceOp::Sum), DType::I32, 9),
        (Collective::Allreduce(ReduceOp::Max), DType::F32, 9),
        (Collective::Broadcast { root: 1 }, DType::F32, 9),
        (Collective::Allreduce(ReduceOp::Sum), DType::F32, 1 << 20),
    ] {
        let engines = engines(3, LIMIT);
        let errors = ranks(&engines, |engine| {
            let odd = engine.rank() == 1;
            let (op, dtype, count) = if odd {
                (other_op, other_dtype, other_count)
            } else {
                (Collective::Allreduce(ReduceOp::Sum), DType::F32, 9)
            };
            let (buffer, _) = region(&vec![0u8; count * dtype.size()]);
            let work = engine.submit(call(engine, op, dtype, count), buffer.clone(), buffer).unwrap();
            let error = wait(&work).err();
            // A broadcast's root may be through before anybody disagrees; its next call tells.
            error.unwrap_or_else(|| allreduce(engine, &[1.0], ReduceOp::Sum).unwrap_err())
        });
        for error in &errors {
            let cause = if let Error::Broken { cause, .. } = error { cause } else { error };
            let Error::Mismatch { ours, theirs, .. } = cause else { panic!("{error}") };
            assert_ne!(ours, theirs);
            assert!(format!("{ours} {theirs}").contains("allreduce(sum, 9 x float32)"), "{error}");
        }
        let again = ranks(&engines, |engine| allreduce(engine, &[1.0], ReduceOp::Sum).unwrap_err());
        assert!(again.iter().all(|error| matches!(error, Error::Broken { .. })));
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_at_the_deadline() {
    let engines = engines(3, Duration::from_millis(600));
    let errors = ranks(&engines, |engine| {
        if engine.rank() == 2 {
            std::thread::sleep(Duration::from_millis(2500));
            return allreduce(engine, &[1.0], ReduceOp::Sum).unwrap_err();
        }
        let start = Instant::now();
        let error = allreduce(engine, &[1.0], ReduceOp::Sum).unwrap_err();
        assert!(start.elapsed() > Duration::from_millis(550) && start.elapsed() < Duration::from_secs(2));
        error
    });
    for error in &errors[..2] {
        let Error::Timeout { detail, .. } = error else { panic!("{error}") };
        assert!(detail.contains("rank 2 has not called it yet"), "{detail}");
    }
    assert!(matches!(&errors[2], Error::Broken { .. }));
}

#[test]
fn a_lost_rank_ends_the_others_operations_and_is_named() {
    let mut mesh = loopback::mesh(4);
    let victim = mesh.remove(1);
    let start = |(transport, rank)| Engine::start(Box::new(transport), EngineConfig::new(rank, 4)).unwrap();
    let engines: Vec<_> = mesh.into_iter().zip([0, 2, 3]).map(start).collect();
    let errors = std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(victim);
        });
        ranks(&engines, |engine| allreduce(engine, &vec![1.0; 100_000], ReduceOp::Sum).unwrap_err())
    });
    for error in errors {
        assert!(matches!(error, Error::PeerLost { peer: 1, .. }), "{error}");
    }
}

#[test]
fn a_rank_that_finishes_early_breaks_nobody() {
    let engines = engines(3, LIMIT);
    for round in 0..20 {
        let results = ranks(&engines, |engine| allreduce(engine, &vec![round as f32; 50_000], ReduceOp::Sum));
        assert!(results.iter().all(|r| r.as_ref().unwrap().iter().all(|&v| v == 3.0 * round as f32)));
    }
    ranks(&engines, |engine| {
        let result = allreduce(engine, &vec![1.0; 200_000], ReduceOp::Sum);
        if engine.rank() != 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        engine.shutdown(LIMIT);
        assert!(result.unwrap().iter().all(|&v| v == 3.0));
    });
}

#[test]
fn groups_run_side_by_side() {
    let engines = engines(4, LIMIT);
    let sums = ranks(&engines, |engine| {
        let pairs = [engine.new_group(vec![0, 1], "").unwrap(), engine.new_group(vec![3, 2], "").unwrap()];
        let mine = pairs[engine.rank() / 2];
        let (buffer, memory) = region(&[engine.rank() as f64 + 1.0]);
        let call = Call { group: mine, ..call(engine, Collective::Allreduce(ReduceOp::Product), DType::F64, 1) };
        wait(&engine.submit(call.clone(), buffer.clone(), buffer.clone()).unwrap()).unwrap();
        let foreign = Call { group: pairs[1 - engine.rank() / 2], ..call };
        assert!(matches!(engine.submit(foreign, buffer.clone(), buffer), Err(Error::Invalid(_))));
        values::<f64>(&memory)[0]
    });
    assert_eq!(sums, [2.0, 2.0, 12.0, 12.0]);
}

#[test]
fn senseless_calls_are_refused_before_anything_is_sent() {
    let engines = engines(2, LIMIT);
    let engine = &engines[0];
    let (buffer, _) = region(&[0f32; 8]);
    let shifted = Region { ptr: buffer.ptr.wrapping_add(4), len: 28, owner: None, identity: None };
    let short = Region { len: 28, ..buffer.clone() };
    let sum = Collective::Allreduce(ReduceOp::Sum);
    for (op, dtype, count, input, output, expected) in [
        (sum, DType::F32, 9, buffer.clone(), buffer.clone(), "36 are needed"),
        (sum, DType::F32, 7, short, shifted, "overlap"),
        (Collective::Allreduce(ReduceOp::Average), DType::I32, 8, buffer.clone(), buffer.clone(), "average"),
        (Collective::Broadcast { root: 2 }, DType::F32, 8, buffer.clone(), buffer.clone(), "ranks 0 to 1"),
    ] {
        let Err(error) = engine.submit(call(engine, op, dtype, count), input, output) else { panic!("accepted") };
        assert_eq!(error.scope(), crate::error::Scope::Operation);
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(
        engine.new_group(vec![0, 2], "").is_err()
            && engine.new_group(vec![0, 0], "").is_err()
            && engine.new_group(vec![], "").is_err()
    );
    // The order of calls is undisturbed.
    let results = ranks(&engines, |engine| allreduce(engine, &[2.0], ReduceOp::Sum).unwrap());
    assert_eq!(results, [[4.0], [4.0]]);
}

#[test]
fn a_closed_engine_says_so() {
    let engines = engines(2, LIMIT);
    ranks(&engines, |engine| engine.shutdown(LIMIT));
    assert!(matches!(allreduce(&engines[0], &[1.0], ReduceOp::Sum), Err(Error::Closed(_))));
}

#[test]
fn a_barrier_holds_everybody_until_the_last_has_come() {
    let engines = engines(3, LIMIT);
    let start = Instant::now();
    let left = ranks(&engines, |engine| {
        std::thread::sleep(Duration::from_millis(150 * engine.rank() as u64));
        let call = call(engine, Collective::Barrier, DType::U8, 0);
        wait(&engine.submit(call, Region::empty(), Region::empty()).unwrap()).unwrap();
        start.elapsed()
    });
    assert!(left.iter().all(|at| *at >= Duration::from_millis(300)), "{left:?}");
}

#[test]
fn a_group_is_known_by_its_members_alone() {
    let engines = engines(3, LIMIT);
    let sums = ranks(&engines, |engine| {
        if engine.rank() == 1 {
            // An outsider makes other groups, or none.
            engine.new_group(vec![1], "").unwrap();
            return 0.0;
        }
        let (first, second) = (engine.new_group(vec![0, 2], "").unwrap(), engine.new_group(vec![0, 2], "").unwrap());
        assert_ne!(first, second);
        let order = if engine.rank() == 0 { [first, second] } else { [second, first] };
        let works = order.map(|group| {
            let (buffer, memory) = region(&[if group == first { 1.0 } else { 10.0 }]);
            let call =
                Call { group, blocking: false, ..call(engine, Collective::Allreduce(ReduceOp::Sum), DType::F64, 1) };
            (engine.submit(call, buffer.clone(), buffer).unwrap(), memory)
        });
        works.iter().for_each(|(work, _)| wait(work).unwrap());
        works.iter().map(|(_, memory)| values::<f64>(memory)[0]).sum()
    });
    assert_eq!(sums, [22.0, 0.0, 22.0]);
}

#[test]
fn groups_of_different_purposes_are_counted_apart() {
    let engines = engines(2, LIMIT);
    let sums = ranks(&engines, |engine| {
        // The two ranks make the same groups in another order; one of them makes more for a purpose of its own.
        let purposes = if engine.rank() == 0 { ["", "mine", "ab", "ba"] } else { ["ba", "ab", "", ""] };
        let mut made = HashMap::new();
        for purpose in purposes {
            let group = engine.new_group(vec![0, 1], purpose).unwrap();
            made.entry(purpose).or_insert(group);
        }
        let works = ["", "ab", "ba"].map(|purpose| {
            let (buffer, memory) = region(&[purpose.len() as f64 + if purpose == "ab" { 10.0 } else { 1.0 }]);
            let group = made[purpose];
            let call =
                Call { group, blocking: false, ..call(engine, Collective::Allreduce(ReduceOp::Sum), DType::F64, 1) };
            (engine.submit(call, buffer.clone(), buffer).unwrap(), memory)
        });
        works.each_ref().map(|(work, memory)| {
            wait(work).unwrap();
            values::<f64>(memory)[0]
        })
    });
    assert_eq!(sums, [[2.0, 24.0, 6.0]; 2]);
}

#[test]
fn ranks_that_order_a_group_differently_are_told() {
    let engines = engines(2, LIMIT);
    let errors = ranks(&engines, |engine| {
        let group = engine.new_group(if engine.rank() == 0 { vec![0, 1] } else { vec![1, 0] }, "").unwrap();
        let (buffer, _) = region(&[0f32]);
        let call = Call { group, ..call(engine, Collective::Broadcast { root: 0 }, DType::F32, 1) };
        // Both believe to be the root and send at once; a second call tells at the latest.
        let mut error = None;
        for _ in 0..2 {
            let work = engine.submit(call.clone(), buffer.clone(), buffer.clone()).unwrap();
            error = error.or(wait(&work).err());
            std::thread::sleep(Duration::from_millis(100));
        }
        error.unwrap()
    });
    for error in errors {
        let cause = if let Error::Broken { cause, .. } = &error { cause } else { &error };
        assert!(matches!(cause, Error::Mismatch { .. }) && error.to_string().contains("another order"), "{error}");
    }
}

#[test]
fn statistics_need_not_wait_for_the_progress_thread_to_wake_up_by_itself() {
    let engines = engines(2, LIMIT);
    let start = Instant::now();
    for _ in 0..100 {
        std::thread::sleep(Duration::from_millis(1)); // so that it goes to sleep
        assert_eq!(engines[0].counters().operations, 0);
    }
    // It sleeps for a second at a time: waiting for that would take 50 s and more.
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}
