use super::*;
use crate::collective::plan::Plan;
use crate::collective::select::{ALGORITHMS, Algorithm, plan_for};
use mdas_kernels::ReduceOp;
use proptest::prelude::*;

const SUM: Collective = Collective::Allreduce(ReduceOp::Sum);
const SCATTER: Collective = Collective::ReduceScatter(ReduceOp::Average);

fn ops(size: usize) -> Vec<Collective> {
    let mut ops = vec![SUM, SCATTER, Collective::Allgather, Collective::Barrier];
    let mut roots = vec![0, size / 2, size - 1];
    roots.dedup();
    ops.extend(roots.into_iter().map(|root| Collective::Broadcast { root }));
    ops
}

fn recipe(algorithm: Algorithm, op: Collective) -> impl Fn(&Shape) -> Recipe {
    move |shape| algorithm.plan(op, shape).expect("known collective").into()
}

fn knows(algorithm: Algorithm, world: &World) -> bool {
    algorithm.plan(world.op, &world.shape(0)).is_some()
}

fn counts(size: usize) -> Vec<usize> {
    let mut counts = vec![0, 1, size - 1, size, size + 1, 13, 2 * size + 3];
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Which ranks share a node matters to one algorithm only.
fn arrangements(algorithm: Algorithm, size: usize) -> Vec<Nodes> {
    if algorithm != HIERARCHICAL {
        return vec![Nodes::One];
    }
    let divisors = (2..size).filter(|each| size.is_multiple_of(*each));
    divisors.flat_map(|each| [Nodes::Blocks(each), Nodes::Cyclic(size / each)]).collect()
}

const PLAIN: Rules = Rules { window: 1, in_place: false, schedule: Schedule::Eager };

/// Every algorithm, collective, length and accumulation type, in place and out of place, with
/// the rules taken in turn; the order of summation must not depend on the chunk.
fn every_algorithm(size: usize) {
    let rules = [
        (1, Schedule::Eager),
        (4, Schedule::Random(1)),
        (4, Schedule::Starve(0)),
        (1, Schedule::Lazy),
        (usize::MAX, Schedule::Eager),
        (2, Schedule::Starve(size - 1)),
        (1, Schedule::Random(2)),
    ];
    let mut rules = rules.into_iter().cycle();
    let mut checked = 0;
    for &algorithm in ALGORITHMS {
        for op in ops(size) {
            for count in counts(size) {
                for (widen, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
                    for nodes in arrangements(algorithm, size) {
                        let mut expressions = None;
                        for chunk in [1, 3, 1000] {
                            let world = World { op, size, count, chunk, widen, nodes };
                            if !knows(algorithm, &world) {
                                continue;
                            }
                            let Some((window, schedule)) = rules.next() else { continue };
                            let rules = Rules { window, in_place, schedule };
                            let proof = check(&world, &rules, recipe(algorithm, op))
                                .unwrap_or_else(|wrong| panic!("{algorithm:?}, {world:?}, {rules:?}: {wrong}"));
                            let expected = expressions.get_or_insert_with(|| proof.expressions.clone());
                            assert_eq!(*expected, proof.expressions, "{algorithm:?}, {world:?}: depends on the chunk");
                            checked += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(checked > 500, "only {checked} plans were checked");
}

macro_rules! every_world {
    ($($name:ident $size:literal),*) => { $(#[test] fn $name() { every_algorithm($size) })* };
}
every_world!(
    world_1 1, world_2 2, world_3 3, world_4 4, world_5 5, world_6 6, world_7 7, world_8 8, world_9 9, world_10 10,
    world_11 11, world_12 12, world_13 13, world_14 14, world_15 15, world_16 16, world_17 17
);

#[test]
fn the_schedule_and_the_window_change_nothing() {
    for &algorithm in ALGORITHMS {
        for size in [2, 3, 5] {
            for op in ops(size) {
                let world = World { op, size, count: 11, chunk: 2, widen: true, nodes: Nodes::One };
                if !knows(algorithm, &world) {
                    continue;
                }
                let expected = check(&world, &PLAIN, recipe(algorithm, op)).expect("a right plan");
                let starved = (0..size).map(Schedule::Starve);
                let random = (0..5).map(Schedule::Random);
                for schedule in [Schedule::Eager, Schedule::Lazy].into_iter().chain(starved).chain(random) {
                    for window in [1, 2, 4, size, usize::MAX] {
                        let rules = Rules { window, in_place: true, schedule };
                        assert_eq!(check(&world, &rules, recipe(algorithm, op)), Ok(expected.clone()), "{rules:?}");
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_chosen_is_right(
        size in 1usize..20, count in 0usize..200, chunk in 1usize..50, widen: bool, in_place: bool,
        op in 0usize..5, root in 0usize..20, small in 0usize..400, window in 1usize..9, seed: u64, each in 1usize..5,
        forced in proptest::option::of(0..ALGORITHMS.len()),
    ) {
        let op = [SUM, SCATTER, Collective::Allgather, Collective::Barrier, Collective::Broadcast { root: root % size }][op];
        let nodes = if seed % 2 == 0 { Nodes::Blocks(each) } else { Nodes::Cyclic(each) };
        let world = World { op, size, count, chunk, widen, nodes };
        let rules = Rules { window, in_place, schedule: Schedule::Random(seed) };
        let forced = forced.map(|index| ALGORITHMS[index]);
        let proof = check(&world, &rules, |shape| plan_for(op, 2, shape, small, forced).into());
        prop_assert!(proof.is_ok(), "{:?}", proof);
    }
}

#[test]
fn between_two_nodes_of_two_ranks_the_hierarchy_moves_two_thirds_of_what_a_ring_moves() {
    let world = World { op: SUM, size: 4, count: 480, chunk: 7, widen: false, nodes: Nodes::Blocks(2) };
    let crossing = |algorithm: Algorithm| -> usize {
        let crosses = |rank: usize| move |step: &Step| matches!(step, Step::Send { peer, .. } if peer / 2 != rank / 2);
        let sent = |step: Step| if let Step::Send { from, .. } = step { from.len } else { 0 };
        let of = |rank: usize| recipe(algorithm, SUM)(&world.shape(rank)).plan.filter(crosses(rank)).map(sent);
        (0..4).flat_map(of).sum()
    };
    assert_eq!((crossing(HIERARCHICAL), crossing(RING)), (2 * 480, 3 * 480));
}

#[test]
fn nodes_of_different_sizes_have_no_hierarchy() {
    for (size, nodes) in [(5, Nodes::Blocks(2)), (4, Nodes::One), (4, Nodes::Blocks(1)), (7, Nodes::Cyclic(3))] {
        let world = World { op: SUM, size, count: 10, chunk: 2, widen: false, nodes };
        assert!(!knows(HIERARCHICAL, &world), "{world:?}");
    }
}

#[test]
fn halving_and_doubling_sends_as_little_as_the_ring() {
    let world = World { op: SUM, size: 8, count: 80, chunk: 1000, widen: false, nodes: Nodes::One };
    let proof = check(&world, &PLAIN, recipe(crate::collective::halving_doubling::HALVING_DOUBLING, SUM));
    let proof = proof.expect("a right plan");
    assert_eq!((proof.messages, proof.elements), (8 * 2 * 3, 2 * 7 * 80));
}

#[test]
fn the_ring_sends_the_least_that_is_possible() {
    let world = World { op: SUM, size: 4, count: 40, chunk: 5, widen: false, nodes: Nodes::One };
    let proof = check(&world, &PLAIN, recipe(crate::collective::ring::RING, SUM)).expect("a right plan");
    assert_eq!((proof.messages, proof.elements), (4 * 2 * 3 * 2, 2 * 3 * 40));
}

// Wrong plans, made from right ones: the checker has to see every one of them.

/// What the checker says when rank 1's steps are changed by `spoil`.
fn spoiled(algorithm: Algorithm, world: &World, rules: &Rules, spoil: impl Fn(&mut Vec<Step>)) -> Violation {
    let recipe = |shape: &Shape| {
        let Recipe { plan, scratch } = recipe(algorithm, world.op)(shape);
        let mut steps: Vec<Step> = plan.collect();
        if shape.rank == 1 {
            spoil(&mut steps);
        }
        Recipe { plan: Box::new(steps.into_iter()) as Plan, scratch }
    };
    match check(world, rules, recipe) {
        Ok(proof) => panic!("the checker accepts a wrong plan: {proof:?}"),
        Err(wrong) => wrong,
    }
}

use crate::collective::exchange::EXCHANGE;
use crate::collective::hierarchical::HIERARCHICAL;
use crate::collective::ring::RING;
use crate::collective::tree::TREE;
const THREE: World = World { op: SUM, size: 3, count: 6, chunk: 2, widen: false, nodes: Nodes::One };

// The right plan of rank 1, for reference:
// 0 send 2..4 | 1 store 0..2, 2 send | 3 store 4..6 (last), 4 send | 5 store 2..4, 6 send | 7 store 0..2

#[test]
fn sees_a_missing_send() {
    const LAST_SEND: Step = Step::Send { peer: 2, from: Span::new(Space::Output, 2, 2) };
    let wrong = spoiled(RING, &THREE, &PLAIN, |steps| steps.retain(|step| *step != LAST_SEND));
    assert_eq!((wrong.rank, wrong.step), (2, Some(7)));
    assert_eq!(wrong.fault, Fault::Unmatched { peer: 1 });
    assert_eq!(wrong.to_string(), "rank 2, step 7, Output 2..4: the message has no counterpart in the plan of rank 1");
}

#[test]
fn sees_a_missing_store() {
    let wrong = spoiled(RING, &THREE, &PLAIN, |steps| steps.truncate(7));
    assert_eq!((wrong.rank, wrong.fault), (0, Fault::Unmatched { peer: 1 }));
}

#[test]
fn sees_a_contribution_that_counts_twice() {
    let twice = |steps: &mut Vec<Step>| {
        let own = Span::new(Space::Input, 0, 2);
        let sum = own.of(Space::Output);
        steps.insert(2, Step::reduce(Source::Local(own), sum, sum));
    };
    let wrong = spoiled(RING, &THREE, &PLAIN, twice);
    let why = "contains the contribution of rank 1 2 times".to_string();
    assert_eq!((wrong.rank, wrong.fault), (0, Fault::Wrong { index: 0, why }));
}

#[test]
fn sees_a_contribution_that_is_missing() {
    let forget = |steps: &mut Vec<Step>| {
        if let Step::Store { with, .. } = &mut steps[1] {
            *with = None;
        }
    };
    let why = "contains the contribution of rank 1 0 times".to_string();
    assert_eq!(spoiled(RING, &THREE, &PLAIN, forget).fault, Fault::Wrong { index: 0, why });
}

#[test]
fn sees_another_order_of_summation() {
    // Rank 1 combines the contributions of ranks 1 and 2 first.
    // Its plan: copy, send, send | 3 store rank 0's, 4 add its own, 5 add rank 2's.
    let reorder = |steps: &mut Vec<Step>| {
        let [own, sums, result] = [(Space::Scratch, 0), (Space::Scratch, 2), (Space::Output, 0)]
            .map(|(space, start)| Span::new(space, start, 2));
        steps[4] = Step::reduce(Source::Message { peer: 2, kind: Kind::Accumulator }, own, result);
        steps[5] = Step::reduce(Source::Local(sums), result, result).finish_if(true);
    };
    let world = World { count: 2, ..THREE };
    let wrong = spoiled(EXCHANGE, &world, &PLAIN, reorder);
    assert_eq!((wrong.rank, wrong.fault), (1, Fault::Order { index: 0 }));
}

#[test]
fn sees_what_overwrites_a_message_in_flight() {
    // Nothing has told rank 1 yet that its first block has been received.
    let overwrite = |steps: &mut Vec<Step>| {
        let input = Span::new(Space::Input, 0, 2);
        steps.insert(1, Step::copy(Source::Local(input), Span::new(Space::Output, 2, 2)));
    };
    let rules = Rules { in_place: true, ..PLAIN };
    let wrong = spoiled(RING, &THREE, &rules, overwrite);
    assert_eq!((wrong.rank, wrong.step, wrong.span), (1, Some(1), Some(Span::new(Space::Output, 2, 2))));
    assert_eq!(wrong.fault, Fault::InFlight { send: 0, peer: 2 });
}

#[test]
fn sees_that_an_exchange_in_place_must_send_a_copy() {
    let raw = |shape: &Shape| {
        let Recipe { plan, scratch } = recipe(EXCHANGE, SUM)(shape);
        let raw = |step| match step {
            Step::Send { peer, from } => Step::Send { peer, from: from.of(Space::Input) },
            Step::Store { source: Source::Message { peer, .. }, with, into, finish } => {
                Step::Store { source: Source::Message { peer, kind: Kind::Element }, with, into, finish }
            }
            local => local,
        };
        Recipe { plan: Box::new(plan.map(raw)) as Plan, scratch }
    };
    assert!(check(&THREE, &PLAIN, raw).is_ok(), "out of place this is right");
    // No schedule is needed that makes it go wrong: it is not known to go right.
    let wrong = check(&THREE, &Rules { in_place: true, ..PLAIN }, raw).expect_err("a wrong plan");
    assert!(matches!(wrong.fault, Fault::InFlight { .. }), "{wrong}");
}

#[test]
fn sees_what_lands_before_its_place_is_free() {
    // Rank 0 sends at once; rank 1 still needs its own element at that place.
    let plan = |shape: &Shape| {
        let (input, output) = (Span::new(Space::Input, 0, 1), Span::new(Space::Output, 0, 1));
        let scratch = Span::new(Space::Scratch, 0, 1);
        let steps = match shape.rank {
            0 => vec![Step::copy(Source::Local(input), output), Step::Send { peer: 1, from: output }],
            _ => vec![
                Step::copy(Source::Local(input), scratch),
                Step::copy(Source::Message { peer: 0, kind: Kind::Element }, output),
            ],
        };
        Recipe { plan: Box::new(steps.into_iter()), scratch: 1 }
    };
    let op = Collective::Broadcast { root: 0 };
    let world = World { op, size: 2, count: 1, chunk: 1, widen: false, nodes: Nodes::One };
    assert!(check(&world, &PLAIN, plan).is_ok(), "out of place this is right");
    // Seen whether it lands early or not: in the step that uses the place, or in the message.
    let fault =
        |window, schedule| check(&world, &Rules { window, in_place: true, schedule }, plan).expect_err("wrong").fault;
    assert_eq!(fault(1, Schedule::Starve(1)), Fault::MayHaveLanded { landing: 1 });
    assert_eq!(fault(1, Schedule::Lazy), Fault::LandsTooEarly { user: 0 });
}

#[test]
fn sees_a_swapped_length() {
    let world = World { count: 5, ..THREE }; // blocks of 2, 2 and 1
    let wrong = spoiled(RING, &world, &PLAIN, |steps| steps.swap(2, 4));
    assert_eq!(wrong.fault, Fault::Length { peer: 1, step: 2, sent: 1, awaited: 2 });
}

#[test]
fn sees_a_wrong_type() {
    let world = World { widen: true, ..THREE };
    let raw = |steps: &mut Vec<Step>| {
        if let Some(Step::Send { from, .. }) = steps.iter_mut().find(|step| matches!(step, Step::Send { .. })) {
            *from = from.of(Space::Input);
        }
    };
    let wrong = spoiled(TREE, &world, &PLAIN, raw);
    assert_eq!(wrong.fault, Fault::WrongKind { peer: 1, step: 1, sent: Kind::Element, awaited: Kind::Accumulator });
}

#[test]
fn sees_a_sum_that_is_rounded_on_the_way() {
    let world = World { widen: true, ..THREE };
    let round = |shape: &Shape| {
        // The plan for a type that needs no wider one, run on one that does.
        recipe(RING, SUM)(&Shape { widen: false, ..shape.clone() })
    };
    let why = "rounded before the reduction was complete".to_string();
    assert_eq!(check(&world, &PLAIN, round).expect_err("wrong").fault, Fault::Wrong { index: 0, why });
}

#[test]
fn sees_a_division_too_many_or_too_few() {
    let finish = |which: usize, value: bool| {
        move |steps: &mut Vec<Step>| {
            if let Step::Store { finish, .. } = &mut steps[which] {
                *finish = value;
            }
        }
    };
    let fault = |which, value| spoiled(RING, &THREE, &PLAIN, finish(which, value)).fault;
    let early = "finished before the reduction was complete".to_string();
    assert_eq!(fault(1, true), Fault::Wrong { index: 0, why: early });
    let never = "the last store of the reduction does not finish".to_string();
    assert_eq!(fault(3, false), Fault::Wrong { index: 4, why: never });
}

#[test]
fn sees_a_deadlock() {
    // Rank 1 waits before it sends its first block, and so do the others.
    let late = |shape: &Shape| {
        let Recipe { plan, scratch } = recipe(RING, SUM)(shape);
        let mut steps: Vec<Step> = plan.collect();
        steps.swap(0, 1);
        Recipe { plan: Box::new(steps.into_iter()) as Plan, scratch }
    };
    let world = World { size: 2, count: 4, ..THREE };
    for schedule in [Schedule::Eager, Schedule::Lazy, Schedule::Starve(1), Schedule::Random(3)] {
        let wrong = check(&world, &Rules { window: usize::MAX, in_place: false, schedule }, late);
        assert_eq!(wrong.expect_err("a deadlock").fault, Fault::Deadlock { peer: 1 });
    }
}

#[test]
fn sees_steps_that_make_no_sense() {
    let fault = |step: Step| spoiled(RING, &THREE, &PLAIN, |steps| steps.insert(0, step)).fault;
    let input = Span::new(Space::Input, 0, 2);
    let output = input.of(Space::Output);
    assert_eq!(fault(Step::Send { peer: 1, from: input }), Fault::NoPeer { peer: 1 });
    assert_eq!(fault(Step::Send { peer: 3, from: input }), Fault::NoPeer { peer: 3 });
    assert_eq!(fault(Step::Send { peer: 2, from: Span { len: 3, ..input } }), Fault::Size { chunk: 2 });
    assert_eq!(fault(Step::Send { peer: 2, from: Span { len: 0, ..input } }), Fault::Size { chunk: 2 });
    assert_eq!(fault(Step::Send { peer: 2, from: Span { start: 5, ..input } }), Fault::OutOfBounds { len: 6 });
    assert_eq!(fault(Step::copy(Source::Local(output), input)), Fault::WritesInput);
    assert_eq!(fault(Step::copy(Source::Local(output), Span { start: 2, ..output })), Fault::Uninitialized);
    let shifted = Span { start: 1, ..output };
    assert_eq!(fault(Step::copy(Source::Local(output), shifted)), Fault::Operand { other: output });
    let short = Span { len: 1, ..input };
    assert_eq!(fault(Step::copy(Source::Local(short), output)), Fault::Operand { other: short });
}
