//! Cascades of drafters (CS-Drafting, Chen et al. 2023): larger drafters review what smaller ones
//! propose, and smaller ones take over the later candidates of a chain.
//!
//! A matrix K describes both. Its rows are the reviewers: the target, then each drafter but the
//! last. Its columns are the drafters, from the largest to the smallest. Row i gives the number of
//! candidates that each drafter contributes to the chain that reviewer i reads. In a *vertical*
//! cascade (Theorem 4.3), only the first drafter has candidates in the first row, and it reviews
//! the next drafter's candidates. In a *horizontal* cascade (Theorem 4.5), several drafters have
//! candidates in the first row and take turns.
//!
//! A drafter with a model works in steps. In each step, smaller drafters first propose the chain
//! that this drafter reviews. The drafter reads that chain in one forward, and appends the accepted
//! candidates and its own next token to the chain that it proposes itself. It repeats this until
//! its chain has the length that the matrix gives. As in the authors' code, the candidates accepted
//! in the last step may exceed that length.
//!
//! A chain may have a stop rule that ends it before that length. An inner drafter then hands over
//! to its reviewer according to its acceptance head, confidence or entropy, as SpecDec++ hands over
//! to the target. The round's stop rule may also end the chain that the target reads.
//!
//! The target may also read other first tokens, the siblings of the chain's first token. Each
//! sibling is followed by looked-up tokens. This is the authors' tree attention, for which they
//! published settings but no code.

mod chain_rules;
mod drafting;

use draftsmith_theory::{Decoding, DrafterId, Lenience, RoundEnd, StopRuleConfig, TokenChoice};

use chain_rules::ChainRules;
use drafting::CascadeRound;

use crate::drafter::{DraftRound, Drafter, LookUp, Member, ModelDrafter, StepDrafter};
use crate::error::{DecodeError, Result};
use crate::registry::{DrafterParts, NamedParts, Sizes};
use crate::session::ModelSession;
use crate::target::{Target, TargetLayers};

/// The matrix K of a cascade. Entry (i, j) is the number of candidates that drafter j contributes
/// to the chain that reviewer i reads. Reviewer 0 is the target, and reviewer i is drafter i − 1.
/// Entries below the diagonal are ignored.
pub type CascadeLengths = Vec<Vec<usize>>;

/// The settings of a cascade.
#[derive(Debug, Clone, PartialEq)]
pub struct CascadeConfig {
    /// The matrix K for greedy decoding.
    pub greedy: CascadeLengths,
    /// The matrix K for sampled decoding.
    pub sampled: CascadeLengths,
    /// The lenience of all reviewers except the target, which always verifies exactly.
    pub lenience: Lenience,
    /// The stop rule of the chain that each reviewer reads, starting with the target's chain.
    /// Missing entries and `None` mean no stop rule. A rule that reads probabilities requires a
    /// chain without prompt lookup.
    pub rules: Vec<Option<StopRuleConfig>>,
    /// The number of first tokens of a proposal, including the chain's; 1 proposes a chain. Each of
    /// the others is followed by up to as many looked-up tokens as the target's row of the matrix
    /// has. If the chain begins with a looked-up token, there are no others.
    pub num_first_tokens: usize,
    /// Whether the other first tokens are followed by nothing, as in CS-Drafting's paper.
    pub bare_siblings: bool,
}

impl CascadeConfig {
    /// Creates settings with the same matrix for greedy and sampled decoding, exact review and no
    /// stop rules. The cascade proposes a chain.
    pub fn new(lengths: CascadeLengths) -> Self {
        let (sampled, lenience, rules) = (lengths.clone(), Lenience::NONE, Vec::new());
        let bare_siblings = false;
        Self { greedy: lengths, sampled, lenience, rules, num_first_tokens: 1, bare_siblings }
    }

    /// Returns the matrix K for greedy or sampled decoding.
    pub fn lengths(&self, decoding: &Decoding) -> &CascadeLengths {
        match decoding.choice {
            TokenChoice::Greedy => &self.greedy,
            TokenChoice::Sampled(_) => &self.sampled,
        }
    }
}

/// A drafter that proposes one chain by several drafters together, and any other first tokens
/// beside it.
pub(crate) struct Cascade<'m, T> {
    id: DrafterId,
    config: CascadeConfig,
    /// The drafters with models, largest first.
    models: Vec<Box<dyn StepDrafter<T> + 'm>>,
    /// The prompt-lookup drafter, which is always the last; `None` if the cascade has none.
    lookup: Option<Box<dyn LookUp<T> + 'm>>,
    /// A function that builds the stop rules for a new sequence's chains.
    init_rules: Box<dyn Fn() -> ChainRules + Send + 'm>,
    /// The stop rules of the chains, by slot.
    rules: Vec<ChainRules>,
}

impl<'m, T: Target> Cascade<'m, T> {
    /// Builds a cascade of `models`, ordered from the largest to the smallest, followed by prompt
    /// lookup.
    ///
    /// # Panics
    /// If a matrix does not have one row and one column per drafter, a rule is invalid, or the
    /// number of first tokens is 0.
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
        assert!(config.num_first_tokens > 0, "the chain has a first token");
        let rules = config.rules.clone();
        let init_rules = Box::new(move || ChainRules::new(&rules).expect("the rules are valid"));
        let mut cascade = Self { id, config, models, lookup, init_rules, rules: Vec::new() };
        cascade.begin_rules(0);
        cascade
    }

    /// Replaces the stop rules of the chains by rules that no setting can express. They must not
    /// read signals.
    #[cfg(test)]
    pub(crate) fn ending_chains_by(
        mut self,
        rules: impl Fn() -> Vec<Option<Box<dyn draftsmith_theory::StopRule>>> + Send + 'm,
    ) -> Self {
        self.init_rules = Box::new(move || ChainRules::of(rules()));
        self.begin_rules(0);
        self
    }

    /// Sets the number of first tokens.
    #[cfg(test)]
    pub(crate) fn with_first_tokens(mut self, num_first_tokens: usize) -> Self {
        self.config.num_first_tokens = num_first_tokens;
        self
    }

    /// Puts nothing after the other first tokens.
    #[cfg(test)]
    pub(crate) fn with_bare_siblings(mut self) -> Self {
        self.config.bare_siblings = true;
        self
    }

    /// Rebuilds the stop rules of a slot's chains for a new sequence.
    fn begin_rules(&mut self, slot: usize) {
        match self.rules.get_mut(slot) {
            Some(rules) => *rules = (self.init_rules)(),
            None => self.rules.resize_with(slot + 1, &self.init_rules),
        }
    }

    /// Returns whether a stop rule reads probabilities although its chain contains looked-up
    /// candidates, which have none.
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

/// The drafters and the settings of a cascade.
#[derive(Debug, Clone)]
pub struct CascadeParts {
    /// The settings.
    pub config: CascadeConfig,
    /// The drafters: models from the largest to the smallest, then prompt lookup, if any.
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
    fn begin(&mut self, target: &mut T, slot: usize, prompt: &[u32]) -> Result<()> {
        for model in &mut self.models {
            model.begin(target, slot, prompt)?;
        }
        self.begin_rules(slot);
        self.lookup.iter_mut().try_for_each(|lookup| lookup.begin(target, slot, prompt))
    }

    fn propose(&mut self, target: &mut T, rounds: &mut [DraftRound<'_>]) -> Result<()> {
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
            let CascadeRound { round, room, forwards, drafted, siblings, .. } = drafting;
            let proposal = &mut round.proposal;
            drafted.into_iter().for_each(|it| proposal.push_next(it.token_id, it.drawn_from));
            proposal.forwards = forwards;
            if !siblings.is_empty() {
                self.propose_siblings(siblings, room - 1, round);
            }
        }
        Ok(())
    }

    /// Keeps the accepted tokens of the chain in all drafters, and reports them to the chain's stop
    /// rule. Models have not read the tokens beside the chain, which come after it in the proposal.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        let num_in_chain = path.iter().enumerate().take_while(|(at, node)| at == *node).count();
        self.forget(slot, num_standing, &path[..num_in_chain]);
        let end = RoundEnd { num_accepted: num_in_chain, num_kept: path.len() + 1 };
        self.rules[slot].reviewed(0, end);
    }

    fn context(&self) -> usize {
        self.models.iter().map(|model| model.context()).min().unwrap_or(usize::MAX)
    }
}
