//! A record as it stands in a prompt file, before its keys are looked at.

use serde_json::Value;

use crate::error::Place;

/// The most bytes of a record: two million tokens, more than any model reads.
pub(super) const MOST_BYTES: usize = 8 << 20;

/// A record of a prompt file.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) place: Place,
    pub(super) value: Value,
    /// A key that a prompt could have stood under, and why it cannot be read.
    pub(super) unread: Option<(&'static str, String)>,
}
