//! Compares a server's counts with expected ones, and decides which readings of a drafter they fit.
//!
//! A prompt's deviation is the number of accepted candidates, by position where the server counts them,
//! and of rounds by which its counts lie outside of the expected ones. Servers treat the last round of
//! an answer differently, so what is expected of it is a range. Rounding lets servers decide near-ties
//! differently. We model deviations as Laplace-distributed, with a scale that is measured by random
//! errors in the drafter's weights and states. A reading fits if the sum of deviations is at most four
//! standard deviations above its mean. It is named if it fits and the drafter as trained does not.

use super::measured::{CountedAnswer, ServerCounts};

/// The least scale of a prompt's deviation, in candidates.
pub(super) const LEAST_SCALE: f64 = 0.25;
/// A server's rounding may have more effect than the errors that measure it, by this factor.
const SCALE_FACTOR: f64 = 1.5;
/// The standard deviations by which a sum of deviations may exceed its mean.
const NUM_DEVIATIONS: f64 = 4.0;
/// The log-likelihood ratio, in nats, above which a reading is more probable than the one as trained.
const LEAST_GAIN: f64 = 10.0;
/// Readings whose log-likelihoods differ by less, in nats, are named together.
const SAME: f64 = 3.0;

/// The counts that are expected of an answer, each as its smallest and its largest value.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Expected {
    rounds: [f64; 2],
    /// The rounds that accept the candidate at each position.
    by_position: Vec<[f64; 2]>,
    /// The accepted candidates that are in the answer, and its rounds.
    pub(super) within: [f64; 2],
    /// The rounds of the answer that accept the candidate at each position.
    pub(super) within_by_position: Vec<f64>,
}

impl Expected {
    /// Counts an answer's rounds, given the candidates that each accepted, up to its end. It has
    /// `num_tokens` tokens in rounds.
    pub(super) fn of_rounds(
        accepted: impl Iterator<Item = usize>,
        num_tokens: usize,
        num_candidates: usize,
    ) -> Self {
        let mut expected = Self { by_position: vec![[0.0; 2]; num_candidates], ..Self::default() };
        let (mut left, mut last) = (num_tokens, None);
        for accepted in accepted.take_while(|_| num_tokens > 0) {
            let accepted = accepted.min(left);
            expected.rounds = expected.rounds.map(|rounds| rounds + 1.0);
            expected.by_position[..accepted].iter_mut().flatten().for_each(|count| *count += 1.0);
            last = Some((left, accepted));
            left = left.saturating_sub(accepted + 1);
        }
        expected.within_by_position =
            expected.by_position.iter().map(|[count, _]| *count).collect();
        expected.within = [expected.within_by_position.iter().sum(), expected.rounds[1]];
        if let Some((left, accepted)) = last.filter(|(left, accepted)| accepted == left) {
            // Some draft no candidate for the last token, and others count what follows it.
            expected.by_position[accepted - 1][0] -= 1.0;
            let beyond = expected.by_position[left..].iter_mut();
            beyond.for_each(|[_, most]| *most += 1.0);
        }
        if last.is_some_and(|(left, _)| left == 1) {
            expected.rounds[0] -= 1.0;
        }
        expected
    }

    /// Returns the range from a share of the accepted candidates to all, for a server that changes its
    /// number of candidates.
    pub(super) fn by_share(&self, share: f64) -> Self {
        let [least, most] = self.accepted();
        let (by_position, rounds) = (vec![[share * least, most]], [0.0, f64::INFINITY]);
        Self { by_position, rounds, ..self.clone() }
    }

    fn accepted(&self) -> [f64; 2] {
        [0, 1].map(|end| self.by_position.iter().map(|range| range[end]).sum())
    }

    /// Returns by how many candidates and rounds a server's counts lie outside of the expected ones.
    pub(super) fn deviation(&self, measured: &ServerCounts) -> f64 {
        let ServerCounts { num_rounds, num_accepted, by_position, .. } = measured;
        let by_rounds = num_rounds.map_or(0.0, |rounds| outside(rounds, self.rounds));
        let num_positions = by_position.len().max(self.by_position.len());
        if by_position.is_empty() || self.by_position.len() == 1 {
            let by_sum = num_accepted.map_or(0.0, |it| outside(it, self.accepted()));
            return by_rounds.max(by_sum);
        }
        let at = |position: usize| {
            let counted = by_position.get(position).copied().unwrap_or(0.0);
            outside(counted, self.by_position.get(position).copied().unwrap_or([0.0; 2]))
        };
        by_rounds.max((0..num_positions).map(at).sum())
    }

    /// Returns these counts as a server like that of `like` would tell them.
    pub(super) fn as_measured(&self, like: &ServerCounts) -> ServerCounts {
        let [accepted, rounds] = self.within;
        ServerCounts {
            num_rounds: like.num_rounds.map(|_| rounds),
            num_drafted: like.num_drafted,
            num_accepted: like.num_accepted.map(|_| accepted),
            by_position: match like.by_position.is_empty() {
                true => Vec::new(),
                false => self.within_by_position.clone(),
            },
        }
    }
}

fn outside(value: f64, [least, most]: [f64; 2]) -> f64 {
    (least - value).max(value - most).max(0.0)
}

/// How a reading's expected counts agree with a server's.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ReadingFit {
    /// The deviation of each answer.
    pub(super) deviations: Vec<f64>,
    scale: f64,
}

impl ReadingFit {
    /// Compares expected counts with measured ones. `scale` is that of [`scale_of`].
    pub(super) fn of(expected: &[Expected], answers: &[CountedAnswer], scale: f64) -> Self {
        let pairs = expected.iter().zip(answers);
        let deviations = pairs.map(|(expected, it)| expected.deviation(&it.measured)).collect();
        Self { deviations, scale }
    }

    fn sum(&self) -> f64 {
        self.deviations.iter().sum()
    }

    /// Returns whether rounding explains the deviations.
    pub(super) fn is_fit(&self) -> bool {
        let num = self.deviations.len() as f64;
        self.sum() <= self.scale * (num + NUM_DEVIATIONS * num.sqrt())
    }

    /// Computes the log-likelihood in nats.
    pub(super) fn log_likelihood(&self) -> f64 {
        let num = self.deviations.len() as f64;
        -self.sum() / self.scale - num * (2.0 * self.scale).ln()
    }

    /// Counts the answers that agree with this reading, and not with `other`.
    pub(super) fn num_only(&self, other: &Self) -> usize {
        let pairs = self.deviations.iter().zip(&other.deviations);
        let agrees = |deviation: f64| deviation <= 2.0 * self.scale;
        pairs.filter(|(own, other)| agrees(**own) && !agrees(**other)).count()
    }
}

/// Measures the scale of deviations by expectations that differ only by random errors. `like` tells which
/// counts the server gives.
pub(super) fn scale_of(exact: &[Expected], noisy: &[Expected], like: &[CountedAnswer]) -> f64 {
    let pairs = exact.iter().zip(noisy).zip(like);
    let deviation = |((exact, noisy), answer): ((&Expected, &Expected), &CountedAnswer)| {
        exact.deviation(&noisy.as_measured(&answer.measured))
    };
    let mean = pairs.map(deviation).sum::<f64>() / exact.len() as f64;
    (SCALE_FACTOR * mean).max(LEAST_SCALE)
}

/// Returns the numbers of the readings that explain what the drafter as trained does not, the most
/// probable first; empty if none does.
pub(super) fn causes<'f>(
    trained: &ReadingFit,
    others: impl Iterator<Item = &'f ReadingFit>,
) -> Vec<usize> {
    // Random candidates leave more deviations than rounding, so their sum cannot be halved.
    let is_random = |fit: &ReadingFit| fit.scale > trained.scale;
    let is_better = |fit: &ReadingFit| {
        fit.is_fit()
            && (is_random(fit) || fit.sum() <= trained.sum() / 2.0)
            && fit.log_likelihood() >= trained.log_likelihood() + LEAST_GAIN
    };
    let mut better: Vec<(usize, f64)> = (others.enumerate())
        .filter(|(_, fit)| !trained.is_fit() && is_better(fit))
        .map(|(number, fit)| (number, fit.log_likelihood()))
        .collect();
    better.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    let best = better.first().map_or(0.0, |(_, best)| *best);
    better.retain(|(_, likelihood)| *likelihood >= best - SAME);
    better.into_iter().map(|(number, _)| number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(accepted: &[usize], num_tokens: usize) -> Expected {
        Expected::of_rounds(accepted.iter().copied(), num_tokens, 3)
    }

    fn measured(num_rounds: f64, by_position: &[f64]) -> ServerCounts {
        ServerCounts {
            num_rounds: Some(num_rounds),
            num_drafted: Some(3.0 * num_rounds),
            num_accepted: Some(by_position.iter().sum()),
            by_position: by_position.to_vec(),
        }
    }

    #[test]
    fn the_last_round_is_counted_as_any_server_counts_it() {
        // Rounds of 3, 1 and 2 tokens, of which the last has both accepted.
        let expected = rounds(&[2, 0, 2], 6);
        assert_eq!(expected.within, [4.0, 3.0]);
        for by_position in [[2.0, 2.0, 0.0], [2.0, 1.0, 0.0], [2.0, 2.0, 1.0]] {
            assert_eq!(expected.deviation(&measured(3.0, &by_position)), 0.0, "{by_position:?}");
        }
        assert_eq!(expected.deviation(&measured(3.0, &[1.0, 1.0, 1.0])), 1.0);
        assert_eq!(expected.deviation(&measured(5.0, &[2.0, 2.0, 0.0])), 2.0);
        // One token is left, for which a server may draft nothing.
        let expected = rounds(&[2, 1], 4);
        for (num_rounds, by_position) in [(1.0, [1.0, 1.0, 0.0]), (2.0, [2.0, 2.0, 1.0])] {
            let told = measured(num_rounds, &by_position);
            assert_eq!(expected.deviation(&told), 0.0, "{by_position:?}");
        }
    }

    #[test]
    fn a_cause_is_named_only_if_it_explains_what_rounding_does_not() {
        let fit = |deviation: f64| ReadingFit { deviations: vec![deviation; 16], scale: 0.25 };
        let [exact, small, large] = [0.0, 0.4, 5.0].map(fit);
        let named =
            |trained: &ReadingFit, others: &[&ReadingFit]| causes(trained, others.iter().copied());
        assert!(named(&small, &[&exact]).is_empty(), "rounding explains it");
        assert_eq!(named(&large, &[&large, &exact]), [1]);
        assert_eq!(named(&large, &[&exact, &large, &exact]), [0, 2]);
        assert!(named(&large, &[&fit(4.0)]).is_empty(), "nothing fits");
        assert!(named(&fit(0.6), &[&fit(0.45)]).is_empty(), "it is hardly better");
        let drawn = ReadingFit { deviations: vec![1.5; 16], scale: 1.5 };
        assert_eq!(named(&fit(2.0), &[&large, &drawn]), [1]);
        assert_eq!(named(&fit(2.0), &[&drawn, &exact]), [1], "an exact reading is more probable");
    }
}
