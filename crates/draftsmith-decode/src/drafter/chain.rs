//! Drafting of candidate chains: a draft step gives one candidate, and the next step reads it.

use draftsmith_theory::{
    CandidateSource, DraftPhase, DrawnFrom, DrawnToken, Draws, SignalNeeds, SoftmaxSummary, argmax,
};

use crate::drafter::{DraftRound, DraftRow, DraftStep, StepDrafter};
use crate::error::{DecodeError, Result};

/// Drafts a chain of candidates for each round. All unfinished draft phases share each draft
/// forward.
///
/// # Errors
/// If the drafter fails.
pub fn propose_chain<T>(
    drafter: &mut dyn StepDrafter<T>,
    target: &mut T,
    rounds: &mut [DraftRound<'_>],
) -> Result<()> {
    let most = drafter.max_candidates();
    let begin = |round: &mut DraftRound<'_>| DraftPhase::begin(round.rule, round.limits.upto(most));
    let mut phases: Vec<DraftPhase> = rounds.iter_mut().map(begin).collect();
    loop {
        let pairs = rounds.iter().zip(&phases).filter(|(_, phase)| phase.needs_step());
        let steps = pairs.map(|(round, phase)| {
            let (num_candidates, needs) = (phase.num_candidates(), phase.needs());
            let DraftRound { slot, tokens, decoding, .. } = round;
            let step = DraftStep::in_chain(*slot, tokens, num_candidates, needs, decoding);
            DraftStep { most: phase.num_left(), ..step }
        });
        let steps: Vec<DraftStep<'_>> = steps.collect();
        if steps.is_empty() {
            return Ok(());
        }
        let rows = drafter.draft(target, &steps)?;
        let pairs = rounds.iter_mut().zip(&mut phases).filter(|(_, phase)| phase.needs_step());
        for ((round, phase), row) in pairs.zip(&rows) {
            let DraftRound { slot, tokens, proposal, rule, limits, decoding, draws } = round;
            proposal.forwards.add(drafter.id(), row.num_forwards);
            let draw_candidate = |needs| {
                let probs = decoding.sampled_probs(row.logits());
                let drawn = draw(row.logits(), probs.as_deref(), needs, *draws);
                proposal
                    .push_next(drawn.token_id, probs.map_or(DrawnFrom::OneHot, DrawnFrom::Probs));
                drawn
            };
            let mut source = RowSource { drafter, slot: *slot, row, draw_candidate };
            phase.advance(&mut source, row.signals, *rule, *limits, tokens)?;
        }
    }
}

/// Draws a draft phase's next candidate from one row of the drafter's last step.
pub(crate) struct RowSource<'a, T, F> {
    pub(crate) drafter: &'a mut dyn StepDrafter<T>,
    pub(crate) slot: usize,
    /// The first row that the last draft step returned for the slot.
    pub(crate) row: &'a DraftRow,
    /// A function that draws the candidate and appends it to the proposal.
    pub(crate) draw_candidate: F,
}

impl<T, F: FnMut(SignalNeeds) -> DrawnToken> CandidateSource for RowSource<'_, T, F> {
    type Error = DecodeError;

    fn draw(&mut self, needs: SignalNeeds) -> DrawnToken {
        (self.draw_candidate)(needs)
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>> {
        self.drafter.predict_acceptance((self.slot, 0), &self.row.own_logits, candidate)
    }
}

/// Draws a candidate from `probs`. If `probs` is `None`, returns the most probable token of
/// `logits`.
pub(crate) fn draw(
    logits: &[f32],
    probs: Option<&[f64]>,
    needs: SignalNeeds,
    draws: &mut dyn Draws,
) -> DrawnToken {
    let token_id = probs.map_or_else(|| argmax(logits), |probs| draws.categorical(probs) as u32);
    let candidate_prob = || match probs {
        Some(probs) => probs[token_id as usize],
        None => SoftmaxSummary::of(logits).largest_prob,
    };
    DrawnToken { token_id, candidate_prob: needs.candidate_prob.then(candidate_prob) }
}
