//! Responses of a target model that runs on inference servers, and its hidden states. Responses are
//! requested over HTTP and kept in a journal file.
//!
//! ```no_run
//! use draftsmith_served::{
//!     Listener, Secret, Served, ServedError, ServedTurn, ServerHints, ServerRecipe, TargetSettings,
//! };
//!
//! fn ask(target: TargetSettings, listener: &impl Listener) -> Result<(), ServedError> {
//!     let server = ServerRecipe {
//!         urls: vec!["http://localhost:8000/v1".to_owned()],
//!         model: "org/target".to_owned(),
//!         ..ServerRecipe::default()
//!     };
//!     let (token, hints) = (Secret::default(), ServerHints::OF_RECIPE);
//!     let mut served = Served::open(&server, token, target, "served.jsonl".as_ref(), hints)?;
//!     let (id, prompt_ids) = ("prompts#0".to_owned(), vec![0, 17, 42]);
//!     let turn = ServedTurn { id: id.clone(), prompt_ids: prompt_ids.clone() };
//!     // A conversation's next turn after the given answers; here there is only one.
//!     let next = |turn: &ServedTurn, answers: &[String]| Ok(answers.is_empty().then(|| turn.clone()));
//!     served.answer([Ok::<_, ServedError>(turn)], next, listener)?;
//!     println!("{:?}", served.response(&id, &prompt_ids)?.ids);
//!     Ok(())
//! }
//! ```
//!
//! This crate handles token ids, texts and log-probabilities, but no tensors, models or
//! command-line arguments. It prints nothing: the caller's [`Listener`] reports progress and can
//! stop the work.

mod client;
mod completer;
mod error;
mod http;
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
mod states;
mod states_file;
#[cfg(test)]
mod tests;
mod threads;

pub use completer::{Completed, Completer, CompletionAsk, NUM_LOG_PROBS};
pub(crate) use error::Result;
pub use error::ServedError;
pub use http::Endpoint;
pub use secret::Secret;
pub use served::{Listener, Served, ServedResponse, ServedTurn, TargetSettings, Wait};
pub use settings::{
    KeptIn, ServerHints, ServerLabels, ServerRecipe, StatesRecipe, check_given_url,
};
pub use states::{ServedStates, StatesAsk, StatesClient};
pub use states_file::StatesDtype;
pub use threads::side_by_side;

/// The message of `expect` for locks, which are never poisoned.
const HELD: &str = "nobody panics while holding it";
