//! Blocks: arrays of a fixed number of lanes that LLVM keeps in vector registers.

/// Lanes of a block. 16 floats fill one AVX-512 register, two of AVX2, four of SSE2.
pub(crate) const LANES: usize = 16;

/// `f` in every lane.
#[inline(always)]
pub(crate) fn map<T: Copy, U: Copy + Default, const N: usize>(a: [T; N], f: impl Fn(T) -> U) -> [U; N] {
    let mut out = [U::default(); N];
    for i in 0..N {
        out[i] = f(a[i]);
    }
    out
}

/// `f` in every lane of two blocks.
#[inline(always)]
pub(crate) fn zip<T: Copy, V: Copy, U: Copy + Default, const N: usize>(
    a: [T; N],
    b: [V; N],
    f: impl Fn(T, V) -> U,
) -> [U; N] {
    let mut out = [U::default(); N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// The block from `at` on.
#[inline(always)]
pub(crate) fn load<const N: usize>(from: &[f32], at: usize) -> [f32; N] {
    let block = &from[at..at + N];
    let mut out = [0.0; N];
    out.copy_from_slice(block);
    out
}

/// Writes the block from `at` on.
#[inline(always)]
pub(crate) fn store<const N: usize>(to: &mut [f32], at: usize, block: [f32; N]) {
    to[at..at + N].copy_from_slice(&block);
}
