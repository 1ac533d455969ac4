//! What proposes tokens, as the decoding loop sees it, and the chain of those that draft step by
//! step.

use draftsmith_theory::{
    Decoding, DraftLimits, DraftSignals, DraftSteps, DrafterId, Drawn, DrawnFrom, Draws, Proposal,
    SignalNeeds, StopRule, argmax, draft_phase, largest_prob,
};

use crate::error::DecodeError;

/// What proposes tokens, with a sequence in each slot of its target. It is handed the target at
/// each step, because a self-draft runs the target's own layers; a separate draft ignores it.
pub trait Drafter<T> {
    /// Starts a sequence in a slot, after the target has.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError>;

    /// Proposes tokens for a round.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn propose(
        &mut self,
        target: &mut T,
        slot: usize,
        round: DraftRound<'_>,
    ) -> Result<(), DecodeError>;

    /// Keeps of what it has read in a slot the first `num_standing` tokens and the proposed ones on
    /// `path`, and forgets the rest.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]);

    /// The longest sequence a slot can hold.
    fn context(&self) -> usize;
}

/// A round to draft for.
pub struct DraftRound<'a> {
    /// The sequence that stands; proposed tokens are appended in the order of their nodes.
    pub tokens: &'a mut Vec<u32>,
    /// Empty, to be filled.
    pub proposal: &'a mut Proposal,
    /// When to stop.
    pub rule: &'a mut dyn StopRule,
    /// What ends drafting whatever the rule says.
    pub limits: DraftLimits<'a>,
    /// How tokens are chosen.
    pub decoding: &'a Decoding,
    /// The sequence's own.
    pub draws: &'a mut dyn Draws,
}

/// A drafter that names one candidate a forward. It proposes a chain, by [`propose_chain`], and its
/// steps can be recorded.
pub trait StepDrafter<T>: Drafter<T> {
    /// Its name.
    fn id(&self) -> DrafterId;

    /// Reads what it has not read of `tokens`, the whole sequence with this round's
    /// `num_candidates` candidates at its end, and returns what the next candidate is drawn from,
    /// with the signals that are needed of it.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn draft(
        &mut self,
        target: &mut T,
        slot: usize,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<Drafted, DecodeError>;

    /// The chance that `candidate` is accepted, which was just drawn from `logits`, those of the
    /// last [`draft`](Self::draft) in the slot, as predicted by an acceptance head that looks ahead
    /// and does not wait for the candidate to be read. None without such a head. Asked where the
    /// rule reads an acceptance head.
    ///
    /// # Errors
    /// If the prediction is not a number or the device fails.
    fn predict_acceptance(
        &mut self,
        target: &mut T,
        slot: usize,
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let _ = (target, slot, logits, candidate);
        Ok(None)
    }
}

/// One step of drafting.
#[derive(Debug, Clone)]
pub struct Drafted {
    /// Logits over the target's vocabulary.
    pub logits: Vec<f32>,
    /// What stop rules may read.
    pub signals: DraftSignals,
    /// Forwards of the draft that this step took.
    pub num_forwards: usize,
}

/// Proposes the chain of candidates that one draft phase draws.
///
/// # Errors
/// If the drafter fails.
pub fn propose_chain<T, D: StepDrafter<T> + ?Sized>(
    drafter: &mut D,
    target: &mut T,
    slot: usize,
    round: DraftRound<'_>,
) -> Result<(), DecodeError> {
    let DraftRound { tokens, proposal, rule, limits, decoding, draws } = round;
    let mut steps = ChainSteps { drafter, target, slot, proposal, decoding, draws, logits: vec![] };
    draft_phase(&mut steps, rule, limits, tokens)?;
    Ok(())
}

/// A drafter's forwards as the steps of a draft phase.
struct ChainSteps<'a, T, D: ?Sized> {
    drafter: &'a mut D,
    target: &'a mut T,
    slot: usize,
    proposal: &'a mut Proposal,
    decoding: &'a Decoding,
    draws: &'a mut dyn Draws,
    /// Of the last step.
    logits: Vec<f32>,
}

impl<T, D: StepDrafter<T> + ?Sized> DraftSteps for ChainSteps<'_, T, D> {
    type Error = DecodeError;

    fn step(
        &mut self,
        tokens: &[u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Result<DraftSignals, DecodeError> {
        let Drafted { logits, signals, num_forwards } =
            self.drafter.draft(self.target, self.slot, tokens, num_candidates, needs)?;
        self.logits = logits;
        self.proposal.forwards.add(self.drafter.id(), num_forwards);
        Ok(signals)
    }

    fn draw(&mut self, needs: SignalNeeds) -> Drawn {
        let probs = self.decoding.sampled_probs(&self.logits);
        let drawn = draw(&self.logits, probs.as_deref(), needs, self.draws);
        self.proposal.push_next(drawn.token_id, probs.map_or(DrawnFrom::OneHot, DrawnFrom::Probs));
        drawn
    }

    fn predict_acceptance(&mut self, candidate: u32) -> Result<Option<f64>, DecodeError> {
        self.drafter.predict_acceptance(self.target, self.slot, &self.logits, candidate)
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

/// Proposes nothing: the target decodes alone.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoDrafter;

impl<T> Drafter<T> for NoDrafter {
    fn begin(&mut self, _target: &mut T, _slot: usize, _prompt: &[u32]) -> Result<(), DecodeError> {
        Ok(())
    }

    fn propose(
        &mut self,
        _target: &mut T,
        _slot: usize,
        _round: DraftRound<'_>,
    ) -> Result<(), DecodeError> {
        Ok(())
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        usize::MAX
    }
}
