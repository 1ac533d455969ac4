//! Cascades of drafters (CS-Drafting, Chen et al. 2023): larger drafters review what smaller ones
//! propose, and smaller ones take over the later candidates of a chain.
//!
//! One matrix says both. Its rows are those who review, the target first and then each drafter but
//! the last; its columns the drafters, from the largest to the smallest. Row i says how many
//! candidates of each drafter the chain is made of that reviewer i reads. So a *vertical* cascade has
//! its first drafter alone in the first row, whose candidates are what it lets stand of the next
//! drafter's, and a *horizontal* one has several drafters there, which take turns.
//!
//! A drafter with a model goes on in steps: smaller ones propose the chain of its row, it reads them
//! all in one forward, and what stands, with a token of its own, is part of the chain that it proposes.
//! Steps are taken until there are as many tokens as the matrix says, so that a chain may grow
//! longer by what the last step let stand, as in the authors' code. None is taken back.

use draftsmith_theory::{
    CascadeCandidate, DrafterId, Forwards, Lenience, SignalNeeds, TokenChoice, review_greedy,
    review_sampled,
};

use crate::draft_row::draft_rows;
use crate::drafter::{DraftRound, DraftStep, Drafter, StepDrafter};
use crate::error::DecodeError;
use crate::max_gram::MaxGramDraft;
use crate::target::Target;

/// How a cascade drafts.
#[derive(Debug, Clone, PartialEq)]
pub struct CascadeConfig {
    /// K: row i, column j has the candidates of drafter j in the chain that reviewer i reads, the
    /// target being reviewer 0 and drafter i − 1 reviewer i. What stands below the diagonal is not
    /// read.
    pub lengths: Vec<Vec<usize>>,
    /// Of all reviewers but the target.
    pub lenience: Lenience,
}

/// A drafter of drafters.
pub struct Cascade<'m, T> {
    id: DrafterId,
    config: CascadeConfig,
    /// From the largest on.
    models: Vec<Box<dyn StepDrafter<T> + 'm>>,
    /// Behind them.
    lookup: Option<MaxGramDraft<'m>>,
}

/// A round's chain, as far as it is drafted.
struct Chain<'c, 'r, T> {
    target: &'c mut T,
    round: &'c mut DraftRound<'r>,
    forwards: Forwards,
}

impl<'m, T: Target> Cascade<'m, T> {
    /// A cascade of drafters with models, from the largest on, and of prompt lookup behind them.
    ///
    /// # Panics
    /// Unless the matrix has a row and a column for each.
    pub fn new(
        id: DrafterId,
        config: CascadeConfig,
        models: Vec<Box<dyn StepDrafter<T> + 'm>>,
        lookup: Option<MaxGramDraft<'m>>,
    ) -> Self {
        let num_drafters = models.len() + usize::from(lookup.is_some());
        let is_square = config.lengths.iter().all(|row| row.len() == num_drafters);
        assert!(is_square && config.lengths.len() == num_drafters, "a row and a column for each");
        Self { id, config, models, lookup }
    }

    /// Where its target must let its shallow layers run ahead, if it must.
    pub(crate) fn exit_layer(&self) -> Option<usize> {
        self.models.iter().find_map(|model| model.id().exit_layer())
    }

    /// Appends a chain for reviewer `row` to the sequence, of `room` tokens at most, and returns it.
    /// The first row's ends where the round's rule says so.
    ///
    /// # Errors
    /// If a model fails.
    fn draft(
        &mut self,
        chain: &mut Chain<'_, '_, T>,
        row: usize,
        room: usize,
    ) -> Result<Vec<CascadeCandidate>, DecodeError> {
        let mut drafted: Vec<CascadeCandidate> = Vec::new();
        let mut most = 0;
        for drafter in row..self.config.lengths.len() {
            most += self.config.lengths[row][drafter];
            while drafted.len() < most.min(room) {
                let step = if drafter == self.models.len() {
                    self.look_up(chain, most.min(room) - drafted.len())?
                } else {
                    self.step(chain, drafter, room - drafted.len())?
                };
                let has_more = !step.is_empty();
                drafted.extend(step);
                if chain.is_over(&drafted) || (row == 0 && chain.stops(&drafted)) {
                    return Ok(drafted);
                }
                if !has_more {
                    break;
                }
            }
        }
        Ok(drafted)
    }

    /// Appends what a drafter lets stand of a smaller one's chain, and its own token behind it.
    fn step(
        &mut self,
        chain: &mut Chain<'_, '_, T>,
        drafter: usize,
        room: usize,
    ) -> Result<Vec<CascadeCandidate>, DecodeError> {
        let (slot, num_standing) = (chain.round.slot, chain.round.tokens.len());
        let proposed = self.draft(chain, drafter + 1, room - 1)?;
        let step = DraftStep {
            num_rows: proposed.len() + 1,
            ..DraftStep::in_chain(slot, chain.round.tokens, proposed.len(), SignalNeeds::default())
        };
        let model = &mut self.models[drafter];
        let decoding = chain.round.decoding;
        let rows = draft_rows(&mut **model, chain.target, &[step], [decoding])?;
        chain.forwards.add(model.id(), 1);
        let lenience = self.config.lenience;
        let stands = match decoding.choice {
            TokenChoice::Greedy => review_greedy(&proposed, |row| rows[row].logits(), lenience),
            TokenChoice::Sampled(sampling) => {
                let probs_after = |row: usize| sampling.probs(rows[row].logits());
                review_sampled(&proposed, probs_after, lenience, &mut *chain.round.draws)
            }
        };
        if !proposed.is_empty() {
            let path: Vec<usize> = (0..stands.len() - 1).collect();
            chain.target.commit(slot, num_standing, &path);
            self.forget(slot, num_standing, &path);
        }
        chain.round.tokens.truncate(num_standing);
        chain.round.tokens.extend(stands.iter().map(|token| token.token_id));
        Ok(stands)
    }

    /// Appends what is looked up.
    fn look_up(
        &mut self,
        chain: &mut Chain<'_, '_, T>,
        most: usize,
    ) -> Result<Vec<CascadeCandidate>, DecodeError> {
        let Some(lookup) = &mut self.lookup else { return Ok(Vec::new()) };
        let eos_token_ids = chain.round.limits.eos_token_ids;
        let found = lookup.look_up(chain.round.slot, chain.round.tokens, most, eos_token_ids);
        chain.forwards.add(DrafterId::MaxGram, found.len());
        Ok(found.into_iter().map(CascadeCandidate::certain).collect())
    }

    /// Keeps of what its drafters have read what stands.
    fn forget(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.models.iter_mut().for_each(|model| model.commit(slot, num_standing, path));
        let lookup = self.lookup.as_mut();
        lookup.into_iter().for_each(|it| Drafter::<T>::commit(it, slot, num_standing, path));
    }
}

impl<T> Chain<'_, '_, T> {
    /// Whether nothing behind what is drafted could be kept.
    fn is_over(&self, drafted: &[CascadeCandidate]) -> bool {
        let eos_token_ids = self.round.limits.eos_token_ids;
        drafted.iter().any(|token| eos_token_ids.contains(&token.token_id))
    }

    /// Whether the round's rule ends the chain here.
    fn stops(&mut self, drafted: &[CascadeCandidate]) -> bool {
        let DraftRound { tokens, rule, .. } = &mut *self.round;
        let candidates = &tokens[tokens.len() - drafted.len()..];
        let stops = rule.stops(candidates, &Default::default());
        stops && drafted.len() >= rule.bounds().min
    }
}

impl<T: Target> Drafter<T> for Cascade<'_, T> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        for model in &mut self.models {
            model.begin(target, slot, prompt)?;
        }
        self.lookup.iter_mut().try_for_each(|lookup| lookup.begin(target, slot, prompt))
    }

    /// Rounds one after the other: their chains take forwards of their own.
    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        for round in rounds {
            let DraftRound { rule, limits, .. } = round;
            if !rule.needs().is_nothing() {
                return Err(DecodeError::NoSignals { drafter: self.id });
            }
            rule.begin_round();
            let most = if rule.skips_drafting() { 0 } else { rule.bounds().max };
            let room = most.min(limits.room);
            let mut chain = Chain { target, round, forwards: Forwards::default() };
            let drafted = self.draft(&mut chain, 0, room)?;
            let forwards = chain.forwards;
            let proposal = &mut round.proposal;
            drafted.into_iter().for_each(|it| proposal.push_next(it.token_id, it.drawn_from));
            proposal.forwards = forwards;
        }
        Ok(())
    }

    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.forget(slot, num_standing, path);
    }

    fn context(&self) -> usize {
        self.models.iter().map(|model| model.context()).min().unwrap_or(usize::MAX)
    }
}
