//! One row of a rollouts file, and the rules for it.
//!
//! A response X of N tokens has one row of its own, whose candidates are X itself, and one row for
//! each position at which something else is drafted and then rejected: what the drafter proposes there
//! instead, and after that. At every other position X's own token is drafted and accepted, but for
//! the last that the limit allows, where nothing is drafted. Log-probabilities are natural
//! logarithms.

use crate::error::DataError;
use crate::values::{Numbers, unknown_id};

/// What the drafter proposes from one position of a response on, or the response itself: a row of
/// `rollouts-<drafter>-<set>-<decoding>.parquet`.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutRow {
    /// The prompt's id, `source#n`.
    pub id: String,
    /// The prompt's tokens, in the response's row; none in others.
    pub prompt_ids: Vec<u32>,
    /// The position in the response from which the candidates continue; 0 for the response itself.
    pub start: u32,
    /// The greatest number of new tokens the response might have had: the limit of new tokens, or
    /// what the context left.
    pub limit: u32,
    /// The tokens, and what drafter and target think of each.
    pub candidates: RolloutCandidates,
    /// Whether the candidates are the response itself.
    pub is_response: bool,
}

/// The candidates of a [`RolloutRow`]; every list has the length of `candidate_ids`, and each value
/// is conditioned on the prompt, the response before `start`, and the candidates before.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RolloutCandidates {
    /// The candidate tokens.
    pub candidate_ids: Vec<u32>,
    /// The candidate's probability under what it was drawn from: as served, or raw where greedy.
    pub candidate_prob: Vec<f64>,
    /// The largest raw draft probability (T = 1).
    pub confidence: Vec<f64>,
    /// The same among the ten largest, scaled to a sum of 1.
    pub confidence_of_ten: Vec<f64>,
    /// Entropy of the raw draft distribution (T = 1), in nats.
    pub draft_entropy: Vec<f64>,
    /// The acceptance head's probability that this candidate is accepted; `None` without a head. The
    /// last candidate's may be NaN: no stop rule asks for it.
    pub predicted_acceptance_prob: Option<Vec<f64>>,
    /// log q of the candidate, of the drafter's distribution that acceptance is defined by; −∞
    /// allowed.
    pub draft_log_prob: Vec<f64>,
    /// log p of the candidate, of the target's distribution that acceptance is defined by; −∞
    /// allowed. NaN where the target was not asked: for all candidates, or all after a rollout's first.
    pub target_log_prob: Vec<f64>,
    /// Of a greedy response's own tokens: which of the drafter's most probable each is, from 0 on, as a
    /// tree has children; 64 stands for that or more. `None` of others, and in files of versions that did
    /// not record it.
    pub draft_rank: Option<Vec<u32>>,
}

/// The column whose last number may be NaN.
const PREDICTED: &str = "predicted_acceptance_prob";
/// Which of the drafter's tokens a greedy response's are.
pub(super) const DRAFT_RANK: &str = "draft_rank";
/// The column in which a rollout may have only the first value.
pub(super) const TARGET_LOG_PROB: &str = "target_log_prob";

impl RolloutRow {
    /// Checks the rules that the row keeps alone; [`validate_rollouts`](crate::validate_rollouts)
    /// checks those among rows.
    ///
    /// Lists have one length and hold something; a response starts at 0 and fits its limit, a
    /// rollout leaves it room for one token more; probabilities are within \[0, 1\], the entropy is
    /// finite and at least 0, and log-probabilities are at most 0.
    ///
    /// # Errors
    /// [`DataError::Rollout`] with the first column that breaks a rule.
    pub fn validate(&self) -> Result<(), DataError> {
        self.validate_lengths()?;
        let num_candidates = self.candidates.candidate_ids.len();
        if num_candidates == 0 {
            return Err(self.error("candidate_ids", "is empty, a row has a candidate"));
        }
        if self.is_response == self.prompt_ids.is_empty() {
            let problem = match self.is_response {
                true => "is empty, the response's row has its prompt",
                false => "is not empty, but only the response's row has the prompt",
            };
            return Err(self.error("prompt_ids", problem));
        }
        if !self.is_response && self.candidates.draft_rank.is_some() {
            let problem = "is not null, but only the response's tokens have ranks";
            return Err(self.error(DRAFT_RANK, problem));
        }
        if self.is_response && self.start != 0 {
            return Err(self.error("start", "is not 0, where the response begins"));
        }
        // Of a round, the target's own token is kept too.
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

    /// Checks that a model of `vocab_size` tokens knows the prompt and every candidate.
    ///
    /// # Errors
    /// [`DataError::Rollout`] if it does not.
    pub fn check_ids(&self, vocab_size: usize) -> Result<(), DataError> {
        let columns =
            [("prompt_ids", &self.prompt_ids), ("candidate_ids", &self.candidates.candidate_ids)];
        columns.into_iter().try_for_each(|(column, ids)| match unknown_id(ids, vocab_size) {
            Some(problem) => Err(self.error(column, problem)),
            None => Ok(()),
        })
    }

    /// Whether the target was asked about all candidates.
    pub fn is_judged(&self) -> bool {
        self.num_judged() == self.candidates.candidate_ids.len()
    }

    /// How many candidates the target was asked about: all, none, or the first of a rollout.
    fn num_judged(&self) -> usize {
        let log_probs = &self.candidates.target_log_prob;
        match log_probs.iter().rposition(|log_prob| !log_prob.is_nan()) {
            None => 0,
            Some(0) if !self.is_response => 1,
            Some(_) => log_probs.len(),
        }
    }

    fn validate_lengths(&self) -> Result<(), DataError> {
        let expected = self.candidates.candidate_ids.len();
        let ranks = self.candidates.draft_rank.iter().map(|ranks| (DRAFT_RANK, ranks.len()));
        let mut lists =
            self.numbers().map(|(column, _, values)| (column, values.len())).chain(ranks);
        match lists.find(|(_, found)| *found != expected) {
            None => Ok(()),
            Some((column, found)) => {
                let problem = format!("has {found} values, `candidate_ids` has {expected}");
                Err(self.error(column, problem))
            }
        }
    }

    fn validate_values(&self) -> Result<(), DataError> {
        for (column, numbers, values) in self.numbers() {
            let problem = match column {
                PREDICTED => {
                    // The last one may be missing.
                    let is_missing = values.last().is_some_and(|prob| prob.is_nan());
                    numbers.problem(&values[..values.len() - usize::from(is_missing)])
                }
                TARGET_LOG_PROB => numbers.problem(&values[..self.num_judged()]),
                _ => numbers.problem(values),
            };
            if let Some(problem) = problem {
                return Err(self.error(column, problem));
            }
        }
        Ok(())
    }

    /// The lists of numbers that are there, by column.
    fn numbers(&self) -> impl Iterator<Item = (&'static str, Numbers, &Vec<f64>)> {
        let candidates = &self.candidates;
        let predicted = candidates.predicted_acceptance_prob.as_ref();
        [
            ("candidate_prob", Numbers::Prob, Some(&candidates.candidate_prob)),
            ("confidence", Numbers::Prob, Some(&candidates.confidence)),
            ("confidence_of_ten", Numbers::Prob, Some(&candidates.confidence_of_ten)),
            ("draft_entropy", Numbers::Entropy, Some(&candidates.draft_entropy)),
            (PREDICTED, Numbers::Prob, predicted),
            ("draft_log_prob", Numbers::LogProb, Some(&candidates.draft_log_prob)),
            (TARGET_LOG_PROB, Numbers::LogProb, Some(&candidates.target_log_prob)),
        ]
        .into_iter()
        .filter_map(|(column, numbers, values)| Some((column, numbers, values?)))
    }

    /// An error about this row's value in a column.
    pub(super) fn error(&self, column: &'static str, problem: impl Into<String>) -> DataError {
        let (id, start) = (self.id.clone(), self.start);
        DataError::Rollout { id, start, column, problem: problem.into() }
    }
}
