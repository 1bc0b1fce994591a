//! Low-rank sketches. Matrices are dense and row by row: `d` is rows x columns, `p` rows x rank, `r` columns x rank.

use mdas_kernels::sketch::{self, Shape};
use pyo3::prelude::*;

use super::{Area, Refused, check, detached};

/// Areas of `d` (or what has its shape), `p` and `r`.
fn areas(shape: Shape, d: usize, p: usize, r: usize) -> Result<[Area; 3], Refused> {
    let Shape { rows, columns, rank } = shape;
    let area = |name, address, (a, b): (usize, usize)| {
        let count = a.checked_mul(b).ok_or_else(|| format!("{name} of {a} x {b} elements is too large"))?;
        Ok::<_, Refused>(Area::new(name, address, count))
    };
    Ok([area("d", d, (rows, columns))?, area("p", p, (rows, rank))?, area("r", r, (columns, rank))?])
}

/// p = d r.
#[pyfunction]
pub(crate) fn times(
    py: Python<'_>,
    rows: usize,
    columns: usize,
    rank: usize,
    d: usize,
    r: usize,
    p: usize,
) -> PyResult<()> {
    let shape = Shape { rows, columns, rank };
    detached(py, || {
        let [d, p, r] = areas(shape, d, p, r)?;
        check(&[p], &[d, r])?;
        // SAFETY: checked; who calls promises the rest.
        let (d, r, p) = unsafe { (d.read(), r.read(), p.write()) };
        sketch::times(shape, d, r, p);
        Ok(())
    })
}

/// r = transposed d p.
#[pyfunction]
pub(crate) fn transposed_times(
    py: Python<'_>,
    rows: usize,
    columns: usize,
    rank: usize,
    d: usize,
    p: usize,
    r: usize,
) -> PyResult<()> {
    let shape = Shape { rows, columns, rank };
    detached(py, || {
        let [d, p, r] = areas(shape, d, p, r)?;
        check(&[r], &[d, p])?;
        // SAFETY: checked; who calls promises the rest.
        let (d, p, r) = unsafe { (d.read(), p.read(), r.write()) };
        sketch::transposed_times(shape, d, p, r);
        Ok(())
    })
}

/// c = h + p transposed r, where `c` and `h` are rows x columns.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "three sizes and four matrices")]
pub(crate) fn expand(
    py: Python<'_>,
    rows: usize,
    columns: usize,
    rank: usize,
    h: usize,
    p: usize,
    r: usize,
    c: usize,
) -> PyResult<()> {
    let shape = Shape { rows, columns, rank };
    detached(py, || {
        let [h, p, r] = areas(shape, h, p, r)?;
        let c = Area::new("c", c, h.count);
        check(&[c], &[h, p, r])?;
        // SAFETY: checked; who calls promises the rest.
        let (h, p, r, c) = unsafe { (h.read(), p.read(), r.read(), c.write()) };
        sketch::expand(shape, h, p, r, c);
        Ok(())
    })
}

/// Makes the columns of `p` (rows x rank) orthonormal, in place. Dead columns are refilled from `seed`.
/// Returns how many columns were not finite, and how many were refilled.
#[pyfunction]
pub(crate) fn orthonormalize(
    py: Python<'_>,
    rows: usize,
    rank: usize,
    p: usize,
    seed: u64,
) -> PyResult<(usize, usize)> {
    detached(py, || {
        let [_, p, _] = areas(Shape { rows, columns: 0, rank }, 0, p, 0)?;
        check(&[p], &[])?;
        // SAFETY: checked; who calls promises the rest.
        let found = sketch::orthonormalize(unsafe { p.write() }, rank, seed);
        Ok((found.nonfinite, found.refilled))
    })
}
