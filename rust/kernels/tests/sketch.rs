//! Products against float64, orthonormality, dead columns, and the same bits at every level.

use mdas_kernels::sketch::{Orthonormalized, Shape, expand, orthonormalize, times, transposed_times};
use mdas_kernels::{Level, with_level};
use proptest::prelude::*;

fn bits(matrix: &[f32]) -> Vec<u32> {
    matrix.iter().map(|x| x.to_bits()).collect()
}

/// `f` at every level; the results have to be the same bits.
fn everywhere(f: impl Fn() -> Vec<f32>) -> Vec<f32> {
    let results: Vec<_> = Level::available().map(|level| with_level(level, &f)).collect();
    for result in &results {
        assert_eq!(bits(result), bits(&results[0]));
    }
    results[0].clone()
}

fn assert_close(got: &[f32], want: impl Iterator<Item = f64>, tolerance: f64) {
    for (i, (&got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= tolerance, "element {i}: {got} instead of {want}");
    }
}

/// Row-major product of `a` (n x k) and `b` (k x m), in float64, of elements that the closures give.
fn product(n: usize, k: usize, m: usize, a: impl Fn(usize, usize) -> f32, b: impl Fn(usize, usize) -> f32) -> Vec<f64> {
    let element = |i, j| (0..k).map(|l| f64::from(a(i, l)) * f64::from(b(l, j))).sum();
    (0..n).flat_map(|i| (0..m).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

/// Some matrix with elements in [-1, 1).
fn matrix(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2) | 1;
    let mut next = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn assert_orthonormal(p: &[f32], rank: usize) {
    let gram = product(rank, p.len() / rank, rank, |i, l| p[l * rank + i], |l, j| p[l * rank + j]);
    for (at, &x) in gram.iter().enumerate() {
        let want = if at / rank == at % rank { 1.0 } else { 0.0 };
        assert!((x - want).abs() < 1e-6, "columns {} and {}: {x}", at / rank, at % rank);
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let columns = prop_oneof![Just(0usize), Just(16), 1..80usize, 1000..1100usize, Just(2500)];
    (0..20usize, columns, prop_oneof![0..10usize, Just(32)]).prop_map(|(rows, columns, rank)| Shape {
        rows,
        columns,
        rank,
    })
}

proptest! {
    #[test]
    fn products_equal_float64(shape in shapes(), seed: u32) {
        let Shape { rows, columns, rank } = shape;
        let (d, r, p) = (matrix(rows * columns, seed), matrix(columns * rank, seed ^ 1), matrix(rows * rank, seed ^ 2));

        let got = everywhere(|| { let mut p = vec![7.0; rows * rank]; times(shape, &d, &r, &mut p); p });
        let want = product(rows, columns, rank, |i, l| d[i * columns + l], |l, j| r[l * rank + j]);
        assert_close(&got, want.into_iter(), 1e-6 * (1 + columns) as f64);

        let got = everywhere(|| { let mut r = vec![7.0; columns * rank]; transposed_times(shape, &d, &p, &mut r); r });
        let want = product(columns, rows, rank, |i, l| d[l * columns + i], |l, j| p[l * rank + j]);
        assert_close(&got, want.into_iter(), 1e-6 * (1 + rows) as f64);

        let got = everywhere(|| { let mut c = vec![7.0; rows * columns]; expand(shape, &d, &p, &r, &mut c); c });
        let want = product(rows, rank, columns, |i, l| p[i * rank + l], |l, j| r[j * rank + l]);
        assert_close(&got, want.iter().zip(&d).map(|(q, &h)| q + f64::from(h)), 1e-6 * (1 + rank) as f64);
    }

    #[test]
    fn columns_become_orthonormal(rank in 1..=32usize, more in 0..60usize, seed: u32, scale in -30..30i32) {
        let scale = 10f32.powi(scale);
        let p: Vec<f32> = matrix((rank + more) * rank, seed).iter().map(|x| x * scale).collect();
        let got = everywhere(|| {
            let mut p = p.clone();
            assert_eq!(orthonormalize(&mut p, rank, 1).nonfinite, 0);
            p
        });
        assert_orthonormal(&got, rank);
    }

    #[test]
    fn a_sketch_of_full_rank_is_the_matrix(rows in 1..20usize, columns in 1..50usize, seed: u32) {
        let shape = Shape { rows, columns, rank: rows.min(columns) };
        let d = matrix(rows * columns, seed);
        let (mut p, mut r) = (vec![0.0; rows * shape.rank], vec![0.0; columns * shape.rank]);
        orthonormalize(&mut r, shape.rank, 3);
        times(shape, &d, &r, &mut p);
        orthonormalize(&mut p, shape.rank, 4);
        transposed_times(shape, &d, &p, &mut r);
        let mut sketch = vec![7.0; d.len()];
        expand(shape, &vec![0.0; d.len()], &p, &r, &mut sketch);
        assert_close(&sketch, d.iter().map(|&x| x.into()), 1e-5);
    }
}

/// Columns: two good ones, zero, a multiple of the first, one with a NaN, an infinite one.
fn half_dead(rows: usize) -> Vec<f32> {
    let good = matrix(rows * 2, 5);
    (0..rows)
        .flat_map(|i| {
            let bad = if i == 3 { f32::NAN } else { 1.0 };
            [good[2 * i], good[2 * i + 1], 0.0, -2.0 * good[2 * i], bad, f32::INFINITY]
        })
        .collect()
}

#[test]
fn dead_columns_are_refilled_from_the_seed() {
    let refilled = |seed| {
        everywhere(|| {
            let mut p = half_dead(40);
            assert_eq!(orthonormalize(&mut p, 6, seed), Orthonormalized { nonfinite: 2, refilled: 4 });
            p
        })
    };
    let (one, two) = (refilled(1), refilled(2));
    assert_orthonormal(&one, 6);
    assert_orthonormal(&two, 6);
    for (row, (x, y)) in one.chunks(6).zip(two.chunks(6)).enumerate() {
        assert_eq!(x[..2], y[..2], "row {row}");
        assert_ne!(x[2..], y[2..], "row {row}");
    }
}

#[test]
fn columns_beyond_the_rows_become_zero() {
    let mut p = matrix(3 * 5, 1);
    assert_eq!(orthonormalize(&mut p, 5, 1), Orthonormalized { nonfinite: 0, refilled: 2 });
    let square: Vec<f32> = p.chunks(5).flat_map(|row| row[..3].to_vec()).collect();
    assert_orthonormal(&square, 3);
    assert!(p.chunks(5).all(|row| row[3..] == [0.0, 0.0]));
}

#[test]
fn refilled_columns_are_the_same_on_every_machine() {
    let mut p = [0.0; 6];
    orthonormalize(&mut p, 2, 42);
    // From the same recipe in plain Python.
    let python = [1057157636, 1047697926, 3208141393, 3201302210, 3203401510, 1063382210];
    assert_eq!(bits(&p), python);
}

#[test]
#[should_panic(expected = "2 x 3 of rank 1 with matrices of 5, 2 and 3 elements")]
fn sizes_must_fit() {
    times(Shape { rows: 2, columns: 3, rank: 1 }, &[0.0; 5], &[0.0; 3], &mut [0.0; 2]);
}
