//! Cascades of drafters (CS-Drafting, Chen et al. 2023): larger drafters review what smaller ones
//! propose, and smaller ones take over the later candidates of a chain.
//!
//! A matrix K describes both. Its rows are the reviewers: the target, then each drafter but the last.
//! Its columns are the drafters, from the largest to the smallest. Row i gives the number of candidates
//! that each drafter contributes to the chain that reviewer i reads. A *vertical* cascade (Theorem 4.3)
//! has only its first drafter in the first row, and that drafter reviews the next one's candidates. A
//! *horizontal* cascade (Theorem 4.5) has several drafters there, which take turns.
//!
//! A drafter with a model works in steps. Smaller drafters propose the chain of its row; it reads the
//! chain in one forward; the candidates it accepts and its next token go into the chain that it
//! proposes. It takes steps until the chain has as many tokens as the matrix says. The chain may get
//! longer by the tokens that the last step accepts, as in the authors' code.
//!
//! A chain may have a stop rule that ends it before its length: an inner drafter then hands over to its
//! reviewer by its head, confidence or entropy, as SpecDec++ hands over to the target. The round's stop
//! rule may also end the first row's chain.

mod chain_rules;
mod drafting;

use draftsmith_theory::{Decoding, DrafterId, Lenience, RoundEnd, StopRuleConfig, TokenChoice};

use chain_rules::ChainRules;
use drafting::CascadeRound;

use crate::drafter::{DraftRound, Drafter, LookUp, Member, ModelDrafter, StepDrafter};
use crate::error::DecodeError;
use crate::registry::{DrafterParts, NamedParts, Sizes};
use crate::session::ModelSession;
use crate::target::{Target, TargetLayers};

/// The matrix K: entry (i, j) is the number of drafter j's candidates in the chain that reviewer i reads.
/// Reviewer 0 is the target, reviewer i is drafter i − 1. Entries below the diagonal are ignored.
pub type CascadeLengths = Vec<Vec<usize>>;

/// How a cascade drafts.
#[derive(Debug, Clone, PartialEq)]
pub struct CascadeConfig {
    /// K for greedy decoding.
    pub greedy: CascadeLengths,
    /// K for sampled decoding.
    pub sampled: CascadeLengths,
    /// Lenience of all reviewers but the target.
    pub lenience: Lenience,
    /// The stop rule of each reviewer's chain, the target's first; a reviewer without an entry has none. A
    /// rule that reads signals needs a chain without look-ups.
    pub rules: Vec<Option<StopRuleConfig>>,
}

impl CascadeConfig {
    /// Creates a configuration with one matrix for greedy and sampled decoding, exact review and no stop rules.
    pub fn new(lengths: CascadeLengths) -> Self {
        let (sampled, lenience, rules) = (lengths.clone(), Lenience::NONE, Vec::new());
        Self { greedy: lengths, sampled, lenience, rules }
    }

    /// Returns the matrix K for a way of decoding.
    pub fn lengths(&self, decoding: &Decoding) -> &CascadeLengths {
        match decoding.choice {
            TokenChoice::Greedy => &self.greedy,
            TokenChoice::Sampled(_) => &self.sampled,
        }
    }
}

/// Several drafters that propose one chain together.
pub(crate) struct Cascade<'m, T> {
    id: DrafterId,
    config: CascadeConfig,
    /// The drafters with models, largest first.
    models: Vec<Box<dyn StepDrafter<T> + 'm>>,
    /// Prompt lookup, the smallest drafter.
    lookup: Option<Box<dyn LookUp<T> + 'm>>,
    /// Builds the stop rules of a sequence's chains.
    init_rules: Box<dyn Fn() -> ChainRules + Send + 'm>,
    /// The stop rules of each slot's chains.
    rules: Vec<ChainRules>,
}

impl<'m, T: Target> Cascade<'m, T> {
    /// Builds a cascade of `models`, largest first, and then prompt lookup.
    ///
    /// # Panics
    /// Unless matrices have a row and a column for each drafter, and rules are valid.
    pub(crate) fn new(
        id: DrafterId,
        config: CascadeConfig,
        models: Vec<Box<dyn StepDrafter<T> + 'm>>,
        lookup: Option<Box<dyn LookUp<T> + 'm>>,
    ) -> Self {
        let num_drafters = models.len() + usize::from(lookup.is_some());
        for lengths in [&config.greedy, &config.sampled] {
            let is_square = lengths.iter().all(|row| row.len() == num_drafters);
            assert!(is_square && lengths.len() == num_drafters, "a row and a column for each");
        }
        let rules = config.rules.clone();
        let init_rules = Box::new(move || ChainRules::new(&rules).expect("the rules are valid"));
        let mut cascade = Self { id, config, models, lookup, init_rules, rules: Vec::new() };
        cascade.begin_rules(0);
        cascade
    }

    /// Replaces the stop rules of the chains by some that no configuration can express. They must not read signals.
    #[cfg(test)]
    pub(crate) fn ending_chains_by(
        mut self,
        rules: impl Fn() -> Vec<Option<Box<dyn draftsmith_theory::StopRule>>> + Send + 'm,
    ) -> Self {
        self.init_rules = Box::new(move || ChainRules::of(rules()));
        self.begin_rules(0);
        self
    }

    /// Resets the stop rules of a slot's chains.
    fn begin_rules(&mut self, slot: usize) {
        match self.rules.get_mut(slot) {
            Some(rules) => *rules = (self.init_rules)(),
            None => self.rules.resize_with(slot + 1, &self.init_rules),
        }
    }

    /// Returns whether a stop rule reads signals although its chain has look-ups, which give none.
    fn lacks_signals(&self, decoding: &Decoding) -> bool {
        let matrix = self.config.lengths(decoding);
        let mut rules = self.config.rules.iter().enumerate();
        rules.any(|(row, rule)| {
            let needs = rule.as_ref().is_some_and(|rule| !rule.needs().is_nothing());
            let lengths = matrix.get(row).map_or(&[][..], |lengths| lengths);
            needs && lengths.iter().skip(self.models.len()).any(|length| *length > 0)
        })
    }
}

impl<'m> ModelDrafter<'m> for Cascade<'m, ModelSession<'m>> {}

/// The drafters of a cascade, and how they work together.
#[derive(Debug, Clone)]
pub struct CascadeParts {
    /// How they work together.
    pub config: CascadeConfig,
    /// The drafters, largest first: those that draft step by step, then look-ups.
    pub drafters: Vec<NamedParts>,
}

impl DrafterParts for CascadeParts {
    fn target_layers(&self) -> TargetLayers {
        NamedParts::target_layers(&self.drafters)
    }

    fn drafter<'m>(&'m self, id: DrafterId, sizes: Sizes<'m>) -> Box<dyn ModelDrafter<'m> + 'm> {
        let (mut models, mut lookup) = (Vec::new(), None);
        for member in self.drafters.iter().map(|it| it.drafter(sizes).into_member()) {
            match member {
                Member::Steps(model) => models.push(model),
                Member::LookUp(look_ups) => lookup = Some(look_ups),
                Member::Neither => {}
            }
        }
        Box::new(Cascade::new(id, self.config.clone(), models, lookup))
    }
}

impl<T: Target> Drafter<T> for Cascade<'_, T> {
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<(), DecodeError> {
        for model in &mut self.models {
            model.begin(target, slot, prompt)?;
        }
        self.begin_rules(slot);
        self.lookup.iter_mut().try_for_each(|lookup| lookup.begin(target, slot, prompt))
    }

    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        let mut rooms = Vec::with_capacity(rounds.len());
        for DraftRound { rule, limits, decoding, .. } in rounds.iter_mut() {
            if !rule.needs().is_nothing() || self.lacks_signals(decoding) {
                return Err(DecodeError::NoSignals { drafter: self.id });
            }
            rule.begin_round();
            let most = if rule.skips_drafting() { 0 } else { rule.bounds().max };
            rooms.push(most.min(limits.room));
        }
        for drafting in self.draft(target, rounds.iter_mut().zip(rooms))? {
            let CascadeRound { round, forwards, drafted, .. } = drafting;
            let proposal = &mut round.proposal;
            drafted.into_iter().for_each(|it| proposal.push_next(it.token_id, it.drawn_from));
            proposal.forwards = forwards;
        }
        Ok(())
    }

    /// Keeps the accepted tokens in all drafters, and passes the round's outcome to the rule of the target's chain.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.forget(slot, num_standing, path);
        let end = RoundEnd { num_accepted: path.len(), num_kept: path.len() + 1 };
        self.rules[slot].reviewed(0, end);
    }

    fn context(&self) -> usize {
        self.models.iter().map(|model| model.context()).min().unwrap_or(usize::MAX)
    }
}
