//! The scores of a self-draft on held-out responses.

use serde::{Deserialize, Serialize};

use crate::lessons::distillation::{DistillationLoss, NUM_SCORES};
use crate::run::member::Score;

/// The largest number of unrolled steps.
pub const MAX_STEPS: usize = 8;

/// The scores of one drafter. Means over no tokens are NaN.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftScores {
    /// The number of tokens predicted by the first step.
    pub num_tokens: usize,
    /// The mean of −Σ p log q in the first step, in nats. p is the target's and q the drafter's
    /// distribution over the draft vocabulary.
    pub cross_entropy: f64,
    /// The mean of Σ min(p, q) in the first step.
    pub overlap: f64,
    /// For each step, the fraction of tokens for which the drafter's most probable token equals the
    /// response's. The drafter reads the response's tokens before it.
    pub agreement: Vec<f64>,
    /// The mean number of drafted tokens that equal the response's, up to the first difference, in
    /// rounds that begin at every position.
    pub accepted_length: f64,
}

/// The scores of one adapter on one set of tokens, against the target's raw distribution (T = 1).
/// Means over no tokens are NaN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterScores {
    /// The number of tokens predicted.
    pub num_tokens: usize,
    /// The mean of −Σ p log q in nats, where p is the target's distribution and q the adapter's.
    pub cross_entropy: f64,
    /// The mean of −Σ p log p in nats: the lowest possible `cross_entropy`.
    pub target_entropy: f64,
    /// The fraction of tokens for which the target and the adapter have the same most probable
    /// token.
    pub agreement: f64,
    /// The mean of Σ min(p, q): the expected acceptance probability of a token drawn from q.
    pub overlap: f64,
}

impl AdapterScores {
    /// Computes the mean KL(p ‖ q) in nats: the part of the cross-entropy that training can remove.
    pub fn kl(&self) -> f64 {
        self.cross_entropy - self.target_entropy
    }

    /// Returns the mean of the given loss.
    pub fn loss(&self, loss: DistillationLoss) -> f64 {
        // Σ |p − q| = 2 (1 − Σ min(p, q))
        let [cross_entropy, distance] = loss.weights().map(f64::from);
        cross_entropy * self.cross_entropy + distance * 2.0 * (1.0 - self.overlap)
    }
}

/// Scores that are computed from the sums over the validation rows.
pub trait LessonScores: Sized + 'static {
    /// Whether the most probable tokens of each step are compared with the response's.
    const READS_STEPS: bool;
    /// The scores that are logged.
    const SCORES: &'static [Score<Self>];
    /// The names of the scores that are shown after each epoch.
    const SHOWN: &'static [&'static str];

    /// Computes the scores.
    fn of(tally: DraftTally) -> Self;

    /// Returns the number that is smallest for the best epoch.
    fn to_minimise(&self, loss: DistillationLoss) -> f64;

    /// Returns the agreement of the first step.
    fn agreement(&self) -> f64;

    /// Formats the scores as one line.
    fn text(&self) -> String;
}

impl LessonScores for DraftScores {
    const READS_STEPS: bool = true;
    const SCORES: &'static [Score<Self>] = &[
        Score::higher("accepted length", |scores| scores.accepted_length),
        Score::higher("agreement", Self::agreement),
        Score::lower("cross-entropy", |scores| scores.cross_entropy),
        Score::higher("overlap", |scores| scores.overlap),
    ];
    const SHOWN: &'static [&'static str] = &["accepted length", "agreement", "cross-entropy"];

    fn of(tally: DraftTally) -> Self {
        let mean = |sum: f64| sum / tally.num_tokens as f64;
        let shares = tally.steps.iter().map(|[num, agreeing]| *agreeing as f64 / *num as f64);
        let [cross_entropy, _, _, overlap] = tally.sums.map(mean);
        Self {
            num_tokens: tally.num_tokens,
            cross_entropy,
            overlap,
            agreement: shares.collect(),
            accepted_length: mean(tally.num_accepted as f64),
        }
    }

    fn to_minimise(&self, _loss: DistillationLoss) -> f64 {
        -self.accepted_length
    }

    fn agreement(&self) -> f64 {
        self.agreement.first().copied().unwrap_or(0.0)
    }

    fn text(&self) -> String {
        let shares = self.agreement.iter().map(|share| format!("{share:.3}"));
        format!(
            "validation over {} tokens: accepted length {:.3}, agreement by step {}, cross-entropy {:.4}, \
             overlap {:.4}",
            self.num_tokens,
            self.accepted_length,
            shares.collect::<Vec<_>>().join(" "),
            self.cross_entropy,
            self.overlap,
        )
    }
}

impl LessonScores for AdapterScores {
    const READS_STEPS: bool = false;
    const SCORES: &'static [Score<Self>] = &[
        Score::lower("cross-entropy", |scores| scores.cross_entropy),
        Score::lower("KL", Self::kl),
        Score::higher("agreement", |scores| scores.agreement),
        Score::higher("overlap", |scores| scores.overlap),
    ];
    const SHOWN: &'static [&'static str] = &["cross-entropy", "agreement", "overlap"];

    fn of(tally: DraftTally) -> Self {
        let num_tokens = tally.num_tokens;
        let [cross_entropy, target_entropy, agreement, overlap] =
            tally.sums.map(|sum| sum / num_tokens as f64);
        Self { num_tokens, cross_entropy, target_entropy, agreement, overlap }
    }

    fn to_minimise(&self, loss: DistillationLoss) -> f64 {
        self.loss(loss)
    }

    fn agreement(&self) -> f64 {
        self.agreement
    }

    fn text(&self) -> String {
        format!(
            "validation over {} tokens: cross-entropy {:.4} (the target's own {:.4}), agreement {:.4}, overlap {:.4}",
            self.num_tokens, self.cross_entropy, self.target_entropy, self.agreement, self.overlap,
        )
    }
}

/// Sums over the validation rows.
#[derive(Debug, Default)]
pub struct DraftTally {
    /// The sums of the first step: see
    /// [`LmHead::score_sums`](crate::lessons::distillation::LmHead::score_sums).
    pub(crate) sums: [f64; NUM_SCORES],
    pub(crate) num_tokens: usize,
    /// The numbers of tokens and of agreements in each step.
    pub(crate) steps: Vec<[usize; 2]>,
    pub(crate) num_accepted: usize,
}

impl DraftTally {
    /// Adds a batch. `rows` contains, for each row and step, whether each token agrees. The round
    /// that begins at the n-th token of a row consists of the n-th entry of each step.
    pub(crate) fn add(&mut self, rows: &[Vec<Vec<bool>>]) {
        for steps in rows {
            for (step, agree) in steps.iter().enumerate() {
                if self.steps.len() == step {
                    self.steps.push([0, 0]);
                }
                let [num, num_agreeing] = &mut self.steps[step];
                *num += agree.len();
                *num_agreeing += agree.iter().filter(|agree| **agree).count();
            }
            let num_rounds = steps.first().map_or(0, Vec::len);
            let accepted = |round: usize| {
                steps.iter().take_while(|agree| agree.get(round) == Some(&true)).count()
            };
            self.num_accepted += (0..num_rounds).map(accepted).sum::<usize>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_accepted_up_to_the_first_difference() {
        let mut tally =
            DraftTally { sums: [6.0, 0.0, 0.0, 1.5], num_tokens: 4, ..Default::default() };
        // Four tokens to draft: rounds accept 2, 0 and 2 of three steps, and 1 of the only one at the end.
        let row = vec![vec![true, false, true, true], vec![true, true, true], vec![false, true]];
        tally.add(&[row, vec![vec![], vec![], vec![]]]);
        let scores = DraftScores::of(tally);
        assert_eq!(scores.num_tokens, 4);
        assert_eq!((scores.cross_entropy, scores.overlap), (1.5, 0.375));
        assert_eq!(scores.agreement, [0.75, 1.0, 0.5]);
        assert_eq!(scores.accepted_length, 5.0 / 4.0);
    }
}
