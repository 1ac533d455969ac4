//! A stop rule that ends a round when another candidate costs more than it is worth.
//! `replay::cost_optimal` fits the rule to recordings.

use serde::{Deserialize, Serialize};

use super::entry::{RuleConfig, RuleFamily, RuleSettings};
use super::{
    AcceptanceSignal, Bounds, DraftSignals, HeadEstimate, HeadTiming, SignalNeeds, StopRule,
    StopRuleEntry, StopRuleName,
};
use crate::serialized::deserialize_by_new;
use crate::{Result, TheoryError};

/// A piecewise constant function of a signal.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepFunction {
    /// The boundaries between steps, ascending.
    edges: Vec<f64>,
    /// The values below the first edge, between each two edges, and from the last edge on.
    values: Vec<f64>,
}

deserialize_by_new!(StepFunction { edges: Vec<f64>, values: Vec<f64> });

impl StepFunction {
    /// Creates the function that is `values[0]` below `edges[0]` and `values[i]` from `edges[i -
    /// 1]` on.
    ///
    /// # Errors
    /// Unless the edges ascend, there is one more value than edges, and all numbers are finite.
    pub fn new(edges: Vec<f64>, values: Vec<f64>) -> Result<Self> {
        let finite = edges.iter().chain(&values).all(|number| number.is_finite());
        let ascending = edges.windows(2).all(|pair| pair[0] < pair[1]);
        let (num_edges, num_values) = (edges.len(), values.len());
        TheoryError::ensure(finite && ascending && num_values == num_edges + 1, || {
            format!(
                "a step function needs ascending finite edges and one value more than edges, not `{num_edges}` edges and \
                 `{num_values}` values"
            )
        })?;
        Ok(Self { edges, values })
    }

    /// Creates a constant function.
    ///
    /// # Errors
    /// If the value is not finite.
    pub fn constant(value: f64) -> Result<Self> {
        Self::new(Vec::new(), vec![value])
    }

    /// Returns the value at `x`.
    pub fn at(&self, x: f64) -> f64 {
        self.values[self.edges.partition_point(|edge| *edge <= x)]
    }
}

/// The settings of the rule that stops when another candidate costs more than it is worth. The rule
/// decides twice per candidate. Before the draw it weighs the cost of a verified row. After the
/// draw it weighs the cost of another draft forward and its verified row.
///
/// A candidate is worth λ, the seconds per token, if it and all candidates before it are accepted.
/// So a round continues while ∏ p̂ · E\[p̂ of the next candidate\] is at least t_row / λ before a
/// draw, and at least (t_draft + t_row) / λ before a draft forward. SpecDec++'s Theorem 3.1 says
/// that the best policy is a threshold on the rejection probability, but not which threshold. One
/// step of look-ahead gives it. λ depends on the rule that it defines, so tuning finds it as a
/// fixed point by replay.
///
/// All acceptance probabilities in the settings assume that all earlier candidates are accepted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostOptimalConfig {
    /// The signal that the rule reads.
    pub signal: AcceptanceSignal,
    /// The minimum expected number of tokens for which a draft forward and a verified row are worth
    /// their cost: (t_draft + t_row) / λ.
    pub least_worth: f64,
    /// The minimum expected number of tokens for which a verified row is worth its cost: t_row / λ.
    pub least_draw_worth: f64,
    /// The acceptance probability of a candidate, given its signal.
    pub estimate: StepFunction,
    /// The acceptance probability of the candidate about to be drawn, given its signal or, with an
    /// acceptance head, the prediction for the candidate before it. Not used with a head that
    /// [looks ahead](crate::HeadTiming::looks_ahead), which may predict only after the draw.
    pub draw_outlook: StepFunction,
    /// The probability that all candidates after the one that gave the signal are accepted, up to
    /// the candidate that another draft forward would give. These are the next two candidates if a
    /// head predicts after reading, and otherwise the next one.
    pub outlook: StepFunction,
    /// The value in place of [`outlook`](Self::outlook) before the head's first prediction: the
    /// probability that a round's first two candidates are accepted. Only used with a head that
    /// predicts after reading; the other signals are known by then.
    pub initial_outlook: f64,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

impl CostOptimalConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[
        StopRuleEntry {
            name: StopRuleName::CostHead,
            file_name: "cost-head",
            text: "cost-optimal, by head",
            family: RuleFamily::Cost,
            heads: &[HeadTiming::AfterRead, HeadTiming::AtDraw, HeadTiming::BeforeDraw],
            settings: RuleSettings::Fitted(AcceptanceSignal::AcceptanceProb),
        },
        StopRuleEntry {
            name: StopRuleName::CostConfidence,
            file_name: "cost-confidence",
            text: "cost-optimal, by confidence",
            family: RuleFamily::Cost,
            heads: &[],
            settings: RuleSettings::Fitted(AcceptanceSignal::Confidence),
        },
        StopRuleEntry {
            name: StopRuleName::CostEntropy,
            file_name: "cost-entropy",
            text: "cost-optimal, by entropy",
            family: RuleFamily::Cost,
            heads: &[],
            settings: RuleSettings::Fitted(AcceptanceSignal::Entropy),
        },
    ];
}

impl RuleConfig for CostOptimalConfig {
    fn form(&self) -> usize {
        match self.signal {
            AcceptanceSignal::AcceptanceProb => 0,
            AcceptanceSignal::Confidence => 1,
            AcceptanceSignal::Entropy => 2,
        }
    }

    fn check(&self) -> Result<()> {
        let worths =
            [("least_worth", self.least_worth), ("least_draw_worth", self.least_draw_worth)];
        worths.into_iter().try_for_each(|(name, worth)| {
            let is_valid = worth >= 0.0 && worth.is_finite();
            TheoryError::check(is_valid, name, "be 0 or more tokens and finite", worth)
        })
    }

    fn rule(&self) -> Box<dyn StopRule> {
        let outlook = self.initial_outlook;
        Box::new(CostOptimal { config: self.clone(), all_accepted_prob: 1.0, outlook })
    }
}

struct CostOptimal {
    config: CostOptimalConfig,
    /// The product ∏ p̂ of the estimates so far in this round.
    all_accepted_prob: f64,
    /// The acceptance probability of the candidate that another draft forward would give.
    outlook: f64,
}

impl CostOptimal {
    /// Returns the signal of the candidate that is drawn or about to be drawn. None if the head has
    /// not predicted its acceptance yet.
    fn own_signal(&self, signals: &DraftSignals) -> Option<f64> {
        let given = "a rule is run with what gives the signal it reads";
        match self.config.signal {
            AcceptanceSignal::AcceptanceProb => {
                signals.acceptance_prob.and_then(HeadEstimate::of_drawn)
            }
            AcceptanceSignal::Confidence => Some(signals.confidence.expect(given)),
            AcceptanceSignal::Entropy => Some(signals.entropy.expect(given)),
        }
    }

    fn update(&mut self, signal: f64) {
        self.all_accepted_prob *= self.config.estimate.at(signal);
        self.outlook = self.config.outlook.at(signal);
    }
}

impl StopRule for CostOptimal {
    fn bounds(&self) -> Bounds {
        self.config.bounds
    }

    fn begin_round(&mut self) {
        self.all_accepted_prob = 1.0;
        self.outlook = self.config.initial_outlook;
    }

    fn stops_before_draw(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        if candidates.is_empty() {
            return false;
        }
        let signal = match self.config.signal {
            AcceptanceSignal::AcceptanceProb => {
                let of_read = signals.acceptance_prob.and_then(HeadEstimate::of_read);
                of_read.inspect(|prob| self.update(*prob))
            }
            AcceptanceSignal::Confidence | AcceptanceSignal::Entropy => self.own_signal(signals),
        };
        // A head that looks ahead may predict only after the draw.
        let Some(signal) = signal else { return false };
        self.all_accepted_prob * self.config.draw_outlook.at(signal) < self.config.least_draw_worth
    }

    fn stops(&mut self, candidates: &[u32], signals: &DraftSignals) -> bool {
        if let Some(signal) = self.own_signal(signals) {
            self.update(signal);
        } else {
            let has_predicted = candidates.len() == 1 || signals.acceptance_prob.is_some();
            assert!(has_predicted, "a rule that needs an acceptance head is run with one");
        }
        self.all_accepted_prob * self.outlook < self.config.least_worth
    }

    fn needs(&self) -> SignalNeeds {
        self.config.signal.needs()
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule::test_rounds::round_length;
    use super::*;
    use crate::CostModel;
    use crate::threshold_policy::Process;

    fn config(signal: AcceptanceSignal) -> CostOptimalConfig {
        CostOptimalConfig {
            signal,
            least_worth: 0.3,
            least_draw_worth: 0.1,
            estimate: StepFunction::new(vec![0.5], vec![0.2, 0.9]).expect("valid"),
            draw_outlook: StepFunction::new(vec![0.5], vec![0.05, 0.9]).expect("valid"),
            outlook: StepFunction::constant(0.8).expect("valid"),
            initial_outlook: 0.7,
            bounds: Bounds::default(),
        }
    }

    fn confident(confidences: &[f64]) -> Vec<DraftSignals> {
        let heard = |c: &f64| DraftSignals { confidence: Some(*c), ..Default::default() };
        confidences.iter().map(heard).collect()
    }

    #[test]
    fn a_step_function_has_its_value_from_the_edge_on() {
        let steps = StepFunction::new(vec![0.1, 0.5], vec![1.0, 2.0, 3.0]).expect("valid");
        let found = [-5.0, 0.0999, 0.1, 0.3, 0.5, 9.0].map(|x| steps.at(x));
        assert_eq!(found, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]);
        assert!(StepFunction::new(vec![0.5, 0.5], vec![0.0; 3]).is_err());
        assert!(StepFunction::new(vec![0.5], vec![0.0]).is_err());
        assert!(StepFunction::constant(f64::NAN).is_err());
    }

    fn predicted(acceptance_probs: &[f64]) -> Vec<DraftSignals> {
        let mut signals = vec![DraftSignals::default()];
        signals.extend(acceptance_probs.iter().map(|prob| with(HeadEstimate::OfRead(*prob))));
        signals
    }

    fn with(estimate: HeadEstimate) -> DraftSignals {
        DraftSignals { acceptance_prob: Some(estimate), ..Default::default() }
    }

    #[test]
    fn a_look_ahead_head_decides_before_the_next_forward() {
        let head = CostOptimalConfig {
            least_draw_worth: 0.3,
            initial_outlook: 0.0,
            ..config(AcceptanceSignal::AcceptanceProb)
        };
        // 0.9·0.9·0.8 tokens for a third forward, then 0.9·0.9·0.2·0.8 for a fourth. The rule
        // decides about no draw, although the outlook given 0.2 is 0.05.
        let ahead = [0.9, 0.9, 0.2, 0.9].map(|prob| with(HeadEstimate::OfDrawn(prob)));
        assert_eq!(round_length(&mut rule(head.clone()), &ahead), Some(3));
        let sure = [with(HeadEstimate::OfDrawn(0.9)); 4];
        assert_eq!(round_length(&mut rule(head), &sure), None);
    }

    #[test]
    #[should_panic(expected = "run with one")]
    fn a_rule_without_its_head_is_a_bug() {
        let head = CostOptimalConfig {
            least_worth: 0.0,
            least_draw_worth: 0.0,
            ..config(AcceptanceSignal::AcceptanceProb)
        };
        round_length(&mut rule(head), &[DraftSignals::default(); 2]);
    }

    fn rule(config: CostOptimalConfig) -> CostOptimal {
        CostOptimal { outlook: config.initial_outlook, config, all_accepted_prob: 1.0 }
    }

    #[test]
    fn it_continues_while_a_candidate_is_worth_its_forward() {
        let mut confidence = rule(config(AcceptanceSignal::Confidence));
        // 0.9·0.8 = 0.72, 0.648, …: below 0.3 at the tenth power of 0.9.
        assert_eq!(round_length(&mut confidence, &confident(&[0.7; 20])), Some(10));
        let free = CostOptimalConfig {
            least_worth: 0.0,
            least_draw_worth: 0.0,
            ..config(AcceptanceSignal::Confidence)
        };
        assert_eq!(round_length(&mut rule(free), &confident(&[0.1; 9])), None);
    }

    #[test]
    fn a_candidate_that_is_not_worth_its_row_is_not_drawn() {
        // The draft is unsure of the third candidate: 0.81·0.05 tokens for a row.
        let mut confidence = rule(config(AcceptanceSignal::Confidence));
        assert_eq!(round_length(&mut confidence, &confident(&[0.7, 0.7, 0.1])), Some(2));
        let head = config(AcceptanceSignal::AcceptanceProb);
        // The head predicts a rejection of the second: 0.18·0.05 tokens.
        assert_eq!(round_length(&mut rule(head.clone()), &predicted(&[0.9, 0.2])), Some(2));
        // If rows are free, the third is drawn but no fourth.
        let free_rows = CostOptimalConfig { least_draw_worth: 0.0, ..head };
        assert_eq!(round_length(&mut rule(free_rows), &predicted(&[0.9, 0.2, 0.9])), Some(3));
    }

    #[test]
    fn if_little_is_accepted_a_round_has_one_candidate() {
        let poor =
            CostOptimalConfig { initial_outlook: 0.2, ..config(AcceptanceSignal::AcceptanceProb) };
        assert_eq!(round_length(&mut rule(poor), &predicted(&[0.9])), Some(1));
    }

    #[test]
    fn with_independent_known_probabilities_it_is_the_best_policy() {
        let levels = vec![(3.0 / 6.0, 0.95), (2.0 / 6.0, 0.6), (1.0 / 6.0, 0.2)];
        let mean = (3.0 * 0.95 + 2.0 * 0.6 + 0.2) / 6.0;
        let identity = StepFunction::new(vec![0.4, 0.8], vec![0.2, 0.6, 0.95]).expect("ascending");
        let bounds = Bounds { min: 1, max: 5 };
        let (mut num_stops, mut num_states) = (0, 0);
        for draft_seconds in [0.02, 0.1, 0.3] {
            let costs = CostModel { draft_seconds, target_seconds: 1.0, row_seconds: 0.01 };
            let process = Process { levels: levels.clone(), num_unpredicted: 0, costs, bounds };
            let best = process.optimal_policy();
            let mut rule = rule(CostOptimalConfig {
                least_worth: (draft_seconds + 0.01) / best.seconds_per_token,
                least_draw_worth: 0.0,
                estimate: identity.clone(),
                draw_outlook: StepFunction::constant(mean).expect("finite"),
                outlook: StepFunction::constant(mean).expect("finite"),
                initial_outlook: mean,
                bounds,
                ..config(AcceptanceSignal::Confidence)
            });
            // Every sequence of levels up to the longest round.
            for drawn in 1..bounds.max {
                for sequence in 0..3_usize.pow(drawn as u32) {
                    let probs: Vec<f64> = (0..drawn)
                        .map(|at| levels[sequence / 3_usize.pow(at as u32) % 3].1)
                        .collect();
                    rule.begin_round();
                    let mut stops = false;
                    for (at, signals) in confident(&probs).iter().enumerate() {
                        stops = rule.stops(&vec![0; at + 1], signals);
                    }
                    let product: f64 = probs.iter().product();
                    // Products in a different order differ by rounding.
                    let decision = best.decisions.iter().find(|decision| {
                        decision.num_candidates == drawn
                            && (decision.all_accepted_prob - product).abs() < 1e-12
                    });
                    assert_eq!(stops, !decision.expect("every state").continues, "{probs:?}");
                    num_stops += usize::from(stops);
                    num_states += 1;
                }
            }
        }
        assert!(0 < num_stops && num_stops < num_states, "{num_stops} of {num_states}");
    }

    #[test]
    fn a_worth_must_be_finite_and_not_negative() {
        for least_worth in [-1.0, f64::NAN, f64::INFINITY] {
            let config = CostOptimalConfig { least_worth, ..config(AcceptanceSignal::Entropy) };
            assert!(config.check().is_err());
        }
    }
}
