//! wip
use std::time::Duration;
pub const INTERVAL: Duration = Duration::from_millis(4);
#[derive(Default)]
pub struct Pacer {}
