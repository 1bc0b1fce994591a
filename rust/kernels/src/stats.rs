//! Sums over vectors: norms, distances, inner products.
//!
//! All in float64, in which the square of a float32 is exact and cannot overflow: a sum is
//! finite exactly if the elements are. The order is fixed: element `i` goes to lane `i % 16`,
//! and the lanes are added up in halves.

use crate::convert::Arch;
use crate::dispatch::{Kernel, dispatch};
use crate::lanes::{LANES, blocks, total, zip};

/// Copies `src` to `dst` and returns the squared norm, reading `src` once.
///
/// # Panics
/// If the lengths differ.
pub fn copy_sqnorm(dst: &mut [f32], src: &[f32]) -> f64 {
    assert_eq!(dst.len(), src.len(), "copy between vectors of different lengths");
    dispatch(CopyNorm { dst, src })
}

/// The squared Euclidean norm.
pub fn sqnorm(a: &[f32]) -> f64 {
    dot(a, a)
}

/// The squared Euclidean distance.
///
/// # Panics
/// If the lengths differ.
pub fn sqdist(a: &[f32], b: &[f32]) -> f64 {
    pairs(a, b, |x, y| (x - y) * (x - y))
}

/// The inner product.
///
/// # Panics
/// If the lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    pairs(a, b, |x, y| x * y)
}

fn pairs(a: &[f32], b: &[f32], term: impl Fn(f64, f64) -> f64) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of different lengths");
    dispatch(Pairs { a, b, term })
}

struct Pairs<'a, T> {
    a: &'a [f32],
    b: &'a [f32],
    term: T,
}

impl<T: Fn(f64, f64) -> f64> Kernel for Pairs<'_, T> {
    type Output = f64;
    #[inline(always)]
    fn run<A: Arch>(self) -> f64 {
        let mut sums = [0.0; LANES];
        blocks!(self.a.len(), |at, load, store| {
            let term = |x: f32, y: f32| (self.term)(f64::from(x), f64::from(y));
            sums = zip(sums, zip(load(self.a, at), load(self.b, at), term), |sum, term| sum + term);
        });
        total(sums)
    }
}

struct CopyNorm<'a> {
    dst: &'a mut [f32],
    src: &'a [f32],
}

impl Kernel for CopyNorm<'_> {
    type Output = f64;
    #[inline(always)]
    fn run<A: Arch>(self) -> f64 {
        let mut sums = [0.0; LANES];
        blocks!(self.src.len(), |at, load, store| {
            let block: [f32; LANES] = load(self.src, at);
            store(self.dst, at, block);
            sums = zip(sums, block, |sum, x| sum + f64::from(x) * f64::from(x));
        });
        total(sums)
    }
}
