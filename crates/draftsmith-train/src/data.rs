//! From rows to steps: which rows make which batch, and the thread that prepares them.

pub(crate) mod batches;
pub(crate) mod split;
