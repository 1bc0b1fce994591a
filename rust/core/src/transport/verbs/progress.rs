//! What has happened: completions, the ends of streams, events of the device.

use super::channel::{Ended, GOODBYE, RECEIVE};
use super::rail::Rail;
use super::{BATCH, CHANNEL, DEVICE, OWED, SPIN, State, URGENT, Verbs};
use crate::error::{Error, Result};
use crate::transport::poller::Ready;
use crate::transport::{Event, Waitable};
use mdas_verbs::choose::Choice;
use mdas_verbs::{AsyncEvent, Completion, Outcome, explain};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

impl Verbs {
    /// Takes completions in until there are none; returns whether there were any.
    pub(super) fn drain(&mut self, events: &mut Vec<Event>) -> Result<bool> {
        let mut any = false;
        for rail in 0..self.rails.len() {
            loop {
                let mut completions = std::mem::take(&mut self.completions);
                let polled = self.rails[rail].queue.poll(BATCH, &mut completions);
                for completion in completions.drain(..) {
                    self.complete(rail, completion, events);
                }
                self.completions = completions;
                let count = polled.map_err(|error| Error::system("verbs", error))?;
                any |= count > 0;
                if count < BATCH {
                    break;
                }
            }
        }
        Ok(any)
    }

    fn complete(&mut self, rail: usize, completion: Completion, events: &mut Vec<Event>) {
        // Of a queue pair that is gone there may be some left.
        let Some(&(peer, place)) = self.rails[rail].numbers.get(&completion.queue_pair) else { return };
        let frames = &mut self.frames;
        let channels = &mut self.peers[peer].channels;
        let Some(channel) = channels.get_mut(place) else { return };
        match completion.outcome {
            Outcome::Sent => {
                channel.finish(completion.id, frames, |ended| {
                    if let Ended::Write(id) = ended {
                        events.push(Event::Sent { id });
                    }
                });
                self.pump(peer, place, events);
            }
            Outcome::Received { bytes, immediate } => {
                let buffer = (completion.id & !RECEIVE) as usize;
                if immediate & GOODBYE != 0 {
                    channel.goodbye = true;
                } else {
                    channel.credit = channel.credit.saturating_add(immediate);
                }
                if bytes > 0 {
                    channel.owed += 1;
                    events.push(Event::Control { peer, frame: frames.message(buffer, bytes as usize) });
                }
                if channels.iter().all(|channel| channel.goodbye) {
                    return self.depart(peer, events);
                }
                self.receive_again(peer, place, completion.id, events);
                self.pump(peer, place, events);
                let returned = self.channel(peer, place).map(|channel| channel.return_credit(OWED));
                if let Some(Err(error)) = returned {
                    self.lose(peer, error.to_string(), events);
                }
            }
            Outcome::Written { bytes, immediate } => {
                let landing = self.landings.remove(&immediate).filter(|landing| landing.peer == peer);
                match landing {
                    Some(landing) if landing.bytes == bytes as usize => {
                        events.push(Event::Arrived { peer, key: landing.key });
                    }
                    _ => {
                        let cause = format!(
                            "protocol error: {bytes} bytes for landing area {immediate}, which it was not offered"
                        );
                        return self.lose(peer, cause, events);
                    }
                }
                self.receive_again(peer, place, completion.id, events);
            }
            Outcome::Failed { status, vendor } => {
                let Choice { device, port, gid, .. } = &self.rails[rail].choice;
                let gid = std::net::Ipv6Addr::from(*gid);
                let cause = format!(
                    "{} (status {status}, vendor error {vendor:#x}) on {device} port {port}, GID {gid}",
                    explain(status)
                );
                self.lose(peer, cause, events);
            }
        }
    }

    fn receive_again(&mut self, peer: usize, place: usize, id: u64, events: &mut Vec<Event>) {
        let piece = (place == URGENT).then(|| self.frames.piece((id & !RECEIVE) as usize));
        let Some(channel) = self.channel(peer, place) else { return };
        // SAFETY: the completion of this receive has been seen, and its message taken out: the buffer is free again.
        if let Err(error) = unsafe { channel.pair.receive(id, piece) } {
            self.lose(peer, error.to_string(), events);
        }
    }

    /// The peer's stream has something: it can only be its end.
    fn listen(&mut self, peer: usize, events: &mut Vec<Event>) -> Result<()> {
        let Some(stream) = &self.peers[peer].stream else { return Ok(()) };
        let mut byte = [0];
        let cause = match rustix::io::read(stream, &mut byte) {
            Ok(0) => "connection closed".into(),
            Ok(_) => "protocol error: it sent something beside its queue pairs".into(),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(()),
            Err(errno) => errno.to_string(),
        };
        // What it sent before it went is there already.
        self.drain(events)?;
        if self.peers[peer].state == State::Connected {
            self.lose(peer, cause, events);
        } else {
            self.disconnect(peer);
        }
        Ok(())
    }

    fn device_event(&mut self, rail: usize, events: &mut Vec<Event>) -> Result<()> {
        let Rail { context, choice, .. } = &self.rails[rail];
        let (context, name) = (context.clone(), choice.device.clone());
        while let Some(event) = context.next_event().map_err(|error| Error::system("verbs", error))? {
            match event {
                AsyncEvent::PortDown(port) => log::warn!("verbs: {name} port {port} is down"),
                AsyncEvent::PortActive(port) => log::info!("verbs: {name} port {port} is active"),
                AsyncEvent::QueuePair(number) => {
                    self.drain(events)?; // its requests say more
                    if let Some(&(peer, _)) = self.rails[rail].numbers.get(&number) {
                        self.lose(peer, format!("the queue pair for it on {name} failed"), events);
                    }
                }
                AsyncEvent::Device => {
                    return Err(Error::system("verbs", format!("the device {name} has failed")));
                }
                AsyncEvent::Other(_) => {}
            }
        }
        Ok(())
    }

    /// From now on completions end a wait. Those that came before that do not, and are taken in; were there any?
    fn arm(&mut self, events: &mut Vec<Event>) -> Result<bool> {
        let armed = self.rails.iter().try_for_each(|rail| rail.queue.arm());
        armed.map_err(|error| Error::system("verbs", error))?;
        self.drain(events)
    }

    /// Waits up to `wait` for completions, streams, or the waker; returns whether the waker was used.
    pub(super) fn turn(&mut self, wait: Duration, events: &mut Vec<Event>) -> Result<bool> {
        let start = Instant::now();
        while !wait.is_zero() && start.elapsed() < SPIN {
            if self.drain(events)? {
                return Ok(false);
            }
        }
        let system = |error| Error::system("verbs", error);
        let wait = if self.arm(events)? { Duration::ZERO } else { wait.saturating_sub(start.elapsed()) };
        let mut ready = Vec::new();
        let woken = self
            .poller
            .wait(wait, |Ready { index, .. }| ready.push(index))
            .map_err(|cause| Error::system("verbs: epoll_wait", cause))?;
        for index in ready {
            match (index.checked_sub(CHANNEL), index.checked_sub(DEVICE)) {
                (Some(rail), _) => self.rails[rail].queue.acknowledge().map_err(system)?,
                (_, Some(rail)) => self.device_event(rail, events)?,
                _ => self.listen(index, events)?,
            }
        }
        self.drain(events)?;
        Ok(woken)
    }
}

impl Waitable for Verbs {
    fn signal(&self) -> BorrowedFd<'_> {
        self.poller.signal()
    }

    fn before_wait(&mut self) -> Result<Option<Instant>> {
        let mut events = std::mem::take(&mut self.backlog);
        let any = self.arm(&mut events);
        self.backlog = events;
        any.map(|any| (any || !self.backlog.is_empty()).then(Instant::now))
    }
}
