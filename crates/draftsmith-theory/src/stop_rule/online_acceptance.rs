//! A stop rule that uses vLLM's online estimate of acceptance, a logistic model of the draft's
//! largest probability that learns while it serves.
//!
//! vLLM 0.33 uses the estimate to decide which candidates to verify (`OnlineAcceptanceEstimator`).
//! Here the same model, updated by the same steps, ends draft phases. It needs no training, so an
//! acceptance head must beat it. If all candidates before it are accepted, the candidate at
//! position k is accepted with probability σ(ω·f + β_k). Here f = ln(c / (1 − c)), with c the
//! largest probability of the distribution that the candidate is drawn from. After every 100 rounds
//! one damped Newton step updates ω and the β_k.

use serde::{Deserialize, Serialize};

use super::entry::{Grid, RuleConfig, RuleFamily, RuleSettings};
use super::{Bounds, DraftSignals, RoundEnd, SignalNeeds, StopRule, StopRuleEntry, StopRuleName};
use crate::{Result, TheoryError};

/// The number of rounds between two steps of the fit.
const ROUNDS_PER_FIT: usize = 100;
/// The bound to which |f| is clamped.
const MOST_FEATURE: f64 = 40.0;
/// The regularisation term that is added to sums of squares and of weights.
const RIDGE: f64 = 1e-3;
/// The number of labels at which a step is halved.
const HALF_STEP_LABELS: f64 = 50.0;

/// The settings of a rule that stops when the estimated probability that all candidates of the
/// round are accepted falls below a threshold. The target still verifies the candidate just drawn.
///
/// Each sequence begins with the coefficients in `start`, so that results do not depend on the
/// order of prompts. `tune` sets them to those that the estimator learns on the tuning prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnlineAcceptanceConfig {
    /// The threshold, a probability.
    pub survival_threshold: f64,
    /// The coefficients at the beginning of a sequence.
    #[serde(default)]
    pub start: AcceptanceModel,
    /// The minimum and maximum candidate length.
    pub bounds: Bounds,
}

/// The coefficients of the estimator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AcceptanceModel {
    /// The slope ω.
    pub slope: f64,
    /// The intercepts β_k by position k in the round. Positions beyond the last entry use the last
    /// intercept.
    pub intercepts: Vec<f64>,
}

impl Default for AcceptanceModel {
    /// Returns the coefficients that vLLM starts with.
    fn default() -> Self {
        Self { slope: 0.5, intercepts: vec![-0.2] }
    }
}

impl OnlineAcceptanceConfig {
    pub(super) const ENTRIES: &'static [StopRuleEntry] = &[StopRuleEntry {
        name: StopRuleName::OnlineAcceptance,
        file_name: "online-acceptance",
        text: "online acceptance",
        family: RuleFamily::Confidence,
        heads: &[],
        settings: RuleSettings::Grid(Grid::of_probabilities(
            "vLLM's online estimator: a round ends when the estimated chance that all its candidates are \
                  accepted is below this",
            |survival_threshold, _, bounds| {
                Self { survival_threshold, start: AcceptanceModel::default(), bounds }.into()
            },
        )),
    }];
}

impl RuleConfig for OnlineAcceptanceConfig {
    fn check(&self) -> Result<()> {
        let AcceptanceModel { slope, intercepts } = &self.start;
        let is_finite = intercepts.iter().all(|it| it.is_finite()) && !intercepts.is_empty();
        let is_valid = *slope >= 0.0 && slope.is_finite() && is_finite;
        TheoryError::check(is_valid, "start", "have a slope of 0 or more and intercepts", *slope)
    }

    fn rule(&self) -> Box<dyn StopRule> {
        let estimator = OnlineEstimator::new(self.start.clone());
        Box::new(OnlineAcceptance {
            config: self.clone(),
            estimator,
            round: Vec::new(),
            survival: 1.0,
        })
    }
}

/// The online estimator: its coefficients, and the sums over the rounds since its last step.
#[derive(Debug, Clone)]
pub(crate) struct OnlineEstimator {
    pub(crate) model: AcceptanceModel,
    /// The sums of each position in the round.
    sums: Vec<Sums>,
    num_rounds: usize,
}

/// The sums over the labels y of a position since the last step, for predictions p with weights w =
/// p(1 − p) and errors e = y − p.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    /// The sum Σ w·f².
    weighted_squares: f64,
    /// The sum Σ w·f.
    weighted: f64,
    /// The sum Σ w.
    weights: f64,
    /// The sum Σ e·f.
    error_features: f64,
    /// The sum Σ e.
    errors: f64,
    num: f64,
}

/// Computes the feature f = ln(c / (1 − c)) of a candidate with confidence c, clamped to ±40.
pub fn confidence_logit(confidence: f64) -> f64 {
    (confidence / (1.0 - confidence)).ln().clamp(-MOST_FEATURE, MOST_FEATURE)
}

/// A candidate's feature f and its acceptance probability p, predicted when it was drafted.
pub(crate) type Predicted = (f64, f64);

impl OnlineEstimator {
    pub(crate) fn new(model: AcceptanceModel) -> Self {
        Self { model, sums: Vec::new(), num_rounds: 0 }
    }

    /// Predicts the acceptance probability of the candidate at `position` in its round.
    /// `confidence` is the largest probability of the distribution that the candidate was drawn
    /// from.
    pub(crate) fn predict(&self, position: usize, confidence: f64) -> Predicted {
        let feature = confidence_logit(confidence);
        let AcceptanceModel { slope, intercepts } = &self.model;
        let intercept = intercepts.get(position).or(intercepts.last()).copied().unwrap_or(0.0);
        (feature, 1.0 / (1.0 + (-(slope * feature + intercept)).exp()))
    }

    /// Learns from a round, given its predictions and the number of its accepted candidates. The
    /// first rejected candidate is a label too. Later candidates are not, since verification never
    /// reached them.
    pub(crate) fn observe(&mut self, round: &[Predicted], num_accepted: usize) {
        if self.sums.len() < round.len() {
            self.sums.resize(round.len(), Sums::default());
        }
        for (position, (feature, predicted)) in round.iter().enumerate().take(num_accepted + 1) {
            let weight = predicted * (1.0 - predicted);
            let error = f64::from(u8::from(position < num_accepted)) - predicted;
            let sums = &mut self.sums[position];
            sums.weighted_squares += weight * feature * feature;
            sums.weighted += weight * feature;
            sums.weights += weight;
            sums.error_features += error * feature;
            sums.errors += error;
            sums.num += 1.0;
        }
        self.num_rounds += 1;
        if self.num_rounds == ROUNDS_PER_FIT {
            self.fit();
        }
    }

    /// Takes one damped Newton step for the slope and for the intercept of each position, then
    /// resets the sums.
    fn fit(&mut self) {
        let sums = std::mem::take(&mut self.sums);
        self.num_rounds = 0;
        let total = |of: &dyn Fn(&Sums) -> f64| sums.iter().map(of).sum::<f64>();
        let damped = |num: f64| num / (num + HALF_STEP_LABELS);
        let weights = |it: &Sums| it.weights + RIDGE;
        let gradient = total(&|it| it.error_features - it.weighted * it.errors / weights(it));
        let curvature =
            RIDGE + total(&|it| it.weighted_squares - it.weighted.powi(2) / weights(it));
        let step = gradient / curvature * damped(total(&|it| it.num));
        let AcceptanceModel { slope, intercepts } = &mut self.model;
        let step = if step.is_nan() || *slope + step < 0.0 { 0.0 } else { step };
        *slope += step;
        let last = intercepts.last().copied().unwrap_or(0.0);
        if intercepts.len() < sums.len() {
            intercepts.resize(sums.len(), last);
        }
        for (intercept, it) in intercepts.iter_mut().zip(&sums) {
            let step = (it.errors - it.weighted * step) / weights(it) * damped(it.num);
            *intercept += if step.is_nan() { 0.0 } else { step };
        }
    }
}

struct OnlineAcceptance {
    config: OnlineAcceptanceConfig,
    estimator: OnlineEstimator,
    /// The predictions of the current round.
    round: Vec<Predicted>,
    /// The product of the current round's predictions.
    survival: f64,
}

impl StopRule for OnlineAcceptance {
    fn bounds(&self) -> Bounds {
        self.config.bounds
    }

    fn begin_sequence(&mut self) {
        self.estimator = OnlineEstimator::new(self.config.start.clone());
        self.begin_round();
    }

    fn begin_round(&mut self) {
        self.round.clear();
        self.survival = 1.0;
    }

    fn stops(&mut self, _candidates: &[u32], signals: &DraftSignals) -> bool {
        let confidence = signals.confidence.expect("drafters give the signals a rule needs");
        let predicted = self.estimator.predict(self.round.len(), confidence);
        self.round.push(predicted);
        self.survival *= predicted.1;
        self.survival < self.config.survival_threshold
    }

    fn end_round(&mut self, end: RoundEnd) {
        // A round without candidates counts as a round of the server too. Looked-up candidates give
        // no labels.
        let num_accepted = end.num_accepted.min(self.round.len());
        self.estimator.observe(&std::mem::take(&mut self.round), num_accepted);
    }

    fn needs(&self) -> SignalNeeds {
        SignalNeeds { confidence: true, ..SignalNeeds::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::StopRuleConfig;
    use super::super::rule::test_rounds::round_length;
    use super::*;
    use crate::SeededDraws;

    fn config(survival_threshold: f64) -> OnlineAcceptanceConfig {
        let start = AcceptanceModel::default();
        OnlineAcceptanceConfig { survival_threshold, start, bounds: Bounds::default() }
    }

    fn sure(confidence: f64) -> DraftSignals {
        DraftSignals { confidence: Some(confidence), ..DraftSignals::default() }
    }

    #[test]
    fn the_rule_multiplies_predictions_and_starts_again_each_round_and_sequence() {
        let mut rule = config(0.3).rule();
        // σ(0.5·ln(c/(1 − c)) − 0.2): 0.711 at 0.9, 0.450 at 0.5.
        assert_eq!(round_length(&mut *rule, &[sure(0.9); 9]), Some(4));
        assert_eq!(round_length(&mut *rule, &[sure(0.5); 9]), Some(2));
        // A certain draft is never stopped.
        assert_eq!(round_length(&mut *rule, &[sure(1.0); 9]), None);
        for _ in 0..ROUNDS_PER_FIT {
            round_length(&mut *rule, &[sure(0.9); 9]);
            rule.end_round(RoundEnd { num_accepted: 0, num_kept: 1 });
        }
        assert_eq!(round_length(&mut *rule, &[sure(0.9); 9]), Some(1), "it has learned");
        rule.begin_sequence();
        assert_eq!(round_length(&mut *rule, &[sure(0.9); 9]), Some(4), "and forgotten");
    }

    #[test]
    fn a_fit_is_the_damped_newton_step_of_the_joint_system() {
        let mut estimator = OnlineEstimator::new(AcceptanceModel::default());
        let mut draws = SeededDraws::new(7, &["online"]);
        // Rows (f, 1 at k = 0, 1 at k = 1) of the whole system, with weights and errors.
        let (mut matrix, mut gradient, mut num) = ([[0.0; 3]; 3], [0.0; 3], [0.0; 2]);
        for _ in 0..ROUNDS_PER_FIT {
            let confidences = [draws.uniform(), draws.uniform()];
            let round = [0, 1].map(|k| estimator.predict(k, confidences[k]));
            let num_accepted = (draws.uniform() * 3.0) as usize;
            for k in 0..2.min(num_accepted + 1) {
                let (f, p) = round[k];
                let row = [f, f64::from(u8::from(k == 0)), f64::from(u8::from(k == 1))];
                let error = f64::from(u8::from(k < num_accepted)) - p;
                for i in 0..3 {
                    gradient[i] += error * row[i];
                    (0..3).for_each(|j| matrix[i][j] += p * (1.0 - p) * row[i] * row[j]);
                }
                num[k] += 1.0;
            }
            estimator.observe(&round, num_accepted);
        }
        (0..3).for_each(|i| matrix[i][i] += RIDGE);
        // Eliminating both intercepts gives the slope's step, which is damped before theirs are
        // computed.
        let schur = matrix[0][0] - (1..3).map(|k| matrix[0][k].powi(2) / matrix[k][k]).sum::<f64>();
        let right =
            gradient[0] - (1..3).map(|k| matrix[0][k] * gradient[k] / matrix[k][k]).sum::<f64>();
        let all = num[0] + num[1];
        let slope = right / schur * all / (all + 50.0);
        let AcceptanceModel { slope: found, intercepts } = estimator.model;
        assert!((found - 0.5 - slope).abs() < 1e-12, "{found} {slope}");
        for k in 0..2 {
            let step = (gradient[k + 1] - matrix[0][k + 1] * slope) / matrix[k + 1][k + 1];
            let step = step * num[k] / (num[k] + 50.0);
            assert!((intercepts[k] + 0.2 - step).abs() < 1e-12, "{intercepts:?} {step}");
        }
    }

    #[test]
    fn it_learns_how_a_draft_is_accepted() {
        // Truth: σ(1.2·f + 0.5 − 0.4·k).
        let truth = |k: usize, f: f64| 1.0 / (1.0 + (-(1.2 * f + 0.5 - 0.4 * k as f64)).exp());
        let mut estimator = OnlineEstimator::new(AcceptanceModel::default());
        let mut draws = SeededDraws::new(3, &["truth"]);
        let mut losses = [0.0; 2];
        for nth in 0..12_000 {
            let round: Vec<Predicted> =
                (0..4).map(|k| estimator.predict(k, 0.3 + 0.69 * draws.uniform())).collect();
            let accepts =
                |k: usize, draws: &mut SeededDraws| draws.uniform() < truth(k, round[k].0);
            let num_accepted = (0..4).take_while(|k| accepts(*k, &mut draws)).count();
            let first = if num_accepted > 0 { round[0].1 } else { 1.0 - round[0].1 };
            match nth {
                0..1000 => losses[0] -= first.ln(),
                11_000.. => losses[1] -= first.ln(),
                _ => {}
            }
            estimator.observe(&round, num_accepted);
        }
        let AcceptanceModel { slope, intercepts } = &estimator.model;
        assert!((slope - 1.2).abs() < 0.15, "{slope}");
        for (k, intercept) in intercepts.iter().enumerate() {
            assert!((intercept - 0.5 + 0.4 * k as f64).abs() < 0.25, "{intercepts:?}");
        }
        assert!(losses[1] < losses[0], "{losses:?}");
    }

    #[test]
    fn settings_are_checked() {
        for threshold in [-0.1, 1.1, f64::NAN] {
            assert!(StopRuleConfig::from(config(threshold)).init().is_err());
        }
        for (slope, intercepts) in [(-1.0, vec![0.0]), (1.0, vec![]), (1.0, vec![f64::NAN])] {
            let start = AcceptanceModel { slope, intercepts };
            assert!(OnlineAcceptanceConfig { start, ..config(0.5) }.check().is_err());
        }
    }
}
