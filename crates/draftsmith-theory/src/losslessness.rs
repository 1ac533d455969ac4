//! A statistical test of whether sampled output has the target's distribution.
//!
//! Exact enumeration proves the decoding loop lossless over probability tables. This test covers
//! the tokens that a real model emits, with its caches and kernels. The target's distribution p and
//! the draft's distribution q are known for each token. If the output has the target's
//! distribution, two things follow.
//!
//! First, the randomised probability integral transforms u = F(x−) + V·p(x), with V uniform, are
//! independent and uniform on (0, 1), because each is uniform given the tokens before it
//! (Rosenblatt 1952; Brockwell 2007 for discrete distributions). F may sum tokens in any order that
//! is independent of x. We order by p/q, since a broken verification moves mass from tokens that
//! the draft underrates to tokens that it overrates, which shifts u. A Kolmogorov-Smirnov test and
//! a test of the mean check that u is uniform, against any kind of fault.
//!
//! Second, the output's likelihood under a faulty distribution over its likelihood under p is a
//! product of factors with expectation 1, so this ratio exceeds 1/α with probability at most α, at
//! any stopping time (Ville 1939; Shafer 2021, testing by betting). A token of which the target is
//! almost certain leaves the ratio unchanged, so a few uncertain tokens among thousands suffice. We
//! test for two faults. Wrongly accepted candidates move the output towards q. A faulty rejection
//! draws the next token from p instead of (p − q)+.

mod rounding;

pub use self::rounding::Rounding;

use crate::SeededDraws;
use crate::distribution::overlap;

/// The target probability above which a token's transform is left out as mostly noise.
const NEARLY_CERTAIN: f64 = 0.99;

/// The number of tests whose minimum gives the p-value.
const NUM_TESTS: f64 = 3.0;

/// A test of whether the observed tokens have the target's distribution.
#[derive(Debug, Clone, Default)]
pub struct LosslessnessTest {
    num_impossible: usize,
    /// The transforms of uncertain tokens, each uniform on (0, 1) if the output is lossless.
    transforms: Vec<f64>,
    /// The log-likelihood ratio of ½p + ½q to p. This mixture is the output if half of the
    /// candidates are accepted unverified.
    leaning_log_ratio: f64,
    /// The log-likelihood ratio of (1 − β)p + min(p, q) to p, with β the overlap. This mixture is
    /// the output if rejections draw from p.
    redrawn_log_ratio: f64,
}

impl LosslessnessTest {
    /// Observes an emitted token, with the target's distribution p and the draft's distribution q
    /// for its position. Both are taken after temperature and filters.
    ///
    /// The test is valid for any q that is independent of `token`. Nothing else may use `draws`.
    ///
    /// # Panics
    /// If the lengths differ, or the token is outside the vocabulary.
    pub fn observe(&mut self, p: &[f64], q: &[f64], token: u32, draws: &mut SeededDraws) {
        assert_eq!(p.len(), q.len(), "both distributions must be over one vocabulary");
        let token = token as usize;
        if p[token] == 0.0 {
            self.num_impossible += 1;
            return;
        }
        let ratio = q[token] / p[token];
        let rejected = (1.0 - overlap(p, q)).max(0.0);
        self.leaning_log_ratio += (0.5 + 0.5 * ratio).ln();
        self.redrawn_log_ratio += (rejected + ratio.min(1.0)).ln();
        if p.iter().all(|prob| *prob <= NEARLY_CERTAIN) {
            self.transforms.push(transform(p, q, token, draws.uniform()));
        }
    }

    /// Returns the number of observed tokens of target probability 0. Even one proves a fault.
    pub fn num_impossible(&self) -> usize {
        self.num_impossible
    }

    /// Computes the p-value of the hypothesis that the output has the target's distribution: the
    /// minimum over three tests, times three (Bonferroni). It is 1 without tokens, and 0 after a
    /// token of target probability 0.
    pub fn p_value(&self) -> f64 {
        if self.num_impossible > 0 {
            return 0.0;
        }
        let least = self.ratio_p_value().min(self.mean_p_value());
        (NUM_TESTS * least.min(kolmogorov_smirnov_p_value(&self.transforms))).min(1.0)
    }

    /// Computes a p-value, 1 divided by the mean of the two likelihood ratios. This mean has
    /// expectation 1 too, so the p-value is valid but conservative.
    fn ratio_p_value(&self) -> f64 {
        let (leaning, redrawn) = (self.leaning_log_ratio, self.redrawn_log_ratio);
        let larger = leaning.max(redrawn);
        let log_mean = larger + (0.5 * ((leaning - larger).exp() + (redrawn - larger).exp())).ln();
        (-log_mean).exp().min(1.0)
    }

    /// Computes the two-sided p-value of the transforms' mean; a uniform number has variance 1/12.
    fn mean_p_value(&self) -> f64 {
        let num_transforms = self.transforms.len() as f64;
        let excess: f64 = self.transforms.iter().map(|transform| transform - 0.5).sum();
        let deviation = excess.abs() * (12.0 / num_transforms.max(1.0)).sqrt();
        complementary_error_function(deviation / std::f64::consts::SQRT_2)
    }
}

/// Computes F(x−) + V·p(x), with x = `token` and V = `uniform`. F sums tokens in ascending order of
/// p/q; equal ratios are ordered by token id.
fn transform(p: &[f64], q: &[f64], token: usize, uniform: f64) -> f64 {
    let key = p[token] / q[token];
    let (mut before, mut total) = (0.0, 0.0);
    for (other, (prob, draft_prob)) in p.iter().zip(q).enumerate() {
        // This is NaN if both are 0, but then the token adds 0 either way.
        let other_key = prob / draft_prob;
        let comes_before = other_key < key || (other_key == key && other < token);
        total += prob;
        before += if comes_before { *prob } else { 0.0 };
    }
    (before + uniform * p[token]) / total
}

/// Computes the two-sided p-value that the numbers are uniform; 1 without numbers.
///
/// It is asymptotic with Stephens' correction (1970), accurate even for a handful of numbers.
fn kolmogorov_smirnov_p_value(uniforms: &[f64]) -> f64 {
    if uniforms.is_empty() {
        return 1.0;
    }
    let mut sorted = uniforms.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let len = sorted.len() as f64;
    let distances = sorted.iter().enumerate().map(|(rank, uniform)| {
        let (below, through) = (rank as f64 / len, (rank + 1) as f64 / len);
        (uniform - below).max(through - uniform)
    });
    let distance = distances.fold(0.0, f64::max);
    let root = len.sqrt();
    kolmogorov_tail((root + 0.12 + 0.11 / root) * distance)
}

/// Computes P(K > x) of Kolmogorov's distribution: 2 Σ (−1)^(j−1) exp(−2 j² x²). That sum converges
/// slowly for small x, where the equal expression 1 − √(2π)/x Σ exp(−(2j − 1)² π² / (8 x²)) is
/// used.
fn kolmogorov_tail(x: f64) -> f64 {
    use std::f64::consts::PI;
    if x <= 0.0 {
        return 1.0;
    }
    if x < 1.0 {
        let term = |j: i32| (-f64::from(2 * j - 1).powi(2) * PI * PI / (8.0 * x * x)).exp();
        return 1.0 - (2.0 * PI).sqrt() / x * (1..=5).map(term).sum::<f64>();
    }
    let term = |j: i32| {
        let sign = if j % 2 == 1 { 1.0 } else { -1.0 };
        sign * (-2.0 * f64::from(j * j) * x * x).exp()
    };
    2.0 * (1..=5).map(term).sum::<f64>()
}

/// Computes erfc(x) for x >= 0, to a relative error of 1.2e-7, by the Chebyshev fit of *Numerical
/// Recipes* (1992, section 6.2).
fn complementary_error_function(x: f64) -> f64 {
    const FIT: [f64; 10] = [
        -1.265_512_23,
        1.000_023_68,
        0.374_091_96,
        0.096_784_18,
        -0.186_288_06,
        0.278_868_07,
        -1.135_203_98,
        1.488_515_87,
        -0.822_152_23,
        0.170_872_77,
    ];
    let t = 1.0 / (1.0 + 0.5 * x);
    t * (-x * x + FIT.iter().rev().fold(0.0, |sum, factor| sum * t + factor)).exp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draws;
    use crate::verify::verify_chain;

    const VOCAB_SIZE: usize = 12;

    /// The significance level of `check`.
    const ALPHA: f64 = 1e-4;

    /// Draws a target's and a draft's distribution with an overlap of about 0.7.
    fn distributions(place: usize) -> (Vec<f64>, Vec<f64>) {
        let mut rng = SeededDraws::new(place as u64, &["losslessness", "laws"]);
        let mut distribution = |near: Option<&[f64]>| -> Vec<f64> {
            let weights: Vec<f64> = (0..VOCAB_SIZE)
                .map(|token| {
                    let own = rng.uniform().powi(4);
                    near.map_or(own, |near| near[token] * (0.2 + 1.6 * rng.uniform()) + 0.02 * own)
                })
                .collect();
            let total: f64 = weights.iter().sum();
            weights.iter().map(|weight| weight / total).collect()
        };
        let p = distribution(None);
        let q = distribution(Some(&p));
        (p, q)
    }

    /// Returns the test after `num_tokens` tokens, each emitted by `emit` from (p, q).
    fn tested(
        seed: u64,
        num_tokens: usize,
        emit: impl Fn(&[f64], &[f64], &mut SeededDraws) -> usize,
    ) -> LosslessnessTest {
        let mut draws = SeededDraws::new(seed, &["losslessness", "emitted"]);
        let mut transforms = SeededDraws::new(seed, &["losslessness", "transforms"]);
        let mut test = LosslessnessTest::default();
        for place in 0..num_tokens {
            let (p, q) = distributions(place);
            let token = emit(&p, &q, &mut draws) as u32;
            test.observe(&p, &q, token, &mut transforms);
        }
        test
    }

    fn difference(a: &[f64], b: &[f64]) -> Vec<f64> {
        a.iter().zip(b).map(|(a, b)| (a - b).max(0.0)).collect()
    }

    /// Draws the first token of a round with the shipped verification.
    fn verified(p: &[f64], q: &[f64], draws: &mut SeededDraws) -> usize {
        let candidate = draws.categorical(q) as u32;
        let commit = verify_chain(&[candidate], &[q], &[p, p], draws);
        if commit.path.is_empty() { commit.next_token as usize } else { candidate as usize }
    }

    #[test]
    fn lossless_output_passes() {
        for seed in 0..5 {
            let plain = tested(seed, 4000, |p, _, draws| draws.categorical(p));
            assert!(plain.p_value() > 0.001, "{}", plain.p_value());
            let verified = tested(seed, 4000, verified);
            assert!(verified.p_value() > 0.001, "{}", verified.p_value());
            assert_eq!(verified.num_impossible(), 0);
        }
    }

    #[test]
    fn lossless_output_is_rejected_at_most_at_the_level() {
        let num_cases = 3000;
        let distributions: Vec<_> = (0..100).map(distributions).collect();
        let mut draws = SeededDraws::new(0, &["losslessness", "level"]);
        let p_value = |_| {
            let mut test = LosslessnessTest::default();
            for (p, q) in &distributions {
                let token = draws.categorical(p) as u32;
                test.observe(p, q, token, &mut draws);
            }
            test.p_value()
        };
        let p_values: Vec<f64> = (0..num_cases).map(p_value).collect();
        for level in [0.01, 0.1] {
            let found = p_values.iter().filter(|p_value| **p_value <= level).count() as f64;
            let expected = level * f64::from(num_cases);
            // Four standard deviations above. Below, the correction for three tests is
            // conservative.
            assert!(found < expected + 4.0 * expected.sqrt(), "{found} at {level}");
            assert!(found > 0.4 * expected - 4.0 * (0.4 * expected).sqrt(), "{found} at {level}");
        }
    }

    #[test]
    fn a_verification_that_accepts_everything_is_rejected() {
        let test = tested(0, 2000, |_, q, draws| draws.categorical(q));
        assert!(test.p_value() < ALPHA, "{}", test.p_value());
    }

    #[test]
    fn a_rejection_that_draws_from_the_target_itself_is_rejected() {
        let test = tested(0, 3000, |p, q, draws| {
            let candidate = draws.categorical(q);
            let is_accepted = draws.bernoulli(p[candidate] / q[candidate]);
            if is_accepted { candidate } else { draws.categorical(p) }
        });
        assert!(test.p_value() < ALPHA, "{}", test.p_value());
    }

    #[test]
    fn a_residual_with_the_wrong_sign_is_rejected() {
        let test = tested(0, 1000, |p, q, draws| {
            let candidate = draws.categorical(q);
            let is_accepted = draws.bernoulli(p[candidate] / q[candidate]);
            if is_accepted { candidate } else { draws.categorical(&difference(q, p)) }
        });
        assert!(test.p_value() < ALPHA, "{}", test.p_value());
    }

    /// Withholds token 1 at p = q = (½, ½): token 0 comes out with probability ¾, because a bonus
    /// token is drawn from p. The likelihood ratios miss this fault.
    #[test]
    fn a_candidate_withheld_for_its_own_value_is_rejected() {
        let half = [0.5, 0.5];
        let mut draws = SeededDraws::new(0, &["losslessness", "withheld"]);
        let mut test = LosslessnessTest::default();
        for _ in 0..1000 {
            let candidate = draws.categorical(&half);
            let token = if candidate == 1 { draws.categorical(&half) } else { candidate };
            test.observe(&half, &half, token as u32, &mut draws);
        }
        assert!(test.p_value() < ALPHA, "{}", test.p_value());
    }

    /// Draws from the next position's distribution, as after a cache rollback that is one token
    /// short.
    #[test]
    fn output_of_another_positions_distribution_is_rejected() {
        let mut draws = SeededDraws::new(0, &["losslessness", "places"]);
        let mut test = LosslessnessTest::default();
        for place in 0..1000 {
            let ((p, q), (other, _)) = (distributions(place), distributions(place + 1));
            let token = draws.categorical(&other) as u32;
            test.observe(&p, &q, token, &mut draws);
        }
        assert!(test.p_value() < ALPHA, "{}", test.p_value());
    }

    #[test]
    fn a_token_of_target_probability_zero_is_proof() {
        let mut draws = SeededDraws::new(0, &[]);
        let mut test = LosslessnessTest::default();
        assert_eq!(test.p_value(), 1.0);
        test.observe(&[0.5, 0.5, 0.0], &[1.0, 0.0, 0.0], 0, &mut draws);
        assert!(test.p_value() > 0.0);
        test.observe(&[0.5, 0.5, 0.0], &[1.0, 0.0, 0.0], 2, &mut draws);
        assert_eq!((test.p_value(), test.num_impossible()), (0.0, 1));
    }

    /// Tests a target that is almost certain of most tokens, as trained ones are: the fault shows
    /// in few tokens, and the others must not hide it.
    #[test]
    fn few_uncertain_tokens_among_thousands_suffice() {
        let (sure, unsure) = ([0.999, 0.0005, 0.0005], [0.5, 0.3, 0.2]);
        let drafts = ([0.98, 0.02, 0.0], [0.2, 0.2, 0.6]);
        let p_value = |emit: fn(&[f64], &[f64], &mut SeededDraws) -> usize| {
            let mut draws = SeededDraws::new(0, &["losslessness", "sure"]);
            let mut test = LosslessnessTest::default();
            for place in 0..3000 {
                let (p, q) = if place % 20 == 0 { (unsure, drafts.1) } else { (sure, drafts.0) };
                let token = emit(&p, &q, &mut draws) as u32;
                test.observe(&p, &q, token, &mut draws);
            }
            test.p_value()
        };
        assert!(p_value(verified) > 0.001);
        assert!(p_value(|_, q, draws| draws.categorical(q)) < ALPHA);
    }

    #[test]
    fn the_likelihood_ratios_have_expectation_one_under_the_target() {
        let mut draws = SeededDraws::new(0, &[]);
        for place in 0..50 {
            let (p, q) = distributions(place);
            let (mut leaning, mut redrawn) = (0.0, 0.0);
            for (token, prob) in p.iter().enumerate() {
                let mut test = LosslessnessTest::default();
                test.observe(&p, &q, token as u32, &mut draws);
                leaning += prob * test.leaning_log_ratio.exp();
                redrawn += prob * test.redrawn_log_ratio.exp();
            }
            // A dozen terms, each rounded by a logarithm and an exponential.
            assert!((leaning - 1.0).abs() < 1e-12 && (redrawn - 1.0).abs() < 1e-12, "{place}");
        }
    }

    #[test]
    fn the_transform_adds_up_tokens_in_the_order_of_p_over_q() {
        // p/q is 2, 1, 2 and ½.
        let (p, q) = ([0.125, 0.25, 0.25, 0.375], [0.0625, 0.25, 0.125, 0.75]);
        for (token, before) in [(3, 0.0), (1, 0.375), (0, 0.625), (2, 0.75)] {
            assert_eq!(transform(&p, &q, token, 0.5), before + 0.5 * p[token], "token {token}");
        }
        // A token that only the draft lacks comes last.
        assert_eq!(transform(&[0.5, 0.5, 0.0], &[0.0, 1.0, 0.0], 0, 0.0), 0.5);
    }

    #[test]
    fn tails_match_published_tables() {
        // Published critical values of Kolmogorov's distribution at 20 %, 5 %, 1 % and 0.1 %, and
        // its median.
        for (x, tail) in
            [(1.073, 0.2), (1.358, 0.05), (1.628, 0.01), (1.949, 0.001), (0.827_57, 0.5)]
        {
            assert!((kolmogorov_tail(x) / tail - 1.0).abs() < 0.005, "{x}");
        }
        assert_eq!(kolmogorov_tail(0.0), 1.0);
        assert!((kolmogorov_tail(0.05) - 1.0).abs() < 1e-12);
        // Both sums agree where they meet.
        assert!((kolmogorov_tail(1.0 - 1e-12) - kolmogorov_tail(1.0)).abs() < 1e-10);
        for (x, value) in
            [(0.0, 1.0), (0.5, 0.479_500_122), (2.0, 0.004_677_735), (5.0, 1.537_46e-12)]
        {
            assert!((complementary_error_function(x) / value - 1.0).abs() < 1e-5, "{x}");
        }
    }
}
