//! The state machine behind the engine: takes orders, runs operations, hands out frames, watches deadlines.
//! Driven by one thread at a time (see `progress`).

use super::EngineConfig;
use super::call::{Fingerprint, GroupId};
use super::exec::{Exec, Order, Recipe};
use super::inquiry::{Inquiry, Wait};
use super::protocol::{Frame, OpKey, Reason};
use super::wires::{Gone, Wires};
use crate::collective::plan::Shape;
use crate::collective::select;
use crate::error::Error;
use crate::transport::{Event, Lane, Transport};
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

    /// Anything in flight or queued?
    pub fn busy(&self) -> bool {
        self.lanes().any(|lane| !lane.active.is_empty() || !lane.queued.is_empty())
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
                    self.groups.insert(id, Group { ranks, broken: None, lanes: Default::default() });
                }
                Command::Submit(order) => self.submit(*order),
            }
        }
        let wait = if self.busy() { wait.min(Duration::from_millis(25)) } else { wait };
        let mut events = std::mem::take(&mut self.events);
        if let Err(error) = self.wires.transport.poll(wait, &mut events) {
            self.fail_everything(&error);
        }
        for event in events.drain(..) {
            self.handle(event);
        }
        self.events = events;
        while let Some(key) = self.touched.pop() {
            self.advance(key);
        }
        self.watch();
    }

    /// Ends everything that is left with `error`, then says goodbye to all.
    pub fn close(&mut self, error: &Error, deadline: Duration) {
        self.fail_everything(error);
        self.wires.transport.close(deadline);
    }

    fn fail_everything(&mut self, error: &Error) {
        self.failed.get_or_insert_with(|| error.clone());
        let ids: Vec<_> = self.groups.keys().copied().collect();
        for id in ids {
            self.break_group(id, error, false);
        }
    }

    fn submit(&mut self, order: Order) {
        let key = order.key;
        let fingerprint = order.call.fingerprint();
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
            let work = order.work.clone();
            let recipe = recipe(&order, group.ranks.clone(), &self.config, self.wires.transport.chunk_bytes(lane));
            match Exec::new(order, recipe) {
                Ok(mut exec) => {
                    exec.inquiry.own_rank = self.config.rank;
                    state.active.push_back(exec);
                }
                Err(error) => {
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
        let Some((exec, wires)) = self.exec(key) else { return };
        match exec.advance(wires) {
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
            drop(exec);
            work.finish(Ok(()));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Control { peer, frame } => {
                self.wires.peers[peer].heard = Instant::now();
                match Frame::decode(&frame) {
                    Some(frame) => self.dispatch(peer, frame),
                    None => self.gone(
                        peer,
                        Gone::Lost("it sent a frame that makes no sense; do all ranks run the same version?".into()),
                    ),
                }
            }
            Event::Arrived { peer, key } => {
                self.wires.peers[peer].heard = Instant::now();
                if let Some((op, index)) = self.wires.landed(peer, key)
                    && let Some((exec, _)) = self.exec(op)
                {
                    exec.landed(peer, index);
                    self.touched.push(op);
                }
            }
            Event::Sent { id } => {
                if let Some(op) = self.wires.sent(id)
                    && let Some((exec, _)) = self.exec(op)
                {
                    exec.sent(id);
                    self.touched.push(op);
                }
            }
            Event::Departed { peer } => self.gone(peer, Gone::Departed),
            Event::Lost { peer, cause } => self.gone(peer, Gone::Lost(cause)),
        }
    }

    fn dispatch(&mut self, peer: usize, frame: Frame) {
        match frame {
            Frame::Grant { op, .. } | Frame::Inline { op, .. } => self.arrive(op, peer, frame),
            Frame::Credit { bytes } => self.wires.credit(peer, bytes),
            Frame::Abort { group, reason } => {
                let error = reason.into_error(peer);
                self.break_group(group, &error, false);
            }
            Frame::Query { op } => {
                let called = self.groups.get(&op.group).map_or(0, |group| group.lanes[op.lane as usize].called);
                self.wires.say(peer, &Frame::Answer { op, called });
            }
            Frame::Answer { op, called } => {
                if let Some((exec, _)) = self.exec(op) {
                    exec.inquiry.answers.insert(peer, called);
                }
            }
        }
    }

    /// A frame for an operation that may be running, waiting, over, or not called yet.
    fn arrive(&mut self, op: OpKey, peer: usize, frame: Frame) {
        let known = self.groups.get(&op.group).and_then(|group| {
            if group.broken.is_some() {
                return None;
            }
            let lane = &group.lanes[op.lane as usize];
            let active = lane.active.iter().find(|exec| exec.key == op).map(|exec| exec.fingerprint);
            let queued = || lane.queued.iter().find(|order| order.key == op).map(|order| order.call.fingerprint());
            let finished = || lane.finished.iter().find(|(seq, _)| *seq == op.seq).map(|(_, fingerprint)| *fingerprint);
            active.map(|f| (f, true)).or_else(|| queued().or_else(finished).map(|f| (f, false)))
        });
        let clash = known.and_then(|(ours, _)| Some((ours, clash(ours, &frame)?)));
        match known {
            _ if clash.is_some() => {
                if let Some((ours, theirs)) = clash {
                    self.mismatch(op, ours, peer, theirs);
                }
            }
            Some((_, true)) => {
                self.deliver(peer, frame);
                self.touched.push(op);
            }
            // A broken group reads nothing more.
            None if self.groups.get(&op.group).is_some_and(|group| group.broken.is_some()) => {
                self.discard(peer, &frame)
            }
            // All others keep it for the call that will come.
            _ => self.early.entry(op).or_default().push((peer, frame)),
        }
    }

    /// Nobody will read this frame: its credit goes back.
    fn discard(&mut self, peer: usize, frame: &Frame) {
        if let Frame::Inline { payload, .. } = frame {
            self.wires.consumed(peer, payload.len() + INLINE_HEADER);
        }
    }

    /// Hands a frame to its running operation.
    fn deliver(&mut self, peer: usize, frame: Frame) {
        let result = match frame {
            Frame::Grant { op, index, key, bytes, .. } => match self.exec(op) {
                Some((exec, wires)) => exec.granted(peer, index, key, bytes, wires).map_err(|error| (op, error)),
                None => Ok(()),
            },
            Frame::Inline { op, index, payload, .. } => {
                let cost = payload.len() + INLINE_HEADER;
                self.wires.counters.bytes_received += payload.len() as u64;
                if let Some((exec, _)) = self.exec(op) {
                    exec.inlined(peer, index, payload, cost);
                }
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err((op, error)) = result {
            self.break_group(op.group, &error, true);
        }
    }

    fn mismatch(&mut self, op: OpKey, ours: Fingerprint, peer: usize, theirs: Fingerprint) {
        let error = Error::Mismatch {
            operation: format!("operation {op}"),
            rank: self.config.rank,
            ours: ours.to_string(),
            peer,
            theirs: theirs.to_string(),
        };
        self.break_group(op.group, &error, true);
    }

    fn gone(&mut self, peer: usize, gone: Gone) {
        let state = &mut self.wires.peers[peer];
        if state.gone.is_some() {
            return;
        }
        let lost = match &gone {
            Gone::Lost(cause) => Some(cause.clone()),
            Gone::Departed => None,
        };
        state.gone = Some(gone);
        let hit: Vec<GroupId> =
            self.groups.iter().filter(|(_, group)| group.ranks.contains(&peer)).map(|(id, _)| *id).collect();
        for id in hit {
            match &lost {
                Some(cause) => {
                    let operation = self.groups[&id]
                        .lanes
                        .iter()
                        .flat_map(|lane| &lane.active)
                        .next()
                        .map_or_else(|| "between operations".into(), Exec::describe);
                    let error = Error::PeerLost { operation, peer, cause: cause.clone() };
                    self.break_group(id, &error, true);
                }
                // The others may still have sent all that is needed.
                None => {
                    let keys = self.groups[&id].lanes.iter().flat_map(|lane| lane.active.iter().map(|exec| exec.key));
                    self.touched.extend(keys);
                }
            }
        }
    }

    /// All operations of the group end with `error`; the first error stands. `tell`: the other ranks, too.
    fn break_group(&mut self, id: GroupId, error: &Error, tell: bool) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.broken.is_some() {
            return;
        }
        group.broken = Some(error.clone());
        let ranks = group.ranks.clone();
        let mut works = Vec::new();
        for lane in &mut group.lanes {
            for mut exec in lane.active.drain(..) {
                exec.abandon(&mut self.wires);
                works.push(exec.work.clone());
            }
            works.extend(lane.queued.drain(..).map(|order| order.work));
        }
        let unread: Vec<OpKey> = self.early.keys().filter(|key| key.group == id).copied().collect();
        for (peer, frame) in unread.iter().filter_map(|key| self.early.remove(key)).flatten().collect::<Vec<_>>() {
            self.discard(peer, &frame);
        }
        if tell {
            let reason = Reason::from(error);
            for &peer in ranks.iter().filter(|&&peer| peer != self.config.rank) {
                self.wires.say(peer, &Frame::Abort { group: id, reason: reason.clone() });
            }
        }
        for work in works {
            work.finish(Err(error.clone()));
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
                        self.wires.say(peer, &Frame::Query { op: exec.key });
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
    }
}

/// Bytes of an inline frame besides its payload.
const INLINE_HEADER: usize = 1 + 13 + 19 + 4;

/// Does the frame's call differ from ours?
fn clash(ours: Fingerprint, frame: &Frame) -> Option<Fingerprint> {
    match frame {
        Frame::Grant { call, .. } | Frame::Inline { call, .. } if *call != ours => Some(*call),
        _ => None,
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
