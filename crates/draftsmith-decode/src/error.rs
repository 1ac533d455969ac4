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
    /// A token of the prompt is outside the model's vocabulary.
    #[error(
        "token id {id} is outside the {role}'s vocabulary of {vocab_size}: \
         the tokenizer does not belong to this model"
    )]
    UnknownToken {
        /// The token id.
        id: u32,
        /// The number of tokens in the model's vocabulary.
        vocab_size: usize,
        /// The model with that vocabulary, for example `target`.
        role: &'static str,
    },
    /// A model computed a logit that is NaN or +∞, or no finite logit for a token.
    #[error(
        "the {role}'s logits are not finite after {num_tokens} tokens: \
         its weights are broken, or too large for f32"
    )]
    NotFinite {
        /// The model, for example `draft` or `acceptance head`.
        role: &'static str,
        /// The number of tokens that the model had read.
        num_tokens: usize,
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
    /// The device failed to deliver a result.
    #[error("the device failed while it ran the {role}: {message}")]
    Device {
        /// The model that was running.
        role: &'static str,
        /// The device's message.
        message: String,
    },
}
