//! The error type of this crate.

use draftsmith_theory::DrafterId;

/// An error while decoding or recording.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The prompt has no tokens.
    #[error(
        "the prompt has no tokens; give at least one (a beginning-of-sequence token is enough)"
    )]
    EmptyPrompt,
    /// The prompt leaves no room for a new token.
    #[error(
        "the prompt has {prompt} tokens, but the {role}'s context holds {context}: \
         shorten the prompt or use a model with a longer context"
    )]
    PromptTooLong {
        /// The number of tokens in the prompt.
        prompt: usize,
        /// The context length of the model's cache, in tokens.
        context: usize,
        /// The model with that context, for example `target`, `draft` or `adapter`.
        role: &'static str,
    },
    /// The stop rule reads draft probabilities, but the drafter provides none.
    #[error(
        "the stop rule reads probabilities, but the drafter `{drafter}` has none: end its rounds at \
         a fixed length"
    )]
    NoSignals {
        /// The drafter's name.
        drafter: DrafterId,
    },
    /// Any other problem: an unknown token, logits that are not finite, or a device that failed.
    #[error("{0}")]
    Invalid(String),
}

/// The result type of this crate's functions.
pub(crate) type Result<T, E = DecodeError> = std::result::Result<T, E>;
