//! The schema of `summary.json`, which describes the program, machine, models, prompts and cost
//! models of the rows in `results.json`. The `evaluate` command fills it in.

use std::path::Path;

use draftsmith_files::{parse_json, read_bytes};
use draftsmith_theory::{CostFit, Decoding, ModelSummary, Rounding, SignalNeeds};
use serde::{Deserialize, Serialize};

use super::{
    Conclusion, DecodingName, DrafterName, Estimate, Group, ResultRow, StopRuleName, groups,
    nan_if_null,
};
use crate::error::Result;

/// The share of processor time of other programs above which the order of close settings is doubtful.
pub const MAX_FOREIGN_LOAD: f64 = 0.1;

/// The content of `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluationSummary {
    /// The recipe's name.
    pub recipe: String,
    /// The conclusion: the settings to deploy, and reasons to doubt the measurements.
    pub conclusion: Conclusion,
    /// The version of this program.
    pub version: String,
    /// The device, such as `cpu` or `cuda:0`.
    pub device: String,
    /// The type that models compute in.
    pub dtype: Rounding,
    /// The machine in words, with processor, cores, memory and operating system.
    pub machine: String,
    /// The share of all processors that other programs used during the measurements that were kept,
    /// from 0 to 1. Null if unknown.
    pub foreign_load: Option<f64>,
    /// The versions of libraries and drivers, in display order.
    pub versions: Vec<Version>,
    /// The target, draft, head and adapters, in this order.
    pub models: Vec<ModelSummary>,
    /// The maximum number of tokens of an answer.
    pub max_new_tokens: usize,
    /// The number of prompts answered at the same time.
    pub batch_size: usize,
    /// The seeds of sampled decoding.
    pub seeds: Vec<u64>,
    /// The prompts.
    pub datasets: Vec<DatasetSummary>,
    /// An entry for each dataset and way of decoding.
    pub groups: Vec<GroupSummary>,
    /// The tables of papers that the recipe asks for.
    #[serde(default)]
    pub papers: Vec<FilledTable>,
}

impl EvaluationSummary {
    /// Reads the `summary.json` beside a `results.json`; `None` if there is none that this version
    /// can read.
    pub fn beside(results: &Path) -> Option<Self> {
        let path = results.with_file_name("summary.json");
        parse_json(&path, &read_bytes(&path).ok()?).ok()
    }

    /// Lists what makes speeds of two evaluations incomparable, in words: other targets, prompts, lengths, types or
    /// machines.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let target = |of: &Self| {
            let target = of.models.iter().find(|model| model.role == "target");
            target.map_or(String::new(), |model| format!("{} ({:.8})", model.name, model.hash))
        };
        let prompts = |of: &Self| {
            let each =
                of.datasets.iter().map(|set| format!("{} of `{}`", set.num_prompts, set.name));
            each.collect::<Vec<_>>().join(", ")
        };
        type Described = fn(&EvaluationSummary) -> String;
        let plain: [(&str, Described); 4] = [
            ("tokens an answer, at most", |of| of.max_new_tokens.to_string()),
            ("prompts side by side", |of| of.batch_size.to_string()),
            ("compute type", |of| format!("{:?}", of.dtype).to_lowercase()),
            ("machine", |of| format!("{}, {}", of.device, of.machine)),
        ];
        let plain = plain.map(|(what, describe)| (what, describe(self), describe(other)));
        let own =
            [("target", target(self), target(other)), ("prompts", prompts(self), prompts(other))];
        let all = own.into_iter().chain(plain).filter(|(_, one, other)| one != other);
        all.map(|(what, one, other)| format!("{what}: {one} and {other}")).collect()
    }
}

/// A table of a paper with its figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FilledTable {
    /// The title, as in [`PaperTable`](crate::PaperTable).
    pub title: String,
    /// The note, as in [`PaperTable`](crate::PaperTable).
    pub note: String,
    /// The measured figures, then the published ones.
    pub blocks: Vec<FilledBlock>,
    /// A sentence with the number of comparisons of two rows that come out as published, and the
    /// one that differs most. Empty if no two rows can be compared.
    pub trend: String,
}

/// The figures of one measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FilledBlock {
    /// The name of the measurement.
    pub name: String,
    /// Whether the figures are the paper's.
    pub is_published: bool,
    /// The names of columns.
    pub columns: Vec<String>,
    /// The rows.
    pub rows: Vec<FilledRow>,
}

/// A row of a [`FilledBlock`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FilledRow {
    /// The name of the row.
    pub name: String,
    /// The figures by column, with their 95 % intervals. Both ends equal the figure if it has no
    /// interval; null where there is no figure.
    pub figures: Vec<Option<Estimate>>,
}

/// A library or driver and its version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The name.
    pub name: String,
    /// The version.
    pub version: String,
}

/// A set of prompts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatasetSummary {
    /// The prompt file's name, as in the rows.
    pub name: String,
    /// The number of prompts.
    pub num_prompts: usize,
    /// The number of prompts that the recipe's training data was also built from, compared by
    /// content. Null if the recipe builds no data or its prompts cannot be read.
    pub num_in_data: Option<usize>,
}

/// A dataset under one way of decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GroupSummary {
    /// The dataset, as in the rows.
    pub dataset: String,
    /// The decoding, with all sampling settings.
    pub decoding: Decoding,
    /// The number of forgiven mismatches with plain greedy decoding, over all settings. In these,
    /// both tokens' logits were the largest up to rounding. 0 for sampled decoding.
    pub num_forgiven_ties: usize,
    /// The fitted cost models, in the order of drafters, without those that could not be fitted.
    pub costs: Vec<CostSummary>,
    /// The promised and measured gains of tuned rules.
    pub promises: Vec<PromiseSummary>,
}

/// The promised and measured gains of a tuned rule over the best fixed length, without prefill.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PromiseSummary {
    /// The drafter.
    pub drafter: DrafterName,
    /// The tuned rule.
    pub stop_rule: StopRuleName,
    /// The fixed length that the rule is compared with.
    pub best_fixed_length: usize,
    /// The gain in the replay of validation prompts.
    pub expected_gain: Estimate,
    /// The gain on the evaluated prompts.
    pub measured_gain: Estimate,
    /// Whether the promise was kept.
    pub outcome: PromiseOutcome,
}

/// Whether a promise was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromiseOutcome {
    /// The measured gain is at least the promised gain, or agrees with it within both intervals,
    /// and its interval excludes no gain.
    Held,
    /// The measured gain is smaller than the promised gain.
    NotHeld,
    /// The measured gain may be the promised one or none.
    TooUncertain,
}

impl PromiseOutcome {
    /// Compares a promised gain with a measured one.
    pub fn of(expected: &Estimate, measured: &Estimate) -> Self {
        let is_near = measured.value >= expected.value || measured.agrees_with(expected);
        // A promised gain is not kept by what may be none.
        let is_gain = measured.low > 0.0 || expected.value <= 0.0;
        match (is_near, is_gain) {
            (true, true) => Self::Held,
            (true, false) => Self::TooUncertain,
            (false, _) => Self::NotHeld,
        }
    }

    /// Returns the outcome in words, as in `too uncertain to tell`.
    pub fn text(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::NotHeld => "not held",
            Self::TooUncertain => "too uncertain to tell",
        }
    }
}

/// The signal that a stop rule reads, which a draft forward must compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuleReads {
    /// No signal, only the number of candidates.
    Nothing,
    /// A probability in the drafter's distribution.
    Probability,
    /// The entropy of the drafter's distribution.
    Entropy,
    /// The prediction of an acceptance head.
    Head,
    /// No rule, because the model decodes alone, without the other model.
    Alone,
}

impl RuleReads {
    /// Returns the signal that a rule with these needs reads. Among several signals the head comes
    /// first, then the entropy.
    pub fn of(needs: SignalNeeds) -> Self {
        match needs {
            SignalNeeds { acceptance_prob: true, .. } => Self::Head,
            SignalNeeds { entropy: true, .. } => Self::Entropy,
            needs if needs.is_nothing() => Self::Nothing,
            _ => Self::Probability,
        }
    }

    /// Returns the signal in words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Probability => "probabilities",
            Self::Entropy => "entropy",
            Self::Head => "the head",
            Self::Alone => "none: by itself",
        }
    }
}

/// The cost model fitted to plain decoding and the settings of one drafter, with its errors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CostSummary {
    /// The drafter.
    pub drafter: DrafterName,
    /// The signal that the rules of these settings read; null for all settings together.
    pub reads: Option<RuleReads>,
    /// t_draft: the seconds per draft forward; null for the target by itself.
    #[serde(deserialize_with = "nan_if_null")]
    pub draft_seconds: f64,
    /// t_target: the seconds per target forward; null for a draft by itself.
    #[serde(deserialize_with = "nan_if_null")]
    pub target_seconds: f64,
    /// t_row: the seconds per verified row; null if it cannot be separated from the other two.
    pub row_seconds: Option<f64>,
    /// The centred R² of the fit.
    #[serde(deserialize_with = "nan_if_null")]
    pub r_squared: f64,
    /// The mean relative error of a prompt's time.
    #[serde(deserialize_with = "nan_if_null")]
    pub mean_relative_error: f64,
    /// The maximum relative error of a prompt's time.
    #[serde(deserialize_with = "nan_if_null")]
    pub max_relative_error: f64,
}

impl CostSummary {
    /// Summarises `fit`, a cost model over the settings of `drafter` whose rules read `reads`, or
    /// over all settings of the drafter if `reads` is `None`.
    pub fn new(drafter: DrafterName, reads: Option<RuleReads>, fit: &CostFit) -> Self {
        Self {
            drafter,
            reads,
            draft_seconds: fit.model.draft_seconds,
            target_seconds: fit.model.target_seconds,
            row_seconds: fit.rows_separable.then_some(fit.model.row_seconds),
            r_squared: fit.r_squared,
            mean_relative_error: fit.mean_relative_error,
            max_relative_error: fit.max_relative_error,
        }
    }

    /// Summarises the seconds per forward of a model that decodes alone. The model is the draft, or
    /// the target if `drafter` is `None`.
    pub fn alone(drafter: DrafterName, seconds: f64) -> Self {
        let is_target = drafter == DrafterName::None;
        Self {
            drafter,
            reads: Some(RuleReads::Alone),
            draft_seconds: if is_target { f64::NAN } else { seconds },
            target_seconds: if is_target { seconds } else { f64::NAN },
            row_seconds: None,
            r_squared: f64::NAN,
            mean_relative_error: f64::NAN,
            max_relative_error: f64::NAN,
        }
    }
}

impl GroupSummary {
    /// Yields the cost models that cover all settings of a drafter.
    fn costs_of_all(&self) -> impl Iterator<Item = &CostSummary> {
        self.costs.iter().filter(|cost| cost.reads.is_none())
    }

    /// Returns the cost model fitted to all settings of the drafter.
    pub(crate) fn cost_of(&self, drafter: DrafterName) -> Option<&CostSummary> {
        self.costs_of_all().find(|cost| cost.drafter == drafter)
    }
}

impl EvaluationSummary {
    /// Returns the summary with the conclusion that follows from the rows.
    #[must_use]
    pub fn concluded(self, rows: &[ResultRow]) -> Self {
        let groups = groups(rows);
        Self { conclusion: Conclusion::of(&groups, self.doubts()), ..self }
    }

    /// Lists reasons to doubt the measurements, as sentences.
    fn doubts(&self) -> Vec<String> {
        let seen = self.datasets.iter().filter_map(|dataset| {
            let num = dataset.num_in_data.filter(|num| *num > 0)?;
            let DatasetSummary { name, num_prompts, .. } = dataset;
            Some(format!(
                "{num} of the {num_prompts} prompts of {name} are prompts that the training data was built \
                 from. Speeds on unseen prompts may be lower."
            ))
        });
        let load = self.foreign_load.filter(|load| *load > MAX_FOREIGN_LOAD).map(|load| {
            format!(
                "Other programs used {:.0} % of the processors while this ran. The speed-ups hold under such \
                 a load. On a quiet machine they may be others, and close settings in another order.",
                100.0 * load
            )
        });
        seen.chain(load).collect()
    }

    /// Returns the summary's entry for a group of rows.
    pub(crate) fn group(&self, group: &Group<'_>) -> Option<&GroupSummary> {
        self.groups.iter().find(|summary| {
            summary.dataset == group.dataset
                && DecodingName::of(&summary.decoding) == group.decoding
                && summary.decoding.sampling().temperature == group.temperature
        })
    }
}

/// Formats the text of `summary.json`.
///
/// # Errors
/// Never in practice, because a summary is always valid JSON.
pub fn summary_to_json(summary: &EvaluationSummary) -> Result<String> {
    Ok(serde_json::to_string_pretty(summary)? + "\n")
}
