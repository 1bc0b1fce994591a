//! Blocks: arrays of a fixed number of lanes that LLVM keeps in vector registers.

/// Lanes of a block. 16 floats fill one AVX-512 register, two of AVX2, four of SSE2.
pub(crate) const LANES: usize = 16;

/// Runs `body` for every block of `len` elements: with plain loads and stores for the whole ones, then
/// once more, if need be, with [`load_padded`] and [`store_cut`]. The body is written out twice, since a branch
/// in the loop keeps LLVM from vectorizing it, and a closure need not be inlined.
macro_rules! blocks {
    ($len:expr, |$at:ident, $load:ident, $store:ident| $body:block) => {{
        let len: usize = $len;
        let whole = len - len % $crate::lanes::LANES;
        {
            #[allow(unused_imports)]
            use $crate::lanes::{load as $load, store as $store};
            for $at in (0..whole).step_by($crate::lanes::LANES) $body
        }
        if whole < len {
            #[allow(unused_imports)]
            use $crate::lanes::{load_padded as $load, store_cut as $store};
            let $at = whole;
            $body
        }
    }};
}
pub(crate) use blocks;

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
pub(crate) fn load<T: Copy + Default, const N: usize>(from: &[T], at: usize) -> [T; N] {
    let mut out = [T::default(); N];
    out.copy_from_slice(&from[at..at + N]);
    out
}

/// The last block, with zeros past the end.
#[inline(always)]
pub(crate) fn load_padded<T: Copy + Default, const N: usize>(from: &[T], at: usize) -> [T; N] {
    let mut out = [T::default(); N];
    let rest = &from[at..];
    out[..rest.len()].copy_from_slice(rest);
    out
}

/// Writes the block from `at` on.
#[inline(always)]
pub(crate) fn store<T: Copy, const N: usize>(to: &mut [T], at: usize, block: [T; N]) {
    to[at..at + N].copy_from_slice(&block);
}

/// Writes the last block, as much of it as fits before the end.
#[inline(always)]
pub(crate) fn store_cut<T: Copy, const N: usize>(to: &mut [T], at: usize, block: [T; N]) {
    let rest = &mut to[at..];
    rest.copy_from_slice(&block[..rest.len()]);
}

/// The sum of all lanes, always in the same order: halves onto each other.
#[inline(always)]
pub(crate) fn total<T: Copy + std::ops::AddAssign>(mut lanes: [T; LANES]) -> T {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            let upper = lanes[i + width];
            lanes[i] += upper;
        }
    }
    lanes[0]
}
