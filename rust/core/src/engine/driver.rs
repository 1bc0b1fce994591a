//! The state machine behind the engine: takes orders, runs operations, hands out frames, watches deadlines.
//! Driven by one thread at a time (see `progress`).

mod dispatch;
mod leaving;

use super::EngineConfig;
use super::call::{Fingerprint, GroupId};
use super::exec::{Exec, Order, Recipe};
use super::inquiry::{Inquiry, Wait};
use super::protocol::{Frame, OpKey};
use super::wires::Wires;
use crate::collective::plan::Shape;
use crate::collective::select;
use crate::error::Error;
use crate::transport::{Event, Lane, Transport};
use dispatch::clash;
use leaving::Leaving;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Operations of one lane of one group that run at the same time: the next ones fill the pipeline
/// while the first drains.
const MAX_ACTIVE: usize = 4;
/// Finished operations whose calls are remembered, to explain a straggler's mismatch.
const REMEMBERED: usize = 64;

/// From callers to the driver.
pub enum Command {
    /// A group has been made.
    NewGroup(GroupId, Arc<[usize]>),
    /// An operation.
    Submit(Box<Order>),
}

#[derive(Default)]
struct LaneState {
    called: u64,
    queued: VecDeque<Order>,
    active: VecDeque<Exec>,
    finished: VecDeque<(u64, Fingerprint)>,
}

struct Group {
    ranks: Arc<[usize]>,
    broken: Option<Error>,
    lanes: [LaneState; 2],
}

/// See the module.
pub struct Driver {
    config: Arc<EngineConfig>,
    wires: Wires,
    groups: BTreeMap<GroupId, Group>,
    early: HashMap<OpKey, Vec<(usize, Frame)>>,
    /// Given up, but not out of use yet.
    leaving: Vec<Leaving>,
    /// Groups that others have broken before they were made here.
    stillborn: HashMap<GroupId, Error>,
    events: Vec<Event>,
    touched: Vec<OpKey>,
    ticked: Instant,
    failed: Option<Error>,
}

impl Driver {
    /// Over a transport that is connected to everybody.
    pub fn new(transport: Box<dyn Transport>, config: Arc<EngineConfig>) -> Self {
        let wires = Wires::new(transport, config.size);
        Driver {
            config,
            wires,
            groups: BTreeMap::new(),
            early: HashMap::new(),
            leaving: Vec::new(),
            stillborn: HashMap::new(),
            events: Vec::new(),
            touched: Vec::new(),
            ticked: Instant::now(),
            failed: None,
        }
    }

    /// Statistics.
    pub fn counters(&self) -> super::wires::Counters {
        self.wires.counters
    }

    /// Anything in flight, queued, or being left?
    pub fn busy(&self) -> bool {
        !self.leaving.is_empty() || self.lanes().any(|lane| !lane.active.is_empty() || !lane.queued.is_empty())
    }

    /// Last time that an active operation moved.
    pub fn last_move(&self) -> Option<Instant> {
        self.lanes().flat_map(|lane| lane.active.iter().map(|exec| exec.moved)).max()
    }

    fn lanes(&self) -> impl Iterator<Item = &LaneState> {
        self.groups.values().flat_map(|group| &group.lanes)
    }

    /// Takes commands, moves bytes (waiting up to `wait` for some), runs what can run.
    pub fn round(&mut self, commands: impl Iterator<Item = Command>, wait: Duration) {
        for command in commands {
            match command {
                Command::NewGroup(id, ranks) => {
                    let broken = self.stillborn.remove(&id);
                    for &peer in ranks.iter().filter(|&&peer| broken.is_some() && peer != self.config.rank) {
                        self.wires.say_stopped(id, peer);
                    }
                    self.groups.insert(id, Group { ranks, broken, lanes: Default::default() });
                }
                Command::Submit(order) => self.submit(*order),
            }
        }
        let wait = if self.busy() { wait.min(Duration::from_millis(25)) } else { wait };
        let mut events = std::mem::take(&mut self.events);
        if let Err(error) = self.wires.transport.poll(wait, &mut events) {
            self.break_all(&error.given_up("all operations".into(), self.config.rank), true);
        }
        for event in events.drain(..) {
            self.handle(event);
        }
        self.events = events;
        while let Some(key) = self.touched.pop() {
            self.advance(key);
        }
        self.watch();
        if !self.leaving.is_empty() {
            self.settle();
        }
    }

    /// Ends everything that is left with `error`, says goodbye to all, and keeps nothing open or registered: whoever
    /// holds a handle holds us.
    pub fn close(&mut self, error: &Error, deadline: Duration) {
        self.break_all(error, false);
        self.wires.close(deadline);
        self.finish_leaving();
    }

    fn submit(&mut self, order: Order) {
        let key = order.key;
        let fingerprint = order.fingerprint();
        let Some(group) = self.groups.get_mut(&key.group) else {
            return order.work.finish(Err(Error::Invalid(format!("group {} does not exist", key.group.0))));
        };
        let lane = &mut group.lanes[key.lane as usize];
        lane.called = key.seq + 1;
        if let Some(cause) = group.broken.as_ref().or(self.failed.as_ref()) {
            let operation = format!("{fingerprint} {key}");
            return order.work.finish(Err(Error::Broken { operation, cause: Box::new(cause.clone()) }));
        }
        lane.queued.push_back(order);
        // What came before the call may already disagree with it.
        let clash = self
            .early
            .get(&key)
            .and_then(|frames| frames.iter().find_map(|(peer, frame)| Some((*peer, clash(fingerprint, frame)?))));
        match clash {
            Some((peer, theirs)) => self.mismatch(key, fingerprint, peer, theirs),
            None => self.activate(key.group, key.lane),
        }
    }

    /// Starts queued operations while there is room.
    fn activate(&mut self, id: GroupId, lane: Lane) {
        loop {
            let Some(group) = self.groups.get_mut(&id) else { return };
            let state = &mut group.lanes[lane as usize];
            if state.active.len() >= MAX_ACTIVE {
                return;
            }
            let Some(order) = state.queued.pop_front() else { return };
            let key = order.key;
            let (work, fingerprint) = (order.work.clone(), order.fingerprint());
            let recipe = recipe(&order, group.ranks.clone(), &self.config, self.wires.transport.chunk_bytes(lane));
            match Exec::new(order, recipe, &mut self.wires) {
                Ok(mut exec) => {
                    exec.inquiry.own_rank = self.config.rank;
                    state.active.push_back(exec);
                }
                Err(error) => {
                    let error = error.given_up(format!("{fingerprint} {key}"), self.config.rank);
                    work.finish(Err(error.clone()));
                    return self.break_group(id, &error, true);
                }
            }
            for (peer, frame) in self.early.remove(&key).unwrap_or_default() {
                self.deliver(peer, frame);
            }
            self.advance(key);
        }
    }

    fn exec(&mut self, key: OpKey) -> Option<(&mut Exec, &mut Wires)> {
        let lane = &mut self.groups.get_mut(&key.group)?.lanes[key.lane as usize];
        let exec = lane.active.iter_mut().find(|exec| exec.key == key)?;
        Some((exec, &mut self.wires))
    }

    fn advance(&mut self, key: OpKey) {
        let rank = self.config.rank;
        let Some((exec, wires)) = self.exec(key) else { return };
        match exec.advance(wires).map_err(|error| error.given_up(exec.describe(), rank)) {
            Ok(false) => {}
            Ok(true) => {
                wires.counters.operations += 1;
                self.complete(key);
                self.activate(key.group, key.lane);
            }
            Err(error) => self.break_group(key.group, &error, true),
        }
    }

    fn complete(&mut self, key: OpKey) {
        let Some(group) = self.groups.get_mut(&key.group) else { return };
        let lane = &mut group.lanes[key.lane as usize];
        let Some(position) = lane.active.iter().position(|exec| exec.key == key) else { return };
        if let Some(exec) = lane.active.remove(position) {
            lane.finished.push_back((key.seq, exec.fingerprint));
            if lane.finished.len() > REMEMBERED {
                lane.finished.pop_front();
            }
            let work = exec.work.clone();
            // Memory first, then the news: whoever is told may free the buffers.
            exec.retire(&mut self.wires);
            work.finish(Ok(()));
        }
    }

    /// Deadlines, and the questions and warnings before them.
    fn watch(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.ticked) < Duration::from_millis(10) {
            return;
        }
        self.ticked = now;
        let mut expired = Vec::new();
        for (id, group) in &mut self.groups {
            for exec in group.lanes.iter_mut().flat_map(|lane| &mut lane.active) {
                let waited = now.duration_since(exec.moved);
                let warn_after = self.config.warn_after.min(exec.timeout / 2);
                if waited < (warn_after / 2).min(exec.timeout / 4) {
                    exec.inquiry.warned = false;
                    continue;
                }
                if exec
                    .inquiry
                    .asked
                    .is_none_or(|at| now.duration_since(at) >= Inquiry::interval(exec.timeout.min(warn_after)))
                {
                    exec.inquiry.asked = Some(now);
                    for &peer in group.ranks.iter().filter(|&&peer| peer != self.config.rank) {
                        self.wires.ask(peer, exec.key);
                    }
                }
                let wait = Wait { op: exec.key, ranks: &group.ranks, patience: warn_after, waited, now };
                if waited >= warn_after && !std::mem::replace(&mut exec.inquiry.warned, true) {
                    let verdict = exec.inquiry.verdict(&wait, &self.wires);
                    let (waited, timeout) = (waited.as_secs_f64(), exec.timeout.as_secs_f64());
                    log::warn!("{}: waiting for {waited:.1} s (timeout {timeout:.1} s): {verdict}", exec.describe());
                }
                if waited >= exec.timeout {
                    let wait = Wait { patience: exec.timeout, ..wait };
                    expired.push((*id, exec.inquiry.judge(exec.describe(), &wait, &self.wires)));
                    break;
                }
            }
        }
        for (id, error) in expired {
            self.break_group(id, &error, true);
        }
        self.lose_patience(now);
    }
}

fn recipe(order: &Order, ranks: Arc<[usize]>, config: &EngineConfig, chunk_bytes: usize) -> Recipe {
    let call = &order.call;
    let accumulator = call.dtype.accumulator(call.reduce_op());
    let nodes = ranks.iter().map(|&rank| config.nodes[rank]).collect();
    let shape = Shape {
        rank: ranks.iter().position(|&rank| rank == config.rank).unwrap_or(0),
        size: ranks.len(),
        count: call.count,
        chunk: (chunk_bytes / accumulator.size()).max(1),
        widen: accumulator != call.dtype,
        nodes,
    };
    let choice = select::plan_for(call.op, call.dtype.size(), &shape, config.small_bytes, config.algorithm);
    Recipe { plan: choice.plan, algorithm: choice.name, scratch: choice.scratch, accumulator, ranks }
}
