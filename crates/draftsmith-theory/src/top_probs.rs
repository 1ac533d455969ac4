//! Distributions of which only the most probable tokens are known, as servers return them: an
//! approximation and a bound on its error.
//!
//! A server returns the log-probabilities, at temperature 1, of its k most probable tokens. The
//! other tokens share the remaining mass, each with at most the probability of the k-th token. The
//! approximation spreads this mass evenly over them. At temperature 1 the known tokens keep their
//! probabilities. With another temperature, top-k, top-p or min-p, the unknown tokens affect the
//! known ones too. [`TopProbs::outside_mass`] bounds the error.

use crate::Sampling;

/// The tolerance for rounded sums of probabilities at the edge of a top-p set.
const EDGE: f64 = 1e-5;

/// The most probable tokens of a distribution, with their log-probabilities at temperature 1.
#[derive(Debug, Clone, PartialEq)]
pub struct TopProbs {
    /// The known tokens with their log-probabilities, in descending order.
    top: Vec<(u32, f32)>,
    /// The number of leading entries of `top` that are the distribution's most probable tokens. A
    /// further entry may be the drawn token.
    num_best: usize,
    /// The log-probability of the last of these, which no other token exceeds.
    least: f32,
    /// Whether more is known than one drawn token.
    is_known: bool,
}

impl TopProbs {
    /// Creates a distribution from its `k` most probable tokens and further known tokens, in any
    /// order, each once. If `known` has fewer than `k` tokens, all other tokens are taken to have
    /// negligible probability.
    ///
    /// # Panics
    /// If `known` is empty, or a log-probability is NaN.
    pub fn new(known: impl IntoIterator<Item = (u32, f32)>, k: usize) -> Self {
        let mut top: Vec<(u32, f32)> = known.into_iter().collect();
        top.sort_by(|one, other| other.1.total_cmp(&one.1).then(one.0.cmp(&other.0)));
        let num_best = k.clamp(1, top.len().max(1));
        let least = top.get(num_best - 1).expect("a token is known").1;
        assert!(!least.is_nan(), "log-probabilities must be numbers");
        Self { top, num_best, least, is_known: true }
    }

    /// Creates the distribution with all mass on one token.
    pub fn certain(token: u32) -> Self {
        Self { top: vec![(token, 0.0)], num_best: 1, least: f32::NEG_INFINITY, is_known: true }
    }

    /// Creates a distribution known only by one drawn token, which gets all mass. Its error bound
    /// is 1.
    pub fn unknown(drawn: u32) -> Self {
        Self { is_known: false, ..Self::certain(drawn) }
    }

    /// Computes the mass of all tokens but the first `num`, at temperature 1.
    fn remaining_mass(&self, num: usize) -> f64 {
        let known: f64 =
            self.top[..num].iter().map(|(_, log_prob)| f64::from(*log_prob).exp()).sum();
        (1.0 - known).max(0.0)
    }

    /// Returns the approximate distribution as logits, which are the log-probabilities of
    /// `vocab_size` tokens.
    ///
    /// # Panics
    /// If a token is outside the vocabulary.
    pub fn logits(&self, vocab_size: usize) -> Vec<f32> {
        let num_others = vocab_size.saturating_sub(self.top.len());
        let each = (self.remaining_mass(self.top.len()) / num_others.max(1) as f64).ln() as f32;
        let mut logits = vec![each.min(self.least); vocab_size];
        for (token, log_prob) in &self.top {
            logits[*token as usize] = *log_prob;
        }
        logits
    }

    /// Computes a bound on the total variation distance between the distributions of
    /// [`Self::logits`] and of the true logits, both after `sampling`. So no probability and no
    /// overlap with another distribution has a larger error, apart from rounding. At temperature 1
    /// without top-k, top-p and min-p the bound is the mass outside the most probable tokens.
    ///
    /// The n unknown tokens have total mass m, and none has more than p_k. At temperature T, the
    /// sum of their weights p^(1/T) lies between n·(m/n)^(1/T), if all are equal, and m·p_k^(1/T −
    /// 1), if as few tokens as possible hold the mass. The known tokens keep their proportions at
    /// both extremes. So the distance is at most the mass of the unknown tokens, or the mass that
    /// top-p cuts off at one extreme and not at the other.
    pub fn outside_mass(&self, sampling: &Sampling, vocab_size: usize) -> f64 {
        if !self.is_known {
            return 1.0;
        }
        let exponent = sampling.temperature.recip();
        let largest = f64::from(self.top[0].1);
        let weight = |log_prob: f32| ((f64::from(log_prob) - largest) * exponent).exp();
        let num_kept = sampling.top_k.map_or(self.num_best, |top_k| top_k.min(self.num_best));
        let is_cut = sampling.top_k.is_some_and(|top_k| top_k <= self.num_best);
        let mut weights: Vec<f64> =
            self.top[..num_kept].iter().map(|(_, log_prob)| weight(*log_prob)).collect();
        let inside: f64 = weights.iter().sum();
        let (mut low, mut high) = match is_cut {
            true => (0.0, 0.0),
            false => self.outside_weights(exponent, vocab_size),
        };
        if sampling.top_k.is_some() {
            low = 0.0;
        }
        // Returns the number of tokens in the top-p set; None if it includes unknown tokens.
        let nucleus = |outside: f64| -> Option<usize> {
            if sampling.top_p >= 1.0 {
                return (outside == 0.0).then_some(weights.len());
            }
            let needed = sampling.top_p * (inside + outside);
            let mut sum = 0.0;
            weights
                .iter()
                .position(|weight| {
                    sum += weight;
                    sum >= needed
                })
                .map(|last| last + 1)
        };
        // Rounding moves the edge of the top-p set.
        let edge = if sampling.top_p < 1.0 { EDGE * inside } else { 0.0 };
        let (mut few, mut many) = (nucleus((low - edge).max(0.0)), nucleus(high + edge));
        if let Some(min_p) = sampling.min_p {
            weights.retain(|weight| *weight >= min_p);
            let num_likely = weights.len();
            let is_outside_likely = weight(self.least) >= min_p * (1.0 - EDGE);
            for count in [&mut few, &mut many] {
                *count = match *count {
                    Some(count) => Some(count.min(num_likely)),
                    None => (!is_outside_likely).then_some(num_likely),
                };
            }
            if !is_outside_likely {
                high = 0.0;
            }
        }
        let sum = |count: usize| weights[..count].iter().sum::<f64>();
        match (few, many) {
            (Some(few), Some(many)) => 1.0 - sum(few) / sum(many),
            (Some(few), None) => 1.0 - sum(few) / (inside + high),
            (None, _) => (high / (inside + high) / sampling.top_p).min(1.0),
        }
    }

    /// Computes the minimum and maximum sum of the unknown tokens' weights, if the most probable
    /// token has weight 1.
    fn outside_weights(&self, exponent: f64, vocab_size: usize) -> (f64, f64) {
        let num_others = vocab_size.saturating_sub(self.num_best) as f64;
        let remaining_mass = self.remaining_mass(self.num_best);
        if remaining_mass == 0.0 || num_others == 0.0 {
            return (0.0, 0.0);
        }
        let largest = f64::from(self.top[0].1);
        let mass = remaining_mass * (-largest).exp();
        let least = (f64::from(self.least) - largest).exp();
        let alike = num_others * (mass / num_others).min(least).powf(exponent);
        let few = mass * least.powf(exponent - 1.0);
        (alike.min(few), alike.max(few))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::random_probs;
    use crate::{SeededDraws, overlap};

    const VOCAB: usize = 60;

    /// Draws the logits of a distribution with a tail.
    fn logits(draws: &mut SeededDraws, sharpness: f64) -> Vec<f32> {
        let probs = random_probs(draws, VOCAB);
        let log_probs = probs.iter().map(|prob| sharpness * prob.max(1e-9).ln());
        let all: Vec<f64> = log_probs.collect();
        let total: f64 = all.iter().map(|log| log.exp()).sum();
        all.iter().map(|log| (log - total.ln()) as f32).collect()
    }

    fn top(logits: &[f32], k: usize, drawn: u32) -> TopProbs {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
        let mut known: Vec<u32> = order[..k].to_vec();
        if !known.contains(&drawn) {
            known.push(drawn);
        }
        TopProbs::new(known.into_iter().map(|id| (id, logits[id as usize])), k)
    }

    #[test]
    fn the_served_distribution_is_within_the_bound() {
        let mut draws = SeededDraws::new(3, &["top probs"]);
        let (mut num_exact, mut num_outside, mut tightest) = (0, 0, f64::INFINITY);
        for case in 0..400 {
            let truth = logits(&mut draws, 0.3 + f64::from(case % 8) * 0.6);
            let other = Sampling::default().probs(&logits(&mut draws, 1.0));
            for k in [1, 5, 20] {
                let known = top(&truth, k, case % VOCAB as u32);
                for temperature in [0.6, 1.0, 1.4] {
                    for (top_p, top_k, min_p) in [
                        (1.0, None, None),
                        (0.9, None, None),
                        (1.0, Some(4), None),
                        (1.0, Some(30), None),
                        (0.8, Some(10), None),
                        (1.0, None, Some(0.1)),
                        (0.95, None, Some(0.02)),
                    ] {
                        let sampling = Sampling { temperature, top_p, top_k, min_p };
                        let (p, taken) =
                            (sampling.probs(&truth), sampling.probs(&known.logits(VOCAB)));
                        let bound = known.outside_mass(&sampling, VOCAB);
                        let distance: f64 =
                            p.iter().zip(&taken).map(|(p, q)| (p - q).abs()).sum::<f64>() / 2.0;
                        assert!(
                            distance <= bound + 1e-5,
                            "{sampling:?}, {k}: {distance} > {bound}"
                        );
                        let off = (overlap(&p, &other) - overlap(&taken, &other)).abs();
                        assert!(off <= bound + 1e-5, "{sampling:?}: overlap off by {off}");
                        num_exact += usize::from(bound < 1e-9);
                        num_outside += usize::from(bound > 0.01);
                        if bound > 0.01 {
                            tightest = tightest.min(bound - distance);
                        }
                    }
                }
            }
        }
        assert!(num_exact > 1000 && num_outside > 1000, "{num_exact}, {num_outside}");
        assert!(tightest < 0.01, "the bound is met: {tightest}");
    }

    #[test]
    fn unwarped_known_tokens_keep_their_probabilities() {
        let mut draws = SeededDraws::new(4, &["top probs"]);
        let truth = logits(&mut draws, 2.0);
        let known = top(&truth, 5, 0);
        let (p, taken) =
            (Sampling::default().probs(&truth), Sampling::default().probs(&known.logits(VOCAB)));
        let outside: f64 = 1.0 - known.top[..5].iter().map(|(id, _)| p[*id as usize]).sum::<f64>();
        for (id, _) in &known.top {
            assert!((p[*id as usize] - taken[*id as usize]).abs() < 1e-6);
        }
        assert!((known.outside_mass(&Sampling::default(), VOCAB) - outside).abs() < 1e-6);
        let certain = TopProbs::certain(7);
        assert_eq!(Sampling::default().probs(&certain.logits(VOCAB))[7], 1.0);
        assert_eq!(certain.outside_mass(&Sampling::default(), VOCAB), 0.0);
    }
}
