//! Tests sampled answers of full length.
//!
//! Late prefixes are all different, so [`super::sampled`] cannot count the tokens that follow them.
//! Here each drawn token is compared with the reference's distribution after the same prefix. Two
//! sums over tokens are tested: how many are the most probable token, and their log-probabilities.
//! Given the prefix, the expectation of each term is known, so the deviation of a sum is a martingale.
//! Sums begin at four places of an answer, so that early tokens don't hide a fault that shows late.

use std::collections::BTreeMap;

use draftsmith_served::CompletionAsk;
use draftsmith_theory::SeededDraws;

use super::sampled::{FullLengthTest, SUSPECTED, SampledTest, TestedWhat};
use super::{Result, complete_all, known_ask};

/// The number of places of an answer, evenly spaced, from which tokens are tested.
const NUM_PLACES: usize = 4;
/// The standard errors of a difference that is found with probability 0.9: 3.3 for the significance
/// of a test, 1.6 so that the first and the repeated test each succeed in 95 %.
const NUM_ERRORS: f64 = 4.9;

/// A drawn token, and the reference's distribution at its position.
struct LateToken {
    position: usize,
    /// The probabilities in descending order; the last one is that of all other tokens together.
    probs: Vec<f64>,
    /// The index of the drawn token's probability.
    drawn: usize,
}

impl LateToken {
    fn of(position: usize, id: u32, probs: BTreeMap<u32, f64>) -> Self {
        let mut sorted: Vec<(u32, f64)> = probs.into_iter().collect();
        sorted.sort_by(|one, other| other.1.total_cmp(&one.1));
        let drawn = sorted.iter().position(|(other, _)| *other == id).unwrap_or(sorted.len());
        let mut probs: Vec<f64> = sorted.into_iter().map(|(_, prob)| prob).collect();
        // Rounded probabilities may sum to more than 1.
        probs.push((1.0 - probs.iter().sum::<f64>()).max(1e-6));
        let total: f64 = probs.iter().sum();
        probs.iter_mut().for_each(|prob| *prob /= total);
        Self { position, probs, drawn }
    }
}

/// Computes the standard deviation of a sum over drawn tokens, and the probability of a deviation at
/// least as large in either direction. `value` gives a token's term by its rank and probability.
/// `rounding` is the change of a log-probability, in nats, that rounding explains.
fn deviation(
    tokens: &[&LateToken],
    value: impl Fn(usize, f64) -> f64,
    rounding: f64,
) -> (f64, f64) {
    let (mut found, mut variance, mut most) = (0.0, 0.0, 0.0_f64);
    // Rounding changes log-probabilities uniformly, and equal distributions alike.
    let mut alike: BTreeMap<Vec<u64>, (f64, f64)> = BTreeMap::new();
    for token in tokens {
        let terms = || token.probs.iter().enumerate().map(|(at, prob)| (*prob, value(at, *prob)));
        let mean: f64 = terms().map(|(prob, value)| prob * value).sum();
        found += value(token.drawn, token.probs[token.drawn]) - mean;
        let mut changed = 0.0;
        for (prob, value) in terms() {
            let value = value - mean;
            variance += prob * value * value;
            changed += (prob * value).powi(2);
            most = most.max(value.abs());
        }
        let same = alike.entry(token.probs.iter().map(|prob| prob.to_bits()).collect());
        same.and_modify(|it| it.0 += 1.0).or_insert((1.0, changed));
    }
    let changed: f64 = alike.values().map(|(num, changed)| num * num * changed).sum();
    variance += rounding * rounding / 3.0 * changed;
    // Bennett's inequality for martingales, without the factor by which it exceeds a normal tail.
    let ratio = most * found.abs() / variance;
    let exponent = variance / (most * most) * ((1.0 + ratio) * ratio.ln_1p() - ratio);
    (variance.sqrt(), if variance > 0.0 { libm::erfc(exponent.max(0.0).sqrt()) } else { 1.0 })
}

impl SampledTest<'_> {
    /// Samples answers of `num_tokens` tokens to all prompts, and tests all their tokens but the
    /// first. Suspicious tests are repeated with new seeds.
    ///
    /// # Errors
    /// If a server fails, or the listener asks to stop.
    pub(super) fn full_length(
        &self,
        prompts: &[Vec<u32>],
        num_tokens: usize,
    ) -> Result<Vec<FullLengthTest>> {
        let mut tests = self.sums(prompts, num_tokens, "first")?;
        let is_suspicious =
            |test: &FullLengthTest| test.p_value <= SUSPECTED / (2 * NUM_PLACES) as f64;
        if tests.iter().any(is_suspicious) {
            let again = self.sums(prompts, num_tokens, "again")?;
            let pairs = tests.iter_mut().zip(again).filter(|(test, _)| is_suspicious(test));
            pairs.for_each(|(test, again)| test.again = Some(again.p_value));
        }
        Ok(tests)
    }

    fn sums(
        &self,
        prompts: &[Vec<u32>],
        num_tokens: usize,
        name: &str,
    ) -> Result<Vec<FullLengthTest>> {
        let mut draws = SeededDraws::new(self.plan.seed, &[name, "full length", "certify"]);
        let asked = prompts.iter().cycle().take(self.plan.num_full_length());
        let asks: Vec<CompletionAsk<'_>> =
            asked.map(|prompt| self.ask(prompt, num_tokens, &mut draws)).collect();
        let answers = complete_all(self.server, &asks, self.concurrency, self.listener)?;
        let mut tokens = Vec::new();
        for (ask, answer) in asks.iter().zip(&answers) {
            self.listener.advance();
            let ends = 1..answer.ids.len();
            let prefixes: Vec<Vec<u32>> =
                ends.clone().map(|at| [ask.prompt, &answer.ids[..at]].concat()).collect();
            let asks: Vec<CompletionAsk<'_>> = prefixes.iter().map(|it| known_ask(it)).collect();
            let known = complete_all(self.reference, &asks, self.concurrency, self.listener)?;
            for (at, known) in ends.zip(known) {
                let probs = self.probabilities(known.known.into_iter().next().unwrap_or_default());
                tokens.push(LateToken::of(at, self.joined(answer.ids[at]), probs));
            }
        }
        let places = (0..NUM_PLACES).map(|place| (place * num_tokens / NUM_PLACES).max(1));
        let tests = places.flat_map(|from| {
            let some: Vec<&LateToken> = tokens.iter().filter(|it| it.position >= from).collect();
            let num = some.len();
            let test = |what, (error, p_value): (f64, f64)| {
                let detectable = NUM_ERRORS * error / num as f64;
                FullLengthTest { from, what, num, detectable, p_value, again: None }
            };
            let most_probable = deviation(&some, |at, _| f64::from(at == 0), self.rounding);
            let log_probs = deviation(&some, |_, prob| prob.ln(), self.rounding);
            [test(TestedWhat::MostProbable, most_probable), test(TestedWhat::LogProbs, log_probs)]
        });
        Ok(tests.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_are_at_least_those_of_the_binomial_distribution() {
        // P(X >= 24) for X of 1,000 trials at 0.01 is 1.04e-4; the normal distribution gives 4.3e-6.
        let drawn = |at| usize::from(at < 24);
        let token = |at| LateToken { position: 1, probs: vec![0.99, 0.01], drawn: drawn(at) };
        let all: Vec<LateToken> = (0..1_000).map(token).collect();
        let all: Vec<&LateToken> = all.iter().collect();
        let (error, p_value) = deviation(&all, |at, _| f64::from(at == 0), 0.0);
        assert!((error - 9.9_f64.sqrt()).abs() < 1e-9, "{error}");
        assert!((1.04e-4..5e-4).contains(&p_value), "{p_value}");
        let sure = LateToken { position: 1, probs: vec![1.0], drawn: 0 };
        assert_eq!(deviation(&[&sure], |_, prob| prob.ln(), 0.1).1, 1.0);
    }
}
