//! A target and, if there is one, its draft, with the text side they share.

use draftsmith_model::CausalLm;

use crate::text_side::TextSide;

/// A target with an optional draft. Clones of models share weights with the workspace.
#[derive(Debug)]
pub struct Pair {
    /// The target.
    pub target: CausalLm,
    /// The draft, if there is one.
    pub draft: Option<CausalLm>,
    /// Tokenizer, chat template and what ends answers.
    pub text: TextSide,
}

/// The models that label responses.
#[derive(Clone, Copy)]
pub struct LabelModels<'m> {
    /// The target; `None` if servers run it.
    pub target: Option<&'m CausalLm>,
    /// The draft, if there is one.
    pub draft: Option<&'m CausalLm>,
    /// The longest sequence, in tokens, that both can read.
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
