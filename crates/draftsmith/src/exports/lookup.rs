//! Prompt lookup as a recipe or a flag asks for it.

use draftsmith_decode::DrafterParts;
use draftsmith_theory::MaxGramConfig;

/// What Max-Gram drafts with.
#[derive(Debug, Clone)]
pub(crate) struct Lookup {
    pub(crate) config: MaxGramConfig,
}

impl Lookup {
    /// The drafter's parts.
    pub(crate) fn parts(&self) -> DrafterParts<'_> {
        DrafterParts::MaxGram { config: self.config, bigrams: None }
    }
}
