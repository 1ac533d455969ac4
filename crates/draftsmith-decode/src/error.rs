//! What can go wrong while decoding.

use draftsmith_theory::DrafterId;

/// An error of decoding.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// There is nothing to continue.
    #[error("the prompt has no tokens; give at least one (a beginning-of-sequence token will do)")]
    EmptyPrompt,
    /// The prompt leaves no room for a new token.
    #[error(
        "the prompt has {prompt} tokens, but the {role}'s context holds {context}: \
         shorten the prompt or use a model with a longer context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens the context holds.
        context: usize,
        /// Whose context it is: `target`, `draft` or `adapter`.
        role: &'static str,
    },
    /// A prompt has a token that the model has no embedding for.
    #[error(
        "token id {id} is outside the {role}'s vocabulary of {vocab_size}: \
         the tokenizer does not belong to this model"
    )]
    UnknownToken {
        /// The token.
        id: u32,
        /// Embeddings the model has.
        vocab_size: usize,
        /// Whose vocabulary it is.
        role: &'static str,
    },
    /// A model's logits cannot be made into a distribution.
    #[error(
        "the {role}'s logits are not finite after {num_tokens} tokens: \
         its weights are broken, or too large for f32"
    )]
    NotFinite {
        /// Whose logits they are.
        role: &'static str,
        /// Tokens read.
        num_tokens: usize,
    },
    /// A stop rule reads of a drafter what it does not have.
    #[error(
        "the stop rule reads probabilities, which the drafter `{drafter}` does not have: end its \
         rounds at a fixed length"
    )]
    NoSignals {
        /// The drafter.
        drafter: DrafterId,
    },
    /// The device failed to deliver a result.
    #[error("the device failed while the {role} was run: {message}")]
    Device {
        /// Who was being run.
        role: &'static str,
        /// What the device said.
        message: String,
    },
}
