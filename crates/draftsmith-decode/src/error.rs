//! Errors of decoding.

use draftsmith_theory::DrafterId;

/// An error of decoding.
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
        /// The number of tokens that the context holds.
        context: usize,
        /// The model with that context: `target`, `draft` or `adapter`.
        role: &'static str,
    },
    /// The prompt has a token that the model has no embedding for.
    #[error(
        "token id {id} is outside the {role}'s vocabulary of {vocab_size}: \
         the tokenizer does not belong to this model"
    )]
    UnknownToken {
        /// The token.
        id: u32,
        /// The number of embeddings.
        vocab_size: usize,
        /// The model with that vocabulary.
        role: &'static str,
    },
    /// A model's logits make no distribution: one is NaN or +∞.
    #[error(
        "the {role}'s logits are not finite after {num_tokens} tokens: \
         its weights are broken, or too large for f32"
    )]
    NotFinite {
        /// The role of the model, such as `acceptance head`.
        role: &'static str,
        /// The number of tokens that it has read.
        num_tokens: usize,
    },
    /// A stop rule reads probabilities, but the drafter has none.
    #[error(
        "the stop rule reads probabilities, but the drafter `{drafter}` has none: end its rounds at \
         a fixed length"
    )]
    NoSignals {
        /// The drafter.
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
