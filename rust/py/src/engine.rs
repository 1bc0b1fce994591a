//! `Engine`: one rank's place in a job.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mdas_core::collective::Collective;
use mdas_core::collective::select::{ALGORITHMS, Algorithm};
use mdas_core::engine::{self, Call, EngineConfig, GroupId, Region};
use mdas_core::error::Error;
use mdas_core::transport::{Lane, Transport, loopback};
use mdas_kernels::{DType, ReduceOp};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::errors;
use crate::process::{AtHome, Inherited};
use crate::view::View;
use crate::work::Work;

/// One rank's place in a job: runs collectives over groups of its ranks. All ranks of a group call the
/// same operations in the same order, per lane.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct Engine {
    engine: AtHome<Arc<engine::Engine>>,
    sockets: Vec<Inherited>,
}

/// How a collective is to be run, beside its memory.
struct Options<'a> {
    group: u32,
    lane: &'a str,
    tag: u32,
    timeout: Option<f64>,
    blocking: bool,
}

impl Engine {
    fn new(engine: Arc<engine::Engine>, sockets: Vec<Inherited>) -> Self {
        Self { engine: AtHome::new(engine), sockets }
    }

    fn submit(
        &self,
        py: Python<'_>,
        op: Collective,
        (dtype, count): (DType, usize),
        (input, output): (Region, Region),
        options: &Options<'_>,
    ) -> PyResult<Work> {
        self.engine.home().check(py)?;
        let lane = match options.lane {
            "bulk" => Lane::Bulk,
            "urgent" => Lane::Urgent,
            other => return Err(invalid(py, format!("lane is {other:?}, but must be \"bulk\" or \"urgent\""))),
        };
        let timeout = options.timeout.map(|seconds| errors::patience(py, "timeout", seconds)).transpose()?;
        let (tag, blocking) = (options.tag, options.blocking);
        let call = Call { group: GroupId(options.group), lane, op, dtype, count, tag, timeout, blocking };
        let work = py.detach(|| self.engine.submit(call, input, output)).map_err(|e| errors::to_python(py, &e))?;
        Ok(Work::new(work, self.engine.home()))
    }

    /// `count`: of the whole vector (allreduce, broadcast), or of one rank's share.
    fn submit_views(
        &self,
        py: Python<'_>,
        op: Collective,
        (input, output): (&Bound<'_, View>, &Bound<'_, View>),
        count: usize,
        options: &Options<'_>,
    ) -> PyResult<Work> {
        let (from, into) = (input.get(), output.get());
        if !into.writable {
            return Err(PyTypeError::new_err("the view for the result is read-only"));
        }
        if from.dtype != into.dtype {
            let message = format!("out has elements of type {}, but the input of type {}", into.dtype, from.dtype);
            return Err(invalid(py, message));
        }
        self.submit(py, op, (from.dtype, count), (from.region(), into.region()), options)
    }
}

#[pymethods]
impl Engine {
    /// This process's rank in the world.
    #[getter]
    fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Number of ranks in the world.
    #[getter]
    fn size(&self) -> usize {
        self.engine.size()
    }

    /// "tcp", "loopback".
    #[getter]
    fn transport(&self) -> &'static str {
        self.engine.transport_name()
    }

    /// Has this process left the job, or has the engine failed for good?
    #[getter]
    fn closed(&self) -> bool {
        self.engine.is_closed()
    }

    /// Makes a group of these world ranks; its members all call this, for groups of the same set of ranks and the
    /// same `purpose` in the same order. Returns its number.
    #[pyo3(signature = (ranks, purpose=""))]
    fn new_group(&self, py: Python<'_>, ranks: Vec<usize>, purpose: &str) -> PyResult<u32> {
        self.engine.home().check(py)?;
        let group = py.detach(|| self.engine.new_group(ranks, purpose)).map_err(|e| errors::to_python(py, &e))?;
        Ok(group.0)
    }

    /// `output` = reduction of all ranks' `input`; equal counts everywhere.
    #[pyo3(signature = (group, input, output, op="sum", lane="bulk", tag=0, timeout=None, blocking=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn allreduce(
        &self,
        py: Python<'_>,
        group: u32,
        input: &Bound<'_, View>,
        output: &Bound<'_, View>,
        op: &str,
        lane: &str,
        tag: u32,
        timeout: Option<f64>,
        blocking: bool,
    ) -> PyResult<Work> {
        let op = Collective::Allreduce(reduction(py, op)?);
        let options = Options { group, lane, tag, timeout, blocking };
        self.submit_views(py, op, (input, output), input.get().count, &options)
    }

    /// `output` = `input` of rank `root` of the group; in place without `output`.
    #[pyo3(signature = (group, input, root, lane="bulk", tag=0, timeout=None, blocking=false, output=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn broadcast(
        &self,
        py: Python<'_>,
        group: u32,
        input: &Bound<'_, View>,
        root: usize,
        lane: &str,
        tag: u32,
        timeout: Option<f64>,
        blocking: bool,
        output: Option<&Bound<'_, View>>,
    ) -> PyResult<Work> {
        let options = Options { group, lane, tag, timeout, blocking };
        let views = (input, output.unwrap_or(input));
        self.submit_views(py, Collective::Broadcast { root }, views, input.get().count, &options)
    }

    /// `output` = the inputs of all ranks of the group, in rank order.
    #[pyo3(signature = (group, input, output, lane="bulk", tag=0, timeout=None, blocking=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn allgather(
        &self,
        py: Python<'_>,
        group: u32,
        input: &Bound<'_, View>,
        output: &Bound<'_, View>,
        lane: &str,
        tag: u32,
        timeout: Option<f64>,
        blocking: bool,
    ) -> PyResult<Work> {
        let options = Options { group, lane, tag, timeout, blocking };
        self.submit_views(py, Collective::Allgather, (input, output), input.get().count, &options)
    }

    /// `output` of rank r of the group = part r of the reduction of all ranks' `input`.
    #[pyo3(signature = (group, input, output, op="sum", lane="bulk", tag=0, timeout=None, blocking=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        group: u32,
        input: &Bound<'_, View>,
        output: &Bound<'_, View>,
        op: &str,
        lane: &str,
        tag: u32,
        timeout: Option<f64>,
        blocking: bool,
    ) -> PyResult<Work> {
        let op = Collective::ReduceScatter(reduction(py, op)?);
        let options = Options { group, lane, tag, timeout, blocking };
        self.submit_views(py, op, (input, output), output.get().count, &options)
    }

    /// Over when every rank of the group has called it.
    #[pyo3(signature = (group, lane="urgent", tag=0, timeout=None, blocking=false))]
    fn barrier(
        &self,
        py: Python<'_>,
        group: u32,
        lane: &str,
        tag: u32,
        timeout: Option<f64>,
        blocking: bool,
    ) -> PyResult<Work> {
        let options = Options { group, lane, tag, timeout, blocking };
        self.submit(py, Collective::Barrier, (DType::U8, 0), (Region::empty(), Region::empty()), &options)
    }

    /// Statistics since the start, by name.
    fn counters(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, u64>> {
        self.engine.home().check(py)?;
        let counters = py.detach(|| self.engine.counters());
        Ok(BTreeMap::from([
            ("bytes_sent", counters.bytes_sent),
            ("bytes_received", counters.bytes_received),
            ("bytes_copied", counters.bytes_copied),
            ("operations", counters.operations),
            ("registrations", counters.registrations),
        ]))
    }

    /// In a forked child: closes its copies of the sockets, without a word to the other ranks, so that they
    /// notice when the parent dies. Does nothing elsewhere.
    fn abandon(&self) {
        if !self.engine.home().is_here() {
            self.sockets.iter().for_each(Inherited::close);
        }
    }

    /// Says goodbye to the other ranks and stops; returns when that is done, after `deadline` seconds at most.
    fn shutdown(&self, py: Python<'_>, deadline: f64) -> PyResult<()> {
        self.engine.home().check(py)?;
        let deadline = errors::duration(py, "deadline", deadline)?;
        py.detach(|| self.engine.shutdown(deadline));
        Ok(())
    }
}

/// Settings of engines. Equal on all ranks of a job.
#[pyclass(frozen, module = "mdas._core")]
pub(crate) struct EngineSettings {
    timeout: Duration,
    warn_after: Duration,
    small_bytes: Option<usize>,
    algorithm: Option<Algorithm>,
    cpus: Vec<usize>,
    /// Bytes per second.
    pub(crate) rate_limit: Option<u32>,
}

#[pymethods]
impl EngineSettings {
    /// `timeout`, `warn_after`: seconds without progress until an operation fails, or a warning names the late
    /// ranks. `small_bytes`: up to this size latency decides which algorithm is used. `algorithm`: use this one
    /// wherever it knows the collective. `cpus`: where the progress thread may run; empty for anywhere.
    /// `rate_limit`: most bytes per second that bulk may send to one peer over TCP.
    #[new]
    #[pyo3(signature = (timeout=300.0, warn_after=10.0, small_bytes=None, algorithm=None, cpus=vec![], rate_limit=None))]
    fn new(
        py: Python<'_>,
        timeout: f64,
        warn_after: f64,
        small_bytes: Option<usize>,
        algorithm: Option<&str>,
        cpus: Vec<usize>,
        rate_limit: Option<u32>,
    ) -> PyResult<Self> {
        let algorithm = algorithm.map(|name| {
            Algorithm::named(name).ok_or_else(|| {
                invalid(py, format!("algorithm is {name:?}, but must be one of {}", names_of_algorithms().join(", ")))
            })
        });
        Ok(Self {
            timeout: errors::duration(py, "timeout", timeout)?,
            warn_after: errors::duration(py, "warn_after", warn_after)?,
            small_bytes,
            algorithm: algorithm.transpose()?,
            cpus,
            rate_limit,
        })
    }
}

impl EngineSettings {
    /// The engine's configuration for one rank.
    pub(crate) fn config(&self, rank: usize, size: usize, nodes: Arc<[u32]>) -> EngineConfig {
        let defaults = EngineConfig::new(rank, size);
        EngineConfig {
            nodes,
            timeout: self.timeout,
            warn_after: self.warn_after,
            small_bytes: self.small_bytes.unwrap_or(defaults.small_bytes),
            algorithm: self.algorithm,
            cpus: self.cpus.clone(),
            ..defaults
        }
    }
}

/// The engine on a connected transport.
pub(crate) fn connected(transport: Box<dyn Transport>, config: EngineConfig) -> Result<Engine, Error> {
    let sockets = transport.sockets().into_iter().filter_map(Inherited::new).collect();
    engine::Engine::start(transport, config).map(|engine| Engine::new(engine, sockets))
}

/// Ranks 0 to `size` - 1 as engines of this one process, connected through memory. `nodes`: the node number of
/// each rank; all on one node by default.
#[pyfunction]
#[pyo3(name = "loopback", signature = (size, settings=None, nodes=None))]
pub(crate) fn loopback_engines(
    py: Python<'_>,
    size: usize,
    settings: Option<&EngineSettings>,
    nodes: Option<Vec<u32>>,
) -> PyResult<Vec<Engine>> {
    let nodes: Arc<[u32]> = nodes.unwrap_or_else(|| vec![0; size]).into();
    if nodes.len() != size || size == 0 {
        return Err(invalid(py, format!("{size} ranks, but {} node numbers", nodes.len())));
    }
    let start = |(rank, transport)| {
        let config = match settings {
            Some(settings) => settings.config(rank, size, nodes.clone()),
            None => EngineConfig { nodes: nodes.clone(), ..EngineConfig::new(rank, size) },
        };
        engine::Engine::start(Box::new(transport), config).map(|engine| Engine::new(engine, Vec::new()))
    };
    let engines: Result<Vec<Engine>, Error> = loopback::mesh(size).into_iter().enumerate().map(start).collect();
    engines.map_err(|e| errors::to_python(py, &e))
}

/// What `EngineSettings` takes as `algorithm`.
pub(crate) fn names_of_algorithms() -> Vec<&'static str> {
    ALGORITHMS.iter().map(|algorithm| algorithm.name).collect()
}

fn reduction(py: Python<'_>, name: &str) -> PyResult<ReduceOp> {
    ReduceOp::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = ReduceOp::ALL.iter().map(|op| op.name()).collect();
        invalid(py, format!("op is {name:?}, but must be one of {}", names.join(", ")))
    })
}

fn invalid(py: Python<'_>, message: String) -> PyErr {
    errors::to_python(py, &Error::Invalid(message))
}
