//! A response that is being recorded.

use std::sync::Arc;

use draftsmith_theory::{Draws, RecordedPlace, SignalNeeds, TokenChoice, argmax};

use super::RecordOptions;
use super::models::Step;
use crate::drafter::DraftStep;
use crate::error::DecodeError;
use crate::logits::Logits;
use crate::target::Target;

/// A response that is being recorded.
pub(super) struct Along<'a> {
    pub(super) number: usize,
    pub(super) slot: usize,
    pub(super) response: &'a [u32],
    pub(super) draws: &'a mut dyn Draws,
    /// The most tokens that a response can have.
    pub(super) limit: usize,
    /// The prompt and the response so far, then the rollout's candidates.
    pub(super) tokens: Vec<u32>,
    pub(super) places: Vec<RecordedPlace>,
    /// The first of some places, and the target's rows there.
    pub(super) ahead: Option<(usize, Arc<Logits>)>,
}

/// A row of the target's logits, among those of one forward.
#[derive(Debug, Clone)]
pub(super) struct TargetRow {
    pub(super) rows: Arc<Logits>,
    pub(super) number: usize,
}

impl TargetRow {
    /// Its logits.
    pub(super) fn logits(&self) -> &[f32] {
        self.rows.row(self.number)
    }
}

/// How many rows of a response are computed at once. Affects only speed and memory.
const NUM_ROWS_AHEAD: usize = 8;

impl Along<'_> {
    /// A draft forward over the tokens so far.
    pub(super) fn step(&self, num_candidates: usize, needs: SignalNeeds) -> DraftStep<'_> {
        DraftStep::in_chain(self.slot, &self.tokens, num_candidates, needs)
    }

    /// The row at the next place of a response that `target` has begun along.
    pub(super) fn row_ahead<T: Target>(
        &mut self,
        target: &mut T,
    ) -> Result<TargetRow, DecodeError> {
        let at = self.at();
        if let Some((first, rows)) = &self.ahead
            && at - first < rows.num_rows()
        {
            return Ok(TargetRow { rows: rows.clone(), number: at - first });
        }
        let end = self.response.len().min(at + NUM_ROWS_AHEAD);
        let text = [&self.tokens, &self.response[at..end]].concat();
        let lens = self.tokens.len()..self.tokens.len() + end - at;
        let rows = Arc::new(target.logits_along(self.slot, &text, lens)?);
        self.ahead = Some((at, rows.clone()));
        Ok(TargetRow { rows, number: 0 })
    }

    /// The index of the response's next token.
    pub(super) fn at(&self) -> usize {
        self.places.len()
    }

    /// That token.
    pub(super) fn token(&self) -> u32 {
        self.response[self.at()]
    }

    /// The candidate that is drafted instead of the response's next token and then rejected, if any.
    /// Greedy decoding does not need the target's logits.
    ///
    /// # Panics
    /// Sampled, if there are none.
    pub(super) fn rejected(
        &mut self,
        step: &Step,
        target_logits: Option<&[f32]>,
        options: &RecordOptions,
    ) -> Option<u32> {
        let token = self.token();
        let (TokenChoice::Sampled(sampling), Some(q)) = (options.decoding.choice, &step.probs)
        else {
            let choice = argmax(step.row.logits());
            return (choice != token).then_some(choice);
        };
        let p = sampling.probs(target_logits.expect("a target that samples is asked"));
        let token = token as usize;
        if self.draws.bernoulli(q[token] / p[token]) {
            return None;
        }
        let residual: Vec<f64> = q.iter().zip(&p).map(|(q, p)| (q - p).max(0.0)).collect();
        // q < p here, hence q > p elsewhere, but for a hair of rounding: then there is nothing to
        // reject.
        let something_left = residual.iter().any(|&weight| weight > 0.0);
        something_left.then(|| self.draws.categorical(&residual) as u32)
    }
}
