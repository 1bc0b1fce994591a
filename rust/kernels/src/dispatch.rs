//! The choice among a kernel's compilations.

use crate::convert::{Arch, Portable};
use std::cell::Cell;
use std::sync::OnceLock;

/// What the kernels are compiled for. Ordered: a CPU that has one has all before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Level {
    /// What every CPU of the target architecture has (x86-64: SSE2; aarch64: NEON).
    Baseline,
    /// x86-64 with AVX2 and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL as well.
    Avx512,
}

impl Level {
    /// The best level of this CPU.
    pub fn best() -> Level {
        static BEST: OnceLock<Level> = OnceLock::new();
        *BEST.get_or_init(detect)
    }

    /// All levels of this CPU, the lowest first.
    pub fn available() -> impl Iterator<Item = Level> {
        [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(|&level| level <= Level::best())
    }

    /// "baseline", "avx2" or "avx512".
    pub fn name(self) -> &'static str {
        match self {
            Level::Baseline => "baseline",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Level::Avx512,
        (true, false) => Level::Avx2,
        (false, _) => Level::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Baseline
}

thread_local! {
    static FORCED: Cell<Option<Level>> = const { Cell::new(None) };
}

/// Runs `body` with this thread's kernels at `level`: for tests and for measurements.
///
/// # Panics
/// If the CPU does not have `level` (see [`Level::available`]).
pub fn with_level<T>(level: Level, body: impl FnOnce() -> T) -> T {
    struct Restore(Option<Level>);
    impl Drop for Restore {
        fn drop(&mut self) {
            FORCED.set(self.0);
        }
    }
    assert!(level <= Level::best(), "this CPU has no {} (its best level is {})", level.name(), Level::best().name());
    let _restore = Restore(FORCED.replace(Some(level)));
    body()
}

/// A body that is compiled once per level.
pub(crate) trait Kernel {
    type Output;
    /// To be `#[inline(always)]`, with all that it calls in its inner loops: code that is not
    /// inlined into the wrapper is compiled for the baseline.
    fn run<A: Arch>(self) -> Self::Output;
}

/// Runs the compilation of `kernel` that fits this CPU.
pub(crate) fn dispatch<K: Kernel>(kernel: K) -> K::Output {
    match FORCED.get().unwrap_or_else(Level::best) {
        Level::Baseline => kernel.run::<Portable>(),
        // SAFETY: a level other than the baseline is either `Level::best()` or was checked against
        // it by `with_level`, so the CPU has the features that the wrapper is compiled with.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => unsafe { avx512(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        Level::Avx2 | Level::Avx512 => unreachable!("levels of x86-64 only"),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn avx2<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<crate::convert::F16c>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<crate::convert::F16c>()
}
