//! Proposals that are chains: a step of a drafter, a candidate, another step.

use draftsmith_theory::{
    CandidateSource, Decoding, DraftPhase, Drawn, DrawnFrom, Draws, Proposal, SignalNeeds, argmax,
    largest_prob,
};

use crate::draft_row::{DraftRow, draft_rows};
use crate::drafter::{DraftRound, DraftStep, StepDrafter};
use crate::error::DecodeError;

/// Proposes the chains of candidates that draft phases draw: a step of all phases at a time, as long
/// as any goes on.
///
/// # Errors
/// If the drafter fails.
pub fn propose_chain<T, D: StepDrafter<T> + ?Sized>(
    drafter: &mut D,
    target: &mut T,
    rounds: &mut [DraftRound<'_>],
) -> Result<(), DecodeError> {
    let begin = |round: &mut DraftRound<'_>| DraftPhase::begin(round.rule, round.limits);
    let mut phases: Vec<DraftPhase> = rounds.iter_mut().map(begin).collect();
    loop {
        let pairs = rounds.iter().zip(&phases).filter(|(_, phase)| phase.needs_step());
        let steps_of = pairs.map(|(round, phase)| {
            DraftStep::in_chain(round.slot, round.tokens, phase.num_candidates(), phase.needs())
        });
        let steps: Vec<DraftStep<'_>> = steps_of.collect();
        if steps.is_empty() {
            return Ok(());
        }
        let pairs = rounds.iter().zip(&phases).filter(|(_, phase)| phase.needs_step());
        let decodings = pairs.map(|(round, _)| round.decoding);
        let rows = draft_rows(drafter, target, &steps, decodings)?;
        let pairs = rounds.iter_mut().zip(&mut phases).filter(|(_, phase)| phase.needs_step());
        for ((round, phase), row) in pairs.zip(&rows) {
            let DraftRound { slot, tokens, proposal, rule, limits, decoding, draws } = round;
            proposal.forwards.add(drafter.id(), row.num_forwards());
            let slot = *slot;
            let mut source =
                ChainSource { drafter, target, slot, proposal, decoding, draws: *draws, row };
            phase.advance(&mut source, row.signals(), *rule, *limits, tokens)?;
        }
    }
}

/// A step of a drafter, as what a draft phase draws from.
struct ChainSource<'a, T, D: ?Sized> {
    drafter: &'a mut D,
    target: &'a mut T,
    slot: usize,
    proposal: &'a mut Proposal,
    decoding: &'a Decoding,
    draws: &'a mut dyn Draws,
    row: &'a DraftRow,
}

impl<T, D: StepDrafter<T> + ?Sized> CandidateSource for ChainSource<'_, T, D> {
    type Error = DecodeError;

    fn draw(&mut self, needs: SignalNeeds) -> Drawn {
        let probs = self.decoding.sampled_probs(self.row.logits());
        let drawn = draw(self.row.logits(), probs.as_deref(), needs, self.draws);
        self.proposal.push_next(drawn.token_id, probs.map_or(DrawnFrom::OneHot, DrawnFrom::Probs));
        drawn
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, DecodeError> {
        let logits = self.row.own_logits();
        self.drafter.predict_acceptance(self.target, (self.slot, 0), logits, candidate)
    }
}

/// Draws a candidate from a draft step: from `probs`, or the most probable token without.
pub(crate) fn draw(
    logits: &[f32],
    probs: Option<&[f64]>,
    needs: SignalNeeds,
    draws: &mut dyn Draws,
) -> Drawn {
    let token_id = match probs {
        Some(probs) => draws.categorical(probs) as u32,
        None => argmax(logits),
    };
    let candidate_prob = || match probs {
        Some(probs) => probs[token_id as usize],
        None => largest_prob(logits),
    };
    Drawn { token_id, candidate_prob: needs.candidate_prob.then(candidate_prob) }
}
