//! The outcome of training heads, for `--json`, stdout and `sweep.json`.

use std::path::PathBuf;

use anyhow::Result;
use draftsmith_model::AcceptanceHeadConfig;
use draftsmith_report::{LogLosses, SweptHead, wrapped};
use draftsmith_theory::HeadScores;
use serde::Serialize;

use super::export_job::Exported;
use crate::console::Console;

/// A drafter's head after training, for `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct HeadOutcome {
    /// The head's directory.
    pub(crate) head_dir: PathBuf,
    /// Whether it existed already, trained with the same settings on the same data.
    pub(crate) kept: bool,
    /// Its scores on the validation rows.
    pub(crate) scores: HeadScores,
    /// Labels per second of its training run, which may have trained other heads too; null if it was kept.
    pub(crate) labels_per_second: Option<f64>,
    /// How well it predicts beside vLLM's online estimator, on held-out responses; null if its labels were not
    /// recorded from rollouts.
    pub(crate) over_online: Option<LogLosses>,
    /// All heads of the sweep, including this one, which is the best; null without a sweep.
    pub(crate) sweep: Option<Vec<SweptHead>>,
}

/// A head on disk.
pub(crate) type ExportedHead = Exported<AcceptanceHeadConfig, HeadScores>;

impl HeadOutcome {
    pub(crate) fn of(head: ExportedHead, sweep: Option<Vec<SweptHead>>) -> Self {
        Self {
            head_dir: head.dir,
            kept: head.speed.is_none(),
            scores: head.scores,
            labels_per_second: head.speed.map(|speed| speed.supervised_per_second),
            over_online: None,
            sweep,
        }
    }

    /// Prints its scores.
    pub(crate) fn print(&self, console: &Console) -> Result<()> {
        let scores = &self.scores;
        console.text(format!(
            "head: {}\nvalidation over {} labels: KL {:.4}, BCE {:.4}, AUROC {}, Brier {:.4}, ECE \
             {:.4} (mean label {:.3}, mean prediction {:.3})\n",
            self.head_dir.display(),
            scores.num_labels,
            scores.kl,
            scores.bce,
            scores.auroc.map_or_else(|| "-".to_owned(), |auroc| format!("{auroc:.4}")),
            scores.brier,
            scores.ece,
            scores.mean_label,
            scores.mean_predicted,
        ))?;
        let Some(losses) = &self.over_online else { return Ok(()) };
        let verdict = match losses.pays() {
            true => {
                "predicts better than vLLM's online estimator, which needs no training; `draftsmith tune` compares \
                     their speed"
            }
            false => {
                "does not predict better than vLLM's online estimator, which needs no training: serve without it"
            }
        };
        let text = format!("On held-out responses the head {verdict}. {}.", losses.text());
        console.text(wrapped(&text, console.width()).join("\n") + "\n")
    }
}
