//! Norms, distances, inner products: in float64, the same bits on every CPU.

use mdas_kernels::stats;
use pyo3::prelude::*;

use super::{Area, check, detached};

/// Copies `count` elements from `source` to `target`; returns their squared norm.
#[pyfunction]
pub(crate) fn copy_sqnorm(py: Python<'_>, target: usize, source: usize, count: usize) -> PyResult<f64> {
    let (target, source) = (Area::new("target", target, count), Area::new("source", source, count));
    detached(py, || {
        check(&[target], &[source])?;
        // SAFETY: checked; who calls promises the rest.
        let (target, source) = unsafe { (target.write(), source.read()) };
        Ok(stats::copy_sqnorm(target, source))
    })
}

/// Squared norm of `count` elements.
#[pyfunction]
pub(crate) fn sqnorm(py: Python<'_>, a: usize, count: usize) -> PyResult<f64> {
    let a = Area::new("a", a, count);
    detached(py, || {
        check(&[], &[a])?;
        // SAFETY: checked; who calls promises the rest.
        Ok(stats::sqnorm(unsafe { a.read() }))
    })
}

/// Squared distance between two vectors of `count` elements.
#[pyfunction]
pub(crate) fn sqdist(py: Python<'_>, a: usize, b: usize, count: usize) -> PyResult<f64> {
    of_two(py, a, b, count, stats::sqdist)
}

/// Inner product of two vectors of `count` elements.
#[pyfunction]
pub(crate) fn dot(py: Python<'_>, a: usize, b: usize, count: usize) -> PyResult<f64> {
    of_two(py, a, b, count, stats::dot)
}

fn of_two(py: Python<'_>, a: usize, b: usize, count: usize, kernel: fn(&[f32], &[f32]) -> f64) -> PyResult<f64> {
    let (a, b) = (Area::new("a", a, count), Area::new("b", b, count));
    detached(py, || {
        check(&[], &[a, b])?;
        // SAFETY: checked; who calls promises the rest.
        let (a, b) = unsafe { (a.read(), b.read()) };
        Ok(kernel(a, b))
    })
}
