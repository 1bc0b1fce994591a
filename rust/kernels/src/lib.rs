//! Vector math of mdas: reductions, the fused optimizer step, norms and sketches. No I/O.
//!
//! # One body, several wrappers
//!
//! Every kernel is written once, in portable Rust, over blocks of a fixed number of lanes
//! (arrays on the stack), as an implementation of `dispatch::Kernel`. The body is inlined into one function per
//! [`Level`] of the CPU, each compiled with other `#[target_feature]`s, so that LLVM turns the
//! same blocks into SSE2, AVX2 or AVX-512 instructions; the best one that the CPU has is chosen
//! at run time. The wheel therefore needs no particular CPU. Only the conversion between float16
//! and float32 is spelled out per level (there is an instruction for it, and LLVM does not find it).
//!
//! # The same bits everywhere
//!
//! Ranks may run on different CPUs and must still end with equal weights, so a kernel gives the
//! same bits at every level, which the tests hold it to:
//!
//! - no fused multiply-add: it rounds once where multiplication and addition round twice, and not
//!   every CPU has it (rustc never fuses by itself);
//! - sums go into a fixed number of lanes, whatever the width of the registers, and the lanes are
//!   added up in a fixed order;
//! - only operations that IEEE 754 rounds correctly: `+ - * /` and the square root.
//!
//! The one thing left open is the payload of a NaN (which operand's wins is up to the compiler).

mod convert;
pub mod dispatch;
pub mod dtype;
mod lanes;
pub mod optimize;
pub mod reduce;
pub mod rules;
pub mod sketch;
pub mod stats;

pub use dispatch::{Level, with_level};
pub use dtype::{DType, ReduceOp, Unsupported, supported};
pub use reduce::{Operand, combine};
