//! The outcome of training an EAGLE-3 drafter, for `--json` and stdout.

use std::path::PathBuf;

use anyhow::Result;
use draftsmith_model::{Eagle3Config, NUM_TARGET_STATES};
use draftsmith_theory::DrafterId;
use draftsmith_train::Eagle3Scores;
use serde::Serialize;

use super::export_job::Exported;
use super::head_outcome::HeadOutcome;
use crate::console::Console;

/// A drafter in the document of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Eagle3Outcome {
    /// The drafter's name.
    pub(crate) drafter: DrafterId,
    pub(crate) eagle3_dir: PathBuf,
    /// The numbers of the target's layers before the states that it reads.
    pub(crate) layers: [usize; NUM_TARGET_STATES],
    pub(crate) num_parameters: usize,
    /// The size of the draft vocabulary; null if it has all tokens.
    pub(crate) draft_vocabulary: Option<usize>,
    /// The share of the validation rows' response tokens in the draft vocabulary.
    pub(crate) vocabulary_coverage: Option<f64>,
    /// Whether the drafter existed, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: Eagle3Scores,
    /// Supervised tokens per second of its training; null if it was kept.
    pub(crate) tokens_per_second: Option<f64>,
    /// Its acceptance head; null if the recipe has none.
    pub(crate) head: Option<HeadOutcome>,
}

impl Eagle3Outcome {
    pub(crate) fn of(drafter: DrafterId, export: Exported<Eagle3Config, Eagle3Scores>) -> Self {
        let Exported { dir, config, scores, speed, .. } = export;
        Self {
            drafter,
            eagle3_dir: dir,
            layers: config.target_layers,
            num_parameters: config.num_parameters(),
            draft_vocabulary: config.draft_vocabulary.as_ref().map(|all| all.ids().len()),
            vocabulary_coverage: config.vocabulary_coverage(),
            kept: speed.is_none(),
            scores,
            tokens_per_second: speed.map(|speed| speed.supervised_per_second),
            head: None,
        }
    }

    /// Prints its scores.
    pub(crate) fn print(&self, console: &Console) -> Result<()> {
        let scores = &self.scores;
        let [low, middle, high] = self.layers;
        let vocabulary = match (self.draft_vocabulary, self.vocabulary_coverage) {
            (Some(size), Some(coverage)) => format!(
                ", drafting {size} tokens: {:.1} % of the validation responses'",
                coverage * 100.0
            ),
            _ => String::new(),
        };
        let shares = scores.agreement.as_slice().iter().map(|share| format!("{share:.3}"));
        let shares = shares.collect::<Vec<_>>().join(" ");
        console.text(format!(
            "{}, over layers {low}, {middle} and {high}: {}\n{} parameters{vocabulary}\nvalidation over {} \
             tokens: accepted length {:.3}, agreement by step {shares}, cross-entropy {:.4}, overlap {:.4}\n",
            self.drafter,
            self.eagle3_dir.display(),
            self.num_parameters,
            scores.num_tokens,
            scores.accepted_length,
            scores.cross_entropy,
            scores.overlap,
        ))?;
        self.head.as_ref().map_or(Ok(()), |head| head.print(console))
    }
}
