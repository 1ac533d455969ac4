//! The outcome of training an adapter, for `--json` and stdout.

use std::path::PathBuf;

use anyhow::Result;
use draftsmith_model::{AdapterArchitecture, AdapterConfig};
use draftsmith_theory::DrafterId;
use draftsmith_train::AdapterScores;
use serde::Serialize;

use super::export_job::Exported;
use super::head_outcome::HeadOutcome;
use crate::console::Console;

/// An adapter in the document of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct AdapterOutcome {
    /// The drafter's name.
    pub(crate) drafter: DrafterId,
    pub(crate) adapter_dir: PathBuf,
    /// The number of the target's layers that run before it.
    pub(crate) exit_layer: usize,
    pub(crate) architecture: AdapterArchitecture,
    pub(crate) num_parameters: usize,
    /// The size of the draft vocabulary; null if it has all tokens.
    pub(crate) draft_vocabulary: Option<usize>,
    /// The share of the validation rows' response tokens in the draft vocabulary.
    pub(crate) vocabulary_coverage: Option<f64>,
    /// Whether the adapter existed, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: AdapterScores,
    /// Supervised tokens per second of its training; null if it was kept.
    pub(crate) tokens_per_second: Option<f64>,
    /// Its acceptance head; null if the recipe has none.
    pub(crate) head: Option<HeadOutcome>,
}

impl AdapterOutcome {
    pub(crate) fn of(drafter: DrafterId, adapter: Exported<AdapterConfig, AdapterScores>) -> Self {
        Self {
            drafter,
            adapter_dir: adapter.dir,
            exit_layer: adapter.config.exit_layer,
            architecture: adapter.config.architecture,
            num_parameters: adapter.config.num_parameters(),
            draft_vocabulary: adapter.config.draft_vocabulary.as_ref().map(|all| all.ids().len()),
            vocabulary_coverage: adapter.config.vocabulary_coverage(),
            kept: adapter.speed.is_none(),
            scores: adapter.scores,
            tokens_per_second: adapter.speed.map(|speed| speed.supervised_per_second),
            head: None,
        }
    }

    /// Prints its scores and those of its head.
    pub(crate) fn print(&self, console: &Console) -> Result<()> {
        let scores = &self.scores;
        let vocabulary = match (self.draft_vocabulary, self.vocabulary_coverage) {
            (Some(size), Some(coverage)) => format!(
                ", drafting {size} tokens: {:.1} % of the validation responses', to which the scores \
                 are limited",
                coverage * 100.0
            ),
            _ => String::new(),
        };
        console.text(format!(
            "{}, behind layer {}: {}\n{}, {} parameters{vocabulary}\nvalidation over {} tokens: \
             cross-entropy {:.4} (the target's own {:.4}), agreement {:.4}, overlap {:.4}\n",
            self.drafter,
            self.exit_layer,
            self.adapter_dir.display(),
            self.architecture,
            self.num_parameters,
            scores.num_tokens,
            scores.cross_entropy,
            scores.target_entropy,
            scores.agreement,
            scores.overlap,
        ))?;
        self.head.as_ref().map_or(Ok(()), |head| head.print(console))
    }
}
