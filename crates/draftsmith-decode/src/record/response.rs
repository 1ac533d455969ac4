//! The state of one response while it is recorded.

use draftsmith_theory::{
    Decoding, Draws, RecordedPlace, RoundForwards, SignalNeeds, TokenChoice, argmax,
};

use super::RecordOptions;
use super::recorder::RecordedStep;
use crate::drafter::DraftStep;
use crate::error::Result;
use crate::target::{Logits, Target};

/// The state of one response while it is recorded.
pub(super) struct RunningResponse<'a> {
    /// The index of the response's request.
    pub(super) number: usize,
    pub(super) slot: usize,
    pub(super) response: &'a [u32],
    pub(super) draws: &'a mut dyn Draws,
    /// The maximum length of the response in tokens, given the limits and the context.
    pub(super) limit: usize,
    pub(super) prompt_len: usize,
    /// The prompt and the response up to the current position, then the rollout's candidates.
    pub(super) tokens: Vec<u32>,
    /// The positions recorded so far.
    pub(super) places: Vec<RecordedPlace>,
    /// The number of draft forwards per round: one per candidate, or one in total.
    pub(super) forwards: RoundForwards,
    /// A position of the response and the target's logits from there on, computed in advance.
    pub(super) ahead: Option<(usize, Logits)>,
}

/// The number of target rows that are computed in advance. It affects only speed and memory.
const NUM_ROWS_AHEAD: usize = 8;

impl RunningResponse<'_> {
    /// Builds a draft step that reads the tokens so far.
    pub(super) fn step<'s>(
        &'s self,
        num_candidates: usize,
        needs: SignalNeeds,
        decoding: &'s Decoding,
    ) -> DraftStep<'s> {
        DraftStep::in_chain(self.slot, &self.tokens, num_candidates, needs, decoding)
    }

    /// Returns the target's logits `num` tokens after position `at` of the response. They are
    /// computed for several positions at once. The sequence must have begun by
    /// [`Target::begin_along`].
    pub(super) fn row_ahead<T: Target>(
        &mut self,
        target: &mut T,
        at: usize,
        num: usize,
    ) -> Result<Vec<f32>> {
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

    /// Returns the position in the response that is recorded next.
    pub(super) fn at(&self) -> usize {
        self.places.len()
    }

    /// Returns the response's token at the position that is recorded next.
    pub(super) fn token(&self) -> u32 {
        self.response[self.at()]
    }

    /// Chooses the candidate that is drafted at position `at` if all earlier candidates were
    /// accepted. A sampled candidate is drawn conditionally on the response: it is either the
    /// response's token, which is accepted, or a token that is rejected.
    ///
    /// # Panics
    /// If decoding is sampled and `target_logits` is `None`.
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
        // The draft's probability q of the response's token is below the target's p, so q > p for
        // some other token. Only rounding can leave no such token.
        let is_possible = residual.iter().any(|&weight| weight > 0.0);
        if is_possible { self.draws.categorical(&residual) as u32 } else { token }
    }
}
