//! The traits of drafters, and the types that drafters exchange with the decoding loop: rounds,
//! draft steps and rows of logits.
//!
//! Every drafter implements [`Drafter`]. A drafter that drafts step by step also implements
//! [`StepDrafter`], so that its steps can be recorded, grown into trees and used inside a cascade.

pub(crate) mod chain;

use std::iter;

use draftsmith_theory::{
    Decoding, DraftLimits, DraftSignals, DrafterId, Draws, HeadEstimate, Proposal, SignalNeeds,
    StopRule,
};

use self::chain::propose_chain;
use crate::error::Result;
use crate::session::ModelSession;

/// A drafter, which proposes tokens for the sequence in each slot of a target. Most methods get the
/// target, because some drafters run the target's own layers or read its hidden states.
pub trait Drafter<T> {
    /// Starts a sequence in a slot. The target must have started it before. By default there is
    /// nothing to start.
    ///
    /// # Errors
    /// If the prompt does not fit or contains unknown tokens.
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        let _ = (target, slot, prompt);
        Ok(())
    }

    /// Returns the drafter as a [`StepDrafter`] if it drafts step by step, otherwise `None`.
    fn by_steps(&mut self) -> Option<&mut dyn StepDrafter<T>> {
        None
    }

    /// Proposes tokens for several sequences, one round each. By default, a drafter that drafts step
    /// by step proposes a chain, and any other proposes nothing.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        self.by_steps().map_or(Ok(()), |drafter| propose_chain(drafter, target, rounds))
    }

    /// Keeps the first `num_standing` tokens of a slot and the proposal's nodes on `path` (their
    /// indices in the proposal), and forgets all other tokens.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]);

    /// Returns the maximum length of a sequence in a slot, in tokens. The default has no limit.
    fn context(&self) -> usize {
        usize::MAX
    }
}

impl<T, D: Drafter<T> + ?Sized> Drafter<T> for &mut D {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        (**self).begin(target, slot, prompt)
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        (**self).propose(target, rounds)
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        (**self).commit(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        (**self).context()
    }
}

/// One round of one sequence, whose proposal the drafter fills.
pub struct DraftRound<'a> {
    /// The sequence's slot (batch index). All rounds of a call have different slots.
    pub slot: usize,
    /// The tokens of the sequence so far. The drafter appends the proposed tokens in the order of
    /// their nodes.
    pub tokens: &'a mut Vec<u32>,
    /// The proposal to fill. It is empty at first.
    pub proposal: &'a mut Proposal,
    /// The rule that decides when to stop drafting.
    pub rule: &'a mut dyn StopRule,
    /// The limits of the draft phase, which apply regardless of the rule.
    pub limits: DraftLimits<'a>,
    /// The choice of candidates: greedy or sampled, and any repetition penalty.
    pub decoding: &'a Decoding,
    /// The source of the sequence's random draws.
    pub draws: &'a mut dyn Draws,
}

impl DraftRound<'_> {
    /// Returns a shorter borrow of the same round, to pass to another drafter.
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

/// A drafter that reads tokens in forwards of a model and returns rows of logits, from which
/// candidates are drawn.
pub trait StepDrafter<T>: Drafter<T> + Send {
    /// Returns the drafter's name. Its forwards are counted under this name.
    fn id(&self) -> DrafterId;

    /// Takes one draft step for each of several sequences in one forward. The drafter reads the
    /// tokens that it has not read, and returns the rows that the next candidates are drawn from,
    /// in the order of the steps.
    ///
    /// # Errors
    /// If the logits are not finite or the device fails.
    fn draft(&mut self, target: &mut T, steps: &[DraftStep<'_>]) -> Result<Vec<DraftRow>>;

    /// Returns the greatest number of candidates in a chain that this drafter proposes alone. A draft
    /// phase ends there.
    fn max_candidates(&self) -> usize {
        usize::MAX
    }

    /// Returns whether the candidates depend on the position where the round began. If so, a
    /// recording drafts a whole new round at every position of a response.
    fn drafts_by_round(&self) -> bool {
        false
    }

    /// Returns a look-ahead head's acceptance probability for `candidate`; `None` without such a
    /// head. The candidate was drawn from the given row of the slot's last [`draft`](Self::draft),
    /// and `logits` are that row's [`own_logits`](DraftRow::own_logits). Called only if the stop
    /// rule reads an acceptance head.
    ///
    /// # Errors
    /// If the prediction is NaN or the device fails.
    fn predict_acceptance(
        &mut self,
        (slot, row): (usize, usize),
        logits: &[f32],
        candidate: u32,
    ) -> Result<Option<f64>> {
        let _ = (slot, row, logits, candidate);
        Ok(None)
    }
}

/// A drafter that copies candidates from text (prompt lookup). It has no draft distribution: each
/// candidate has draft probability 1.
pub trait LookUp<T>: Drafter<T> + Send {
    /// Returns the drafter's name. Copied tokens are counted under this name.
    fn id(&self) -> DrafterId;

    /// Appends up to `most` copied tokens to a slot's sequence, stopping after an end-of-sequence
    /// token, and returns them.
    fn look_up(
        &mut self,
        slot: usize,
        tokens: &mut Vec<u32>,
        most: usize,
        eos_token_ids: &[u32],
    ) -> Vec<u32>;
}

/// A drafter whose target is a local model. Every [`StepDrafter`] is one.
pub trait ModelDrafter<'m>: Drafter<ModelSession<'m>> + Send {
    /// Converts the drafter into a member of a cascade or a merged tree. The default is
    /// [`Member::Neither`].
    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::Neither
    }
}

impl<'m, D: StepDrafter<ModelSession<'m>> + 'm> ModelDrafter<'m> for D {
    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::Steps(self)
    }
}

/// A drafter as a member of a cascade or a merged tree.
pub enum Member<'m> {
    /// A drafter that drafts step by step.
    Steps(Box<dyn StepDrafter<ModelSession<'m>> + 'm>),
    /// A drafter that copies tokens from text.
    LookUp(Box<dyn LookUp<ModelSession<'m>> + 'm>),
    /// A drafter that cannot be a member of another drafter.
    Neither,
}

/// A draft step of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct DraftStep<'a> {
    /// The sequence's slot (batch index). All steps of a call have different slots.
    pub slot: usize,
    /// All tokens of the sequence, with the round's candidates at its end.
    pub tokens: &'a [u32],
    /// The number of candidates at the end of `tokens` that belong to the chain or tree being
    /// drafted, and whose acceptance a head may predict. Inside a composite drafter, other
    /// drafters' candidates may precede them. Only the target knows how many tokens are final.
    pub num_candidates: usize,
    /// The parent of each of the last tokens if they form a tree: the index of an earlier node of
    /// the tree, or `None` for a child of the last token before the tree. Empty for a chain.
    pub parents: &'a [Option<usize>],
    /// The number of rows of logits to return, one after each of the last `num_rows` tokens. It is
    /// 1 when a chain is drafted.
    pub num_rows: usize,
    /// The greatest number of candidates that can follow, this step's included. A drafter that
    /// computes several at once need not compute more.
    pub most: usize,
    /// The signals that the stop rule reads.
    pub needs: SignalNeeds,
    /// The choice of candidates: greedy or sampled, and any repetition penalty.
    pub decoding: &'a Decoding,
}

impl<'a> DraftStep<'a> {
    /// Creates a step that returns one row, after the last token of a chain that can grow without
    /// limit.
    pub fn in_chain(
        slot: usize,
        tokens: &'a [u32],
        num_candidates: usize,
        needs: SignalNeeds,
        decoding: &'a Decoding,
    ) -> Self {
        let most = usize::MAX;
        Self { slot, tokens, num_candidates, parents: &[], num_rows: 1, most, needs, decoding }
    }

    /// Returns the number of tokens before the tree, or of all tokens for a chain.
    pub(crate) fn num_standing(&self) -> usize {
        self.tokens.len() - self.parents.len()
    }

    /// Iterates over the indices of the step's rows, each paired with the step.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&Self, usize)> {
        (0..self.num_rows).map(move |row| (self, row))
    }

    /// Returns the position in `tokens` of the token that a row follows.
    pub(crate) fn at(&self, row: usize) -> usize {
        self.tokens.len() - self.num_rows + row
    }

    /// Collects the tokens that a row follows: the sequence, then the candidates on the path to the
    /// row's node.
    pub fn text_before(&self, row: usize) -> Vec<u32> {
        let num_standing = self.num_standing().min(self.at(row) + 1);
        let mut text: Vec<u32> = self.tokens_before(row).collect();
        text[num_standing..].reverse();
        text
    }

    /// Iterates over the tokens that a row follows, in no particular order.
    pub(crate) fn tokens_before(&self, row: usize) -> impl Iterator<Item = u32> {
        let (at, num_standing) = (self.at(row), self.num_standing());
        let path = iter::successors(at.checked_sub(num_standing), |node| self.parents[*node]);
        let standing = self.tokens[..num_standing.min(at + 1)].iter().copied();
        standing.chain(path.map(move |node| self.tokens[num_standing + node]))
    }

    /// Returns the position of the parent of the candidate at position `at`; `None` if the token at
    /// `at` is not a candidate.
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

/// One row of a draft step: the logits that the next candidate is drawn from, with signals for stop
/// rules.
#[derive(Debug, Clone)]
pub struct DraftRow {
    /// The drafter's logits over the target's vocabulary, before any repetition penalty. Acceptance
    /// heads read these, as in training.
    pub own_logits: Vec<f32>,
    /// The number of draft forwards that are counted for this row; 0 if an earlier forward computed
    /// it or another row of the step counts the forward.
    pub num_forwards: usize,
    /// The logits after the repetition penalty; `None` without a penalty.
    penalised: Option<Vec<f32>>,
    /// The signals for stop rules. Those of the distribution are computed from [`Self::logits`].
    pub signals: DraftSignals,
}

impl DraftRow {
    /// Builds a row of `step` from the drafter's logits. `acceptance_prob` is a head's prediction
    /// for the candidate that the row read, if any.
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

    /// Returns the row with `num_forwards` set to 0, because an earlier forward of the round
    /// computed it.
    #[must_use]
    pub fn without_forward(self) -> Self {
        Self { num_forwards: 0, ..self }
    }

    /// Returns the logits that candidates are drawn from, after any repetition penalty.
    pub fn logits(&self) -> &[f32] {
        self.penalised.as_deref().unwrap_or(&self.own_logits)
    }
}

/// A drafter that proposes nothing, so that the target decodes alone.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoDrafter;

impl<T> Drafter<T> for NoDrafter {
    fn commit(&mut self, _slot: usize, _num_standing: usize, _path: &[usize]) {}
}
