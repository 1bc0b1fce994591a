//! The exceptions of `mdas`, and the one place where a Rust error becomes one of them.

use std::time::Duration;

use mdas_core::error::Error;
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

/// The exception classes, in the order of [`TABLE`].
static CLASSES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

/// Index into [`TABLE`].
#[derive(Clone, Copy)]
enum Class {
    Error,
    Invalid,
    Configuration,
    Mismatch,
    PeerLost,
    Timeout,
    Closed,
}

/// What a class is called, which built-in exception it also is (besides `mdas.Error`), what it says of itself.
struct Row {
    name: &'static str,
    also: fn(Python<'_>) -> Option<Bound<'_, PyType>>,
    doc: &'static str,
}

/// Row 0 is the base of all others. The order is that of [`Class`].
const TABLE: [Row; 7] = [
    Row { name: "Error", also: |_| None, doc: "Base of everything that mdas raises." },
    Row {
        name: "InvalidArgumentError",
        also: |py| Some(py.get_type::<PyValueError>()),
        doc: "A call whose arguments make no sense; refused before anything was sent.",
    },
    Row {
        name: "ConfigurationError",
        also: |_| None,
        doc: "The environment or the configuration does not allow what was asked for, or differs between ranks.",
    },
    Row {
        name: "MismatchError",
        also: |_| None,
        doc: "Two ranks called different operations at the same point of a group's order. Raised on both.",
    },
    Row {
        name: "PeerLostError",
        also: |_| None,
        doc: "A rank died, left, or stopped answering. Attribute `peer`: its world rank, -1 if unknown.",
    },
    Row {
        name: "CollectiveTimeoutError",
        also: |py| Some(py.get_type::<PyTimeoutError>()),
        doc: "Everybody is alive, but somebody did not come in time. Also a TimeoutError.",
    },
    Row { name: "ClosedError", also: |_| None, doc: "shutdown() has been called, or this is a forked child." },
];

fn build(py: Python<'_>) -> PyResult<Vec<Py<PyType>>> {
    let mut classes: Vec<Py<PyType>> = Vec::with_capacity(TABLE.len());
    for row in &TABLE {
        let base = match classes.first() {
            Some(error) => error.bind(py).clone(),
            None => py.get_type::<PyRuntimeError>(),
        };
        let bases = match (row.also)(py) {
            Some(also) => PyTuple::new(py, [base, also])?,
            None => PyTuple::new(py, [base])?,
        };
        let members = PyDict::new(py);
        members.set_item("__module__", "mdas")?;
        members.set_item("__doc__", row.doc)?;
        if row.name == "PeerLostError" {
            members.set_item("peer", -1)?;
        }
        let class = py.get_type::<PyType>().call1((row.name, bases, members))?;
        classes.push(class.cast_into::<PyType>()?.unbind());
    }
    Ok(classes)
}

fn class(py: Python<'_>, which: Class) -> PyResult<Bound<'_, PyType>> {
    let classes = CLASSES.get_or_try_init(py, || build(py))?;
    Ok(classes[which as usize].bind(py).clone())
}

/// Adds the classes to the module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    for (row, class) in TABLE.iter().zip(CLASSES.get_or_try_init(py, || build(py))?) {
        module.add(row.name, class.bind(py))?;
    }
    Ok(())
}

/// The Python exception for an error of the core.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let raised = class(py, class_of(error)).map(|class| PyErr::from_type(class, error.to_string()));
    let raised = raised.unwrap_or_else(|failure| failure);
    if let Some(peer) = peer_of(error)
        && let Err(failure) = raised.value(py).setattr("peer", peer)
    {
        return failure;
    }
    raised
}

/// A group that is broken keeps raising what broke it.
fn class_of(error: &Error) -> Class {
    match error {
        Error::Invalid(_) => Class::Invalid,
        Error::Configuration(_) => Class::Configuration,
        Error::Mismatch { .. } => Class::Mismatch,
        Error::PeerLost { .. } => Class::PeerLost,
        Error::Timeout { .. } => Class::Timeout,
        Error::Broken { cause, .. } => class_of(cause),
        Error::Closed(_) => Class::Closed,
        Error::System { .. } | Error::GivenUp { .. } => Class::Error,
    }
}

fn peer_of(error: &Error) -> Option<usize> {
    match error {
        Error::PeerLost { peer, .. } => Some(*peer),
        Error::Broken { cause, .. } => peer_of(cause),
        _ => None,
    }
}

/// A wait that ended before its operation.
pub(crate) fn wait_is_over(py: Python<'_>, timeout: Duration) -> PyErr {
    let message = format!("still in flight after {timeout:?}: the operation goes on, wait again");
    class(py, Class::Timeout).map_or_else(|failure| failure, |class| PyErr::from_type(class, message))
}

/// Seconds from Python.
pub(crate) fn duration(py: Python<'_>, name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        to_python(py, &Error::Invalid(format!("{name} is {seconds}, not a finite number of seconds from 0 on")))
    })
}

/// Seconds of patience from Python: none at all is a mistake.
pub(crate) fn patience(py: Python<'_>, name: &str, seconds: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(patience) if !patience.is_zero() => Ok(patience),
        _ => Err(to_python(
            py,
            &Error::Invalid(format!("{name} is {seconds}, but must be a positive, finite number of seconds")),
        )),
    }
}
