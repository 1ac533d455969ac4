//! The traits of drafters, and the rounds, steps and rows that they exchange with the decoding loop.
//!
//! Every drafter proposes tokens ([`Drafter`]). One that drafts step by step also implements
//! [`StepDrafter`]: its steps can be recorded, grown into trees and used inside a cascade.

use std::iter;

use draftsmith_theory::{
    Decoding, DraftLimits, DraftSignals, DrafterId, Draws, HeadEstimate, Proposal, SignalNeeds,
    StopRule,
};

use crate::error::DecodeError;
use crate::session::ModelSession;

/// Proposes tokens for the sequence in each slot of a target. Each method gets the target, because a
/// self-draft runs the target's own layers; other drafters ignore it.
pub trait Drafter<T> {
    /// Starts a sequence in a slot. The target has started it already.
    ///
    /// # Errors
    /// If the prompt does not fit or has unknown tokens.
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError>;

    /// Proposes tokens for one round of each of several sequences.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>])
    -> Result<(), DecodeError>;

    /// Keeps the first `num_standing` tokens of a slot and the proposed nodes on `path`, and forgets
    /// everything else that was read.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]);

    /// Returns the length of the longest sequence that a slot can hold, in tokens.
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

/// One sequence's round, as a drafter fills it.
pub struct DraftRound<'a> {
    /// The sequence's slot. No two rounds of a call share one.
    pub slot: usize,
    /// The sequence so far. Proposed tokens are appended in the order of their nodes.
    pub tokens: &'a mut Vec<u32>,
    /// The proposal to fill; empty at first.
    pub proposal: &'a mut Proposal,
    /// When to stop drafting.
    pub rule: &'a mut dyn StopRule,
    /// Bounds on the draft phase, which no rule can exceed.
    pub limits: DraftLimits<'a>,
    /// How tokens are chosen.
    pub decoding: &'a Decoding,
    /// The sequence's random draws.
    pub draws: &'a mut dyn Draws,
}

impl DraftRound<'_> {
    /// Borrows the same round for another drafter to propose for.
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

/// A drafter that reads tokens in forwards of a model and draws each candidate from a row of logits.
pub trait StepDrafter<T>: Drafter<T> + Send {
    /// Returns the drafter's name, under which its forwards are counted.
    fn id(&self) -> DrafterId;

    /// Takes one step of each of several sequences in one forward. The drafter reads the tokens that are new to it,
    /// and returns the rows that the next candidates are drawn from, in the order of the steps.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn draft(
        &mut self,
        target: &mut T,
        steps: &[DraftStep<'_>],
    ) -> Result<Vec<DraftRow>, DecodeError>;

    /// Returns whether the candidates depend on where the round began. A recording then drafts a whole round at every
    /// position: the drafter takes a step after each accepted prefix as the first step of a new round.
    fn drafts_by_round(&self) -> bool {
        false
    }

    /// Returns the acceptance probability that a look-ahead head predicts for `candidate`, which was just drawn from
    /// a row of the last [`draft`](Self::draft) in a slot; `None` without such a head. `logits` are that row's
    /// [`own_logits`](DraftRow::own_logits). Called only if the stop rule reads an acceptance head.
    ///
    /// # Errors
    /// If the prediction is not a number or the device fails.
    fn predict_acceptance(
        &mut self,
        (slot, row): (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>, DecodeError> {
        let _ = (slot, row, logits, candidate);
        Ok(None)
    }
}

/// A drafter that copies candidates from text. They are certain, so it has no distribution.
pub trait LookUp<T>: Drafter<T> + Send {
    /// Returns the drafter's name, under which looked-up tokens are counted.
    fn id(&self) -> DrafterId;

    /// Appends up to `most` tokens to the sequence of a slot, no further than an end token, and returns them.
    fn look_up(
        &mut self,
        slot: usize,
        tokens: &mut Vec<u32>,
        most: usize,
        eos_token_ids: &[u32],
    ) -> Vec<u32>;
}

/// A drafter whose target is a model on this machine.
pub trait ModelDrafter<'m>: Drafter<ModelSession<'m>> + Send {
    /// Returns the drafter itself if it drafts step by step, otherwise `None`.
    fn by_steps(&mut self) -> Option<&mut (dyn StepDrafter<ModelSession<'m>> + 'm)> {
        None
    }

    /// Converts the drafter into a part of a cascade or a merged tree, if it can be one.
    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::Neither
    }
}

/// What a drafter can be inside a cascade or a merged tree.
pub enum Member<'m> {
    /// It drafts step by step.
    Steps(Box<dyn StepDrafter<ModelSession<'m>> + 'm>),
    /// It looks tokens up.
    LookUp(Box<dyn LookUp<ModelSession<'m>> + 'm>),
    /// It cannot be part of another drafter.
    Neither,
}

/// A draft step of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct DraftStep<'a> {
    /// The sequence's slot. No two steps of a call share one.
    pub slot: usize,
    /// The whole sequence, with the round's candidates at its end.
    pub tokens: &'a [u32],
    /// The number of candidates at the end of `tokens` that belong to the chain or tree being drafted, for which a
    /// head may predict. Inside another drafter others may come before them: only the target knows which tokens
    /// stand.
    pub num_candidates: usize,
    /// The parent of each of the last tokens if they form a tree: the number of another node, or `None`
    /// for a child of the sequence's last token. Empty for a chain.
    pub parents: &'a [Option<usize>],
    /// The number of rows to return, those after the last tokens; 1 for a chain.
    pub num_rows: usize,
    /// The signals that the stop rule reads.
    pub needs: SignalNeeds,
    /// How candidates are chosen.
    pub decoding: &'a Decoding,
}

impl<'a> DraftStep<'a> {
    /// Creates a step whose one row comes after a chain.
    pub fn in_chain(
        slot: usize,
        tokens: &'a [u32],
        num_candidates: usize,
        needs: SignalNeeds,
        decoding: &'a Decoding,
    ) -> Self {
        Self { slot, tokens, num_candidates, parents: &[], num_rows: 1, needs, decoding }
    }

    /// Returns the number of tokens before the tree; for a chain, the number of all tokens.
    pub(crate) fn num_standing(&self) -> usize {
        self.tokens.len() - self.parents.len()
    }

    /// Pairs the step with the number of each of its rows.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&Self, usize)> {
        (0..self.num_rows).map(move |row| (self, row))
    }

    /// Returns the position in `tokens` of the last token before a row.
    pub(crate) fn at(&self, row: usize) -> usize {
        self.tokens.len() - self.num_rows + row
    }

    /// Collects the text that a row follows: the sequence, then the candidates on the path to the row's node.
    pub fn text_before(&self, row: usize) -> Vec<u32> {
        let num_standing = self.num_standing().min(self.at(row) + 1);
        let mut text: Vec<u32> = self.tokens_before(row).collect();
        text[num_standing..].reverse();
        text
    }

    /// Iterates over all tokens that come before a row's candidate, in any order.
    pub(crate) fn tokens_before(&self, row: usize) -> impl Iterator<Item = u32> {
        let (at, num_standing) = (self.at(row), self.num_standing());
        let path = iter::successors(at.checked_sub(num_standing), |node| self.parents[*node]);
        let standing = self.tokens[..num_standing.min(at + 1)].iter().copied();
        standing.chain(path.map(move |node| self.tokens[num_standing + node]))
    }

    /// Finds the position of the token before the candidate at position `at`. Returns `None` if the token at `at` is
    /// not a candidate.
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

/// One row of a draft step: what the next candidate is drawn from.
#[derive(Debug, Clone)]
pub struct DraftRow {
    /// The model's logits over the target's vocabulary, without a repetition penalty. Acceptance heads
    /// read these, as in training.
    pub own_logits: Vec<f32>,
    /// The forwards that it took to compute the row; 0 if an earlier one had computed it, or another row
    /// of its step.
    pub num_forwards: usize,
    /// The logits under the repetition penalty, if there is one.
    penalised: Option<Vec<f32>>,
    /// The signals for stop rules, computed from [`Self::logits`].
    pub signals: DraftSignals,
}

impl DraftRow {
    /// Builds a row of `step` from the model's logits. `acceptance_prob` is a head's prediction for the candidate
    /// that was read, if there is one.
    pub fn new(
        (step, row): (&DraftStep<'_>, usize),
        own_logits: Vec<f32>,
        acceptance_prob: Option<HeadEstimate>,
    ) -> Self {
        let decoding = step.decoding;
        let penalised = decoding
            .is_penalised()
            .then(|| decoding.penalised(&own_logits, step.tokens_before(row)).into_owned());
        let logits = penalised.as_deref().unwrap_or(&own_logits);
        let signals = DraftSignals { acceptance_prob, ..step.needs.signals_of_logits(logits) };
        let num_forwards = usize::from(row == 0);
        Self { own_logits, num_forwards, penalised, signals }
    }

    /// Returns the row as one that an earlier forward of the round computed.
    #[must_use]
    pub fn without_forward(self) -> Self {
        Self { num_forwards: 0, ..self }
    }

    /// Returns the logits that candidates are drawn from, under the repetition penalty if there is one.
    pub fn logits(&self) -> &[f32] {
        self.penalised.as_deref().unwrap_or(&self.own_logits)
    }
}

/// Proposes nothing, so that the target decodes without a drafter.
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
