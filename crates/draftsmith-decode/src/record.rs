//! Recording: what a drafter drafts and signals at every place of a response, for replay without
//! models.
//!
//! The drafter reads the response token by token, as in decoding. Where its candidate is not the
//! response's token, or would be rejected, a draft phase runs on from that candidate, and is then
//! rolled back.

mod along;
mod models;
mod rollouts;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow;
use std::sync::Arc;

use draftsmith_theory::{
    Decoding, Draws, Proposal, RecordedPlace, Recording, StopRule, TokenChoice, child_rank,
};

use crate::drafter::StepDrafter;
use crate::error::DecodeError;
use crate::sequence::Limits;
use crate::target::{Target, Verification};
use along::{Along, TargetRow};
use models::{EverySignal, Models, enter};
use rollouts::Rollout;

/// How responses are recorded.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// How the responses were decoded, and how rounds would be.
    pub decoding: Decoding,
    /// The limits they were decoded within.
    pub limits: Limits,
    /// The greatest number of candidates a round can later be replayed with.
    pub max_length: usize,
    /// Whether the drafter has an acceptance head, which is then asked about every candidate.
    pub has_head: bool,
    /// Whether every candidate gets its label also without a head: one is to be trained on them.
    /// Otherwise the target is asked for what a round's end depends on alone: sampled, what it gives a
    /// place's candidates, and greedy nothing, since its choice is the response's token. log p is NaN
    /// where it was not asked.
    pub labels: bool,
    /// Whether the target can be asked about what is drafted behind a rejected candidate. Of one that is
    /// served elsewhere nobody knows what it would say there, and log p is NaN.
    pub is_target_here: bool,
}

/// What the target is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TargetAsked {
    /// Nothing.
    Nothing,
    /// Its logits along the response, which it reads in one forward.
    Along,
    /// Those, and what it gives each candidate behind a rejected one, for which it has to stand where the
    /// draft stands: it reads the response token by token, all slots' in one forward.
    PlaceByPlace,
}

impl RecordOptions {
    /// What the target is asked for.
    fn target_asked(&self) -> TargetAsked {
        if self.has_head || self.labels {
            TargetAsked::PlaceByPlace
        } else if self.decoding.choice == TokenChoice::Greedy {
            TargetAsked::Nothing
        } else {
            TargetAsked::Along
        }
    }
}

/// A response to record.
pub struct RecordRequest<'a> {
    /// At least one token.
    pub prompt: &'a [u32],
    /// What the target gave to it, at least one token.
    pub response: &'a [u32],
    /// Its own.
    pub draws: &'a mut dyn Draws,
}

/// Records what the drafter does along responses, which the target gave under the same decoding and
/// limits: as many side by side as the target has slots, a place of each at a time. Each gets the
/// recording that it would get alone.
///
/// Greedy: what is recorded is what any round would meet. Sampled: a draw of what any round would
/// meet, given the response (see [`Recordings`](draftsmith_theory::Recordings)).
///
/// Acceptance labels are of the distributions as served; greedy, of the models' own at temperature
/// 1.
///
/// `observe` is told at each place how many there are of all responses so far, and may break off:
/// then those that are recorded whole are all that is returned.
///
/// # Errors
/// If a prompt or a response is empty or does not fit, or a model fails.
pub fn record<'a, T: Target, D: StepDrafter<T> + ?Sized>(
    target: &mut T,
    drafter: &mut D,
    options: &RecordOptions,
    requests: impl IntoIterator<Item = RecordRequest<'a>>,
    observe: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Recording>, DecodeError> {
    let mut waiting = requests.into_iter().enumerate();
    let mut free: Vec<usize> = (0..target.num_slots()).rev().collect();
    let mut running: Vec<Along<'a>> = Vec::with_capacity(free.len());
    let mut recorded: Vec<(usize, Recording)> = Vec::new();
    let mut num_places = 0;
    let mut models = Models { target, drafter, options };
    loop {
        while let Some(slot) = free.pop() {
            let Some((number, request)) = waiting.next() else { break };
            running.push(models.begin(number, request, slot)?);
        }
        if running.is_empty() || observe(num_places).is_break() {
            break;
        }
        models.record_place(&mut running)?;
        num_places += running.len();
        for along in running.extract_if(.., |along| along.at() == along.response.len()) {
            free.push(along.slot);
            let prompt = along.tokens[..along.tokens.len() - along.places.len()].to_vec();
            recorded.push((along.number, Recording::new(prompt, along.places, along.limit)));
        }
    }
    recorded.sort_by_key(|(number, _)| *number);
    Ok(recorded.into_iter().map(|(_, recording)| recording).collect())
}

impl<T: Target, D: StepDrafter<T> + ?Sized> Models<'_, T, D> {
    /// Starts a response in a slot.
    fn begin<'r>(
        &mut self,
        number: usize,
        request: RecordRequest<'r>,
        slot: usize,
    ) -> Result<Along<'r>, DecodeError> {
        let RecordRequest { prompt, response, draws } = request;
        if prompt.is_empty() || response.is_empty() {
            return Err(DecodeError::EmptyPrompt);
        }
        let context = self.target.context().min(self.drafter.context());
        let max_len = prompt.len().saturating_add(self.options.limits.max_new_tokens).min(context);
        match self.options.target_asked() {
            // It reads, at most, what the drafter has it read.
            TargetAsked::Nothing => self.target.commit(slot, 0, &[]),
            TargetAsked::Along => {
                self.target.begin_along(slot, &[prompt, response].concat(), prompt.len())?;
            }
            TargetAsked::PlaceByPlace => self.target.begin(slot, prompt)?,
        }
        self.drafter.begin(self.target, slot, prompt)?;
        let (limit, tokens) = (max_len - prompt.len(), prompt.to_vec());
        let places = Vec::with_capacity(response.len());
        Ok(Along { number, slot, response, draws, limit, tokens, places, ahead: None })
    }

    /// The target's row at the next place of each response, where it is asked.
    fn target_rows(
        &mut self,
        running: &mut [Along<'_>],
    ) -> Result<Vec<Option<TargetRow>>, DecodeError> {
        match self.options.target_asked() {
            TargetAsked::Nothing => Ok(vec![None; running.len()]),
            TargetAsked::Along => {
                running.iter_mut().map(|along| along.row_ahead(self.target).map(Some)).collect()
            }
            TargetAsked::PlaceByPlace => {
                let proposal = &Proposal::default();
                let batch: Vec<Verification<'_>> = running
                    .iter()
                    .map(|Along { slot, tokens, .. }| Verification {
                        slot: *slot,
                        tokens,
                        proposal,
                    })
                    .collect();
                let rows = Arc::new(self.target.verify(&batch)?);
                let row = |number| TargetRow { rows: rows.clone(), number };
                Ok((0..batch.len()).map(|number| Some(row(number))).collect())
            }
        }
    }

    /// Records the next place of each response.
    fn record_place(&mut self, running: &mut [Along<'_>]) -> Result<(), DecodeError> {
        let needs = EverySignal { has_head: self.options.has_head }.needs();
        let steps = running.iter().map(|along| along.step(along.at(), needs));
        let steps = self.step(&steps.collect::<Vec<_>>())?;
        let target_rows = self.target_rows(running)?;
        let mut rollouts = Vec::new();
        let places = running.iter_mut().zip(steps).zip(target_rows).enumerate();
        for (number, ((along, step), target_row)) in places {
            // Round by round there is nothing behind the token.
            self.target.commit(along.slot, along.tokens.len(), &[]);
            if let Some(last) = along.places.last_mut() {
                enter(step.predicted_of_read(), &mut last.candidate);
            }
            let target_logits = target_row.as_ref().map(|row| {
                let before = along.tokens.iter().copied();
                self.options.decoding.penalised(row.logits(), before)
            });
            let mut candidate = step.candidate(along.token(), self.options);
            candidate.target_log_prob = self.target_log_prob(&candidate, target_logits.as_deref());
            let token_id = candidate.token_id;
            let predicted = self.predict_of_drawn(along.slot, step.row.own_logits(), token_id)?;
            enter(predicted, &mut candidate);
            // The last token that the limit allows is the target's own in any case.
            let room = along.limit.saturating_sub(along.at() + 1).min(self.options.max_length);
            let rejected = (room > 0)
                .then(|| along.rejected(&step, target_logits.as_deref(), self.options))
                .flatten();
            if let Some(rejected) = rejected {
                let mut rollout = Rollout::begin(number, room, self.options);
                self.advance(&mut rollout, along, &step, Some(rejected))?;
                let first = &mut rollout.candidates[0];
                first.target_log_prob = self.target_log_prob(first, target_logits.as_deref());
                rollouts.push(rollout);
            }
            let is_greedy = self.options.decoding.choice == TokenChoice::Greedy;
            let draft_rank = is_greedy.then(|| child_rank(step.row.logits(), token_id));
            along.places.push(RecordedPlace { candidate, rollout: None, draft_rank });
        }
        if !rollouts.is_empty() {
            self.roll_out(&mut rollouts, running)?;
        }
        for along in running {
            along.tokens.push(along.response[along.at() - 1]);
        }
        Ok(())
    }
}
