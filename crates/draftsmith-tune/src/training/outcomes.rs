//! The results of trainings, as JSON (`--json`) and as text.

use std::path::PathBuf;

use anyhow::Result;
use draftsmith_recipe::kinds::TrainedText;
use draftsmith_report::{LogLosses, SweptHead};
use draftsmith_theory::{DrafterId, HeadScores};
use serde::Serialize;
use serde_json::{Map, Value};

use super::export_job::Exported;

/// The result of training a drafter's acceptance head, as in `--json`.
#[derive(Debug, Serialize)]
pub struct HeadOutcome {
    /// The head's directory.
    pub head_dir: PathBuf,
    /// Whether the head existed already, trained with the same settings on the same data.
    pub kept: bool,
    /// The head's scores on the validation rows.
    pub scores: HeadScores,
    /// The labels per second of the training run, which may have trained other heads too; null if
    /// the head was kept.
    pub labels_per_second: Option<f64>,
    /// The comparison of the head's predictions with vLLM's online estimator on held-out responses;
    /// null if the labels do not come from rollouts, or the head was kept and servers give the states.
    pub over_online: Option<LogLosses>,
    /// All heads of the sweep, including this one, which was chosen; null without a sweep.
    pub sweep: Option<Vec<SweptHead>>,
}

impl HeadOutcome {
    pub(super) fn of(head: Exported, sweep: Option<Vec<SweptHead>>) -> Result<Self> {
        Ok(Self {
            head_dir: head.dir,
            kept: head.speed.is_none(),
            scores: serde_json::from_value(head.scores)?,
            labels_per_second: head.speed.map(|speed| speed.supervised_per_second),
            over_online: None,
            sweep,
        })
    }

    /// Describes the head's directory and scores in two lines.
    pub fn text(&self) -> String {
        let scores = &self.scores;
        format!(
            "head: {}\nvalidation over {} labels: KL {:.4}, BCE {:.4}{}, Brier {:.4}, ECE \
             {:.4} (mean label {:.3}, mean prediction {:.3})",
            self.head_dir.display(),
            scores.num_labels,
            scores.kl,
            scores.bce,
            scores.auroc.map_or_else(String::new, |auroc| format!(", AUROC {auroc:.4}")),
            scores.brier,
            scores.ece,
            scores.mean_label,
            scores.mean_predicted,
        )
    }

    /// Describes the comparison with vLLM's online estimator; `None` without [`Self::over_online`].
    pub fn over_online_text(&self) -> Option<String> {
        let losses = self.over_online.as_ref()?;
        let verdict = match losses.pays() {
            true => {
                "predicts better than vLLM's online estimator, which needs no training; `draftsmith tune` compares \
                     their speed"
            }
            false => {
                "does not predict better than vLLM's online estimator, which needs no training"
            }
        };
        Some(format!("On held-out responses the head {verdict}. {}.", losses.text()))
    }
}

/// The result of training a drafter, as in `--json`.
#[derive(Debug, Serialize)]
pub struct DrafterOutcome {
    /// The drafter's name.
    pub drafter: DrafterId,
    /// The name of the drafter's kind.
    pub kind: &'static str,
    /// The drafter's directory.
    pub dir: PathBuf,
    /// The drafter's properties, which depend on its kind.
    #[serde(flatten)]
    pub properties: Map<String, Value>,
    /// Whether the drafter existed already, trained with the same settings on the same data.
    pub kept: bool,
    /// The drafter's scores on the validation rows.
    pub scores: Value,
    /// The supervised tokens per second of the training run; null if the drafter was kept.
    pub tokens_per_second: Option<f64>,
    /// The drafter's acceptance head; null if the recipe trains none.
    pub head: Option<HeadOutcome>,
    #[serde(skip)]
    text: String,
}

impl DrafterOutcome {
    pub(super) fn new(
        (drafter, kind): (DrafterId, &'static str),
        export: Exported,
        text: TrainedText,
    ) -> Self {
        let TrainedText { place, lines, properties, .. } = text;
        Self {
            text: format!("{drafter}, {place}: {}\n{lines}", export.dir.display()),
            drafter,
            kind,
            dir: export.dir,
            properties,
            kept: export.speed.is_none(),
            scores: export.scores,
            tokens_per_second: export.speed.map(|speed| speed.supervised_per_second),
            head: None,
        }
    }

    /// Describes the drafter, its directory and its scores in a few lines.
    pub fn text(&self) -> &str {
        &self.text
    }
}
