//! Joining.
