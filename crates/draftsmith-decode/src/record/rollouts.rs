//! Rollouts of a recording: a rejected candidate and the candidates that the drafter proposes after
//! it. For drafters that draft by round, a rollout is a whole round.

use draftsmith_theory::{
    CandidateSource, DraftPhase, DrawnToken, Draws, Proposal, RecordedCandidate, RoundForwards,
    SignalNeeds,
};

use super::RecordOptions;
use super::recorder::{EverySignal, RecordedStep, Recorder, enter};
use super::response::RunningResponse;
use crate::drafter::DraftStep;
use crate::drafter::chain::draw;
use crate::error::{DecodeError, Result};
use crate::target::{Target, Verification};

/// The unfinished rollout at one position of a response.
pub(super) struct Rollout {
    /// The index of the rollout's response among the running responses.
    number: usize,
    phase: DraftPhase,
    rule: EverySignal,
    room: usize,
    pub(super) candidates: Vec<RecordedCandidate>,
}

impl Rollout {
    pub(super) fn begin(number: usize, room: usize, options: &RecordOptions) -> Self {
        let mut rule = EverySignal { has_head: options.has_head };
        let limits = options.limits.of_drafts(room);
        let phase = DraftPhase::begin(&mut rule, limits);
        Self { number, phase, rule, room, candidates: Vec::new() }
    }
}

/// Provides a rollout's next candidate from one draft step.
struct RolloutSource<'s, 'r, 'a, T> {
    recorder: &'s mut Recorder<'a, T>,
    slot: usize,
    draws: &'r mut dyn Draws,
    step: &'s RecordedStep,
    /// The candidate that the response determines; `None` if the candidate is drawn from the step.
    given: Option<u32>,
    candidates: &'s mut Vec<RecordedCandidate>,
}

impl<T: Target> CandidateSource for RolloutSource<'_, '_, '_, T> {
    type Error = DecodeError;

    fn draw(&mut self, needs: SignalNeeds) -> DrawnToken {
        let drawn = match self.given {
            Some(token_id) => DrawnToken { token_id, candidate_prob: None },
            None => draw(self.step.row.logits(), self.step.probs.as_deref(), needs, self.draws),
        };
        self.candidates.push(self.step.candidate(drawn.token_id, self.recorder.options));
        drawn
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>> {
        let predicted = self.recorder.predict_of_drawn(self.slot, &self.step.row, candidate)?;
        if let Some(drawn) = self.candidates.last_mut() {
            enter(predicted, drawn);
        }
        Ok(predicted)
    }
}

impl<T: Target> Recorder<'_, T> {
    /// Continues each rollout from its first candidate until its maximum length or the end of the
    /// response. Then rolls the target and the drafter back.
    pub(super) fn roll_out(
        &mut self,
        rollouts: &mut [Rollout],
        running: &mut [RunningResponse<'_>],
    ) -> Result<()> {
        loop {
            let going_on = rollouts.iter_mut().filter(|rollout| rollout.phase.needs_step());
            let mut going_on: Vec<&mut Rollout> = going_on.collect();
            if going_on.is_empty() {
                break;
            }
            let steps: Vec<DraftStep<'_>> = going_on
                .iter()
                .map(|rollout| {
                    let phase = &rollout.phase;
                    let (num_candidates, needs) = (phase.num_candidates(), phase.needs());
                    let one = &running[rollout.number];
                    let step = one.step(num_candidates, needs, &self.options.decoding);
                    DraftStep { most: phase.num_left(), ..step }
                })
                .collect();
            for (step, rollout) in self.step(&steps)?.into_iter().zip(&mut going_on) {
                let last =
                    rollout.candidates.last_mut().expect("a rollout begins with a candidate");
                enter(step.predicted_of_read(), last);
                let one = &mut running[rollout.number];
                if step.row.num_forwards == 0 {
                    one.forwards = RoundForwards::Once;
                }
                let given = self.given(rollout, one, &step)?;
                self.advance(rollout, one, &step, given)?;
            }
        }
        if self.options.asks_after_rejected() {
            self.label(rollouts, running)?;
        }
        for rollout in rollouts {
            let one = &mut running[rollout.number];
            let num_standing = one.tokens.len() - rollout.candidates.len();
            one.tokens.truncate(num_standing);
            self.target.commit(one.slot, num_standing, &[]);
            self.drafter.commit(one.slot, num_standing, &[]);
            let place = one.places.last_mut().expect("a rollout belongs to a position");
            place.rollout = Some(std::mem::take(&mut rollout.candidates));
        }
        Ok(())
    }

    /// Chooses the next candidate of a sampled rollout whose candidates were all accepted so far,
    /// conditionally on the response. Returns `None` for other rollouts, where the drafter draws
    /// freely.
    fn given(
        &mut self,
        rollout: &Rollout,
        one: &mut RunningResponse<'_>,
        step: &RecordedStep,
    ) -> Result<Option<u32>> {
        // The rollout's position is already among the recorded ones.
        let (start, num) = (one.at() - 1, rollout.candidates.len());
        let candidates = rollout.candidates.iter().map(|candidate| &candidate.token_id);
        let along = &one.response[start..];
        let is_accepted = along.len() > num && candidates.eq(&along[..num]);
        if step.probs.is_none() || !is_accepted {
            return Ok(None);
        }
        let row = one.row_ahead(self.target, start, num)?;
        let row = self.options.decoding.penalised(&row, one.tokens.iter().copied());
        Ok(Some(one.candidate_at(start + num, step, Some(&row), self.options)))
    }

    /// Computes the target's log-probability of every candidate after the first, in one forward.
    fn label(&mut self, rollouts: &mut [Rollout], running: &[RunningResponse<'_>]) -> Result<()> {
        // The first candidate's label is already known, and the row after the last candidate is not
        // needed.
        let mut rollouts: Vec<&mut Rollout> =
            rollouts.iter_mut().filter(|rollout| rollout.candidates.len() > 1).collect();
        if rollouts.is_empty() {
            return Ok(());
        }
        let proposals = rollouts.iter().map(|Rollout { candidates, .. }| {
            let read = candidates[1..candidates.len() - 1].iter();
            Proposal::certain_chain(&read.map(|candidate| candidate.token_id).collect::<Vec<_>>())
        });
        let proposals: Vec<Proposal> = proposals.collect();
        let batch = rollouts.iter().zip(&proposals).map(|(rollout, proposal)| {
            let RunningResponse { slot, tokens, .. } = &running[rollout.number];
            Verification { slot: *slot, tokens: &tokens[..tokens.len() - 1], proposal }
        });
        let logits = self.target.verify(&batch.collect::<Vec<_>>())?;
        let mut rows = logits.rows();
        for rollout in &mut rollouts {
            let tokens = &running[rollout.number].tokens;
            let first = tokens.len() + 1 - rollout.candidates.len();
            let candidates = rollout.candidates[1..].iter_mut().zip(first..);
            for ((candidate, num_before), row) in candidates.zip(&mut rows) {
                let before = tokens[..num_before].iter().copied();
                let row = self.options.decoding.penalised(row, before);
                candidate.target_log_prob = self.target_log_prob(candidate, Some(&row));
            }
        }
        Ok(())
    }

    /// Advances a rollout by the candidate of one step. The candidate is `given`, or drawn if that
    /// is `None`.
    pub(super) fn advance(
        &mut self,
        rollout: &mut Rollout,
        one: &mut RunningResponse<'_>,
        step: &RecordedStep,
        given: Option<u32>,
    ) -> Result<()> {
        let Rollout { phase, rule, room, candidates, .. } = rollout;
        let limits = self.options.limits.of_drafts(*room);
        let (slot, draws) = (one.slot, &mut *one.draws);
        let mut source = RolloutSource { recorder: self, slot, draws, step, given, candidates };
        phase.advance(&mut source, step.row.signals, rule, limits, &mut one.tokens)?;
        // The draft phase requests no prediction for a candidate that ends the response.
        if let Some(last) = candidates.last_mut()
            && limits.is_end(&one.tokens)
        {
            let predicted = self.predict_of_drawn(slot, &step.row, last.token_id)?;
            enter(predicted, last);
        }
        Ok(())
    }
}
