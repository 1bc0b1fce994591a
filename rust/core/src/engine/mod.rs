//! The engine: takes calls, orders them, runs their plans over a transport, watches deadlines.
//!
//! - `call`: what is asked for, and the memory it works on
//! - `exec`: runs one operation; `wires`: the transport as operations see it
//! - `driver`: the state machine of all operations; `inquiry`: who is late
//! - `progress`: who drives it; `work`: handles
//! - `protocol`: frames between engines

mod call;
mod driver;
mod exec;
mod inquiry;
mod memory;
mod progress;
mod protocol;
mod tags;
mod wires;
mod work;

#[cfg(test)]
mod tests;

pub use call::{Call, Fingerprint, GroupId};
use call::{hash_purpose, hash_ranks};
pub use memory::{HeapBytes, Region};
pub use tags::name_tags;
pub use wires::Counters;
pub use work::{Times, Work, monotonic_ns};

use crate::collective::{Collective, select::Algorithm};
use crate::error::{Error, Result};
use crate::transport::Transport;
use driver::{Command, Driver};
use exec::Order;
use progress::{Calls, Membership, Shared, lock, next_call};
use protocol::OpKey;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use work::WorkState;

/// Settings; equal on all ranks but for `rank`.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// World rank.
    pub rank: usize,
    /// World size.
    pub size: usize,
    /// Node number of every world rank.
    pub nodes: Arc<[u32]>,
    /// Default deadline: time without progress.
    pub timeout: Duration,
    /// Time without progress after which a warning names the late ranks.
    pub warn_after: Duration,
    /// Largest allreduce, in bytes, that goes by the tree.
    pub small_bytes: usize,
    /// Overrides the choice of the algorithm where it fits.
    pub algorithm: Option<Algorithm>,
    /// CPUs that the progress thread may run on; all that the process may use, if empty.
    pub cpus: Vec<usize>,
    /// The process that made the engine: a forked child must not touch it.
    pub pid: u32,
}

impl EngineConfig {
    /// Defaults, for one rank per node.
    pub fn new(rank: usize, size: usize) -> Self {
        EngineConfig {
            rank,
            size,
            nodes: (0..size as u32).collect(),
            timeout: Duration::from_secs(300),
            warn_after: Duration::from_secs(10),
            small_bytes: 64 << 10,
            algorithm: None,
            cpus: Vec::new(),
            pid: std::process::id(),
        }
    }
}

/// One rank's engine. Calls from any thread; the order of calls within a lane of a group must be the same on
/// all ranks.
pub struct Engine {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    transport_name: &'static str,
}

impl Engine {
    /// Takes over a connected transport and starts the progress thread.
    ///
    /// # Errors
    /// `System` if the thread cannot be started.
    pub fn start(transport: Box<dyn Transport>, config: EngineConfig) -> Result<Arc<Engine>> {
        let config = Arc::new(config);
        let (waker, transport_name) = (transport.waker(), transport.name());
        let shared = Shared::new(Driver::new(transport, config.clone()), waker, config.clone());
        let engine = Engine { shared: shared.clone(), thread: Mutex::new(None), transport_name };
        engine.new_group((0..config.size).collect(), "")?;
        let thread = std::thread::Builder::new()
            .name("mdas-progress".into())
            .spawn(move || {
                prepare_thread(&shared.config.cpus);
                shared.progress();
            })
            .map_err(|error| Error::system("starting the progress thread", error))?;
        *lock(&engine.thread) = Some(thread);
        Ok(Arc::new(engine))
    }

    /// World rank.
    pub fn rank(&self) -> usize {
        self.shared.config.rank
    }

    /// World size.
    pub fn size(&self) -> usize {
        self.shared.config.size
    }

    /// Name of the transport.
    pub fn transport_name(&self) -> &'static str {
        self.transport_name
    }

    /// Does it take no more calls?
    pub fn is_closed(&self) -> bool {
        self.shared.closed.load(Ordering::Acquire)
    }

    /// All ranks.
    pub fn world(&self) -> GroupId {
        GroupId(0)
    }

    /// A group of world ranks, numbered 0.. in the given order. Its members all make it, and groups of the same set
    /// of ranks and the same purpose in the same order; nothing is sent. Groups that serve another `purpose` (any text)
    /// are counted apart, so that a library's groups and those of its user do not depend on each other's order.
    ///
    /// # Errors
    /// `Invalid` for ranks that do not exist or stand there twice, or an empty list.
    pub fn new_group(&self, ranks: Vec<usize>, purpose: &str) -> Result<GroupId> {
        self.shared.check_open()?;
        let size = self.size();
        let mut seen = vec![false; size];
        for &rank in &ranks {
            match seen.get_mut(rank) {
                None => {
                    return Err(Error::Invalid(format!(
                        "a group cannot hold rank {rank}: the world has ranks 0 to {}",
                        size - 1
                    )));
                }
                Some(true) => return Err(Error::Invalid(format!("rank {rank} stands in the group twice"))),
                Some(seen) => *seen = true,
            }
        }
        if ranks.is_empty() {
            return Err(Error::Invalid("a group needs at least one rank".into()));
        }
        let ranks: Arc<[usize]> = ranks.into();
        let mut calls = lock(&self.shared.calls);
        let purpose = hash_purpose(purpose);
        let id = group_id(&ranks, purpose, &calls);
        calls.groups.insert(id, Membership { ranks: ranks.clone(), purpose, next_seq: [0; 2] });
        calls.queue.push(Command::NewGroup(id, ranks));
        Ok(id)
    }

    /// World ranks of a group.
    pub fn ranks(&self, group: GroupId) -> Option<Arc<[usize]>> {
        lock(&self.shared.calls).groups.get(&group).map(|membership| membership.ranks.clone())
    }

    /// Starts an operation. `input` and `output` may be the same memory.
    ///
    /// # Errors
    /// `Invalid` if the call makes no sense (nothing was sent then), `Closed` after a shutdown or in a forked
    /// child. What goes wrong later is told by [`Work::wait`].
    pub fn submit(&self, mut call: Call, mut input: Region, mut output: Region) -> Result<Work> {
        self.shared.check_open()?;
        if call.op == Collective::Barrier {
            (call.dtype, call.count) = (mdas_kernels::DType::U8, 1);
            (input, output) = (barrier_byte()?, barrier_byte()?);
        }
        let state = WorkState::new();
        {
            let mut calls = lock(&self.shared.calls);
            let ranks = calls.groups.get(&call.group).map(|membership| membership.ranks.clone()).unwrap_or_default();
            check(&call, &input, &output, ranks.len().max(1))?;
            let (seq, _) = next_call(&mut calls, call.group, call.lane, self.rank())?;
            let key = OpKey { group: call.group, lane: call.lane, seq };
            let timeout = call.timeout.unwrap_or(self.shared.config.timeout);
            let members = hash_ranks(&ranks, 0);
            let order = Order { key, call: call.clone(), input, output, work: state.clone(), timeout, members };
            calls.queue.push(Command::Submit(Box::new(order)));
        }
        self.shared.kick(call.blocking);
        Ok(Work { state, shared: self.shared.clone() })
    }

    /// Statistics.
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// Lets what is in flight finish (as long as something moves every `drain`), says goodbye, stops the thread.
    /// What is unfinished then fails with `Closed`. Doing it twice is harmless.
    pub fn shutdown(&self, drain: Duration) {
        if std::process::id() != self.shared.config.pid || self.shared.closed.load(Ordering::Acquire) {
            return;
        }
        self.shared.close(drain, Duration::from_secs(2));
        if let Some(thread) = lock(&self.thread).take() {
            // The thread returns nothing; if it panicked, the panic has been printed.
            let _ = thread.join();
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown(Duration::from_secs(1));
    }
}

/// The first group is the world; another one's number follows from its ranks, its purpose and from how many groups
/// with the same of both there are, so that ranks outside need not know of it.
fn group_id(ranks: &[usize], purpose: u32, calls: &Calls) -> GroupId {
    if calls.groups.is_empty() {
        return GroupId(0);
    }
    let mut set = ranks.to_vec();
    set.sort_unstable();
    let same = |membership: &&Membership| {
        let mut other = membership.ranks.to_vec();
        other.sort_unstable();
        membership.purpose == purpose && other == set
    };
    let before = calls.groups.values().filter(same).count() as u64;
    let free = |id: &GroupId| id.0 != 0 && !calls.groups.contains_key(id);
    // Mixed in apart from the count: a sum of both would let one purpose's second group be another one's first.
    let candidates = (0..).map(|attempt: u64| GroupId(hash_ranks(&set, 1 + before + (attempt << 32)) ^ purpose));
    candidates.into_iter().find(free).unwrap_or(GroupId(0))
}

fn barrier_byte() -> Result<Region> {
    HeapBytes::zeroed(1, 1)
        .map(|bytes| Region::of(Arc::new(bytes)))
        .ok_or_else(|| Error::system("allocating one byte", "out of memory"))
}

fn check(call: &Call, input: &Region, output: &Region, size: usize) -> Result<()> {
    let what = call.fingerprint(0);
    if let Collective::Allreduce(op) | Collective::ReduceScatter(op) = call.op {
        mdas_kernels::supported(op, call.dtype).map_err(|error| Error::Invalid(format!("{what}: {error}")))?;
    }
    if let Collective::Broadcast { root } = call.op
        && root >= size
    {
        return Err(Error::Invalid(format!("{what}: the group has ranks 0 to {}", size - 1)));
    }
    for (name, region, elements) in [
        ("input", input, call.op.input_len(call.count, size)),
        ("output", output, call.op.output_len(call.count, size)),
    ] {
        let bytes = elements * call.dtype.size();
        if region.len != bytes {
            return Err(Error::Invalid(format!(
                "{what}: the {name} has {} bytes, but {bytes} are needed ({elements} x {})",
                region.len,
                call.dtype.name()
            )));
        }
    }
    if input.partly_overlaps(output) {
        return Err(Error::Invalid(format!(
            "{what}: input and output overlap without being the same memory; use one buffer or two separate ones"
        )));
    }
    Ok(())
}

/// Signals go to Python's threads, so that Ctrl-C interrupts a wait; CPUs as configured.
fn prepare_thread(cpus: &[usize]) {
    // SAFETY: plain calls on a local signal set, which is initialized by sigfillset.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
    if !cpus.is_empty() {
        let mut set = rustix::thread::CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
            log::warn!(
                "the progress thread cannot run on CPUs {cpus:?} (MDAS_PROGRESS_CPUS): {error}; it runs anywhere"
            );
        }
    }
}
