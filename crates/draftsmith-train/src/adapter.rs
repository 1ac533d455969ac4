//! Self-draft adapters: their settings, what they learn from, and the training itself.
//!
//! The frozen target's hidden states at the exit layers and at the end make a batch (`batches`); the
//! learner holds what the adapter predicts against the target (`distillation`).

pub(crate) mod batches;
pub(crate) mod distillation;
pub(crate) mod learner;
pub(crate) mod rows;
pub(crate) mod scores;
pub(crate) mod settings;
pub(crate) mod stored;
pub(crate) mod train;
