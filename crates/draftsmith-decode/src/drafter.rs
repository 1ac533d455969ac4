//! What proposes tokens, as the decoding loop sees it, and what a drafter that drafts step by step
//! gives.

use draftsmith_theory::{
    Decoding, DraftLimits, DraftSignals, DrafterId, Draws, Proposal, SignalNeeds, StopRule,
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

    /// Proposes tokens for a round of each of several sequences.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>])
    -> Result<(), DecodeError>;

    /// Keeps of what it has read in a slot the first `num_standing` tokens and the proposed ones on
    /// `path`, and forgets the rest.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]);

    /// The longest sequence a slot can hold.
    fn context(&self) -> usize;
}

impl<T, D: Drafter<T> + ?Sized> Drafter<T> for &mut D {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        (**self).begin(target, slot, prompt)
    }

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        (**self).propose(target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        (**self).commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        (**self).context()
    }
}

/// A round to draft for.
pub struct DraftRound<'a> {
    /// The sequence's, another one than other rounds'.
    pub slot: usize,
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

impl DraftRound<'_> {
    /// The same round, for another drafter to propose for.
    pub(crate) fn reborrow(&mut self) -> DraftRound<'_> {
        DraftRound {
            slot: self.slot,
            tokens: self.tokens,
            proposal: self.proposal,
            rule: self.rule,
            limits: self.limits,
            decoding: self.decoding,
            draws: self.draws,
        }
    }
}

/// A drafter that names one candidate a forward. It proposes a chain, by
/// [`propose_chain`](crate::propose_chain), and its steps can be recorded.
pub trait StepDrafter<T>: Drafter<T> {
    /// Its name.
    fn id(&self) -> DrafterId;

    /// Takes a step of each of several sequences, in one forward: reads what it has not read of each,
    /// and returns what its next candidates are drawn from, a step's rows behind the other's.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn draft(
        &mut self,
        target: &mut T,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<Drafted>, DecodeError>;

    /// The prediction of an acceptance head that looks ahead: the probability that `candidate`, just
    /// drawn from the `logits` of a row of the last [`draft`](Self::draft) in a slot, is accepted. None
    /// without such a head. Called if the rule reads an acceptance head.
    ///
    /// # Errors
    /// If the prediction is not a number or the device fails.
    fn predict_acceptance(
        &mut self,
        target: &mut T,
        (slot, row): (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let _ = (target, slot, row, logits, candidate);
        Ok(None)
    }
}

/// A step to take.
#[derive(Debug, Clone, Copy)]
pub struct DraftStep<'a> {
    /// The sequence's, another one than other steps'.
    pub slot: usize,
    /// The whole sequence, with this round's candidates at its end.
    pub tokens: &'a [u32],
    /// How many those are.
    pub num_candidates: usize,
    /// What each of them follows, where they form a tree: the number of another one, or None for the
    /// last token that stands. Empty where they are a chain.
    pub parents: &'a [Option<usize>],
    /// Behind how many of the last tokens a candidate is drawn next: one in a chain.
    pub num_rows: usize,
    /// The signals that are needed of the next candidates.
    pub needs: SignalNeeds,
}

impl<'a> DraftStep<'a> {
    /// A step behind a chain.
    pub fn in_chain(
        slot: usize,
        tokens: &'a [u32],
        num_candidates: usize,
        needs: SignalNeeds,
    ) -> Self {
        Self { slot, tokens, num_candidates, parents: &[], num_rows: 1, needs }
    }

    /// The tokens before those that form a tree; all of them in a chain.
    pub(crate) fn num_standing(&self) -> usize {
        self.tokens.len() - self.parents.len()
    }

    /// Its rows, by number.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&Self, usize)> {
        (0..self.num_rows).map(move |row| (self, row))
    }

    /// The place in `tokens` of the last token that a row has read.
    pub(crate) fn at(&self, row: usize) -> usize {
        self.tokens.len() - self.num_rows + row
    }

    /// The tokens before the one that a row's candidate is, in any order.
    pub(crate) fn tokens_before(&self, row: usize) -> impl Iterator<Item = u32> {
        let (at, num_standing) = (self.at(row), self.num_standing());
        let node = at.checked_sub(num_standing);
        let path = std::iter::successors(node, |node| self.parents[*node]);
        let standing = self.tokens[..num_standing.min(at + 1)].iter().copied();
        standing.chain(path.map(move |node| self.tokens[num_standing + node]))
    }

    /// The place of the token that the one at `at` follows, where that is a candidate.
    pub(crate) fn parent_of(&self, at: usize) -> Option<usize> {
        let num_standing = self.num_standing();
        match at.checked_sub(num_standing) {
            Some(node) => Some(match self.parents[node] {
                Some(parent) => num_standing + parent,
                None => num_standing - 1,
            }),
            None => (at >= self.tokens.len() - self.num_candidates).then(|| at - 1),
        }
    }
}

/// What a step gave.
#[derive(Debug, Clone)]
pub struct Drafted {
    /// The model's own logits, over the target's vocabulary.
    pub logits: Vec<f32>,
    /// What stop rules may read, by those logits.
    pub signals: DraftSignals,
    /// Forwards of the draft that this step took.
    pub num_forwards: usize,
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
        _rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        Ok(())
    }

    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}

    fn context(&self) -> usize {
        usize::MAX
    }
}
