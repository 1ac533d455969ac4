//! Recording: what a drafter drafts and signals at every position of a response, for replay without
//! models.
//!
//! The drafter reads the response token by token, as in decoding. Where its candidate differs from the
//! response's token, or would be rejected, a draft phase continues from that candidate and is then rolled
//! back.
//!
//! If what the drafter drafts depends on where the round began, a whole round is drafted at every position:
//! along the response while candidates are accepted, and on from the first that is rejected.
//!
//! Greedy recordings without a head never ask the target. It is asked about drafted tokens only if a head
//! is recorded, if labels are wanted, or if decoding is sampled, because it then decides how a round ends.

mod recorder;
mod response;
mod rollouts;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow;

use draftsmith_theory::{
    Decoding, Draws, Proposal, RecordedPlace, Recording, RoundForwards, StopRule, TokenChoice,
};

use crate::drafter::StepDrafter;
use crate::error::DecodeError;
use crate::sequence::Limits;
use crate::target::{Target, Verification};
use recorder::{EverySignal, Recorder, enter};
use response::RunningResponse;
use rollouts::Rollout;

/// How responses are recorded.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// How the responses were decoded. Replayed rounds will be decoded in the same way.
    pub decoding: Decoding,
    /// The limits that the responses were decoded within.
    pub limits: Limits,
    /// The largest number of candidates that a replayed round may have.
    pub max_length: usize,
    /// Whether the drafter has an acceptance head, whose prediction for every candidate is recorded.
    pub has_head: bool,
    /// Whether every candidate gets a label even without a head, to train one. Otherwise the target is
    /// asked only for what decides a round's end: if sampled, its probability of each position's
    /// candidates; if greedy, nothing, because its choice is the response's token. log p is NaN for
    /// candidates that it was not asked about.
    pub labels: bool,
    /// Whether the target can be asked about tokens after a rejected candidate. A target that is served
    /// elsewhere cannot, and log p is NaN there.
    pub is_target_here: bool,
}

/// What the target is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TargetUse {
    /// Nothing.
    Unused,
    /// Its logits along the response, which it reads in one forward.
    Along,
    /// Its logits along the response and after rejected candidates. It therefore reads the response token
    /// by token, in step with the drafter, with one forward for all slots.
    PlaceByPlace,
}

impl RecordOptions {
    /// Returns whether the target is asked about candidates after rejected ones.
    fn asks_after_rejected(&self) -> bool {
        (self.has_head || self.labels) && self.is_target_here
    }

    /// Returns what a drafter's recording asks of the target; `by_round` is [`StepDrafter::drafts_by_round`].
    fn target_use(&self, by_round: bool) -> TargetUse {
        if (self.has_head || self.labels) && by_round {
            TargetUse::Along
        } else if self.has_head || self.labels {
            TargetUse::PlaceByPlace
        } else if self.decoding.choice == TokenChoice::Greedy {
            TargetUse::Unused
        } else {
            TargetUse::Along
        }
    }
}

/// A response to record.
pub struct RecordRequest<'a> {
    /// The prompt, at least one token.
    pub prompt: &'a [u32],
    /// The target's response, at least one token.
    pub response: &'a [u32],
    /// The random draws of this recording.
    pub draws: &'a mut dyn Draws,
}

/// Records what the drafter does along responses that the target gave under the same decoding and limits,
/// as many side by side as the target has slots, one position of each at a time. Each response gets the
/// recording that it would get by itself.
///
/// A greedy recording is what any round would meet. A sampled one is a draw of what any round would meet,
/// given the response (see [`Recordings`](draftsmith_theory::Recordings)). Acceptance labels compare the
/// distributions that tokens are drawn from; if greedy, the models' distributions at temperature 1.
///
/// `observe` gets the number of positions recorded so far and may stop the recording. Only responses that
/// are recorded completely are then returned.
///
/// # Errors
/// If a prompt or a response is empty or does not fit, or a model fails.
pub fn record<'a, T: Target>(
    target: &mut T,
    drafter: &mut dyn StepDrafter<T>,
    options: &RecordOptions,
    requests: impl IntoIterator<Item = RecordRequest<'a>>,
    observe: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Recording>, DecodeError> {
    let mut waiting = requests.into_iter().enumerate();
    let mut free: Vec<usize> = (0..target.num_slots()).rev().collect();
    let mut running: Vec<RunningResponse<'a>> = Vec::with_capacity(free.len());
    let mut recorded: Vec<(usize, Recording)> = Vec::new();
    let mut num_places = 0;
    let mut recorder = Recorder { target, drafter, options };
    loop {
        while let Some(slot) = free.pop() {
            let Some((number, request)) = waiting.next() else { break };
            running.push(recorder.begin(number, request, slot)?);
        }
        if running.is_empty() || observe(num_places).is_break() {
            break;
        }
        recorder.record_place(&mut running)?;
        num_places += running.len();
        for one in running.extract_if(.., |one| one.at() == one.response.len()) {
            free.push(one.slot);
            let prompt = one.tokens[..one.prompt_len].to_vec();
            let recording = Recording::new(prompt, one.places, one.limit);
            recorded.push((one.number, recording.with_forwards(one.forwards)));
        }
    }
    recorded.sort_by_key(|(number, _)| *number);
    Ok(recorded.into_iter().map(|(_, recording)| recording).collect())
}

impl<T: Target> Recorder<'_, T> {
    fn target_use(&self) -> TargetUse {
        self.options.target_use(self.drafter.drafts_by_round())
    }

    /// Starts a response in a slot.
    fn begin<'r>(
        &mut self,
        number: usize,
        request: RecordRequest<'r>,
        slot: usize,
    ) -> Result<RunningResponse<'r>, DecodeError> {
        let RecordRequest { prompt, response, draws } = request;
        if prompt.is_empty() || response.is_empty() {
            return Err(DecodeError::EmptyPrompt);
        }
        let context = self.target.context().min(self.drafter.context());
        let max_len = prompt.len().saturating_add(self.options.limits.max_new_tokens).min(context);
        match self.target_use() {
            // The target reads at most the features that the drafter asks for.
            TargetUse::Unused => self.target.commit(slot, 0, &[]),
            TargetUse::Along => {
                self.target.begin_along(slot, &[prompt, response].concat(), prompt.len())?;
            }
            TargetUse::PlaceByPlace => self.target.begin(slot, prompt)?,
        }
        self.drafter.begin(self.target, slot, prompt)?;
        let (limit, tokens) = (max_len - prompt.len(), prompt.to_vec());
        let places = Vec::with_capacity(response.len());
        let prompt_len = prompt.len();
        Ok(RunningResponse {
            number,
            slot,
            response,
            draws,
            limit,
            prompt_len,
            tokens,
            places,
            forwards: RoundForwards::EachStep,
            ahead: None,
        })
    }

    /// Returns the target's logits at the next position of each response; `None` if it is not asked.
    fn target_rows(
        &mut self,
        running: &mut [RunningResponse<'_>],
    ) -> Result<Vec<Option<Vec<f32>>>, DecodeError> {
        match self.target_use() {
            TargetUse::Unused => Ok(vec![None; running.len()]),
            TargetUse::Along => running
                .iter_mut()
                .map(|one| one.row_ahead(self.target, one.at(), 0).map(Some))
                .collect(),
            TargetUse::PlaceByPlace => {
                let proposal = &Proposal::default();
                let batch = running.iter().map(|RunningResponse { slot, tokens, .. }| {
                    Verification { slot: *slot, tokens, proposal }
                });
                let logits = self.target.verify(&batch.collect::<Vec<_>>())?;
                Ok(logits.rows().map(|row| Some(row.to_vec())).collect())
            }
        }
    }

    /// Records the next position of each response.
    fn record_place(&mut self, running: &mut [RunningResponse<'_>]) -> Result<(), DecodeError> {
        let needs = EverySignal { has_head: self.options.has_head }.needs();
        let decoding = &self.options.decoding;
        let by_round = self.drafter.drafts_by_round();
        for one in &*running {
            self.target.begin_round(one.slot, one.tokens.len());
        }
        let num_candidates = |at: usize| if by_round { 0 } else { at };
        let steps = running.iter().map(|one| one.step(num_candidates(one.at()), needs, decoding));
        let steps = self.step(&steps.collect::<Vec<_>>())?;
        let target_rows = self.target_rows(running)?;
        let mut rollouts = Vec::new();
        let places = running.iter_mut().zip(steps).zip(target_rows).enumerate();
        for (number, ((one, step), target_row)) in places {
            self.target.commit(one.slot, one.tokens.len(), &[]);
            if let Some(last) = one.places.last_mut() {
                enter(step.predicted_of_read(), &mut last.candidate);
            }
            let target_logits =
                target_row.as_ref().map(|row| decoding.penalised(row, one.tokens.iter().copied()));
            let mut candidate = step.candidate(one.token(), self.options);
            candidate.target_log_prob = self.target_log_prob(&candidate, target_logits.as_deref());
            let token_id = candidate.token_id;
            let predicted = self.predict_of_drawn(one.slot, &step.row, token_id)?;
            enter(predicted, &mut candidate);
            // The last token within the limit is the target's own in any case.
            let room = one.limit.saturating_sub(one.at() + 1).min(self.options.max_length);
            let drafted = (room > 0)
                .then(|| one.candidate_at(one.at(), &step, target_logits.as_deref(), self.options));
            let drafted = drafted.filter(|drafted| by_round || *drafted != one.token());
            if let Some(candidate) = drafted {
                let mut rollout = Rollout::begin(number, room, self.options);
                self.advance(&mut rollout, one, &step, Some(candidate))?;
                let first = &mut rollout.candidates[0];
                first.target_log_prob = self.target_log_prob(first, target_logits.as_deref());
                rollouts.push(rollout);
            }
            one.places.push(RecordedPlace { candidate, rollout: None });
        }
        if !rollouts.is_empty() {
            self.roll_out(&mut rollouts, running)?;
        }
        for one in running {
            one.tokens.push(one.response[one.at() - 1]);
        }
        Ok(())
    }
}
