//! One row of a rollouts file and its rules.
//!
//! A response X has one row whose candidates are the tokens of X itself. It has a further row for
//! each position at which the drafter proposes another token, which is then rejected. The row holds
//! that token and the candidates that the drafter proposes after it. At every other position X's
//! own token is drafted and accepted, except that nothing is drafted at the last position within
//! the limit. Log-probabilities are natural logarithms.

use crate::columns::{Cell, Column, ColumnPlace, Held, ValueRange, check_columns, column};
use crate::error::{DataError, Result};

/// The columns of the file, in order.
pub(super) static COLUMNS: [Column<RolloutRow>; 13] = [
    column!(Text, id),
    column!(Ids, prompt_ids),
    column!(Number, start),
    column!(Flag, is_response),
    column!(Number, limit),
    column!(Ids, candidates.candidate_ids),
    column!(Doubles(Prob), candidates.candidate_prob),
    column!(Doubles(Prob), candidates.confidence),
    column!(Doubles(Prob), candidates.confidence_of_ten),
    column!(Doubles(Entropy), candidates.draft_entropy),
    Column::part_of(
        "the acceptance head",
        column!(Doubles(Prob), candidates.predicted_acceptance_prob),
    ),
    column!(Doubles(LogProb), candidates.draft_log_prob),
    column!(Doubles(LogProb), candidates.target_log_prob),
];

/// A row of `rollouts-<drafter>-<set>-<decoding>.parquet`: the candidates that the drafter proposes
/// from one position of a response, or the response itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RolloutRow {
    /// The prompt's id, `source#n`.
    pub id: String,
    /// The prompt's tokens in a response's row, empty in other rows.
    pub prompt_ids: Vec<u32>,
    /// The position in the response at which the candidates begin; 0 for the response itself.
    pub start: u32,
    /// The maximum number of response tokens, by the limit on new tokens or the model's context.
    pub limit: u32,
    /// The candidate tokens, with the signals of drafter and target for each.
    pub candidates: RolloutCandidates,
    /// Whether the candidates are the response itself.
    pub is_response: bool,
}

/// The candidates of a [`RolloutRow`]. Every list has the length of `candidate_ids`. Each value is
/// conditioned on the prompt, the response before `start` and the earlier candidates.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RolloutCandidates {
    /// The candidate tokens.
    pub candidate_ids: Vec<u32>,
    /// The candidate's probability in the distribution from which it was drawn, after temperature
    /// and filters. In greedy decoding it is the raw probability.
    pub candidate_prob: Vec<f64>,
    /// The largest raw draft probability (T = 1).
    pub confidence: Vec<f64>,
    /// The largest of the ten largest raw draft probabilities after scaling these to a sum of 1.
    pub confidence_of_ten: Vec<f64>,
    /// The entropy of the raw draft distribution (T = 1), in nats.
    pub draft_entropy: Vec<f64>,
    /// The acceptance head's probability that this candidate is accepted; `None` without a head.
    /// The last value may be NaN, because no stop rule reads it.
    pub predicted_acceptance_prob: Option<Vec<f64>>,
    /// The log-probability log q of the candidate in the drafter's distribution that defines
    /// acceptance; −∞ allowed.
    pub draft_log_prob: Vec<f64>,
    /// The log-probability log p of the candidate in the target's distribution that defines
    /// acceptance; −∞ allowed. NaN where the target was not run: for all candidates, or for all but
    /// a rollout's first.
    pub target_log_prob: Vec<f64>,
}

/// The column whose last value may be NaN.
const PREDICTED: &str = "predicted_acceptance_prob";
/// The column in which all values of a rollout but the first may be NaN.
pub(super) const TARGET_LOG_PROB: &str = "target_log_prob";

impl RolloutRow {
    /// Checks the row by itself; [`validate_rollouts`](crate::validate_rollouts) also checks rows
    /// against each other.
    ///
    /// Lists are not empty and have the same length. A response starts at 0 and fits its limit. A
    /// rollout leaves room for one more token. Probabilities are within \[0, 1\], entropies are
    /// finite and at least 0, and log-probabilities are at most 0.
    ///
    /// # Errors
    /// If a column is invalid. The error names the first one.
    pub fn validate(&self) -> Result<()> {
        let num_candidates = self.candidates.candidate_ids.len();
        self.check(|column| column.length_problem(self, ("candidate_ids", num_candidates)))?;
        if num_candidates == 0 {
            return Err(self.error("candidate_ids", "is empty, a row must have a candidate"));
        }
        if self.is_response == self.prompt_ids.is_empty() {
            let problem = match self.is_response {
                true => "is empty, but a response's row has its prompt",
                false => "is not empty, but only a response's row has the prompt",
            };
            return Err(self.error("prompt_ids", problem));
        }
        if self.is_response && self.start != 0 {
            return Err(self.error("start", "is not 0, where the response begins"));
        }
        // The target adds one token to an accepted rollout.
        let end = self.start as usize + num_candidates + usize::from(!self.is_response);
        if end > self.limit as usize {
            let problem = format!(
                "is {}, too few for {num_candidates} tokens from {} on",
                self.limit, self.start
            );
            return Err(self.error("limit", problem));
        }
        self.validate_values()
    }

    /// Checks that all tokens of the prompt and all candidates are in a vocabulary of `vocab_size`
    /// tokens.
    ///
    /// # Errors
    /// If a column has an unknown token. The error names the first one.
    pub fn check_ids(&self, vocab_size: usize) -> Result<()> {
        self.check(|column| column.unknown_id(self, vocab_size))
    }

    /// Checks that no column has a problem.
    fn check(&self, problem: impl Fn(&Column<Self>) -> Option<String>) -> Result<()> {
        check_columns(&COLUMNS, problem).map_err(|(column, problem)| self.error(column, problem))
    }

    /// Returns whether the target's probabilities of all candidates are known.
    pub fn is_judged(&self) -> bool {
        self.num_judged() == self.candidates.candidate_ids.len()
    }

    /// Counts the candidates whose target probability is known. These are all, none, or only the
    /// first of a rollout.
    fn num_judged(&self) -> usize {
        let log_probs = &self.candidates.target_log_prob;
        match log_probs.iter().rposition(|log_prob| !log_prob.is_nan()) {
            None => 0,
            Some(0) if !self.is_response => 1,
            Some(_) => log_probs.len(),
        }
    }

    fn validate_values(&self) -> Result<()> {
        let predicted = self.candidates.predicted_acceptance_prob.as_ref();
        // The last prediction may be missing.
        let is_missing = predicted.and_then(|all| all.last()).is_some_and(|prob| prob.is_nan());
        let num_candidates = self.candidates.candidate_ids.len();
        self.check(|column| {
            let num = match column.name {
                PREDICTED => num_candidates - usize::from(is_missing),
                TARGET_LOG_PROB => self.num_judged(),
                _ => num_candidates,
            };
            column.problem(self, num)
        })
    }

    /// Creates an error about this row's value in a column.
    pub(super) fn error(&self, column: &'static str, problem: impl Into<String>) -> DataError {
        let (id, start, problem) = (&self.id, self.start, problem.into());
        DataError::invalid(format!("rollout `{id}` at {start}: column `{column}` {problem}"))
    }
}
