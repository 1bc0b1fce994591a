//! float16 and bfloat16 to float32 and back, rounding to nearest even.

use crate::lanes::map;

/// IEEE 754 binary16, by its bits.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct F16(pub u16);

/// bfloat16, by its bits.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct Bf16(pub u16);

/// What a level has instructions for that LLVM does not find by itself.
pub(crate) trait Arch {
    fn widen<const N: usize>(x: [F16; N]) -> [f32; N];
    fn narrow<const N: usize>(x: [f32; N]) -> [F16; N];
}

/// Plain integer arithmetic.
pub(crate) struct Portable;

impl Arch for Portable {
    #[inline(always)]
    fn widen<const N: usize>(x: [F16; N]) -> [f32; N] {
        map(x, f16_to_f32)
    }
    #[inline(always)]
    fn narrow<const N: usize>(x: [f32; N]) -> [F16; N] {
        map(x, f32_to_f16)
    }
}

/// The conversion instructions. Only to be used by wrappers that enable F16C.
#[cfg(target_arch = "x86_64")]
pub(crate) struct F16c;

#[cfg(target_arch = "x86_64")]
impl Arch for F16c {
    #[inline(always)]
    fn widen<const N: usize>(x: [F16; N]) -> [f32; N] {
        use std::arch::x86_64::*;
        let mut out = [0.0; N];
        let whole = N - N % 8;
        for at in (0..whole).step_by(8) {
            // SAFETY: `at + 8 <= N` bounds both unaligned accesses; only `dispatch::avx2` and
            // `avx512` name `F16c`, and they run on CPUs that have the instruction.
            unsafe {
                let bits = _mm_loadu_si128(x.as_ptr().add(at).cast());
                _mm256_storeu_ps(out.as_mut_ptr().add(at), _mm256_cvtph_ps(bits));
            }
        }
        for i in whole..N {
            out[i] = f16_to_f32(x[i]);
        }
        out
    }
    #[inline(always)]
    fn narrow<const N: usize>(x: [f32; N]) -> [F16; N] {
        use std::arch::x86_64::*;
        let mut out = [F16(0); N];
        let whole = N - N % 8;
        for at in (0..whole).step_by(8) {
            // SAFETY: as in `widen`.
            unsafe {
                let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x.as_ptr().add(at)));
                _mm_storeu_si128(out.as_mut_ptr().add(at).cast(), bits);
            }
        }
        for i in whole..N {
            out[i] = f32_to_f16(x[i]);
        }
        out
    }
}

/// Without branches, so that it vectorizes. Method: Fabian Giesen, "Half to float done quic".
#[inline(always)]
pub(crate) fn f16_to_f32(x: F16) -> f32 {
    let sign = u32::from(x.0 & 0x8000) << 16;
    let magnitude = u32::from(x.0 & 0x7fff);
    // Exponent and mantissa in place; the product moves the exponent's bias from 15 to 127 and
    // normalizes subnormals on the way. It is exact.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let quiet = if magnitude > 0x7c00 { 0x0040_0000 } else { 0 };
    let special = (magnitude << 13) | 0x7f80_0000 | quiet;
    f32::from_bits(sign | if magnitude >= 0x7c00 { special } else { finite })
}

/// Without branches, so that it vectorizes. Method: Fabian Giesen, "Float to half, round to nearest even".
#[inline(always)]
pub(crate) fn f32_to_f16(x: f32) -> F16 {
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Adding 0.5 puts the last bit of a float16 subnormal at the end of the float32 mantissa: the
    // addition itself rounds, to nearest even.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let small = if magnitude < (113 << 23) { subnormal } else { normal };
    // From 65520 = 2^16 - 16 on, the nearest float16 is infinity.
    let finite = if magnitude >= 0x477f_f000 { 0x7c00 } else { small };
    F16((sign | if magnitude > 0x7f80_0000 { nan } else { finite }) as u16)
}

#[inline(always)]
pub(crate) fn bf16_to_f32(x: Bf16) -> f32 {
    f32::from_bits(u32::from(x.0) << 16)
}

#[inline(always)]
pub(crate) fn f32_to_bf16(x: f32) -> Bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    let nan = bits & 0x7fff_ffff > 0x7f80_0000;
    Bf16(if nan { quiet } else { rounded } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_as_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            let ours = f16_to_f32(F16(bits));
            assert_eq!(ours.to_bits(), half::f16::from_bits(bits).to_f32().to_bits(), "{bits:#06x}");
            assert_eq!(
                bf16_to_f32(Bf16(bits)).to_bits() & !0x40_0000,
                half::bf16::from_bits(bits).to_f32().to_bits() & !0x40_0000
            );
        }
    }

    #[test]
    fn f32_narrows_as_the_half_crate_says() {
        // Every exponent and sign, mantissas around all ties, and a walk over everything else.
        let edges = (0..512u32).flat_map(|top| {
            (0..1024u32).flat_map(move |middle| {
                [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff].map(|low| (top << 23) | (middle << 13) | low)
            })
        });
        let walk = (0..u32::MAX).step_by(65_521);
        for bits in edges.chain(walk) {
            let x = f32::from_bits(bits);
            assert_eq!(f32_to_f16(x).0, half::f16::from_f32(x).to_bits(), "{bits:#010x}");
            assert_eq!(f32_to_bf16(x).0, half::bf16::from_f32(x).to_bits(), "{bits:#010x}");
        }
    }
}
