//! What an engine has after it has left its job: nothing that could reach anybody, or that anybody would have to close.

use super::{Event, LandingKey, Lane, RawSpan, Transport, Wake, WriteId};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// Drops what it is given.
pub struct Closed;

impl Wake for Closed {
    fn wake(&self) {}
}

impl Transport for Closed {
    fn name(&self) -> &'static str {
        "closed"
    }

    fn chunk_bytes(&self, _lane: Lane) -> usize {
        usize::MAX
    }

    fn expose(&mut self, _peer: usize, _lane: Lane, _landing: RawSpan) -> Result<LandingKey> {
        Err(Error::Closed("mdas has been shut down".into()))
    }

    fn discards(&self, _peer: usize) -> bool {
        true
    }

    fn withdraw(&mut self, _peer: usize, _key: LandingKey) {}

    fn control(&mut self, _peer: usize, _frame: &[u8]) {}

    fn write(&mut self, _peer: usize, _lane: Lane, _key: LandingKey, _source: RawSpan, _id: WriteId) {}

    fn cancel(&mut self, _which: &dyn Fn(WriteId) -> bool) -> Vec<WriteId> {
        Vec::new()
    }

    fn sever(&mut self, _peer: usize, _cause: &str) {}

    fn poll(&mut self, _wait: Duration, _events: &mut Vec<Event>) -> Result<()> {
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(Closed)
    }

    fn close(&mut self, _deadline: Duration) {}
}
