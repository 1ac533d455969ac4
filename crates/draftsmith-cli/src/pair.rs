//! A target and, if there is one, its draft, with the text side they share.

use draftsmith_model::CausalLm;

use crate::text_side::TextSide;

/// A target with an optional draft. Clones of models share weights with the workspace.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) target: CausalLm,
    pub(crate) draft: Option<CausalLm>,
    pub(crate) text: TextSide,
}

impl Pair {
    /// The same target with another draft.
    pub(crate) fn with_draft(&self, draft: CausalLm) -> Self {
        let context = self.target.shape().context.min(draft.shape().context);
        let text = TextSide { context, ..self.text.clone() };
        Self { target: self.target.clone(), draft: Some(draft), text }
    }
}
