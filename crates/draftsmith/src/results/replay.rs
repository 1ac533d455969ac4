//! What replay found: `replay.json`, with groups, each of one drafter, one way of decoding and one
//! set of costs, and how good the acceptance head's predictions are.
//!
//! Every rule's setting is chosen on validation prompts and judged on test prompts. Times are
//! modelled: counts of the replayed rounds times the costs, prefill left out.

use draftsmith_model::WeightDtype;
use draftsmith_theory::{
    Calibration, CostModel, HeadScores, LookupFirst, ReliabilityBin, StopRuleConfig, StopRuleName,
    TreeShape,
};
use serde::{Deserialize, Serialize};

use crate::names::{CostSource, DecodingName, DrafterName, rule_label};
use crate::statistics::Estimate;

/// All that replay found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Replay {
    /// Rules under each drafter, way of decoding and set of costs.
    pub(crate) groups: Vec<ReplayGroup>,
    /// The head's predictions under each way of decoding; none without a head.
    pub(crate) predictions: Vec<HeadPredictions>,
    /// What the models computed in whose rollouts these are.
    #[serde(default, skip_serializing_if = "WeightDtype::is_f32")]
    pub(crate) dtype: WeightDtype,
}

/// How good an acceptance head's predictions are on the test prompts, before and after calibration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct HeadPredictions {
    /// What proposes the candidates.
    pub(crate) drafter: DrafterName,
    /// How tokens are chosen.
    pub(crate) decoding: DecodingName,
    /// The calibration that is in the export, with its scores on the prompts that it was fitted to;
    /// null where there is none.
    pub(crate) calibration: Option<FittedCalibration>,
    /// Prompts that predictions are judged on.
    pub(crate) num_test_prompts: usize,
    /// As the head says them.
    pub(crate) before: JudgedHead,
    /// Calibrated; null where there is no calibration.
    pub(crate) after: Option<JudgedHead>,
}

/// Predictions beside what came of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JudgedHead {
    /// All of them together.
    pub(crate) scores: HeadScores,
    /// Bin by bin, by ascending prediction.
    pub(crate) bins: Vec<ReliabilityBin>,
}

/// One drafter under one way of decoding and one set of costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayGroup {
    /// What proposes candidates.
    pub(crate) drafter: DrafterName,
    /// How tokens are chosen.
    pub(crate) decoding: DecodingName,
    /// Whose costs these are.
    pub(crate) cost_source: CostSource,
    /// Seconds a draft forward, a target forward and a verified row take, for rules that read
    /// nothing; rows on average.
    pub(crate) costs: CostModel,
    /// Prompts the settings were chosen on.
    pub(crate) num_validation_prompts: usize,
    /// Prompts the rows are about.
    pub(crate) num_test_prompts: usize,
    /// Tokens of their responses.
    pub(crate) num_test_tokens: usize,
    /// One a rule, in the order of their names; the best fixed length among them.
    pub(crate) rows: Vec<ReplayRow>,
    /// What a rule could gain that knew the answers (Lemma 2.1); greedy only.
    pub(crate) oracle: Option<Estimate>,
    /// The static tree that was fastest on validation prompts, where the recipe leaves one open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tree: Option<ReplayedTree>,
}

/// A static tree on the test prompts, with a chain as long as it is deep.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayedTree {
    /// Its shape.
    pub(crate) shape: TreeShape,
    /// Its depth.
    pub(crate) candidate_length: usize,
    /// Of how many it was the fastest.
    pub(crate) num_tried: usize,
    /// Modelled speed over the target alone.
    pub(crate) speedup: Estimate,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: Estimate,
    /// Target forwards a token.
    pub(crate) verification_rate: f64,
    /// Discarded candidates a token.
    pub(crate) discard_rate: f64,
}

/// A rule at the setting that was best on validation prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayRow {
    /// What is looked up before the drafter is asked; nothing if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lookup_first: Option<LookupFirst>,
    /// The rule.
    pub(crate) stop_rule: StopRuleName,
    /// Its settings.
    pub(crate) config: StopRuleConfig,
    /// Modelled speed over the target alone, on the test prompts.
    pub(crate) speedup: Estimate,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: Estimate,
    /// Target forwards a token.
    pub(crate) verification_rate: f64,
    /// Discarded candidates a token.
    pub(crate) discard_rate: f64,
    /// Of a rule that reads an acceptance head: the gain over the best fixed length with a perfect
    /// one, at the setting that is best for that on validation prompts.
    pub(crate) ceiling: Option<Estimate>,
    /// `gain` over `ceiling`; none where the ceiling may be nothing.
    pub(crate) share_of_ceiling: Option<Estimate>,
}

impl ReplayRow {
    /// Whether it is the best fixed length, which the others are held against.
    pub(crate) fn is_best_fixed(&self) -> bool {
        self.stop_rule == StopRuleName::FixedLength && self.lookup_first.is_none()
    }

    /// What it is called: `K = 4`, `lookup 2x4, eta = 0.6`.
    pub(crate) fn label(&self) -> String {
        rule_label(self.lookup_first, &self.config)
    }
}

/// A calibration, and the scores of the predictions without and with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FittedCalibration {
    /// Maps the head's prediction to an acceptance probability.
    pub(crate) map: Calibration,
    /// The number of prompts in the fit; the turns of a conversation count as one.
    pub(crate) num_prompts: usize,
    /// Scores of the uncalibrated predictions on these prompts.
    pub(crate) before: HeadScores,
    /// Cross-validated scores of calibrated predictions: each map was fitted without its prompt.
    pub(crate) after: HeadScores,
}
