//! A response that is being recorded.

use draftsmith_theory::{
    Decoding, Draws, RecordedPlace, RoundForwards, SignalNeeds, TokenChoice, argmax,
};

use super::RecordOptions;
use super::recorder::RecordedStep;
use crate::drafter::DraftStep;
use crate::error::DecodeError;
use crate::target::{Logits, Target};

/// A response that is being recorded.
pub(super) struct RunningResponse<'a> {
    /// The number of its request.
    pub(super) number: usize,
    pub(super) slot: usize,
    pub(super) response: &'a [u32],
    pub(super) draws: &'a mut dyn Draws,
    /// The largest length of a response.
    pub(super) limit: usize,
    pub(super) prompt_len: usize,
    /// The prompt and the response so far, then the rollout's candidates.
    pub(super) tokens: Vec<u32>,
    /// The recorded positions.
    pub(super) places: Vec<RecordedPlace>,
    /// The forwards that the rounds took.
    pub(super) forwards: RoundForwards,
    /// The target's rows from a position of the response on.
    pub(super) ahead: Option<(usize, Logits)>,
}

/// How many of a response's target rows are computed at once. Affects only speed and memory.
const NUM_ROWS_AHEAD: usize = 8;

impl RunningResponse<'_> {
    /// Builds a draft step over the tokens so far.
    pub(super) fn step<'s>(
        &'s self,
        num_candidates: usize,
        needs: SignalNeeds,
        decoding: &'s Decoding,
    ) -> DraftStep<'s> {
        DraftStep::in_chain(self.slot, &self.tokens, num_candidates, needs, decoding)
    }

    /// Returns the target's logits `num` tokens after position `at`, from one forward for several positions. The
    /// target must have begun along the response.
    pub(super) fn row_ahead<T: Target>(
        &mut self,
        target: &mut T,
        at: usize,
        num: usize,
    ) -> Result<Vec<f32>, DecodeError> {
        if let Some((first, rows)) = &self.ahead
            && at + num - first < rows.num_rows()
        {
            return Ok(rows.row(at + num - first).to_vec());
        }
        let end = self.response.len().min(at + num + NUM_ROWS_AHEAD);
        let num_before = self.prompt_len + at;
        let text = [&self.tokens[..num_before], &self.response[at..end]].concat();
        let rows = target.logits_along(self.slot, &text, num_before..num_before + end - at)?;
        let row = rows.row(num).to_vec();
        self.ahead = Some((at, rows));
        Ok(row)
    }

    /// Returns the position of the response's next token.
    pub(super) fn at(&self) -> usize {
        self.places.len()
    }

    /// Returns the token of the response that is recorded next.
    pub(super) fn token(&self) -> u32 {
        self.response[self.at()]
    }

    /// Chooses the candidate that is drafted at a position after an accepted prefix: the response's token there if it
    /// is accepted, and otherwise a token that is rejected.
    ///
    /// # Panics
    /// If decoding is sampled and there are no target logits.
    pub(super) fn candidate_at(
        &mut self,
        at: usize,
        step: &RecordedStep,
        target_logits: Option<&[f32]>,
        options: &RecordOptions,
    ) -> u32 {
        let token = self.response[at];
        let (TokenChoice::Sampled(sampling), Some(q)) = (options.decoding.choice, &step.probs)
        else {
            return argmax(step.row.logits());
        };
        let p = sampling.probs(target_logits.expect("a target that samples was asked"));
        if self.draws.bernoulli(q[token as usize] / p[token as usize]) {
            return token;
        }
        let residual: Vec<f64> = q.iter().zip(&p).map(|(q, p)| (q - p).max(0.0)).collect();
        // q < p for the response's token, so q > p for another one, unless rounding leaves nothing to
        // reject.
        let is_possible = residual.iter().any(|&weight| weight > 0.0);
        if is_possible { self.draws.categorical(&residual) as u32 } else { token }
    }
}
