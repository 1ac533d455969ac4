//! Predictions of an acceptance head along recordings, paired with the acceptance of the
//! candidates.
//!
//! A stop rule multiplies the predictions of a round to get the probability that all candidates so
//! far are accepted. So a prediction should be the probability that a candidate is accepted *given
//! that all candidates before it are*. Predictions are therefore judged on the candidates that
//! verification reaches, weighted by the probability of being reached.
//!
//! The output has the target's distribution under every rule, so an accepted prefix is a prefix of
//! a response, and the recorded response is one random sample. After such a prefix a round draws a
//! candidate y from q and accepts it with probability min(1, p(y)/q(y)). Given that the response
//! continues with x (see [`replay`](super)):
//!
//! - with probability min(1, q(x)/p(x)) the candidate was x itself. We use this probability as the
//!   weight, and not whether it happened in the recording, to reduce the variance;
//! - otherwise the candidate was drawn from the normalised (q − p)+. The recording holds it if that
//!   happened, with weight 1.
//!
//! The expected weight of a candidate y over responses is Σₓ p(x) min(1, q(x)/p(x)) \[x = y\] +
//! (q(y) − p(y))+ = min(p, q)(y) + (q − p)+(y) = q(y), which is the probability that y is drawn.
//! The label of y is its acceptance probability min(1, p(y)/q(y)), which has less variance than the
//! recorded outcome. In greedy decoding the candidate is the response's token or is rejected, and
//! weights and labels are 0 or 1.
//!
//! Later candidates of a rollout follow a rejection, where verification ends, so they are left out.
//! Their labels are known. But weighting them by the product of the labels before them would
//! overcount. A prefix that begins with y would get (q − p)+(y) · p(y)/q(y) on top of the p(y) from
//! responses that continue with y.
//!
//! All positions of a response have the same weight. A rule with at most K candidates a round never
//! asks about the target's own token after K accepted candidates, so in use it meets slightly fewer
//! easy positions.

use super::recorded_steps::RecordedSteps;
use super::{RecordedCandidate, Recording, Recordings};
use crate::stop_rule::online_acceptance::OnlineEstimator;
use crate::{AcceptanceModel, Decoding, TokenChoice};

/// A head's prediction for a candidate, with the candidate's acceptance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JudgedPrediction {
    /// The head's prediction.
    pub predicted_prob: f64,
    /// The candidate's acceptance probability; in greedy decoding 1 if the candidate is accepted,
    /// else 0.
    pub label: f64,
    /// The probability that verification reaches the candidate.
    pub weight: f64,
}

impl Recordings {
    /// Pairs the head's predictions with the acceptance of their candidates. Returns one list per
    /// response, empty without a head. `decoding` tells how the responses were decoded.
    ///
    /// Predictions that no rule needs, such as those for a candidate that ends the response, are
    /// left out.
    pub fn judged_predictions(&self, decoding: Decoding) -> Vec<Vec<JudgedPrediction>> {
        let of_response = |response: &super::Recording| {
            // Nothing is drafted for the last token within the limit.
            let num_drafted = response.places.len().min(response.limit - 1);
            let mut judged = Vec::with_capacity(num_drafted);
            for place in &response.places[..num_drafted] {
                let rejected = place.rejected();
                let own = &place.candidate;
                let (own_weight, own_label) = match decoding.choice {
                    TokenChoice::Greedy => (f64::from(u8::from(rejected.is_none())), 1.0),
                    TokenChoice::Sampled(_) => (own.prob_of_being_drafted(), own.acceptance_prob()),
                };
                let mut add = |candidate: &RecordedCandidate, label: f64, weight: f64| {
                    let predicted = candidate.predicted_acceptance_prob.filter(|_| weight > 0.0);
                    judged.extend(predicted.map(|predicted_prob| JudgedPrediction {
                        predicted_prob,
                        label,
                        weight,
                    }));
                };
                add(own, own_label, own_weight);
                if let Some(rejected) = rejected {
                    let label = match decoding.choice {
                        TokenChoice::Greedy => 0.0,
                        TokenChoice::Sampled(_) => rejected.acceptance_prob(),
                    };
                    add(rejected, label, 1.0);
                }
            }
            judged
        };
        if self.head.is_some() {
            self.responses.iter().map(of_response).collect()
        } else {
            vec![Vec::new(); self.responses.len()]
        }
    }
}

/// The maximum number of responses that the online estimator learns from.
const MOST_LEARNED: usize = 100;

/// Predictions of the online estimator and of the head for one verified candidate, and whether it
/// was accepted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundPrediction {
    /// The estimator's prediction, made before it learned from this round.
    pub online_prob: f64,
    /// The head's prediction; None without a head, or where no rule needs one.
    pub head_prob: Option<f64>,
    /// Whether the candidate was accepted.
    pub is_accepted: bool,
}

impl Recordings {
    /// Fits the online estimator to rounds of the recorded length and returns its coefficients. It
    /// learns from at most 100 responses, which are evenly spaced when all are sorted by prompt.
    /// More would be a risk because its steps are unbounded: after 500 responses with nearly
    /// certain acceptance the coefficients can diverge.
    pub fn learned_acceptance(&self) -> AcceptanceModel {
        let mut estimator = OnlineEstimator::new(AcceptanceModel::default());
        let mut responses: Vec<&Recording> = self.responses.iter().collect();
        responses.sort_by_key(|response| &response.prompt);
        let step = responses.len().div_ceil(MOST_LEARNED).max(1);
        for response in responses.into_iter().step_by(step) {
            self.learn_along(response, &mut estimator, |_, _, _| {});
        }
        estimator.model
    }

    /// Returns the predictions of the online estimator and of the head for every verified candidate
    /// in rounds of the recorded length, one list per response. The estimator begins each response
    /// with the coefficients `start`.
    pub fn round_predictions(&self, start: &AcceptanceModel) -> Vec<Vec<RoundPrediction>> {
        let of_response = |response: &Recording| {
            let mut all = Vec::new();
            let mut estimator = OnlineEstimator::new(start.clone());
            self.learn_along(response, &mut estimator, |candidate, online_prob, is_accepted| {
                let head_prob = candidate.predicted_acceptance_prob;
                all.push(RoundPrediction { online_prob, head_prob, is_accepted });
            });
            all
        };
        self.responses.iter().map(of_response).collect()
    }

    /// Lets the estimator predict and learn from the rounds along a response; `observe` gets each
    /// verified candidate, the estimator's prediction, and whether the candidate is accepted.
    fn learn_along(
        &self,
        response: &Recording,
        estimator: &mut OnlineEstimator,
        mut observe: impl FnMut(&RecordedCandidate, f64, bool),
    ) {
        let mut start = 0;
        while start < response.places.len() {
            let room = self.max_length.min(response.limit.saturating_sub(start + 1));
            let mut steps = RecordedSteps::new(&response.places[start..], None);
            let (mut round, mut num_accepted) = (Vec::new(), 0);
            while steps.has_next() && steps.is_accepted() && round.len() < room {
                let candidate = steps.next();
                let predicted = estimator.predict(round.len(), candidate.confidence);
                observe(candidate, predicted.1, steps.is_accepted());
                num_accepted += usize::from(steps.is_accepted());
                round.push(predicted);
            }
            estimator.observe(&round, num_accepted);
            start += num_accepted + 1;
        }
    }
}

impl RecordedCandidate {
    /// Computes min(1, q/p) of the response's token: the probability that this token was drafted
    /// and accepted, given that the response continues with it.
    fn prob_of_being_drafted(&self) -> f64 {
        (self.draft_log_prob - self.target_log_prob).exp().min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_recordings::random;
    use super::super::{RecordedPlace, Recording};
    use super::*;
    use crate::{DrafterId, HeadTiming, Sampling};

    const Q: [f64; 4] = [0.5, 0.125, 0.375, 0.0];
    const P: [f64; 4] = [0.25, 0.25, 0.125, 0.375];
    const SAMPLED: Decoding =
        Decoding::sampled(Sampling { temperature: 1.0, top_p: 1.0, top_k: None, min_p: None });

    /// Creates a candidate from a token; its prediction identifies it.
    fn candidate(token: usize) -> RecordedCandidate {
        RecordedCandidate {
            token_id: token as u32,
            candidate_prob: Q[token],
            confidence: 0.5,
            confidence_of_ten: 0.5,
            entropy: 1.0,
            predicted_acceptance_prob: Some(token as f64 / 8.0),
            draft_log_prob: Q[token].ln(),
            target_log_prob: P[token].ln(),
        }
    }

    fn recordings(token: usize, rejected: Option<usize>) -> Recordings {
        // Behind the rejected one lies a candidate that must not count, and the limit leaves a
        // place that is not drafted.
        let rollout = rejected.map(|token| vec![candidate(token), candidate(2)]);
        let place = RecordedPlace { candidate: candidate(token), rollout };
        let last = RecordedPlace { candidate: candidate(1), rollout: None };
        let recording = Recording::new(Vec::new(), vec![place, last], 2);
        Recordings {
            drafter: DrafterId::DRAFT,
            max_length: 4,
            eos_token_ids: vec![9],
            head: Some(HeadTiming::AfterRead),
            responses: vec![recording],
            answers: None,
        }
    }

    #[test]
    fn over_all_that_may_be_recorded_a_candidate_weighs_its_chance_of_being_drawn() {
        let mut weights = [0.0; 4];
        let excess: Vec<f64> = Q.iter().zip(&P).map(|(q, p)| (q - p).max(0.0)).collect();
        let total_excess: f64 = excess.iter().sum();
        for token in 0..4 {
            let accepted = (Q[token] / P[token]).min(1.0);
            let mut outcomes = vec![(None, accepted)];
            outcomes.extend(
                (0..4).map(|other| (Some(other), (1.0 - accepted) * excess[other] / total_excess)),
            );
            for (rejected, chance) in outcomes {
                if chance == 0.0 {
                    continue;
                }
                let judged = recordings(token, rejected).judged_predictions(SAMPLED);
                for judged in &judged[0] {
                    let of = (judged.predicted_prob * 8.0) as usize;
                    // Labels are kept in f32.
                    assert!((judged.label - (P[of] / Q[of]).min(1.0)).abs() < 1e-7);
                    weights[of] += P[token] * chance * judged.weight;
                }
            }
        }
        for (found, expected) in weights.iter().zip(Q) {
            // Logarithms and back, of eighths.
            assert!((found - expected).abs() < 1e-12, "{weights:?}");
        }
    }

    #[test]
    fn greedy_candidates_are_accepted_or_not() {
        let judged = |token, rejected| {
            let judged = recordings(token, rejected).judged_predictions(Decoding::GREEDY);
            judged[0].iter().map(|one| (one.predicted_prob, one.label, one.weight)).collect()
        };
        let accepted: Vec<(f64, f64, f64)> = judged(2, None);
        assert_eq!(accepted, [(0.25, 1.0, 1.0)]);
        let rejected: Vec<(f64, f64, f64)> = judged(2, Some(1));
        assert_eq!(rejected, [(0.125, 0.0, 1.0)]);
    }

    #[test]
    fn without_a_head_or_a_question_there_is_nothing() {
        let recordings = recordings(0, None).with_candidates(forget);
        assert_eq!(recordings.judged_predictions(SAMPLED), [Vec::new()]);
        let recordings = Recordings { head: None, ..random(1, 3, 0.5) };
        assert_eq!(recordings.judged_predictions(Decoding::GREEDY), vec![Vec::new(); 3]);
    }

    #[test]
    fn the_estimator_is_judged_on_the_candidates_that_verification_reaches() {
        let recordings = random(5, 40, 0.6);
        let start = recordings.learned_acceptance();
        assert_ne!(start, AcceptanceModel::default(), "there are over 100 rounds");
        let config = crate::FixedLengthConfig { candidate_length: recordings.max_length };
        let trace = recordings.trace(&config.into()).expect("replays");
        let predictions = recordings.round_predictions(&start).concat();
        let accepted = predictions.iter().filter(|it| it.is_accepted).count();
        assert_eq!(accepted, trace.counts().num_accepted);
        let rejected = trace.rounds.iter().filter(|round| round.num_accepted < round.num_drafted);
        // A round that the text's end cuts short is not judged further.
        assert!(predictions.len() - accepted <= rejected.count());
        assert!(predictions.iter().all(|it| (0.0..=1.0).contains(&it.online_prob)));
        assert!(predictions.iter().any(|it| it.head_prob.is_some()));
    }

    fn forget(candidate: &mut RecordedCandidate) {
        candidate.predicted_acceptance_prob = None;
    }
}
