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
