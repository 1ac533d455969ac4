//! Recording of the candidates and signals that a drafter would give at every position of a
//! response, so that stop rules can later be replayed without models.
//!
//! The drafter reads the response token by token, as in decoding. Where its candidate would be
//! rejected, a *rollout* follows: the drafter continues from the rejected candidate, as it would
//! within a round, and is then rolled back.
//!
//! For a drafter whose candidates depend on where the round began, a whole round is drafted at
//! every position. It follows the response while candidates are accepted, and continues freely from
//! the first rejected candidate.
//!
//! The target runs only if a head is recorded, if labels are wanted, or if decoding is sampled. In
//! the last case its probabilities decide which candidates are accepted. A greedy recording without
//! head and labels never runs the target.

mod recorder;
mod response;
mod rollouts;
#[cfg(test)]
pub(crate) mod tests;

use std::ops::ControlFlow;

use draftsmith_theory::{
    Decoding, Draws, Proposal, RecordedPlace, Recording, RoundForwards, StopRule, TokenChoice,
};

use crate::drafter::StepDrafter;
use crate::error::{DecodeError, Result};
use crate::sequence::Limits;
use crate::target::{Target, Verification};
use recorder::{EverySignal, Recorder, enter};
use response::RunningResponse;
use rollouts::Rollout;

/// The settings of a recording.
#[derive(Debug, Clone)]
pub struct RecordOptions {
    /// The way in which the responses were decoded, greedy or sampled. Replay assumes the same.
    pub decoding: Decoding,
    /// The limits with which the responses were decoded.
    pub limits: Limits,
    /// The maximum number of candidates in a replayed round.
    pub max_length: usize,
    /// Whether the drafter has an acceptance head. If so, its prediction for every candidate is
    /// recorded.
    pub has_head: bool,
    /// Whether the target's log-probability (log p) is recorded for every candidate even without a
    /// head, as a label for training one. Otherwise a sampled recording has log p only where it
    /// decides acceptance, at the response's own positions, and a greedy recording has none.
    /// Missing values are NaN.
    pub labels: bool,
    /// Whether the target runs locally, so that it can score candidates after a rejected one. For a
    /// remote target their log p is NaN.
    pub is_target_here: bool,
}

/// The extent to which a recording runs the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TargetUse {
    /// The target does not run.
    Unused,
    /// The target computes logits along the response only, which it reads in one forward.
    Along,
    /// The target computes logits along the response and after rejected candidates. It therefore
    /// reads the response token by token, in step with the drafter, with one forward for all slots.
    PlaceByPlace,
}

impl RecordOptions {
    /// Returns whether the target scores candidates after a rejected one.
    fn asks_after_rejected(&self) -> bool {
        (self.has_head || self.labels) && self.is_target_here
    }

    /// Returns how a recording runs the target. `by_round` is [`StepDrafter::drafts_by_round`].
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
    /// The prompt's token ids, at least one.
    pub prompt: &'a [u32],
    /// The token ids of the target's response, at least one.
    pub response: &'a [u32],
    /// The source of random draws for this recording.
    pub draws: &'a mut dyn Draws,
}

/// The responses of a recording, with its settings and observer.
pub struct RecordTask<'t, 'a> {
    /// The settings.
    pub options: &'t RecordOptions,
    /// The responses to record.
    pub requests: Vec<RecordRequest<'a>>,
    /// A function that receives the number of positions recorded so far and may stop the recording.
    pub observe: &'t mut dyn FnMut(usize) -> ControlFlow<()>,
}

impl RecordTask<'_, '_> {
    /// Records the responses as [`record`] does.
    pub(crate) fn along<T: Target>(
        self,
        target: &mut T,
        drafter: &mut dyn StepDrafter<T>,
    ) -> Recorded {
        Some(record(target, drafter, self.options, self.requests, self.observe))
    }
}

/// The recordings of responses; `None` if the drafter does not support recording them.
pub(crate) type Recorded = Option<Result<Vec<Recording>>>;

/// Records the drafter along responses that the target gave under the decoding settings and limits
/// in `options`. Records as many responses concurrently as the target has slots, one position of
/// each at a time. Batching does not change any response's recording.
///
/// A greedy recording contains exactly the candidates that a decoding round would draft. A sampled
/// one contains random candidates, drawn conditionally on the response (see
/// [`Recordings`](draftsmith_theory::Recordings)). Labels compare the distributions that tokens are
/// sampled from. For greedy decoding they compare the models' distributions at temperature 1.
///
/// `observe` receives the number of positions recorded so far and may stop the recording. Only
/// completely recorded responses are then returned.
///
/// # Errors
/// If a prompt or a response is empty or does not fit, or a model fails.
pub fn record<'a, T: Target>(
    target: &mut T,
    drafter: &mut dyn StepDrafter<T>,
    options: &RecordOptions,
    requests: impl IntoIterator<Item = RecordRequest<'a>>,
    observe: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Recording>> {
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
    ) -> Result<RunningResponse<'r>> {
        let RecordRequest { prompt, response, draws } = request;
        if prompt.is_empty() || response.is_empty() {
            return Err(DecodeError::EmptyPrompt);
        }
        let context = self.target.context().min(self.drafter.context());
        let max_len = prompt.len().saturating_add(self.options.limits.max_new_tokens).min(context);
        match self.target_use() {
            // The target runs only where the drafter requests its features.
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

    /// Returns the target's logits at the next position of each response; `None` if the recording
    /// does not run the target.
    fn target_rows(
        &mut self,
        running: &mut [RunningResponse<'_>],
    ) -> Result<Vec<Option<Vec<f32>>>> {
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
    fn record_place(&mut self, running: &mut [RunningResponse<'_>]) -> Result<()> {
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
            // The last token within the limit is always the target's own, so no candidate is
            // drafted for it.
            let most = self.options.max_length.min(self.drafter.max_candidates());
            let room = one.limit.saturating_sub(one.at() + 1).min(most);
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
