//! Acceptance heads: their settings, what they learn from, and the training itself.
//!
//! A response becomes a mixture of the target's and the draft's tokens (`rows`) or the candidates
//! that rounds would meet (`recorded`); the frozen drafter turns it into features (`features`), the
//! loader into batches (`batches`), and the learner takes the loss over them.

pub(crate) mod batches;
pub(crate) mod features;
pub(crate) mod learner;
pub(crate) mod loss;
pub(crate) mod recorded;
pub(crate) mod rows;
pub(crate) mod settings;
pub(crate) mod stored;
pub(crate) mod sweep;
pub(crate) mod train;
