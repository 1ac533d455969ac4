//! Rollouts: a rejected candidate, and what the drafter proposes after it.

use draftsmith_theory::{
    CandidateSource, DraftPhase, Drawn, Draws, Proposal, RecordedCandidate, SignalNeeds,
};

use super::along::Along;
use super::models::{EverySignal, Models, Step, enter};
use super::{RecordOptions, TargetAsked};
use crate::chain::draw;
use crate::drafter::{DraftStep, StepDrafter};
use crate::error::DecodeError;
use crate::target::{Target, Verification};

/// A rejected candidate, and what is drafted after it.
pub(super) struct Rollout {
    /// The index of the response among the running ones.
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

/// A step that a rollout draws from.
struct RolloutSource<'s, 'r, 'a, T, D: ?Sized> {
    models: &'s mut Models<'a, T, D>,
    slot: usize,
    draws: &'r mut dyn Draws,
    step: &'s Step,
    rejected: Option<u32>,
    candidates: &'s mut Vec<RecordedCandidate>,
}

impl<T: Target, D: StepDrafter<T> + ?Sized> CandidateSource for RolloutSource<'_, '_, '_, T, D> {
    type Error = DecodeError;

    fn draw(&mut self, needs: SignalNeeds) -> Drawn {
        let drawn = match self.rejected {
            Some(token_id) => Drawn { token_id, candidate_prob: None },
            None => draw(self.step.row.logits(), self.step.probs.as_deref(), needs, self.draws),
        };
        self.candidates.push(self.step.candidate(drawn.token_id, self.models.options));
        drawn
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, DecodeError> {
        let logits = self.step.row.own_logits();
        let predicted = self.models.predict_of_drawn(self.slot, logits, candidate)?;
        if let Some(drawn) = self.candidates.last_mut() {
            enter(predicted, drawn);
        }
        Ok(predicted)
    }
}

impl<T: Target, D: StepDrafter<T> + ?Sized> Models<'_, T, D> {
    /// Lets the drafter go on from rejected candidates, until the room is used or an end token comes.
    /// Then rolls target and drafter back.
    pub(super) fn roll_out(
        &mut self,
        rollouts: &mut [Rollout],
        running: &mut [Along<'_>],
    ) -> Result<(), DecodeError> {
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
                    running[rollout.number].step(phase.num_candidates(), phase.needs())
                })
                .collect();
            for (step, rollout) in self.step(&steps)?.into_iter().zip(&mut going_on) {
                let last = rollout.candidates.last_mut().expect("one was rejected");
                enter(step.predicted_of_read(), last);
                self.advance(rollout, &mut running[rollout.number], &step, None)?;
            }
        }
        if self.options.target_asked() == TargetAsked::PlaceByPlace && self.options.is_target_here {
            self.judge(rollouts, running)?;
        }
        for rollout in rollouts {
            let along = &mut running[rollout.number];
            let num_standing = along.tokens.len() - rollout.candidates.len();
            along.tokens.truncate(num_standing);
            self.target.commit(along.slot, num_standing, &[]);
            self.drafter.commit(along.slot, num_standing, &[]);
            let place = along.places.last_mut().expect("a rollout is of a place");
            place.rollout = Some(std::mem::take(&mut rollout.candidates));
        }
        Ok(())
    }

    /// Asks the target for log p of the candidates after rejected ones.
    fn judge(
        &mut self,
        rollouts: &mut [Rollout],
        running: &[Along<'_>],
    ) -> Result<(), DecodeError> {
        // The row before the rejected candidate is known, and the last candidate's is not needed.
        let proposals: Vec<Proposal> = rollouts
            .iter()
            .map(|rollout| {
                let drafted = rollout.candidates.iter().map(|candidate| candidate.token_id);
                let drafted: Vec<u32> = drafted.collect();
                Proposal::certain_chain(drafted.get(1..drafted.len() - 1).unwrap_or(&[]))
            })
            .collect();
        let is_read = |rollout: &&Rollout| rollout.candidates.len() > 1;
        let batch: Vec<Verification<'_>> = rollouts
            .iter()
            .zip(&proposals)
            .filter(|(rollout, _)| is_read(rollout))
            .map(|(rollout, proposal)| {
                let Along { slot, tokens, .. } = &running[rollout.number];
                Verification { slot: *slot, tokens: &tokens[..tokens.len() - 1], proposal }
            })
            .collect();
        if !batch.is_empty() {
            let logits = self.target.verify(&batch)?;
            let mut rows = logits.rows();
            for rollout in rollouts.iter_mut().filter(|rollout| rollout.candidates.len() > 1) {
                let tokens = &running[rollout.number].tokens;
                let first = tokens.len() + 1 - rollout.candidates.len();
                let candidates = rollout.candidates[1..].iter_mut().zip(first..);
                for ((candidate, num_before), row) in candidates.zip(&mut rows) {
                    let before = tokens[..num_before].iter().copied();
                    let row = self.options.decoding.penalised(row, before);
                    candidate.target_log_prob = self.target_log_prob(candidate, Some(&row));
                }
            }
        }
        Ok(())
    }

    /// Advances a rollout after a step: with the `rejected` candidate in its first step.
    pub(super) fn advance(
        &mut self,
        rollout: &mut Rollout,
        along: &mut Along<'_>,
        step: &Step,
        rejected: Option<u32>,
    ) -> Result<(), DecodeError> {
        let Rollout { phase, rule, room, candidates, .. } = rollout;
        let limits = self.options.limits.of_drafts(*room);
        let (slot, draws) = (along.slot, &mut *along.draws);
        let mut source = RolloutSource { models: self, slot, draws, step, rejected, candidates };
        phase.advance(&mut source, step.row.signals(), rule, limits, &mut along.tokens)?;
        // No rule is asked about a candidate that ends the response.
        if let Some(last) = candidates.last_mut()
            && limits.is_end(&along.tokens)
        {
            let predicted = self.predict_of_drawn(slot, step.row.own_logits(), last.token_id)?;
            enter(predicted, last);
        }
        Ok(())
    }
}
