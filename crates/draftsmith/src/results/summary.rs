//! `summary.json`: program, machine, models, prompts and cost models that belong to the rows of
//! `results.json`.
//!
//! This file owns the schema and its text. Who fills it in is the `evaluate` command's business.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Decoding, Fit};
use serde::{Deserialize, Serialize};

use super::{
    DecodingName, DrafterName, Estimate, Group, StopRuleName, finite_or_null, temperature,
};

/// What the rows were measured with: `summary.json`, beside `results.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct EvaluationSummary {
    /// The recipe's name.
    pub(crate) recipe: String,
    /// The version of this program.
    pub(crate) version: String,
    /// Where it computed: `cpu`, `cuda:0`.
    pub(crate) device: String,
    /// In what; f32 in files older than the key.
    #[serde(default)]
    pub(crate) dtype: WeightDtype,
    /// The machine, in words: processor, cores, memory, operating system.
    pub(crate) machine: String,
    /// Libraries and drivers with their versions, in the order to be shown.
    pub(crate) versions: Vec<Version>,
    /// Target, draft, head, adapters: in that order.
    pub(crate) models: Vec<ModelSummary>,
    /// The most tokens an answer may have.
    pub(crate) max_new_tokens: usize,
    /// How many prompts were answered side by side; 1 in files older than the key.
    #[serde(default = "one_at_a_time")]
    pub(crate) batch_size: usize,
    /// The seeds of all draws.
    pub(crate) seeds: Vec<u64>,
    /// The prompts.
    pub(crate) datasets: Vec<DatasetSummary>,
    /// One for each dataset and way of decoding.
    pub(crate) groups: Vec<GroupSummary>,
}

fn one_at_a_time() -> usize {
    1
}

/// A library or driver and its version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Version {
    /// What it is.
    pub(crate) name: String,
    /// Which one.
    pub(crate) version: String,
}

/// A model, head or adapter: what it is and where it came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelSummary {
    /// `target`, `draft`, `head`, `adapter`.
    pub(crate) role: String,
    /// Its name, as the recipe gives it.
    pub(crate) name: String,
    /// Architecture, layers, sizes, parameters, in words.
    pub(crate) description: String,
    /// The hash of its files; empty where it has none of its own.
    pub(crate) hash: String,
}

/// A set of prompts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DatasetSummary {
    /// The prompt file's name, as in the rows.
    pub(crate) name: String,
    /// How many prompts were answered.
    pub(crate) num_prompts: usize,
}

/// What belongs to one dataset under one way of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupSummary {
    /// The dataset, as in the rows.
    pub(crate) dataset: String,
    /// How tokens were chosen, with all sampling settings.
    pub(crate) decoding: Decoding,
    /// Mismatches with plain greedy decoding forgiven because both tokens' logits were the greatest
    /// there but for rounding, all settings together; 0 for sampled decoding.
    pub(crate) num_forgiven_ties: usize,
    /// The fitted cost models, in the drafters' order; none of a drafter where it could not be
    /// fitted.
    pub(crate) costs: Vec<CostSummary>,
    /// What tuning promised, and what came of it. Empty in files older than the key.
    #[serde(default)]
    pub(crate) promises: Vec<PromiseSummary>,
}

/// A tuned rule's gain over the best fixed length, as tuning promised it and as it was measured,
/// prefill left out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct PromiseSummary {
    /// What drafts.
    pub(crate) drafter: DrafterName,
    /// The tuned rule.
    pub(crate) stop_rule: StopRuleName,
    /// The fixed length it is compared with.
    pub(crate) best_fixed_length: usize,
    /// The promise, from the replay of validation prompts.
    pub(crate) expected_gain: Estimate,
    /// What these prompts gave.
    pub(crate) measured_gain: Estimate,
    /// Whether the gain is at least the promised one, or differs from it by no more than both
    /// intervals allow.
    pub(crate) holds: bool,
}

/// A fitted cost model and how well it fits, over the target alone and all settings of a drafter
/// pooled: a draft forward of another drafter takes another time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct CostSummary {
    /// What drafted.
    pub(crate) drafter: DrafterName,
    /// t_draft.
    pub(crate) draft_seconds: f64,
    /// t_target.
    pub(crate) target_seconds: f64,
    /// t_row; null where it cannot be told from the other two, and is part of both.
    pub(crate) row_seconds: Option<f64>,
    /// Centred R².
    #[serde(with = "finite_or_null")]
    pub(crate) r_squared: f64,
    /// Mean relative error of a prompt's time.
    #[serde(with = "finite_or_null")]
    pub(crate) mean_relative_error: f64,
    /// Greatest relative error of a prompt's time.
    #[serde(with = "finite_or_null")]
    pub(crate) max_relative_error: f64,
}

impl CostSummary {
    /// What `fit`, over the settings of `drafter`, says.
    pub(crate) fn new(drafter: DrafterName, fit: &Fit) -> Self {
        Self {
            drafter,
            draft_seconds: fit.model.draft_seconds,
            target_seconds: fit.model.target_seconds,
            row_seconds: fit.rows_separable.then_some(fit.model.row_seconds),
            r_squared: fit.r_squared,
            mean_relative_error: fit.mean_relative_error,
            max_relative_error: fit.max_relative_error,
        }
    }
}

impl GroupSummary {
    /// The drafter's fitted cost model.
    pub(crate) fn cost_of(&self, drafter: DrafterName) -> Option<&CostSummary> {
        self.costs.iter().find(|cost| cost.drafter == drafter)
    }
}

impl EvaluationSummary {
    /// What is known of a group of rows.
    pub(crate) fn group(&self, group: &Group<'_>) -> Option<&GroupSummary> {
        self.groups.iter().find(|summary| {
            summary.dataset == group.dataset
                && DecodingName::of(&summary.decoding) == group.decoding
                && temperature(&summary.decoding) == group.temperature
        })
    }
}

/// The text of `summary.json`.
///
/// # Errors
/// None that numbers and strings can cause.
pub(crate) fn summary_to_json(summary: &EvaluationSummary) -> Result<String> {
    Ok(serde_json::to_string_pretty(summary)? + "\n")
}
