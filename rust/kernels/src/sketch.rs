//! Low-rank sketches: products of a matrix with tall thin ones, and their orthonormalization.
//!
//! Matrices are dense float32, row by row: `D` is rows x columns, `P` rows x rank, `R` columns x
//! rank. One round of the power iteration is `P = D R`, [`orthonormalize`]`(P)`, `R' = D^T P`; then
//! `P R'^T` is the sketch of `D`.
//!
//! The large matrix is read once per product, in panels of columns for which the thin matrix
//! stays in the first-level cache. The order of every sum depends on the shape only.

use crate::convert::Arch;
use crate::dispatch::{Kernel, dispatch};
use crate::lanes::{self, LANES, blocks, map, total, zip};

/// Columns of a panel. Part of the order of summation.
const PANEL: usize = 1024;
/// Rows that are gathered before they are added to a sum. Part of the order of summation.
const ROWS: usize = 4;
/// Columns of the thin matrix that are worked on at once. Not part of any order.
const COLUMNS: usize = 4;

/// Sizes of the matrices of a sketch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of `D` and `P`.
    pub rows: usize,
    /// Columns of `D`, rows of `R`.
    pub columns: usize,
    /// Columns of `P` and `R`: small, at most 32 or so.
    pub rank: usize,
}

impl Shape {
    fn check(&self, d: &[f32], p: &[f32], r: &[f32]) {
        let Shape { rows, columns, rank } = *self;
        assert!(
            d.len() == rows * columns && p.len() == rows * rank && r.len() == columns * rank,
            "{rows} x {columns} of rank {rank} with matrices of {}, {} and {} elements",
            d.len(),
            p.len(),
            r.len()
        );
    }
}

/// `p = d r`.
///
/// # Panics
/// If a length does not fit the shape.
pub fn times(shape: Shape, d: &[f32], r: &[f32], p: &mut [f32]) {
    shape.check(d, p, r);
    p.fill(0.0);
    dispatch(Times { shape, d, r: &transposed(r, shape.rank), p });
}

/// `r = d^T p`.
///
/// # Panics
/// If a length does not fit the shape.
pub fn transposed_times(shape: Shape, d: &[f32], p: &[f32], r: &mut [f32]) {
    shape.check(d, p, r);
    dispatch(TransposedTimes { shape, d, p, r });
}

/// `c = h + p r^T`, where `c` and `h` have the shape of `d`.
///
/// # Panics
/// If a length does not fit the shape.
pub fn expand(shape: Shape, h: &[f32], p: &[f32], r: &[f32], c: &mut [f32]) {
    shape.check(h, p, r);
    shape.check(c, p, r);
    dispatch(Expand { shape, h, p, r: &transposed(r, shape.rank), c });
}

/// What [`orthonormalize`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Orthonormalized {
    /// Columns that held infinities or NaNs: the matrix tells nothing about what it was made of.
    pub nonfinite: usize,
    /// Columns that were dead (these included, and all that depend on those before them) and now
    /// hold directions made from the seed.
    pub refilled: usize,
}

/// Makes the columns of `p` (rows x rank) orthonormal, in place, by the modified Gram-Schmidt process,
/// done twice, in float64.
///
/// A column is dead if it is zero, is not finite, or shrinks below 1e-6 of its norm when the
/// columns before it are taken out; it is refilled from a generator that depends on `seed` and the
/// column's number only. Columns beyond the number of rows become zero.
///
/// # Panics
/// If the length is no multiple of the rank.
pub fn orthonormalize(p: &mut [f32], rank: usize, seed: u64) -> Orthonormalized {
    if rank == 0 {
        return Orthonormalized::default();
    }
    assert_eq!(p.len() % rank, 0, "{} elements are no rows of rank {rank}", p.len());
    dispatch(Orthonormalize { p, rank, seed })
}

/// Row by row to column by column: `thin` has `rank` columns.
fn transposed(thin: &[f32], rank: usize) -> Vec<f32> {
    (0..rank).flat_map(|c| thin.iter().skip(c).step_by(rank).copied()).collect()
}

struct Times<'a> {
    shape: Shape,
    d: &'a [f32],
    /// Transposed.
    r: &'a [f32],
    p: &'a mut [f32],
}

impl Kernel for Times<'_> {
    type Output = ();
    #[inline(always)]
    fn run<A: Arch>(self) {
        let Shape { rows, columns, rank } = self.shape;
        for panel in (0..columns).step_by(PANEL) {
            let end = columns.min(panel + PANEL);
            for i in 0..rows {
                let row = &self.d[i * columns..][panel..end];
                let thin = |c: usize| &self.r[c * columns..][panel..end];
                let sums = &mut self.p[i * rank..][..rank];
                let whole = rank - rank % COLUMNS;
                for c in (0..whole).step_by(COLUMNS) {
                    let products: [f32; COLUMNS] = inner_products(row, std::array::from_fn(|q| thin(c + q)));
                    (0..COLUMNS).for_each(|q| sums[c + q] += products[q]);
                }
                for (c, sum) in sums.iter_mut().enumerate().skip(whole) {
                    *sum += inner_products(row, [thin(c)])[0];
                }
            }
        }
    }
}

#[inline(always)]
fn inner_products<const C: usize>(row: &[f32], thin: [&[f32]; C]) -> [f32; C] {
    let mut sums = [[0.0; LANES]; C];
    blocks!(row.len(), |at, load, store| {
        let x: [f32; LANES] = load(row, at);
        for c in 0..C {
            let products = zip(x, load(thin[c], at), |x, y| x * y);
            sums[c] = zip(sums[c], products, |sum, product| sum + product);
        }
    });
    map(sums, total)
}

struct TransposedTimes<'a> {
    shape: Shape,
    d: &'a [f32],
    p: &'a [f32],
    r: &'a mut [f32],
}

impl Kernel for TransposedTimes<'_> {
    type Output = ();
    #[inline(always)]
    fn run<A: Arch>(self) {
        let Shape { rows, columns, rank } = self.shape;
        let mut sums = vec![[0.0; PANEL]; rank];
        for panel in (0..columns).step_by(PANEL) {
            let end = columns.min(panel + PANEL);
            sums.fill([0.0; PANEL]);
            let row = |i: usize| &self.d[i * columns..][panel..end];
            let weights = |i: usize| &self.p[i * rank..][..rank];
            let whole = rows - rows % ROWS;
            for i in (0..whole).step_by(ROWS) {
                let group: [usize; ROWS] = std::array::from_fn(|q| i + q);
                add_rows(group.map(row), group.map(weights), &mut sums);
            }
            for i in whole..rows {
                add_rows([row(i)], [weights(i)], &mut sums);
            }
            for (j, out) in self.r[panel * rank..end * rank].chunks_exact_mut(rank.max(1)).enumerate() {
                for (out, sums) in out.iter_mut().zip(&sums) {
                    *out = sums[j];
                }
            }
        }
    }
}

/// `sums[c] += weights[0][c] * rows[0] + weights[1][c] * rows[1] + ...`
#[inline(always)]
fn add_rows<const Q: usize>(rows: [&[f32]; Q], weights: [&[f32]; Q], sums: &mut [[f32; PANEL]]) {
    blocks!(rows[0].len(), |at, load, store| {
        let x: [[f32; LANES]; Q] = rows.map(|row| load(row, at));
        for (c, sums) in sums.iter_mut().enumerate() {
            let mut gathered = map(x[0], |x| weights[0][c] * x);
            for q in 1..Q {
                gathered = zip(gathered, x[q], |sum, x| sum + weights[q][c] * x);
            }
            // Whole blocks here, also at the end: a row of sums is a whole panel.
            let later = zip(lanes::load(sums, at), gathered, |sum: f32, more| sum + more);
            lanes::store(sums, at, later);
        }
    });
}

struct Expand<'a> {
    shape: Shape,
    h: &'a [f32],
    p: &'a [f32],
    /// Transposed.
    r: &'a [f32],
    c: &'a mut [f32],
}

impl Kernel for Expand<'_> {
    type Output = ();
    #[inline(always)]
    fn run<A: Arch>(self) {
        let Shape { rows, columns, rank } = self.shape;
        for panel in (0..columns).step_by(PANEL) {
            let end = columns.min(panel + PANEL);
            for i in 0..rows {
                let weights = &self.p[i * rank..][..rank];
                let h = &self.h[i * columns..][panel..end];
                let out = &mut self.c[i * columns..][panel..end];
                blocks!(out.len(), |at, load, store| {
                    let mut sum = [0.0; LANES];
                    for (c, &weight) in weights.iter().enumerate() {
                        let thin = &self.r[c * columns..][panel..end];
                        sum = zip(sum, load(thin, at), |sum, x: f32| sum + weight * x);
                    }
                    store(out, at, zip(load(h, at), sum, |h: f32, sum| h + sum));
                });
            }
        }
    }
}

struct Orthonormalize<'a> {
    p: &'a mut [f32],
    rank: usize,
    seed: u64,
}

impl Kernel for Orthonormalize<'_> {
    type Output = Orthonormalized;
    #[inline(always)]
    fn run<A: Arch>(self) -> Orthonormalized {
        /// Below it, rounding of the float32 input is a good part of what is left.
        const DEAD: f64 = 1e-6;
        /// A random direction lies in the span of the others by bad luck never, or always.
        const REFILLS: u64 = 2;

        let mut found = Orthonormalized::default();
        let mut done: Vec<Vec<f64>> = Vec::with_capacity(self.rank);
        for c in 0..self.rank {
            let mut column: Vec<f64> = self.p.iter().skip(c).step_by(self.rank).map(|&x| f64::from(x)).collect();
            let mut norm = dot(&column, &column).sqrt();
            found.nonfinite += usize::from(!norm.is_finite());
            let mut alive = norm.is_finite() && independent(&mut column, norm * DEAD, &done);
            found.refilled += usize::from(!alive);
            for attempt in 0..REFILLS {
                if !alive {
                    let mut random = Random(self.seed ^ mixed((c as u64) << 32 | attempt));
                    column.iter_mut().for_each(|x| *x = random.next());
                    norm = dot(&column, &column).sqrt();
                    alive = independent(&mut column, norm * DEAD, &done);
                }
            }
            if !alive {
                column.fill(0.0);
            }
            for (out, &x) in self.p.iter_mut().skip(c).step_by(self.rank).zip(&column) {
                *out = x as f32;
            }
            done.push(column);
        }
        found
    }
}

/// Takes the orthonormal `others` out of the column and normalizes what is left, if that is more than `least`.
#[inline(always)]
fn independent(column: &mut [f64], least: f64, others: &[Vec<f64>]) -> bool {
    for round in 0..2 {
        for other in others {
            let share = dot(column, other);
            column.iter_mut().zip(other).for_each(|(x, y)| *x -= share * y);
        }
        let norm = dot(column, column).sqrt();
        if round == 0 && norm <= least {
            return false;
        }
        column.iter_mut().for_each(|x| *x /= norm);
    }
    true
}

#[inline(always)]
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; LANES];
    blocks!(a.len(), |at, load, store| {
        let products = zip(load(a, at), load(b, at), |x: f64, y: f64| x * y);
        sums = zip(sums, products, |sum, product| sum + product);
    });
    total(sums)
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
struct Random(u64);

impl Random {
    /// Uniform in [-1, 1).
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mixed(self.0) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
