//! The table `[evaluate.max_gram]`: prompt lookup as a drafter without a model.

use std::path::PathBuf;

use anyhow::Result;
use draftsmith_theory::{MaxGramConfig, SearchedText};
use serde::{Deserialize, Serialize};

use super::require;

/// How prompt lookup is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct MaxGramRecipe {
    /// The most candidates per round; each length is measured.
    pub(crate) lengths: Vec<usize>,
    /// Text that is searched for the sequence's suffix.
    pub(crate) searched: SearchedText,
    /// The fewest tokens in a match.
    pub(crate) min_match: usize,
    /// A table of bigrams that continues rounds where lookup finds nothing more; none if absent.
    pub(crate) bigrams: Option<PathBuf>,
}

impl Default for MaxGramRecipe {
    fn default() -> Self {
        let MaxGramConfig { searched, min_match } = MaxGramConfig::default();
        // The paper's 10, and shorter ones for machines where verifying more rows takes longer.
        Self { lengths: vec![2, 4, 6, 10], searched, min_match, bigrams: None }
    }
}

impl MaxGramRecipe {
    /// The decoder's settings.
    pub(crate) fn config(&self) -> MaxGramConfig {
        MaxGramConfig { searched: self.searched, min_match: self.min_match }
    }

    pub(super) fn check(&self) -> Result<()> {
        require(
            !self.lengths.is_empty() && !self.lengths.contains(&0),
            "evaluate.max_gram.lengths",
            "is empty or has a 0: give numbers of candidates",
        )?;
        require(
            self.min_match > 0,
            "evaluate.max_gram.min_match",
            "is 0: a match has at least one token",
        )
    }
}
