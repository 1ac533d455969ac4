//! A response on its way through recording.

use draftsmith_theory::{Draws, Proposal, RecordedPlace, SignalNeeds, TokenChoice, argmax};

use super::RecordOptions;
use super::models::Step;
use crate::drafter::DraftStep;
use crate::target::Verification;

/// A response on its way.
pub(super) struct Along<'a> {
    pub(super) number: usize,
    pub(super) slot: usize,
    pub(super) response: &'a [u32],
    pub(super) draws: &'a mut dyn Draws,
    /// The most tokens that a response can have.
    pub(super) limit: usize,
    pub(super) prompt_len: usize,
    /// The prompt and the response so far, with what is rolled out at its end.
    pub(super) tokens: Vec<u32>,
    pub(super) places: Vec<RecordedPlace>,
}

impl Along<'_> {
    /// A draft forward over what there is.
    pub(super) fn step(&self, num_candidates: usize, needs: SignalNeeds) -> DraftStep<'_> {
        DraftStep::in_chain(self.slot, &self.tokens, num_candidates, needs)
    }

    /// What the target is to read, with a proposal at its end.
    pub(super) fn verification<'p>(&'p self, proposal: &'p Proposal) -> Verification<'p> {
        Verification { slot: self.slot, tokens: &self.tokens, proposal }
    }

    /// Which of the response's tokens is next.
    pub(super) fn at(&self) -> usize {
        self.places.len()
    }

    /// That token.
    pub(super) fn token(&self) -> u32 {
        self.response[self.at()]
    }

    /// The numbers of tokens that rounds begin behind which meet what is drafted at a place: those that
    /// have accepted none of the response's tokens before it, one, and so on, as far as they are
    /// recorded.
    pub(super) fn starts(&self, place: usize, options: &RecordOptions) -> Vec<usize> {
        let accepted = self.places[..place].iter().rev().take_while(|it| it.rollout.is_none());
        let num_before = accepted.take(options.max_length.saturating_sub(1)).count();
        let num_standing = self.prompt_len + place;
        (0..=num_before).map(|before| num_standing - before).collect()
    }

    /// The candidate that is drafted instead of the response's next token and then rejected, if one
    /// is. Greedy, the target's logits are not needed.
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
