//! The scores of an EAGLE-3 drafter on held-out responses.

use serde::{Deserialize, Serialize};

/// The largest number of unrolled steps.
pub const MAX_STEPS: usize = 8;

/// The scores of one drafter. Means over no tokens are NaN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
    pub agreement: StepShares,
    /// The mean number of drafted tokens that equal the response's, up to the first difference, in
    /// rounds that begin at every position.
    pub accepted_length: f64,
}

impl DraftScores {
    /// Formats the scores as one line.
    pub fn text(&self) -> String {
        let shares = self.agreement.as_slice().iter().map(|share| format!("{share:.3}"));
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

/// A fraction for each unrolled step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "Vec<f64>", try_from = "Vec<f64>")]
pub struct StepShares {
    values: [f64; MAX_STEPS],
    num_steps: usize,
}

impl StepShares {
    /// Creates a list of shares, in the order of the steps.
    ///
    /// # Panics
    /// If there are more than [`MAX_STEPS`].
    pub fn new(shares: &[f64]) -> Self {
        let mut values = [0.0; MAX_STEPS];
        values[..shares.len()].copy_from_slice(shares);
        Self { values, num_steps: shares.len() }
    }

    /// Returns the share of each step.
    pub fn as_slice(&self) -> &[f64] {
        &self.values[..self.num_steps]
    }

    /// Returns the share of the first step.
    pub fn first(&self) -> f64 {
        self.values[0]
    }
}

impl From<StepShares> for Vec<f64> {
    fn from(shares: StepShares) -> Self {
        shares.as_slice().to_vec()
    }
}

impl TryFrom<Vec<f64>> for StepShares {
    type Error = String;

    fn try_from(shares: Vec<f64>) -> Result<Self, String> {
        let num = shares.len();
        if num > MAX_STEPS {
            return Err(format!("{num} steps, expected at most {MAX_STEPS}"));
        }
        Ok(Self::new(&shares))
    }
}

/// Sums over the validation rows.
#[derive(Debug, Default)]
pub(crate) struct DraftTally {
    pub(crate) cross_entropy: f64,
    pub(crate) overlap: f64,
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

    pub(crate) fn scores(self) -> DraftScores {
        let num_tokens = self.steps.first().map_or(0, |[num, _]| *num);
        let mean = |sum: f64| sum / num_tokens as f64;
        let shares = self.steps.iter().map(|[num, agreeing]| *agreeing as f64 / *num as f64);
        DraftScores {
            num_tokens,
            cross_entropy: mean(self.cross_entropy),
            overlap: mean(self.overlap),
            agreement: StepShares::new(&shares.collect::<Vec<f64>>()),
            accepted_length: mean(self.num_accepted as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_accepted_up_to_the_first_difference() {
        let mut tally = DraftTally { cross_entropy: 6.0, overlap: 1.5, ..Default::default() };
        // Four tokens to draft: rounds accept 2, 0 and 2 of three steps, and 1 of the only one at the end.
        let row = vec![vec![true, false, true, true], vec![true, true, true], vec![false, true]];
        tally.add(&[row, vec![vec![], vec![], vec![]]]);
        let scores = tally.scores();
        assert_eq!(scores.num_tokens, 4);
        assert_eq!((scores.cross_entropy, scores.overlap), (1.5, 0.375));
        assert_eq!(scores.agreement.as_slice(), [0.75, 1.0, 0.5]);
        assert_eq!(scores.accepted_length, 5.0 / 4.0);
    }

    #[test]
    fn shares_are_saved_as_a_list() {
        let shares = StepShares::new(&[0.5, 0.25]);
        let text = serde_json::to_string(&shares).unwrap();
        assert_eq!(text, "[0.5,0.25]");
        assert_eq!(serde_json::from_str::<StepShares>(&text).unwrap(), shares);
        let error = serde_json::from_str::<StepShares>("[0,0,0,0,0,0,0,0,0]").unwrap_err();
        assert!(error.to_string().contains("9 steps"), "{error}");
    }
}
