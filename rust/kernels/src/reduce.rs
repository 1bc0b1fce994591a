//! Elementwise reduction of two vectors, with conversion between element and accumulator.

use crate::convert::{Arch, Bf16, F16, bf16_to_f32, f32_to_bf16};
use crate::dispatch::{Kernel, dispatch};
use crate::dtype::{DType, ReduceOp};
use crate::lanes::{LANES, map, zip};
use std::marker::PhantomData;

/// Elements to read, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// The first one.
    pub ptr: *const u8,
    /// Their type.
    pub dtype: DType,
}

/// `dst[i] = finish(a[i] op b[i])`, or `dst[i] = finish(a[i])` without `b`, for `i < n`.
///
/// `a`, `b` and `dst` are each of one element type or of its accumulator type
/// ([`DType::accumulator`]), in any mixture; the arithmetic is done in the accumulator type and
/// rounded once. `finish` divides by `divide_by`, if given, before the rounding. Integers wrap. The
/// lesser and the greater are those of IEEE 754-2019 `minimum` and `maximum`: NaN propagates, -0 < +0.
/// Pointers need no alignment.
///
/// # Panics
/// If the types do not go together, or if integers are to be divided.
///
/// # Safety
/// `a` and `b` are valid for reads and `dst` for writes of `n` elements of their types, and nobody
/// else writes to them or reads `dst` meanwhile. `dst` may be exactly `a` or exactly `b`, if it has
/// the same type; otherwise it overlaps neither.
pub unsafe fn combine(
    op: ReduceOp,
    dst: *mut u8,
    dst_dtype: DType,
    a: Operand,
    b: Option<Operand>,
    n: usize,
    divide_by: Option<u64>,
) {
    let types = [a.dtype, b.map_or(a.dtype, |b| b.dtype), dst_dtype];
    assert!(
        divide_by.is_none() || dst_dtype.is_float(),
        "{op} of {dst_dtype}: only floating-point types can be divided"
    );
    if b.is_none() && divide_by.is_none() && a.dtype == dst_dtype {
        // SAFETY: the caller vouches for `n` elements at both; `copy` allows them to be the same.
        unsafe { std::ptr::copy(a.ptr, dst, n * dst_dtype.size()) };
        return;
    }
    let call = Call { op, dst, a: a.ptr, b: b.map(|b| b.ptr), n, divide_by };
    macro_rules! run {
        ($($a:ident $b:ident $dst:ident: $($types:ty),*;)*) => {
            match types {
                // SAFETY: the pointers are to elements of these very types; the caller vouches for the rest.
                $([DType::$a, DType::$b, DType::$dst] => unsafe { call.run::<$($types),*>() },)*
                [a, b, dst] => panic!("{op} of {a} and {b} into {dst}: not one element type and its accumulator"),
            }
        };
    }
    run! {
        F32 F32 F32: f32, f32, f32;
        F64 F64 F64: f64, f64, f64;
        I32 I32 I32: i32, i32, i32;
        I64 I64 I64: i64, i64, i64;
        U8 U8 U8: u8, u8, u8;
        // On bytes that are 0 or not, the lesser is "and", the greater "or".
        Bool Bool Bool: u8, u8, u8;
        F16 F16 F16: F16, F16, F16;
        F16 F16 F32: F16, F16, f32;
        F16 F32 F16: F16, f32, F16;
        F16 F32 F32: F16, f32, f32;
        F32 F16 F16: f32, F16, F16;
        F32 F16 F32: f32, F16, f32;
        F32 F32 F16: f32, f32, F16;
        BF16 BF16 BF16: Bf16, Bf16, Bf16;
        BF16 BF16 F32: Bf16, Bf16, f32;
        BF16 F32 BF16: Bf16, f32, Bf16;
        BF16 F32 F32: Bf16, f32, f32;
        F32 BF16 BF16: f32, Bf16, Bf16;
        F32 BF16 F32: f32, Bf16, f32;
        F32 F32 BF16: f32, f32, Bf16;
    }
}

/// The arguments of [`combine`] before their types are known to the compiler.
struct Call {
    op: ReduceOp,
    dst: *mut u8,
    a: *const u8,
    b: Option<*const u8>,
    n: usize,
    divide_by: Option<u64>,
}

impl Call {
    /// # Safety
    /// As [`combine`], with the pointers of these types.
    unsafe fn run<A: Element, B: Element<Wide = A::Wide>, D: Element<Wide = A::Wide>>(self) {
        match self.op {
            // SAFETY: passed on from the caller.
            ReduceOp::Sum | ReduceOp::Average => unsafe { self.with::<Sum, A, B, D>() },
            // SAFETY: passed on from the caller.
            ReduceOp::Product => unsafe { self.with::<Product, A, B, D>() },
            // SAFETY: passed on from the caller.
            ReduceOp::Min => unsafe { self.with::<Min, A, B, D>() },
            // SAFETY: passed on from the caller.
            ReduceOp::Max => unsafe { self.with::<Max, A, B, D>() },
        }
    }

    /// # Safety
    /// As [`combine`], with the pointers of these types.
    unsafe fn with<O: Op, A: Element, B: Element<Wide = A::Wide>, D: Element<Wide = A::Wide>>(self) {
        dispatch(Combine {
            op: PhantomData::<O>,
            dst: self.dst.cast::<D>(),
            a: self.a.cast::<A>(),
            b: self.b.map(|b| b.cast::<B>()),
            n: self.n,
            divisor: self.divide_by.map(A::Wide::from_count),
        });
    }
}

struct Combine<O, A: Element, B, D> {
    op: PhantomData<O>,
    dst: *mut D,
    a: *const A,
    b: Option<*const B>,
    n: usize,
    divisor: Option<A::Wide>,
}

impl<O: Op, A: Element, B: Element<Wide = A::Wide>, D: Element<Wide = A::Wide>> Combine<O, A, B, D> {
    /// `N` elements from `at`. All are read before any is written: `dst` may be `a` or `b`.
    #[inline(always)]
    fn block<X: Arch, const N: usize>(&self, at: usize) {
        // SAFETY: `at + N <= n`, and whoever called `combine` vouches for `n` elements.
        let a = A::widen::<X, N>(unsafe { self.a.add(at).cast::<[A; N]>().read_unaligned() });
        let mut value = a;
        if let Some(b) = self.b {
            // SAFETY: as above.
            let b = B::widen::<X, N>(unsafe { b.add(at).cast::<[B; N]>().read_unaligned() });
            value = zip(a, b, O::apply);
        }
        if let Some(divisor) = self.divisor {
            value = map(value, |x| x.divide(divisor));
        }
        // SAFETY: as above.
        unsafe { self.dst.add(at).cast::<[D; N]>().write_unaligned(D::narrow::<X, N>(value)) };
    }
}

impl<O: Op, A: Element, B: Element<Wide = A::Wide>, D: Element<Wide = A::Wide>> Kernel for Combine<O, A, B, D> {
    type Output = ();
    #[inline(always)]
    fn run<X: Arch>(self) {
        let whole = self.n - self.n % LANES;
        for at in (0..whole).step_by(LANES) {
            self.block::<X, LANES>(at);
        }
        for at in whole..self.n {
            self.block::<X, 1>(at);
        }
    }
}

/// What is in memory.
trait Element: Copy + Default {
    /// What one calculates with.
    type Wide: Number;
    fn widen<X: Arch, const N: usize>(x: [Self; N]) -> [Self::Wide; N];
    fn narrow<X: Arch, const N: usize>(x: [Self::Wide; N]) -> [Self; N];
}

impl Element for F16 {
    type Wide = f32;
    #[inline(always)]
    fn widen<X: Arch, const N: usize>(x: [F16; N]) -> [f32; N] {
        X::widen(x)
    }
    #[inline(always)]
    fn narrow<X: Arch, const N: usize>(x: [f32; N]) -> [F16; N] {
        X::narrow(x)
    }
}

impl Element for Bf16 {
    type Wide = f32;
    #[inline(always)]
    fn widen<X: Arch, const N: usize>(x: [Bf16; N]) -> [f32; N] {
        map(x, bf16_to_f32)
    }
    #[inline(always)]
    fn narrow<X: Arch, const N: usize>(x: [f32; N]) -> [Bf16; N] {
        map(x, f32_to_bf16)
    }
}

impl<T: Number> Element for T {
    type Wide = T;
    #[inline(always)]
    fn widen<X: Arch, const N: usize>(x: [T; N]) -> [T; N] {
        x
    }
    #[inline(always)]
    fn narrow<X: Arch, const N: usize>(x: [T; N]) -> [T; N] {
        x
    }
}

trait Number: Copy + Default {
    fn from_count(n: u64) -> Self;
    fn add(self, other: Self) -> Self;
    fn multiply(self, other: Self) -> Self;
    fn divide(self, by: Self) -> Self;
    fn lesser(self, other: Self) -> Self;
    fn greater(self, other: Self) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn from_count(n: u64) -> Self {
                n as $type
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn divide(self, _: Self) -> Self {
                unreachable!("combine refuses to divide integers")
            }
            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                self.max(other)
            }
        }
    )*};
}
integers!(i32, i64, u8);

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            #[inline(always)]
            fn from_count(n: u64) -> Self {
                n as $type
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn divide(self, by: Self) -> Self {
                self / by
            }
            // `f32::min` ignores NaN. Selects instead of branches, so that it vectorizes; values
            // that compare equal differ at most in the sign of a zero, which "or" makes negative.
            #[inline(always)]
            fn lesser(self, other: Self) -> Self {
                let strict = if self < other { self } else { other };
                let equal = <$type>::from_bits(self.to_bits() | other.to_bits());
                let ordered = if self == other { equal } else { strict };
                if self.is_nan() | other.is_nan() { self + other } else { ordered }
            }
            #[inline(always)]
            fn greater(self, other: Self) -> Self {
                let strict = if self > other { self } else { other };
                let equal = <$type>::from_bits(self.to_bits() & other.to_bits());
                let ordered = if self == other { equal } else { strict };
                if self.is_nan() | other.is_nan() { self + other } else { ordered }
            }
        }
    )*};
}
floats!(f32, f64);

trait Op {
    fn apply<T: Number>(a: T, b: T) -> T;
}

macro_rules! ops {
    ($($op:ident: $method:ident),*) => {$(
        struct $op;
        impl Op for $op {
            #[inline(always)]
            fn apply<T: Number>(a: T, b: T) -> T {
                a.$method(b)
            }
        }
    )*};
}
ops!(Sum: add, Product: multiply, Min: lesser, Max: greater);
