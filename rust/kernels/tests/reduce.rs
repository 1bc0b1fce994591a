//! `combine` equals a scalar reference, for every type, mixture of types, length, alignment and level.

use half::{bf16, f16};
use mdas_kernels::{DType, Level, Operand, ReduceOp, combine, supported, with_level};
use proptest::prelude::*;

/// An element, wide enough to hold any type's exactly.
#[derive(Debug, Clone, Copy)]
enum Value {
    Float(f32),
    Double(f64),
    Int(i64),
}
use Value::{Double, Float, Int};

fn read(dtype: DType, bytes: &[u8]) -> Value {
    macro_rules! get {
        ($type:ty) => {
            <$type>::from_ne_bytes(bytes.try_into().unwrap())
        };
    }
    match dtype {
        DType::F32 => Float(get!(f32)),
        DType::F64 => Double(get!(f64)),
        DType::F16 => Float(get!(f16).to_f32()),
        DType::BF16 => Float(get!(bf16).to_f32()),
        DType::I32 => Int(get!(i32).into()),
        DType::I64 => Int(get!(i64)),
        DType::U8 | DType::Bool => Int(bytes[0].into()),
    }
}

fn write(dtype: DType, value: Value) -> Vec<u8> {
    match (dtype, value) {
        (DType::F32, Float(x)) => x.to_ne_bytes().to_vec(),
        (DType::F64, Double(x)) => x.to_ne_bytes().to_vec(),
        (DType::F16, Float(x)) => f16::from_f32(x).to_ne_bytes().to_vec(),
        (DType::BF16, Float(x)) => bf16::from_f32(x).to_ne_bytes().to_vec(),
        (DType::I32, Int(x)) => (x as i32).to_ne_bytes().to_vec(),
        (DType::I64, Int(x)) => x.to_ne_bytes().to_vec(),
        (DType::U8 | DType::Bool, Int(x)) => vec![x as u8],
        _ => panic!("{value:?} is no {dtype}"),
    }
}

/// IEEE 754-2019 minimum, by cases.
fn minimum(a: f64, b: f64) -> f64 {
    match (a, b) {
        _ if a.is_nan() || b.is_nan() => f64::NAN,
        _ if a == b => {
            if a.is_sign_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    }
}

fn apply(op: ReduceOp, a: Value, b: Value) -> Value {
    match (op, a, b) {
        (ReduceOp::Sum | ReduceOp::Average, Float(a), Float(b)) => Float(a + b),
        (ReduceOp::Sum | ReduceOp::Average, Double(a), Double(b)) => Double(a + b),
        (ReduceOp::Sum | ReduceOp::Average, Int(a), Int(b)) => Int(a.wrapping_add(b)),
        (ReduceOp::Product, Float(a), Float(b)) => Float(a * b),
        (ReduceOp::Product, Double(a), Double(b)) => Double(a * b),
        (ReduceOp::Product, Int(a), Int(b)) => Int(a.wrapping_mul(b)),
        (ReduceOp::Min, Float(a), Float(b)) => Float(minimum(a.into(), b.into()) as f32),
        (ReduceOp::Min, Double(a), Double(b)) => Double(minimum(a, b)),
        (ReduceOp::Min, Int(a), Int(b)) => Int(a.min(b)),
        (ReduceOp::Max, Float(a), Float(b)) => Float(-minimum(-f64::from(a), -f64::from(b)) as f32),
        (ReduceOp::Max, Double(a), Double(b)) => Double(-minimum(-a, -b)),
        (ReduceOp::Max, Int(a), Int(b)) => Int(a.max(b)),
        _ => panic!("{a:?} and {b:?} are of different types"),
    }
}

fn finish(value: Value, divide_by: Option<u64>) -> Value {
    match (value, divide_by) {
        (_, None) => value,
        (Float(x), Some(n)) => Float(x / n as f32),
        (Double(x), Some(n)) => Double(x / n as f64),
        (Int(_), Some(_)) => panic!("integers are not divided"),
    }
}

/// Are the elements the same, bit for bit, but for the payload of NaNs?
fn same(dtype: DType, a: &[u8], b: &[u8]) -> bool {
    let nan = |bytes| match read(dtype, bytes) {
        Float(x) => x.is_nan(),
        Double(x) => x.is_nan(),
        Int(_) => false,
    };
    a == b || (nan(a) && nan(b))
}

/// Which memory the result goes to.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Into {
    Fresh,
    First,
    Second,
}

#[derive(Debug, Clone)]
struct Case {
    op: ReduceOp,
    /// Types of the first and the second operand and of the result.
    types: [DType; 3],
    a: Vec<u8>,
    b: Option<Vec<u8>>,
    into: Into,
    divide_by: Option<u64>,
    /// Distance of the three from an aligned address, in bytes.
    offsets: [usize; 3],
}

fn elements(dtype: DType, n: usize) -> BoxedStrategy<Vec<u8>> {
    // Any bits, or one of few values, so that equal ones, zeros of both signs, infinities and NaNs meet.
    let special = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {
            [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65504.0, 6e-8]
                .map(|x| write(dtype, Float(x)))
                .to_vec()
        }
        DType::F64 => [0.0, -0.0, 1.0, f64::INFINITY, f64::NAN].map(|x| write(dtype, Double(x))).to_vec(),
        DType::Bool => [0, 1].map(|x| write(dtype, Int(x))).to_vec(),
        _ => [0, 1, -1, i64::MAX, i64::MIN, i32::MAX.into()].map(|x| write(dtype, Int(x))).to_vec(),
    };
    let any_bits = prop::collection::vec(any::<u8>(), dtype.size());
    let one = if dtype == DType::Bool {
        prop::sample::select(special).boxed()
    } else {
        prop_oneof![any_bits, prop::sample::select(special)].boxed()
    };
    prop::collection::vec(one, n).prop_map(|elements| elements.concat()).boxed()
}

fn cases() -> impl Strategy<Value = Case> {
    let ops = prop::sample::select(ReduceOp::ALL.to_vec());
    let dtypes = prop::sample::select(DType::ALL.to_vec());
    (ops, dtypes)
        .prop_filter("not defined", |&(op, dtype)| supported(op, dtype).is_ok())
        .prop_flat_map(|(op, dtype)| {
            let either = prop::sample::select(vec![dtype, dtype.accumulator(op)]);
            let n = prop_oneof![Just(0usize), Just(1), Just(16), Just(33), 0..120usize];
            let into = prop::sample::select(vec![Into::Fresh, Into::First, Into::Second]);
            let divide_by = if dtype.is_float() { prop::option::of(1..300u64).boxed() } else { Just(None).boxed() };
            (
                Just(op),
                [either.clone(), either.clone(), either],
                n,
                into,
                divide_by,
                any::<bool>(),
                [0..8usize, 0..8, 0..8],
            )
        })
        .prop_flat_map(|(op, mut types, n, into, divide_by, two, offsets)| {
            match into {
                Into::First => types[2] = types[0],
                Into::Second if two => types[2] = types[1],
                _ => {}
            }
            let into = if into == Into::Second && !two { Into::Fresh } else { into };
            let b = if two { elements(types[1], n).prop_map(Some).boxed() } else { Just(None).boxed() };
            (elements(types[0], n), b).prop_map(move |(a, b)| Case { op, types, a, b, into, divide_by, offsets })
        })
}

fn expected(case: &Case) -> Vec<u8> {
    let [a_type, b_type, dst_type] = case.types;
    let mut out = Vec::new();
    for (i, a) in case.a.chunks(a_type.size()).enumerate() {
        let mut value = read(a_type, a);
        if let Some(b) = &case.b {
            value = apply(case.op, value, read(b_type, &b[i * b_type.size()..][..b_type.size()]));
        }
        out.extend(write(dst_type, finish(value, case.divide_by)));
    }
    out
}

fn actual(case: &Case) -> Vec<u8> {
    let [a_type, b_type, dst_type] = case.types;
    let shifted = |bytes: &[u8], offset: usize| [&vec![0xee; offset], bytes].concat();
    let n = case.a.len() / a_type.size();
    let mut a = shifted(&case.a, case.offsets[0]);
    let mut b = shifted(case.b.as_deref().unwrap_or(&[]), case.offsets[1]);
    let mut fresh = shifted(&vec![0xdd; n * dst_type.size()], case.offsets[2]);
    let (a_ptr, b_ptr) = (a[case.offsets[0]..].as_mut_ptr(), b[case.offsets[1]..].as_mut_ptr());
    let dst = match case.into {
        Into::Fresh => fresh[case.offsets[2]..].as_mut_ptr(),
        Into::First => a_ptr,
        Into::Second => b_ptr,
    };
    let second = case.b.as_ref().map(|_| Operand { ptr: b_ptr, dtype: b_type });
    // SAFETY: each vector holds `n` elements of its type, and `dst` is one of them.
    unsafe { combine(case.op, dst, dst_type, Operand { ptr: a_ptr, dtype: a_type }, second, n, case.divide_by) };
    match case.into {
        Into::Fresh => fresh[case.offsets[2]..].to_vec(),
        Into::First => a[case.offsets[0]..].to_vec(),
        Into::Second => b[case.offsets[1]..].to_vec(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn equals_the_scalar_reference(case in cases()) {
        let want = expected(&case);
        let size = case.types[2].size();
        for level in Level::available() {
            let got = with_level(level, || actual(&case));
            prop_assert_eq!(got.len(), want.len());
            for (i, (got, want)) in got.chunks(size).zip(want.chunks(size)).enumerate() {
                prop_assert!(same(case.types[2], got, want), "element {}: {:?}, not {:?}, at {}", i, got, want, level.name());
            }
        }
    }
}

#[test]
fn a_sum_of_16_bits_rounds_once() {
    // 2049 is no float16, and 2048 + 1 would round back to 2048 twice.
    let (parts, mut sum, mut out) = ([1.0f32], [2049.0f32], [0u16]);
    let operand = |x: &[f32]| Operand { ptr: x.as_ptr().cast(), dtype: DType::F32 };
    // SAFETY: one element each.
    unsafe {
        let dst = sum.as_mut_ptr().cast();
        combine(
            ReduceOp::Sum,
            dst,
            DType::F32,
            Operand { ptr: dst, dtype: DType::F32 },
            Some(operand(&parts)),
            1,
            None,
        );
        combine(ReduceOp::Sum, out.as_mut_ptr().cast(), DType::F16, operand(&sum), None, 1, Some(2));
    }
    assert_eq!((sum, f16::from_bits(out[0])), ([2050.0], f16::from_f32(1025.0)));
}

#[test]
#[should_panic(expected = "only floating-point types can be divided")]
fn integers_are_not_divided() {
    let mut x = [4i32];
    let ptr = x.as_mut_ptr().cast();
    // SAFETY: one element, in place.
    unsafe { combine(ReduceOp::Sum, ptr, DType::I32, Operand { ptr, dtype: DType::I32 }, None, 1, Some(2)) };
}

#[test]
#[should_panic(expected = "not one element type and its accumulator")]
fn types_must_go_together() {
    let mut x = [4i32];
    let ptr = x.as_mut_ptr().cast();
    // SAFETY: one element, in place.
    unsafe { combine(ReduceOp::Sum, ptr, DType::I32, Operand { ptr, dtype: DType::F32 }, None, 1, None) };
}
