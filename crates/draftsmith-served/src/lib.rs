//! Targets that servers run: their responses, requested over HTTP, kept in journals and looked up.
//!
//! ```ignore
//! let mut served = Served::open(&server, Secret::default(), target, &dir.join("served.jsonl"))?;
//! served.answer(prompts, |prompt, texts| next_turn(prompt, texts), &listener)?;
//! let ServedResponse { ids, finish, probs } = served.response(&id, &prompt_ids)?;
//! ```
//!
//! This crate sees token ids, texts and log-probabilities: no tensors, models or arguments. It prints
//! nothing; a [`Listener`] shows what happens and says when to stop.

mod client;
mod error;
mod journal;
mod known;
#[cfg(test)]
pub mod loopback;
mod protocol;
#[doc(hidden)]
pub mod readers;
mod reply;
mod response;
mod secret;
mod served;
mod settings;
#[cfg(test)]
mod tests;

pub use error::ServedError;
pub use secret::Secret;
pub use served::{Listener, Served, ServedResponse, ServedTurn, TargetSettings, Wait};
pub use settings::{ServerLabels, ServerRecipe};

/// Why locks are never poisoned.
const HELD: &str = "nobody panics while holding it";
