//! The schema of `replay.json`: the results of stop rules in replay, and the quality of the
//! acceptance head's predictions.
//!
//! The setting of each rule is chosen on validation prompts and scored on test prompts. Times are
//! computed from the counts of the replayed rounds and the costs, without prefill.

use draftsmith_theory::{
    CostModel, CostSource, DecodingName, DrafterName, Estimate, HeadScores, LookupFirst,
    Recordings, ReliabilityBin, Road, Rounding, StopRuleConfig, StopRuleName, rule_label,
};
use serde::{Deserialize, Serialize};

use super::heads::HeadRace;
use crate::statistics::shown_interval;
use crate::text::{gain, interval, number, signed, speed_text};

/// The content of `replay.json`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replay {
    /// The results for each drafter, way of decoding and set of costs.
    pub groups: Vec<ReplayGroup>,
    /// The quality of the head's predictions under each way of decoding; empty without a head.
    pub predictions: Vec<HeadPredictions>,
    /// The heads of a sweep, compared by `tune`; null without a sweep.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<HeadRace>,
    /// The type that models computed in when rollouts were recorded.
    #[serde(default, skip_serializing_if = "Rounding::is_f32")]
    pub dtype: Rounding,
}

/// The quality of a head's predictions on test prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadPredictions {
    /// The drafter.
    pub drafter: DrafterName,
    /// The way of decoding: greedy or sampled.
    pub decoding: DecodingName,
    /// The number of test prompts.
    pub num_test_prompts: usize,
    /// The scores of all predictions.
    pub scores: HeadScores,
    /// The reliability bins, by ascending prediction.
    pub bins: Vec<ReliabilityBin>,
    /// A comparison of the head with an estimator that needs no training.
    pub over_online: HeadOverOnline,
}

/// The mean log-losses of a head and of vLLM's online estimator, in nats per candidate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogLosses {
    /// The head's log-loss.
    pub head: f64,
    /// The estimator's log-loss.
    pub online: f64,
    /// The estimator's log-loss minus the head's, which is positive if the head predicts better.
    /// The interval is over responses.
    pub gain: Estimate,
}

impl LogLosses {
    /// Returns whether the head predicts better, with the whole interval of the gain above 0.
    pub fn pays(&self) -> bool {
        self.gain.low > 0.0
    }

    /// Formats both log-losses and their difference.
    pub fn text(&self) -> String {
        format!(
            "Log-loss: {} nats per candidate against {} (better by {}, 95 %: {} to {})",
            number(self.head, 3),
            number(self.online, 3),
            number(self.gain.value, 3),
            number(self.gain.low, 3),
            number(self.gain.high, 3),
        )
    }
}

/// A comparison of a head with vLLM's untrained online estimator, in rounds of the recorded length.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadOverOnline {
    /// The log-losses of both.
    pub log_losses: LogLosses,
    /// The source of the costs of `speed_gain`.
    pub cost_source: CostSource,
    /// The modelled speed of the best rule that reads the head, relative to the best rule that
    /// reads the estimator, minus 1.
    pub speed_gain: Estimate,
}

impl HeadOverOnline {
    /// Returns whether the head both predicts better and is faster, with both intervals above 0.
    pub fn pays(&self) -> bool {
        self.log_losses.pays() && self.speed_gain.low > 0.0
    }

    /// States whether the head is worth its training, in two sentences.
    pub fn verdict(&self) -> String {
        let Self { log_losses, speed_gain, .. } = self;
        let advice = match self.pays() {
            true => "The head beats vLLM's online estimator, which needs no training.",
            false => {
                "The head does not beat vLLM's online estimator, which needs no training: prefer rules that do not read it."
            }
        };
        format!(
            "{advice} {}; speed at {}: {} ({}).",
            log_losses.text(),
            self.cost_source.text(),
            gain(speed_gain.value),
            interval(*speed_gain, signed),
        )
    }
}

/// The results of one drafter under one way of decoding and one set of costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayGroup {
    /// The drafter.
    pub drafter: DrafterName,
    /// The kind of the drafter, by which reports compare.
    pub road: Road,
    /// The way of decoding: greedy or sampled.
    pub decoding: DecodingName,
    /// The source of the test prompts; null for all sources together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dataset: Option<String>,
    /// The source of the costs.
    pub cost_source: CostSource,
    /// The costs of rounds with candidates for rules that read no signal, with the average time per
    /// verified row.
    pub costs: CostModel,
    /// The number of validation prompts.
    pub num_validation_prompts: usize,
    /// The number of test prompts.
    pub num_test_prompts: usize,
    /// The number of tokens in the responses of test prompts.
    pub num_test_tokens: usize,
    /// The rows, one for each rule in the order of rules, including the best fixed length.
    pub rows: Vec<ReplayRow>,
    /// The modelled seconds per token of the target by itself.
    pub plain_seconds: f64,
    /// The result of an oracle that knows which candidates are accepted; greedy only.
    pub oracle: Option<OracleResult>,
    /// The result of prompt lookup alone; null without look-ups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub look_ups: Option<LookUps>,
    /// The acceptance of first candidates by position in the text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_text_position: Vec<TextRange>,
}

/// The result of an oracle that drafts exactly the candidates that are accepted (SpecDec++,
/// Lemma 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OracleResult {
    /// The modelled speed relative to plain decoding.
    pub speedup: Estimate,
    /// The modelled speed relative to the best fixed length, minus 1.
    pub gain: Estimate,
    /// The number of target forwards per token, N_target/N.
    pub verification_rate: Estimate,
}

/// The result of prompt lookup without another drafter, at the setting that was best on the
/// validation prompts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookUps {
    /// The setting.
    pub look_ups: LookupFirst,
    /// The modelled speed relative to plain decoding.
    pub speedup: Estimate,
}

impl ReplayGroup {
    /// Names the drafter, the way of decoding and the source of prompts, if there is one, such as
    /// `draft, greedy` or `draft, greedy, gsm8k_test`.
    pub(crate) fn name(&self) -> String {
        let name = self.drafter.under(self.decoding);
        match &self.dataset {
            Some(dataset) => format!("{name}, {dataset}"),
            None => name,
        }
    }

    /// States SpecDec++'s Theorem 3.1 at the group's costs, with the Δ that the best threshold of
    /// the head implies; `None` if no threshold of the head was replayed.
    pub(crate) fn theorem_text(&self) -> Option<String> {
        let is_algorithm_2 = |row: &&ReplayRow| {
            row.stop_rule == StopRuleName::RejectionThreshold && row.lookup_first.is_none()
        };
        let h = self.rows.iter().find(is_algorithm_2)?.config.parameter();
        let milliseconds = |seconds: f64| number(1e3 * seconds, 2);
        let [c1, c2] = self.costs.theorem_costs();
        Some(format!(
            "SpecDec++, Theorem 3.1: c1 = {} ms, c2 = {} ms; with Δ = 0 the threshold is {}, and h = {} implies Δ = {} ms",
            milliseconds(c1),
            milliseconds(c2),
            number(self.costs.rejection_threshold(0.0), 2),
            number(h, 2),
            milliseconds(self.costs.implied_delta(h)),
        ))
    }
}

impl LookUps {
    /// Formats setting and speed-up, such as `prompt lookup alone, 2x4: 1.16x (1.10 to 1.22)`.
    pub fn text(&self) -> String {
        format!("prompt lookup alone, {}: {}", self.look_ups, speed_text(&self.speedup))
    }
}

/// The acceptance of first candidates in a range of positions in the text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextRange {
    /// The last position of the range, counted in tokens from the start of the prompt.
    pub up_to: usize,
    /// The number of tokens at which a candidate is drafted.
    pub num_drafted: usize,
    /// The accepted share of these candidates.
    pub acceptance_rate: Estimate,
}

impl TextRange {
    /// Computes the acceptance along recorded responses in each range that they reach.
    pub fn all_of(recordings: &Recordings, seed: u64) -> Vec<Self> {
        let of_range = |(up_to, counts): (usize, Vec<[usize; 2]>)| {
            let rate = |some: &[usize]| {
                let sum = |which: usize| some.iter().map(|at| counts[*at][which]).sum::<usize>();
                sum(1) as f64 / sum(0) as f64
            };
            let num_drafted = counts.iter().map(|[drafted, _]| drafted).sum();
            Self { up_to, num_drafted, acceptance_rate: shown_interval(counts.len(), seed, rate) }
        };
        recordings.by_text_position().into_iter().map(of_range).collect()
    }

    /// Formats the acceptance in ranges, such as `first candidates accepted by position in the text:
    /// 71% (70..72) up to 512`; `None` without ranges.
    pub fn text(ranges: &[Self]) -> Option<String> {
        let hundredths = |rate: f64| number(100.0 * rate, 0);
        let shown = ranges.iter().map(|Self { up_to, acceptance_rate: rate, .. }| {
            format!("{}% ({}) up to {up_to}", hundredths(rate.value), interval(*rate, hundredths))
        });
        let shown = shown.collect::<Vec<_>>().join(", ");
        let heading = "first candidates accepted by position in the text";
        (!shown.is_empty()).then(|| format!("{heading}: {shown}"))
    }
}

/// A rule with the setting that was best on validation prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayRow {
    /// The prompt lookup that runs before the drafter; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lookup_first: Option<LookupFirst>,
    /// The stop rule.
    pub stop_rule: StopRuleName,
    /// The rule's settings.
    pub config: StopRuleConfig,
    /// The modelled speed on test prompts, relative to plain decoding.
    pub speedup: Estimate,
    /// The modelled speed relative to the best fixed length, minus 1.
    pub gain: Estimate,
    /// The number of target forwards per token.
    pub verification_rate: f64,
    /// The number of discarded candidates per token.
    pub discard_rate: f64,
    /// The gain with a perfect acceptance head, at the setting that is best for it on validation
    /// prompts; null for rules that read no head.
    pub ceiling: Option<Estimate>,
    /// The ratio of `gain` to `ceiling`; null unless the whole confidence interval of `ceiling` is
    /// above 0.
    pub share_of_ceiling: Option<Estimate>,
}

impl ReplayRow {
    /// Returns whether this row is the best fixed length, the baseline of the other rows.
    pub(crate) fn is_best_fixed(&self) -> bool {
        self.stop_rule == StopRuleName::FixedLength && self.lookup_first.is_none()
    }

    /// Labels the rule and the prompt lookup before it: `K = 4` or `lookup 2x4, then confidence 0.6`.
    pub fn label(&self) -> String {
        rule_label(self.lookup_first, &self.config)
    }
}
