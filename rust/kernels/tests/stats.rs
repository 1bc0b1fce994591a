//! Sums in the documented order, the same bits at every level.

use mdas_kernels::stats::{copy_sqnorm, dot, sqdist, sqnorm};
use mdas_kernels::{Level, with_level};
use proptest::prelude::*;

/// Element `i` to lane `i % 16`; the lanes in halves.
fn in_order(terms: impl Iterator<Item = f64>) -> f64 {
    let mut lanes = [0.0; 16];
    terms.enumerate().for_each(|(i, term)| lanes[i % 16] += term);
    for width in [8, 4, 2, 1] {
        (0..width).for_each(|i| lanes[i] += lanes[i + width]);
    }
    lanes[0]
}

proptest! {
    #[test]
    fn equal_the_scalar_reference(
        pairs in prop_oneof![Just(0usize), Just(1), Just(16), Just(33), 0..200usize]
            .prop_flat_map(|n| prop::collection::vec((-1e20..1e20f32, -2.0..2.0f32), n))
    ) {
        let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        let wide = || a.iter().zip(&b).map(|(&x, &y)| (f64::from(x), f64::from(y)));
        let want = [
            in_order(wide().map(|(x, _)| x * x)),
            in_order(wide().map(|(x, y)| x * y)),
            in_order(wide().map(|(x, y)| (x - y) * (x - y))),
        ];
        for level in Level::available() {
            let mut copy = vec![9.0; a.len()];
            let got = with_level(level, || [copy_sqnorm(&mut copy, &a), dot(&a, &b), sqdist(&a, &b)]);
            prop_assert_eq!(got.map(f64::to_bits), want.map(f64::to_bits), "{}", level.name());
            prop_assert_eq!(&copy, &a);
            prop_assert_eq!(with_level(level, || sqnorm(&a)).to_bits(), want[0].to_bits());
        }
    }
}

#[test]
fn a_norm_is_finite_exactly_if_the_elements_are() {
    for n in [1, 16, 100] {
        for at in [0, n / 2, n - 1] {
            let mut a = vec![f32::MAX; n];
            assert!(sqnorm(&a).is_finite());
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                a[at] = bad;
                assert!(!sqnorm(&a).is_finite());
                assert!(!copy_sqnorm(&mut vec![0.0; n], &a).is_finite());
            }
        }
    }
}
