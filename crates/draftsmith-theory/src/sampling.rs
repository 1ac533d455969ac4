//! The distribution that a sampled token is drawn from: temperature, top-k, top-p and min-p.
//!
//! These logits warpers and their order are those of HF transformers, which other runtimes and our
//! recipes refer to by the same names. This code runs for every decoded token and every verified
//! row, over vocabularies of 1k to 128k. So each step visits only the tokens that the previous step
//! kept.

use serde::{Deserialize, Serialize};

use crate::distribution::checked_max;
use crate::select::{Token, kth_largest, nucleus};
use crate::{Result, TheoryError, exponentials};

/// The settings of the logits warpers that are applied before a draw, in the order temperature,
/// top-k, top-p, min-p. The default leaves the model's distribution unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sampling {
    /// The positive temperature, by which logits are divided. 1 changes nothing.
    pub temperature: f64,
    /// The mass p in (0, 1] of top-p: the smallest set of most probable tokens with at least this
    /// mass is kept. 1 keeps all tokens.
    pub top_p: f64,
    /// The number k of top-k: the tokens whose logit is at least the k-th largest are kept, which
    /// are more than k in a tie. None keeps all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// The share in (0, 1) of min-p: the tokens with at least this share of the largest probability
    /// are kept. None keeps all tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: None, min_p: None }
    }
}

impl Sampling {
    /// Checks that every setting is in its range.
    ///
    /// # Errors
    /// If a setting is outside its range. The error names the first one.
    pub fn validate(&self) -> Result<()> {
        let Self { temperature, top_p, top_k, min_p } = *self;
        let is_valid = temperature > 0.0 && temperature.is_finite();
        let range = "be positive and finite (for temperature 0, decode greedily)";
        TheoryError::check(is_valid, "temperature", range, temperature)?;
        let is_valid = top_p > 0.0 && top_p <= 1.0;
        TheoryError::check(is_valid, "top_p", "be above 0 and at most 1", top_p)?;
        let range = "be at least 1 (omit it to keep every token)";
        TheoryError::check(top_k != Some(0), "top_k", range, 0.0)?;
        let is_valid = min_p.is_none_or(|min_p| min_p > 0.0 && min_p < 1.0);
        let range = "be above 0 and below 1 (omit it to keep every token)";
        TheoryError::check(is_valid, "min_p", range, min_p.unwrap_or_default())
    }

    /// Computes the probabilities with which a token is drawn: the softmax of the warped `logits`,
    /// 0 for removed tokens.
    ///
    /// Settings must be valid (see [`Sampling::validate`]). Among equally probable tokens at the
    /// edge of the top-p set, those with a higher index are kept. HF transformers does the same,
    /// because it removes tokens from an ascending stable sort.
    ///
    /// # Panics
    /// If no logit is finite, or any is NaN or +∞.
    pub fn probs(&self, logits: &[f32]) -> Vec<f64> {
        let largest = checked_max(logits);
        let Some(top_k) = self.top_k.filter(|&top_k| top_k < logits.len()) else {
            let (mut weights, total) = exponentials::weights(logits, largest, self.temperature);
            let total = checked_total(total);
            if self.top_p >= 1.0 && self.min_p.is_none() {
                // Multiplications are much cheaper than divisions and cost one more rounding.
                let scale = total.recip();
                weights.iter_mut().for_each(|weight| *weight *= scale);
                return weights;
            }
            let all = weights.iter().copied().enumerate();
            let kept = if self.top_p < 1.0 {
                nucleus(all, total, logits.len(), self.top_p)
            } else {
                all.filter(|(_, weight)| self.is_likely(*weight)).collect()
            };
            return self.spread(weights, kept);
        };

        let smallest_kept = kth_largest(logits, top_k);
        // NaN is kept so that the check of the sum finds it.
        let (indices, kept): (Vec<usize>, Vec<f32>) = (0..)
            .zip(logits.iter().copied())
            .filter(|&(_, logit)| logit >= smallest_kept || logit.is_nan())
            .unzip();
        let (weights, total) = exponentials::weights(&kept, largest, self.temperature);
        let mut kept: Vec<Token> = indices.into_iter().zip(weights).collect();
        if self.top_p < 1.0 {
            kept = nucleus(kept.iter().copied(), checked_total(total), kept.len(), self.top_p);
        }
        self.spread(vec![0.0; logits.len()], kept)
    }

    /// Returns whether min-p keeps a token of this weight, if the largest weight is 1.
    fn is_likely(&self, weight: f64) -> bool {
        self.min_p.is_none_or(|min_p| weight >= min_p)
    }

    /// Sets `row` to the normalised weights of the kept tokens after min-p, and 0 elsewhere.
    fn spread(&self, mut row: Vec<f64>, mut kept: Vec<Token>) -> Vec<f64> {
        kept.retain(|(_, weight)| self.is_likely(*weight) || weight.is_nan());
        let total = checked_total(kept.iter().map(|(_, weight)| weight).sum());
        row.fill(0.0);
        for (index, weight) in kept {
            row[index] = weight / total;
        }
        row
    }
}

fn checked_total(total: f64) -> f64 {
    assert!(total.is_finite(), "logits must not be NaN");
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Draws, SeededDraws, log_softmax};

    /// Applies HF's warpers, transcribed step by step, with a full ascending stable sort.
    fn reference_probs(sampling: &Sampling, logits: &[f32]) -> Vec<f64> {
        let mut scores: Vec<f64> =
            logits.iter().map(|&logit| f64::from(logit) / sampling.temperature).collect();
        if let Some(top_k) = sampling.top_k {
            let mut sorted = scores.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let smallest_kept = sorted[top_k.min(sorted.len()) - 1];
            scores
                .iter_mut()
                .filter(|score| **score < smallest_kept)
                .for_each(|score| *score = f64::NEG_INFINITY);
        }
        let softmax = |scores: &[f64]| -> Vec<f64> {
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            scores.iter().map(|score| (score - largest).exp() / total).collect()
        };
        if sampling.top_p < 1.0 {
            let probs = softmax(&scores);
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
            let mut cumulative = 0.0;
            for &index in &order[..order.len() - 1] {
                cumulative += probs[index];
                if cumulative <= 1.0 - sampling.top_p {
                    scores[index] = f64::NEG_INFINITY;
                }
            }
        }
        let probs = softmax(&scores);
        let largest = probs.iter().copied().fold(0.0, f64::max);
        for (score, prob) in scores.iter_mut().zip(&probs) {
            if *prob < sampling.min_p.unwrap_or(0.0) * largest {
                *score = f64::NEG_INFINITY;
            }
        }
        softmax(&scores)
    }

    #[test]
    fn probs_equal_the_plain_transcription() {
        let mut draws = SeededDraws::new(1, &["warpers"]);
        for case in 0..600 {
            let len = [1, 2, 5, 17, 300, 3000][case % 6];
            let spread = [0.01, 3.0, 30.0][case % 3];
            let mut logits: Vec<f32> =
                (0..len).map(|_| ((draws.uniform() - 0.5) * spread) as f32).collect();
            if len > 2 && case % 5 == 0 {
                logits[1] = f32::NEG_INFINITY;
            }
            let sampling = Sampling {
                temperature: [1.0, 0.6, 1.7][draws.categorical(&[1.0; 3])],
                top_p: [1.0, 0.9, 0.5, 0.01][draws.categorical(&[1.0; 4])],
                top_k: [None, Some(1), Some(3), Some(50), Some(5000)][draws.categorical(&[1.0; 5])],
                min_p: [None, Some(0.05), Some(0.3), Some(0.999)][draws.categorical(&[1.0; 4])],
            };
            let probs = sampling.probs(&logits);
            for (index, (prob, expected)) in
                probs.iter().zip(reference_probs(&sampling, &logits)).enumerate()
            {
                // Both are normalised sums of at most 3000 f64 terms.
                assert!(
                    (prob - expected).abs() < 1e-12,
                    "{sampling:?}, token {index}: {prob} != {expected}"
                );
                assert_eq!(*prob == 0.0, expected == 0.0, "{sampling:?}, token {index}");
            }
        }
    }

    #[test]
    fn the_default_is_the_softmax() {
        let logits = [0.3, -1.5, 7.0, f32::NEG_INFINITY, 2.25];
        let probs = Sampling::default().probs(&logits);
        for (prob, log_prob) in probs.iter().zip(log_softmax(&logits)) {
            // exp(log) and a division, each rounded once.
            assert!((prob - log_prob.exp()).abs() < 1e-15);
        }
    }

    /// Returns logits whose softmax at T = 1 is (close to) the given probabilities.
    fn logits_of(probs: &[f64]) -> Vec<f32> {
        probs.iter().map(|prob| prob.ln() as f32).collect()
    }

    #[track_caller]
    fn check(sampling: Sampling, probs: &[f64], expected: &[f64]) {
        let found = sampling.probs(&logits_of(probs));
        for (found, expected) in found.iter().zip(expected) {
            // The logits are f32 logarithms.
            assert!((found - expected).abs() < 1e-6, "{found} != {expected}");
        }
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        let probs = [0.1, 0.4, 0.2, 0.3];
        let top_p = |top_p| Sampling { top_p, ..Sampling::default() };
        check(top_p(0.95), &probs, &probs);
        check(top_p(0.85), &probs, &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
        check(top_p(0.65), &probs, &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        check(top_p(0.35), &probs, &[0.0, 1.0, 0.0, 0.0]);
        check(top_p(1e-300), &probs, &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn top_p_removes_lower_indices_of_equals_first() {
        check(Sampling { top_p: 0.5, ..Sampling::default() }, &[0.25; 4], &[0.0, 0.0, 0.5, 0.5]);
        check(Sampling { top_p: 1e-300, ..Sampling::default() }, &[0.25; 4], &[0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn top_k_keeps_ties_and_top_p_sees_its_result() {
        let top_k = |top_k, top_p| Sampling { top_k: Some(top_k), top_p, ..Sampling::default() };
        check(top_k(2, 1.0), &[0.1, 0.4, 0.2, 0.3], &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        check(top_k(1, 1.0), &[0.4, 0.4, 0.2], &[0.5, 0.5, 0.0]);
        // After top-k the first token has 4/7 > 0.55 of the mass; before it, 0.4.
        check(top_k(2, 0.55), &[0.1, 0.4, 0.2, 0.3], &[0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn temperature_comes_before_top_p() {
        // At T = 1/2 the probabilities are squared and normalised: 16/26, 9/26, 1/26.
        let sampling = Sampling { temperature: 0.5, top_p: 0.6, ..Sampling::default() };
        check(sampling, &[0.5, 0.375, 0.125], &[1.0, 0.0, 0.0]);
        let sampling = Sampling { temperature: 0.5, ..Sampling::default() };
        check(sampling, &[0.5, 0.375, 0.125], &[16.0 / 26.0, 9.0 / 26.0, 1.0 / 26.0]);
    }

    #[test]
    fn min_p_keeps_tokens_with_a_share_of_the_largest_probability() {
        let probs = [0.1, 0.4, 0.2, 0.3];
        let min_p = |min_p| Sampling { min_p: Some(min_p), ..Sampling::default() };
        check(min_p(0.2), &probs, &probs);
        check(min_p(0.4), &probs, &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
        check(min_p(0.99), &probs, &[0.0, 1.0, 0.0, 0.0]);
        // After the temperature the probabilities are 1/30, 16/30, 4/30 and 9/30.
        check(Sampling { temperature: 0.5, ..min_p(0.3) }, &probs, &[0.0, 0.64, 0.0, 0.36]);
    }

    #[test]
    fn settings_out_of_range_are_errors() {
        let valid = Sampling::default();
        assert_eq!(valid.validate(), Ok(()));
        let check = |sampling: Sampling, name: &str| {
            let error = sampling.validate().expect_err("out of range").to_string();
            assert!(error.starts_with(&format!("{name} must ")), "{error}");
        };
        for temperature in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            check(Sampling { temperature, ..valid }, "temperature");
        }
        for top_p in [0.0, 1.1, f64::NAN] {
            check(Sampling { top_p, ..valid }, "top_p");
        }
        check(Sampling { top_k: Some(0), ..valid }, "top_k");
        for min_p in [-0.1, 0.0, 1.0, f64::NAN].map(Some) {
            check(Sampling { min_p, ..valid }, "min_p");
        }
    }

    #[test]
    #[should_panic(expected = "must not be NaN")]
    fn a_nan_logit_is_a_bug_with_top_k_too() {
        Sampling { top_k: Some(1), ..Sampling::default() }.probs(&[0.0, 1.0, f32::NAN]);
    }
}
