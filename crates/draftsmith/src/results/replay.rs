//! What replay found: `replay.json`, with groups, each of one drafter, one way of decoding and one
//! set of costs, and how good the acceptance head's predictions are.
//!
//! Every rule's setting is chosen on validation prompts and judged on test prompts. Times are
//! modelled: counts of the replayed rounds times the costs, prefill left out.

use draftsmith_model::WeightDtype;
use draftsmith_theory::{
    Calibration, CostModel, HeadScores, LookupFirst, ReliabilityBin, StopRuleConfig, StopRuleName,
    TreeShape, expected_walltime_improvement,
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
    /// What independent acceptance would give; null where nothing was drafted, and in files older
    /// than the key.
    #[serde(default)]
    pub(crate) closed_form: Option<ClosedForm>,
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

/// Speed over the target alone at fixed lengths, if every candidate were accepted with the same
/// chance, whatever the others: EWIF, the expected walltime improvement factor (Leviathan et al.,
/// Theorem 3.8). What replay finds beyond it, or short of it, is what acceptance depends on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClosedForm {
    /// The share of the test responses' tokens that the drafter drafts and the target accepts.
    pub(crate) acceptance_prob: f64,
    /// EWIF at the fixed length among the rules.
    pub(crate) ewif: f64,
    /// The fixed length of greatest EWIF.
    pub(crate) best_candidate_length: usize,
    /// EWIF there.
    pub(crate) best_ewif: f64,
}

impl ClosedForm {
    /// What is expected at `candidate_length`, and at the best length up to `max_length`. The
    /// theorem takes rows for nothing; here a candidate costs its row too.
    pub(crate) fn new(
        acceptance_prob: f64,
        candidate_length: usize,
        max_length: usize,
        costs: &CostModel,
    ) -> Self {
        let CostModel { draft_seconds, target_seconds, row_seconds } = *costs;
        let cost_ratio = (draft_seconds + row_seconds) / (target_seconds + row_seconds);
        let ewif = |length| expected_walltime_improvement(acceptance_prob, length, cost_ratio);
        let best = (1..=max_length).max_by(|one, other| ewif(*one).total_cmp(&ewif(*other)));
        let best_candidate_length = best.unwrap_or(candidate_length);
        Self {
            acceptance_prob,
            ewif: ewif(candidate_length),
            best_candidate_length,
            best_ewif: ewif(best_candidate_length),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closed_form_is_the_geometric_sum_over_what_a_round_costs() {
        let close =
            |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12, "{found}");
        let free_rows = CostModel { draft_seconds: 0.1, target_seconds: 1.0, row_seconds: 0.0 };
        let half = ClosedForm::new(0.5, 1, 8, &free_rows);
        // 1.5 / 1.1, then 1.75 / 1.2 = 1.458, 1.875 / 1.3 = 1.442, falling.
        close(half.ewif, 1.5 / 1.1);
        assert_eq!(half.best_candidate_length, 2);
        close(half.best_ewif, 1.75 / 1.2);
        let dear_rows = CostModel { draft_seconds: 0.1, target_seconds: 0.75, row_seconds: 0.25 };
        let half = ClosedForm::new(0.5, 2, 8, &dear_rows);
        // A round of K costs 1 + 0.35·K of what plain decoding's token costs.
        close(half.ewif, 1.75 / 1.7);
        assert_eq!(half.best_candidate_length, 1);
    }
}
