//! Max-Gram and suffix decoding as a drafter (prompt lookup). Candidates are copied from an earlier
//! match in the sequence itself, or from what most often followed in stored answers. Where there is no
//! match, they come from a table of bigrams.
//!
//! Each candidate has draft probability 1, so its acceptance probability is the target's
//! probability of the token. There is no draft distribution that a stop rule could read. A round
//! ends at its maximum length or when the lookup finds no further token.

use std::convert::Infallible;
use std::sync::Arc;

use draftsmith_theory::{
    Bigrams, CandidateSource, DraftPhase, DraftSignals, DrafterId, DrawnFrom, DrawnToken, MaxGram,
    MaxGramConfig, Node, Proposal, SearchedText, SignalNeeds, StoredAnswers,
};

use crate::drafter::{DraftRound, Drafter, LookUp, Member, ModelDrafter};
use crate::error::{DecodeError, Result};
use crate::registry::{DrafterParts, Sizes};

/// A drafter that searches each slot's own sequence with Max-Gram.
#[derive(Debug, Clone)]
pub struct MaxGramDraft<'m> {
    id: DrafterId,
    slots: Vec<MaxGram>,
    bigrams: Option<&'m Bigrams>,
    /// Whether a round proposes a tree.
    tree: bool,
}

impl<'m> MaxGramDraft<'m> {
    /// Creates a drafter for up to `num_slots` concurrent sequences. `bigrams` continue a chain
    /// where the lookup finds no match, and `answers` are searched if the settings say so.
    pub fn new(
        config: MaxGramConfig,
        (bigrams, answers): (Option<&'m Bigrams>, Option<Arc<StoredAnswers>>),
        num_slots: usize,
    ) -> Self {
        let slots = vec![MaxGram::new(config, answers); num_slots];
        let tree = config.searched == SearchedText::Answers && config.suffix.tree;
        Self { id: DrafterId::LOOK_UP, slots, bigrams, tree }
    }

    /// Drafts one round: copies the tokens after the match until the draft phase ends.
    ///
    /// # Errors
    /// If the stop rule reads probabilities.
    fn propose_one(&mut self, round: &mut DraftRound<'_>) -> Result<()> {
        let DraftRound { slot, tokens, proposal, rule, limits, .. } = round;
        if !rule.needs().is_nothing() {
            return Err(DecodeError::NoSignals { drafter: self.id });
        }
        let max_gram = &mut self.slots[*slot];
        max_gram.read(tokens);
        let mut phase = DraftPhase::begin(*rule, *limits);
        if self.tree {
            let nodes = max_gram.continuations(phase.num_left()).nodes;
            let num_nodes = propose_tree(&nodes, (tokens, proposal), limits.eos_token_ids);
            proposal.forwards.add(self.id, num_nodes);
            return Ok(());
        }
        let mut copied = max_gram.continuation(phase.num_left());
        while phase.needs_step()
            && let Some(token) = copied.next_or(self.bigrams, tokens)
        {
            let mut source = Certain { token, proposal };
            let signals = DraftSignals::default();
            let Ok(()) = phase.advance(&mut source, signals, *rule, *limits, tokens);
        }
        proposal.forwards.add(self.id, phase.num_steps());
        Ok(())
    }

    /// Appends up to `most` copied tokens to a round's sequence and proposal, and returns their
    /// number.
    pub(crate) fn propose_up_to(&mut self, most: usize, round: &mut DraftRound<'_>) -> usize {
        let DraftRound { slot, tokens, proposal, limits, .. } = round;
        let most = most.min(limits.room);
        let found = LookUp::<()>::look_up(self, *slot, tokens, most, limits.eos_token_ids);
        found.iter().for_each(|token| proposal.push_next(*token, DrawnFrom::OneHot));
        proposal.forwards.add(self.id, found.len());
        found.len()
    }
}

/// Proposes a tree of tokens, without what would follow an end token, and returns the number of nodes.
fn propose_tree(
    nodes: &[(u32, Option<usize>)],
    (tokens, proposal): (&mut Vec<u32>, &mut Proposal),
    eos_token_ids: &[u32],
) -> usize {
    // The number of each node in the proposal; None for those that follow an end token.
    let mut numbers: Vec<Option<usize>> = Vec::with_capacity(nodes.len());
    for (token_id, follows) in nodes.iter().copied() {
        let is_end = |at: &usize| eos_token_ids.contains(&nodes[*at].0);
        let parent = follows.and_then(|at| numbers[at]);
        let is_kept = !follows.is_some_and(|at| numbers[at].is_none() || is_end(&at));
        numbers.push(is_kept.then(|| {
            let rank = proposal.nodes().iter().filter(|node| node.parent == parent).count();
            tokens.push(token_id);
            proposal.push(Node { parent, token_id, drawn_from: DrawnFrom::OneHot, rank })
        }));
    }
    numbers.iter().flatten().count()
}

/// A source that returns one copied token as the next candidate.
struct Certain<'a> {
    token: u32,
    proposal: &'a mut Proposal,
}

impl CandidateSource for Certain<'_> {
    type Error = Infallible;

    fn draw(&mut self, _needs: SignalNeeds) -> DrawnToken {
        self.proposal.push_next(self.token, DrawnFrom::OneHot);
        DrawnToken { token_id: self.token, candidate_prob: None }
    }

    fn predict_acceptance(&mut self, _candidate: u32) -> Result<Option<f64>, Infallible> {
        Ok(None)
    }
}

impl<T> Drafter<T> for MaxGramDraft<'_> {
    fn begin(&mut self, _target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        self.slots[slot].begin(prompt);
        Ok(())
    }

    fn propose(&mut self, _target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
        rounds.iter_mut().try_for_each(|round| self.propose_one(round))
    }

    /// Forgets all candidates. The next round reads the accepted ones again as part of the
    /// sequence.
    fn commit(&mut self, slot: usize, num_standing: usize, _path: &[usize]) {
        self.slots[slot].truncate(num_standing);
    }
}

impl<T> LookUp<T> for MaxGramDraft<'_> {
    fn id(&self) -> DrafterId {
        self.id
    }

    fn look_up(
        &mut self,
        slot: usize,
        tokens: &mut Vec<u32>,
        most: usize,
        eos_token_ids: &[u32],
    ) -> Vec<u32> {
        let num_found = self.slots[slot].extend(tokens, self.bigrams, most, eos_token_ids);
        tokens[tokens.len() - num_found..].to_vec()
    }
}

impl<'m> ModelDrafter<'m> for MaxGramDraft<'m> {
    fn into_member(self: Box<Self>) -> Member<'m> {
        Member::LookUp(self)
    }
}

/// The settings of prompt lookup and its optional table of bigrams.
#[derive(Debug, Clone)]
pub struct LookUpParts {
    /// The search settings.
    pub config: MaxGramConfig,
    /// The table that continues a chain where the lookup finds no match; `None` ends the chain
    /// there.
    pub bigrams: Option<Bigrams>,
    /// The stored answers to search; `None` for none.
    pub answers: Option<Arc<StoredAnswers>>,
}

impl DrafterParts for LookUpParts {
    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let tables = (self.bigrams.as_ref(), self.answers.clone());
        Box::new(MaxGramDraft { id, ..MaxGramDraft::new(self.config, tables, sizes.num_slots) })
    }
}
