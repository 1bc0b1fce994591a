//! Joining a job: the meeting of all ranks, and the mesh of connections.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mdas_core::bootstrap::{self, Identity};
use mdas_core::error::{Error, Result};
use mdas_core::transport::Transport;
use mdas_core::transport::mixed::Mixed;
use mdas_core::transport::tcp::{Pace, Tcp, TcpOptions};
use mdas_core::transport::verbs::Verbs;
use pyo3::prelude::*;

use crate::engine::{Engine, EngineSettings, connected};
use crate::errors;
use crate::verbs::VerbsOptions;

/// Runs a long wait without the GIL, serving signals: `body` asks its argument every 100 ms whether to go on.
fn interruptible<T: Send>(py: Python<'_>, body: impl FnOnce(&dyn Fn() -> bool) -> Result<T> + Send) -> PyResult<T> {
    let (result, raised) = py.detach(|| {
        let raised: RefCell<Option<PyErr>> = RefCell::new(None);
        let keep_going = || {
            if raised.borrow().is_none()
                && let Err(signal) = Python::attach(|py| py.check_signals())
            {
                raised.replace(Some(signal));
            }
            raised.borrow().is_none()
        };
        (body(&keep_going), raised.into_inner())
    });
    match raised {
        Some(signal) => Err(signal),
        None => result.map_err(|e| errors::to_python(py, &e)),
    }
}

/// The meeting of all ranks at rank 0, at `address` ("host:port"): returns all ranks' blobs, in rank order.
/// Connections of another `job` or `secret` are refused. `deadline` in seconds.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "who, where, what, how long")]
pub(crate) fn meet(
    py: Python<'_>,
    rank: usize,
    size: usize,
    job: String,
    secret: Vec<u8>,
    address: String,
    blob: Vec<u8>,
    deadline: f64,
) -> PyResult<Vec<Vec<u8>>> {
    let deadline = errors::duration(py, "deadline", deadline)?;
    let identity = Identity { rank, size, job, secret };
    interruptible(py, |keep_going| bootstrap::rendezvous::exchange(&identity, &address, blob, deadline, keep_going))
}

/// Where the other ranks of a job connect to this one. Closed when connected, or dropped.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct Listener {
    listener: Mutex<Option<bootstrap::Listener>>,
    address: SocketAddr,
    rank: usize,
    size: usize,
}

#[pymethods]
impl Listener {
    /// Listens at `address`, on a port of the range `ports` (inclusive; (0, 0): any free one), for connections of
    /// `job` that know `secret`.
    #[new]
    fn new(
        py: Python<'_>,
        address: &str,
        ports: (u16, u16),
        rank: usize,
        size: usize,
        job: String,
        secret: Vec<u8>,
    ) -> PyResult<Self> {
        let fail = |error: Error| errors::to_python(py, &error);
        let ip = ip(address).map_err(fail)?;
        let range = (ports != (0, 0)).then_some(ports);
        let identity = Identity { rank, size, job, secret };
        let listener = py.detach(|| bootstrap::Listener::open(ip, range, identity)).map_err(fail)?;
        let address = listener.address();
        Ok(Self { listener: Mutex::new(Some(listener)), address, rank, size })
    }

    /// The port that it listens on.
    #[getter]
    fn port(&self) -> u16 {
        self.address.port()
    }

    /// Listens no longer. Harmless if it has connected or been closed already.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.take()));
    }

    /// Connects with all ranks, whose listeners are at `members`, and starts the engine. `nodes`: node number of
    /// every rank. `configuration`: in words, what must be equal on all ranks. `deadline` in seconds. Peers for which
    /// `over_verbs` says so are reached over verbs, the others over TCP.
    #[pyo3(signature = (members, nodes, settings, configuration, deadline, verbs=None, over_verbs=Vec::new()))]
    #[expect(clippy::too_many_arguments, reason = "who, where, what, how long, over what")]
    fn connect(
        &self,
        py: Python<'_>,
        members: Vec<(String, u16)>,
        nodes: Vec<u32>,
        settings: &EngineSettings,
        configuration: &str,
        deadline: f64,
        verbs: Option<PyRef<'_, VerbsOptions>>,
        over_verbs: Vec<bool>,
    ) -> PyResult<Engine> {
        let deadline: Duration = errors::duration(py, "deadline", deadline)?;
        let addresses: Result<Vec<SocketAddr>> =
            members.iter().map(|(address, port)| Ok(SocketAddr::new(ip(address)?, *port))).collect();
        let addresses = addresses.map_err(|e| errors::to_python(py, &e))?;
        let Some(listener) = self.take() else {
            let error = Error::Invalid("this listener has connected, or been closed, already".into());
            return Err(errors::to_python(py, &error));
        };
        let verbs = verbs.map(|options| options.transport());
        let config = settings.config(self.rank, self.size, nodes.into());
        interruptible(py, |keep_going| {
            let end = Instant::now() + deadline;
            let pace = settings.rate_limit.map_or(Pace::Measured, Pace::Limited);
            let options = TcpOptions { pace, ..TcpOptions::default() };
            let reached: Vec<bool> =
                (0..self.size).map(|peer| verbs.is_some() && over_verbs.get(peer) == Some(&true)).collect();
            let all = (0..self.size).all(|peer| reached[peer] || peer == self.rank);
            // Over verbs a stream per peer suffices: it sets the queue pairs up, and stays as a sign of life.
            let bulk = if all { 0 } else { options.bulk_connections };
            let mut streams = bootstrap::connect(listener, &addresses, configuration, bulk, deadline, keep_going)?;
            let lifelines: Vec<_> = streams
                .iter_mut()
                .zip(&reached)
                .map(|(streams, reached)| Some(streams.take_if(|_| *reached)?.urgent))
                .collect();
            let verbs = verbs.filter(|_| reached.contains(&true)).map(|options| {
                let left = end.saturating_duration_since(Instant::now());
                Verbs::connect(self.rank, lifelines, &options, left, keep_going)
            });
            let transport: Box<dyn Transport> = match verbs.transpose()? {
                Some(verbs) if all => Box::new(verbs),
                None => Box::new(Tcp::new(self.rank, streams, options)?),
                Some(verbs) => {
                    let tcp = Tcp::new(self.rank, streams, options)?;
                    let route = reached.into_iter().map(usize::from).collect();
                    Box::new(Mixed::new(vec![Box::new(tcp), Box::new(verbs)], route)?)
                }
            };
            connected(transport, config)
        })
    }
}

impl Listener {
    fn take(&self) -> Option<bootstrap::Listener> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Reads an address.
pub(crate) fn ip(address: &str) -> Result<IpAddr> {
    address.parse().map_err(|_| Error::Configuration(format!("{address:?} is not an IP address")))
}

/// (name, address, is it up?) of all addresses of this host.
#[pyfunction]
pub(crate) fn interfaces(py: Python<'_>) -> PyResult<Vec<(String, String, bool)>> {
    let found = bootstrap::interfaces().map_err(|e| errors::to_python(py, &e))?;
    Ok(found.into_iter().map(|found| (found.name, found.address.to_string(), found.up)).collect())
}

/// The local address from which packets to `address` ("host:port") leave. Sends nothing.
#[pyfunction]
pub(crate) fn local_address_towards(py: Python<'_>, address: &str) -> PyResult<String> {
    let found = py.detach(|| bootstrap::local_address_towards(address));
    found.map(|ip| ip.to_string()).map_err(|e| errors::to_python(py, &e))
}

/// Equal exactly for processes that share a kernel and a network namespace.
#[pyfunction]
pub(crate) fn host_identity(py: Python<'_>) -> PyResult<String> {
    bootstrap::host_identity().map_err(|e| errors::to_python(py, &e))
}
