//! The table `[evaluate.max_gram]`: prompt lookup beside the drafters that have models.

use std::path::PathBuf;

use anyhow::Result;
use draftsmith_theory::{MaxGramConfig, SearchedText};
use serde::{Deserialize, Serialize};

use super::checks::require;

/// How prompt lookup is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MaxGramRecipe {
    /// The most candidates a round, each measured.
    #[serde(default = "default_lengths")]
    pub(crate) lengths: Vec<usize>,
    /// Where the sequence's suffix is looked for.
    #[serde(default)]
    pub(crate) searched: SearchedText,
    /// The fewest tokens of a match.
    #[serde(default = "default_min_match")]
    pub(crate) min_match: usize,
    /// A table of bigrams that fills up rounds where a look-up says nothing more; none if absent.
    #[serde(default)]
    pub(crate) bigrams: Option<PathBuf>,
}

impl MaxGramRecipe {
    /// How sequences are looked up.
    pub(crate) fn config(&self) -> MaxGramConfig {
        MaxGramConfig { searched: self.searched, min_match: self.min_match }
    }

    pub(super) fn check(&self) -> Result<()> {
        require(
            !self.lengths.is_empty() && !self.lengths.contains(&0),
            "evaluate.max_gram.lengths",
            "is empty or has a 0: name numbers of candidates",
        )?;
        require(
            self.min_match > 0,
            "evaluate.max_gram.min_match",
            "is 0: a match has a token at least",
        )
    }
}

/// The paper's 10, and shorter ones for machines on which a row more costs something.
fn default_lengths() -> Vec<usize> {
    vec![2, 4, 6, 10]
}

/// The paper's.
fn default_min_match() -> usize {
    1
}
