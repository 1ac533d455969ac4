//! A target and its optional draft model, with their shared tokenizer and chat template.

use draftsmith_model::CausalLm;

use crate::text_side::TextSide;

/// A target with an optional draft model. Clones of the models share weights with the workspace.
#[derive(Debug)]
pub struct Pair {
    /// The target model.
    pub target: CausalLm,
    /// The draft model, if there is one.
    pub draft: Option<CausalLm>,
    /// The tokenizer, the chat template, and the tokens and strings that end answers.
    pub text: TextSide,
}

/// The models that label responses.
#[derive(Clone, Copy)]
pub struct LabelModels<'m> {
    /// The target model; `None` if servers run it.
    pub target: Option<&'m CausalLm>,
    /// The draft model, if there is one.
    pub draft: Option<&'m CausalLm>,
    /// The longest sequence that both models can read, in tokens.
    pub context: usize,
    /// The target's vocabulary size.
    pub vocab_size: usize,
}

impl<'m> From<&'m Pair> for LabelModels<'m> {
    fn from(Pair { target, draft, text }: &'m Pair) -> Self {
        let vocab_size = target.shape().vocab_size;
        Self { target: Some(target), draft: draft.as_ref(), context: text.context, vocab_size }
    }
}
