//! Element types and reduction operations, and which go together.

use std::fmt;

macro_rules! named {
    ($(#[$meta:meta])* $type:ident { $($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u8)]
        pub enum $type { $($(#[$doc])* $variant = $code,)* }

        impl $type {
            /// All of them, in the order of their codes.
            pub const ALL: &[$type] = &[$($type::$variant,)*];

            /// The name that users see.
            pub fn name(self) -> &'static str {
                match self { $($type::$variant => $name,)* }
            }

            /// The one of this name.
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|x| x.name() == name)
            }

            /// The one of this code (`as u8`), as it travels in messages.
            pub fn from_code(code: u8) -> Option<Self> {
                Self::ALL.iter().copied().find(|&x| x as u8 == code)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named! {
    /// Type of an element.
    DType {
        /// IEEE 754 binary32.
        F32 = 0, "float32";
        /// IEEE 754 binary64.
        F64 = 1, "float64";
        /// IEEE 754 binary16.
        F16 = 2, "float16";
        /// The upper half of a binary32.
        BF16 = 3, "bfloat16";
        /// Signed, 32 bits.
        I32 = 4, "int32";
        /// Signed, 64 bits.
        I64 = 5, "int64";
        /// Unsigned, 8 bits.
        U8 = 6, "uint8";
        /// One byte: 0 is false, anything else true.
        Bool = 7, "bool";
    }
}

named! {
    /// What a reduction does with two elements.
    ReduceOp {
        /// a + b; integers wrap.
        Sum = 0, "sum";
        /// a + b, in the end divided by the number of ranks; floats only.
        Average = 1, "average";
        /// The lesser: NaN propagates, -0 < +0; bool: logical and.
        Min = 2, "min";
        /// The greater: NaN propagates, -0 < +0; bool: logical or.
        Max = 3, "max";
        /// a * b; integers wrap.
        Product = 4, "product";
    }
}

impl DType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            DType::U8 | DType::Bool => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Is it a floating-point type?
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    /// The type that partial results of `op` have: float32 for sums, averages and products of
    /// 16-bit floats, which are so rounded once, at the end; else the type itself.
    pub fn accumulator(self, op: ReduceOp) -> DType {
        match (self, op) {
            (DType::F16 | DType::BF16, ReduceOp::Sum | ReduceOp::Average | ReduceOp::Product) => DType::F32,
            _ => self,
        }
    }
}

/// A reduction that has no meaning for a type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{op} is not defined for {dtype}: {advice}")]
pub struct Unsupported {
    /// The operation asked for.
    pub op: ReduceOp,
    /// The elements' type.
    pub dtype: DType,
    /// What to do instead.
    pub advice: &'static str,
}

/// Can elements of `dtype` be reduced with `op`?
pub fn supported(op: ReduceOp, dtype: DType) -> Result<(), Unsupported> {
    let advice = match (op, dtype) {
        (ReduceOp::Min | ReduceOp::Max, _) => return Ok(()),
        (_, DType::Bool) => "use \"max\" for a logical or, \"min\" for a logical and, or convert to int64 to count",
        (ReduceOp::Average, _) if !dtype.is_float() => {
            "use \"sum\" and divide with the rounding that you want, or convert to a floating-point type"
        }
        _ => return Ok(()),
    };
    Err(Unsupported { op, dtype, advice })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_lead_back() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype as u8), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        }
        for &op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op as u8), Some(op));
            assert_eq!(ReduceOp::from_name(op.name()), Some(op));
        }
        assert_eq!((DType::from_code(8), ReduceOp::from_code(5)), (None, None));
        assert_eq!((DType::from_name("float"), ReduceOp::from_name("mean")), (None, None));
    }

    #[test]
    fn sixteen_bits_accumulate_in_float32_unless_the_result_is_one_of_the_operands() {
        assert_eq!(DType::F16.accumulator(ReduceOp::Sum), DType::F32);
        assert_eq!(DType::BF16.accumulator(ReduceOp::Product), DType::F32);
        assert_eq!(DType::BF16.accumulator(ReduceOp::Average), DType::F32);
        assert_eq!(DType::F16.accumulator(ReduceOp::Max), DType::F16);
        assert_eq!(DType::I32.accumulator(ReduceOp::Sum), DType::I32);
    }

    #[test]
    fn what_is_refused_says_what_to_do() {
        let refused: Vec<_> = ReduceOp::ALL
            .iter()
            .flat_map(|&op| {
                DType::ALL.iter().filter(move |&&dtype| supported(op, dtype).is_err()).map(move |&dtype| (op, dtype))
            })
            .collect();
        use {DType::*, ReduceOp::*};
        assert_eq!(
            refused,
            [(Sum, Bool), (Average, I32), (Average, I64), (Average, U8), (Average, Bool), (Product, Bool)]
        );
        assert_eq!(
            supported(Sum, Bool).unwrap_err().to_string(),
            "sum is not defined for bool: use \"max\" for a logical or, \"min\" for a logical and, or convert to int64 to count"
        );
    }
}
