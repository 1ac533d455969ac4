//! Prompt lookup as a recipe or a flag asks for it.

use std::path::Path;

use anyhow::Result;
use draftsmith_decode::DrafterParts;
use draftsmith_theory::{Bigrams, MaxGramConfig};

use super::bigrams::read_bigrams;
use crate::recipe::{EvaluateRecipe, MaxGramRecipe};
use crate::workspace::Workspace;

/// What Max-Gram drafts with.
#[derive(Debug, Clone)]
pub(crate) struct Lookup {
    config: MaxGramConfig,
    /// What goes on where a look-up does not.
    bigrams: Option<Bigrams>,
}

impl Lookup {
    /// That of a recipe that has a cascade, or asks for prompt lookup.
    ///
    /// # Errors
    /// As [`Lookup::read`].
    pub(crate) fn of_recipe(evaluate: &EvaluateRecipe, workspace: &Workspace) -> Result<Self> {
        let keys = evaluate.max_gram.as_ref();
        let config = keys.map(MaxGramRecipe::config).unwrap_or_default();
        Self::read(config, keys.and_then(|keys| keys.bigrams.as_deref()), workspace)
    }

    /// Sequences are looked up so, and rounds filled up from the table of bigrams in a file, if one is
    /// named.
    ///
    /// # Errors
    /// If that cannot be read, or is of another tokenizer.
    pub(crate) fn read(
        config: MaxGramConfig,
        bigrams: Option<&Path>,
        workspace: &Workspace,
    ) -> Result<Self> {
        let bigrams = bigrams.map(|path| read_bigrams(path, workspace)).transpose()?;
        Ok(Self { config, bigrams })
    }

    /// The drafter's parts.
    pub(crate) fn parts(&self) -> DrafterParts<'_> {
        DrafterParts::MaxGram { config: self.config, bigrams: self.bigrams.as_ref() }
    }
}
