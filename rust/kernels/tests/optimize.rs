//! The fused pass, at every level, equals its rule applied element by element.

use mdas_kernels::optimize::{Forward, Gradient, Rule, Update, update};
use mdas_kernels::rules::{Adam, Decay, Momentum, Sgd};
use mdas_kernels::{Level, with_level};
use proptest::prelude::*;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Look {
    Absent,
    Base,
    Plain,
    /// shared part and average are the same memory
    Blend(f32),
}

/// What a case consists of: vectors of one length, and which parts of the step there are.
#[derive(Debug, Clone)]
struct Case {
    vectors: [Vec<f32>; 5],
    real: bool,
    look: Look,
    scale: f32,
}

fn cases() -> impl Strategy<Value = Case> {
    let look = prop_oneof![
        Just(Look::Absent),
        Just(Look::Base),
        Just(Look::Plain),
        prop_oneof![Just(0.0f32), Just(1.0), 0.0..1.0f32].prop_map(Look::Blend)
    ];
    let vectors = prop_oneof![Just(0usize), Just(1), Just(16), Just(33), 0..100usize]
        .prop_flat_map(|n| std::array::from_fn::<_, 5, _>(|_| prop::collection::vec(-2.0..2.0f32, n)));
    (vectors, any::<bool>(), look, prop_oneof![Just(1.0f32), 0.1..2.0f32])
        .prop_map(|(vectors, real, look, scale)| Case { vectors, real, look, scale })
}

fn bits(vector: &[f32]) -> Vec<u32> {
    vector.iter().map(|x| x.to_bits()).collect()
}

fn check<R: Rule<K>, const K: usize>(case: &Case, now: R, next: R) -> Result<(), TestCaseError> {
    let [base, average, local, first, second] = &case.vectors;
    let second: Vec<f32> = second.iter().map(|x| x.abs()).collect();
    let old_state: [&Vec<f32>; K] = std::array::from_fn(|k| [first, &second][k]);

    let (mut want_base, mut want_state) = (base.clone(), old_state.map(Clone::clone));
    let mut want_forward = vec![7.0; base.len()];
    for i in 0..base.len() {
        let mut state: [f32; K] = std::array::from_fn(|k| old_state[k][i]);
        if case.real {
            (want_base[i], state) = now.step(base[i], average[i] * case.scale, state);
            (0..K).for_each(|k| want_state[k][i] = state[k]);
        }
        let predicted = match case.look {
            Look::Absent => continue,
            Look::Base => {
                want_forward[i] = want_base[i];
                continue;
            }
            Look::Plain => local[i],
            Look::Blend(1.0) => average[i],
            Look::Blend(alpha) => average[i] + (1.0 - alpha) * (local[i] - average[i]),
        };
        want_forward[i] = next.step(want_base[i], predicted * case.scale, state).0;
    }

    for level in Level::available() {
        let (mut base, mut forward) = (base.clone(), vec![7.0; base.len()]);
        let mut state = old_state.map(Clone::clone);
        let real = case.real.then_some(Update { rule: now, gradient: Gradient::Plain(average), scale: case.scale });
        let predicted = |gradient| Update { rule: next, gradient, scale: case.scale };
        let look = match case.look {
            Look::Absent => Forward::Absent,
            Look::Base => Forward::Base(&mut forward),
            Look::Plain => Forward::Predicted(&mut forward, predicted(Gradient::Plain(local))),
            Look::Blend(alpha) => Forward::Predicted(&mut forward, predicted(Gradient::blend(average, local, alpha))),
        };
        with_level(level, || update(&mut base, state.each_mut().map(|part| &mut part[..]), real, look));
        prop_assert_eq!(bits(&base), bits(&want_base), "base weights, {}", level.name());
        prop_assert_eq!(bits(&forward), bits(&want_forward), "forward weights, {}", level.name());
        for k in 0..K {
            prop_assert_eq!(bits(&state[k]), bits(&want_state[k]), "state {}, {}", k, level.name());
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn sgd(case in cases(), decay in 0.0..0.1f64, maximize: bool) {
        check(&case, Sgd::new(0.1, decay, maximize), Sgd::new(0.05, decay, maximize))?;
    }

    #[test]
    fn momentum(case in cases(), nesterov: bool, first: bool, dampening in 0.0..0.5f64) {
        let (now, next) = (Sgd::new(0.1, 0.01, false), Sgd::new(0.05, 0.02, false));
        check(
            &case,
            Momentum::new(now, 0.9, dampening, nesterov, first),
            Momentum::new(next, 0.8, dampening, nesterov, first && !case.real),
        )?;
    }

    #[test]
    fn adam(case in cases(), step in 1..1000u64, beta1 in 0.3..0.95f64, decoupled: bool) {
        let decay = (0.01, if decoupled { Decay::Decoupled } else { Decay::Penalty });
        check(
            &case,
            Adam::new(0.01, (beta1, 0.999), 1e-8, decay, false, step),
            Adam::new(0.02, (beta1, 0.99), 1e-8, decay, false, step + 1),
        )?;
    }
}

#[test]
#[should_panic(expected = "as long as the 3 weights")]
fn lengths_must_agree() {
    let rule = Sgd::new(0.1, 0.0, false);
    let real = Update { rule, gradient: Gradient::Plain(&[0.0; 2]), scale: 1.0 };
    update(&mut [0.0; 3], [], Some(real), Forward::Absent);
}

#[test]
fn a_confidence_of_one_does_not_look_at_the_local_gradient() {
    let rule = Sgd::new(0.5, 0.0, false);
    let gradient = Gradient::blend(&[1.0, 2.0], &[f32::NAN, f32::INFINITY], 1.0);
    let (mut base, mut forward) = ([1.0, 1.0], [0.0; 2]);
    update(&mut base, [], None, Forward::Predicted(&mut forward, Update { rule, gradient, scale: 1.0 }));
    assert_eq!((base, forward), ([1.0, 1.0], [0.5, 0.0]));
}
