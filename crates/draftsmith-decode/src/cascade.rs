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
//!
//! A chain may have a stop rule, which ends it before its length: an inner drafter then hands over to
//! its reviewer where its head, its confidence or its entropy says so, as SpecDec++ does to the target.
//! The first row's may also be ended by the round's own rule.
//!
//! The leading node may have other children beside the chain's first token, each with look-ups behind
//! it: the authors' tree attention.

mod chain_rules;
mod leading;

use draftsmith_theory::{
    CascadeCandidate, Children, Decoding, DraftSignals, DrafterId, DrawnFrom, Forwards, Lenience,
    RoundEnd, SoftmaxSummary, StopRuleConfig, TokenChoice, review_greedy, review_sampled,
};

use chain_rules::{ChainRule, ChainRules};

use crate::draft_row::draft_rows;
use crate::drafter::{DraftRound, DraftStep, Drafter, StepDrafter};
use crate::error::DecodeError;
use crate::max_gram::MaxGramDraft;
use crate::target::Target;

/// K: row i, column j has the candidates of drafter j in the chain that reviewer i reads, the target
/// being reviewer 0 and drafter i − 1 reviewer i. What stands below the diagonal is not read.
pub type CascadeLengths = Vec<Vec<usize>>;

/// How a cascade drafts.
#[derive(Debug, Clone, PartialEq)]
pub struct CascadeConfig {
    /// K where the most probable token is decoded.
    pub greedy: CascadeLengths,
    /// K where tokens are sampled.
    pub sampled: CascadeLengths,
    /// Of all reviewers but the target.
    pub lenience: Lenience,
    /// What ends the chain that each reviewer reads before its length, from the target's on; none
    /// where there are fewer. A rule that reads signals is for a chain of models' tokens alone.
    pub rules: Vec<Option<StopRuleConfig>>,
    /// Children of the sequence that stands, the chain's first token among them: 1 is the chain alone.
    /// The others are the same drafter's, and behind each is looked up what the first row leaves to
    /// prompt lookup. Where the chain's first token is looked up, it has no siblings.
    pub leading: usize,
}

impl CascadeConfig {
    /// A cascade of one matrix, that forgives nothing, has no rules and proposes a chain.
    pub fn new(lengths: CascadeLengths) -> Self {
        let (sampled, lenience, rules) = (lengths.clone(), Lenience::NONE, Vec::new());
        Self { greedy: lengths, sampled, lenience, rules, leading: 1 }
    }

    /// K under a way of decoding.
    pub fn lengths(&self, decoding: &Decoding) -> &CascadeLengths {
        match decoding.choice {
            TokenChoice::Greedy => &self.greedy,
            TokenChoice::Sampled(_) => &self.sampled,
        }
    }
}

/// A drafter of drafters.
pub struct Cascade<'m, T> {
    id: DrafterId,
    config: CascadeConfig,
    /// From the largest on.
    models: Vec<Box<dyn StepDrafter<T> + 'm>>,
    /// Behind them.
    lookup: Option<MaxGramDraft<'m>>,
    /// Makes the rules of a sequence's chains.
    init_rules: Box<dyn Fn() -> ChainRules + 'm>,
    /// By slot.
    rules: Vec<ChainRules>,
}

/// A round's chain, as far as it is drafted.
struct Chain<'c, 'r, T> {
    target: &'c mut T,
    round: &'c mut DraftRound<'r>,
    /// The tokens that stand before it.
    num_standing: usize,
    forwards: Forwards,
    /// What its first token's drafter may say in that one's place, where it is asked for.
    siblings: Option<Children>,
}

impl<'m, T: Target> Cascade<'m, T> {
    /// A cascade of drafters with models, from the largest on, and of prompt lookup behind them.
    ///
    /// # Panics
    /// Unless matrices have a row and a column for each, rules are valid, and the leading node has a
    /// child.
    pub fn new(
        id: DrafterId,
        config: CascadeConfig,
        models: Vec<Box<dyn StepDrafter<T> + 'm>>,
        lookup: Option<MaxGramDraft<'m>>,
    ) -> Self {
        let num_drafters = models.len() + usize::from(lookup.is_some());
        for lengths in [&config.greedy, &config.sampled] {
            let is_square = lengths.iter().all(|row| row.len() == num_drafters);
            assert!(is_square && lengths.len() == num_drafters, "a row and a column for each");
        }
        assert!(config.leading > 0, "the chain begins with a child of the leading node");
        let rules = config.rules.clone();
        let init_rules = Box::new(move || ChainRules::new(&rules).expect("the rules are valid"));
        let mut cascade = Self { id, config, models, lookup, init_rules, rules: Vec::new() };
        cascade.begin_rules(0);
        cascade
    }

    /// The same with rules that have no settings, and read no signals.
    #[cfg(test)]
    pub(crate) fn ending_chains_by(
        mut self,
        rules: impl Fn() -> Vec<Option<Box<dyn draftsmith_theory::StopRule>>> + 'm,
    ) -> Self {
        self.init_rules = Box::new(move || ChainRules::of(rules()));
        self.begin_rules(0);
        self
    }

    /// The same with so many children of the leading node.
    #[cfg(test)]
    pub(crate) fn branching(mut self, leading: usize) -> Self {
        self.config.leading = leading;
        self
    }

    /// Begins the rules of a slot's chains anew.
    fn begin_rules(&mut self, slot: usize) {
        match self.rules.get_mut(slot) {
            Some(rules) => *rules = (self.init_rules)(),
            None => self.rules.resize_with(slot + 1, &self.init_rules),
        }
    }

    /// Whether a rule reads signals that its chain's tokens do not have.
    fn lacks_signals(&self, decoding: &Decoding) -> bool {
        let matrix = self.config.lengths(decoding);
        let mut rules = self.config.rules.iter().enumerate();
        rules.any(|(row, rule)| {
            let needs = rule.as_ref().is_some_and(|rule| !rule.needs().is_nothing());
            let lengths = matrix.get(row).map_or(&[][..], |lengths| lengths);
            needs && lengths.iter().skip(self.models.len()).any(|length| *length > 0)
        })
    }

    /// How much is looked up behind each sibling of a chain's first token.
    fn num_behind_siblings(&self, decoding: &Decoding) -> usize {
        let first_row = self.config.lengths(decoding).first();
        first_row.and_then(|row| row.get(self.models.len())).copied().unwrap_or(0)
    }

    /// Where its target must let its shallow layers run ahead, if it must.
    pub(crate) fn exit_layer(&self) -> Option<usize> {
        self.models.iter().find_map(|model| model.id().exit_layer())
    }

    /// Whether a head reads where rounds begin, and so may read what the target leaves behind.
    pub(crate) fn has_head_of_rounds(&self) -> bool {
        self.models.iter().any(|model| model.depends_on_round())
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
        let slot = chain.round.slot;
        let mut rule = self.rules[slot].begin(row);
        let drafted = self.draft_by(chain, row, rule.most(room), &mut rule);
        self.rules[slot].end(row, rule);
        drafted
    }

    /// The same, by the rule of the row's chain.
    fn draft_by(
        &mut self,
        chain: &mut Chain<'_, '_, T>,
        row: usize,
        room: usize,
        rule: &mut ChainRule,
    ) -> Result<Vec<CascadeCandidate>, DecodeError> {
        let mut drafted: Vec<CascadeCandidate> = Vec::new();
        let mut most = 0;
        // Behind the last row there is nobody to review.
        let lengths = self.config.lengths(chain.round.decoding).get(row).cloned();
        for (drafter, length) in lengths.into_iter().flatten().enumerate().skip(row) {
            most += length;
            while drafted.len() < most.min(room) && !rule.is_over() {
                let step = if drafter == self.models.len() {
                    self.look_up(chain, most.min(room) - drafted.len(), rule)?
                } else {
                    self.step(chain, (row, drafter), room - drafted.len(), rule)?
                };
                let has_more = !step.is_empty();
                drafted.extend(step);
                if !has_more {
                    break;
                }
                if chain.is_over() || (row == 0 && chain.stops(&drafted)) {
                    return Ok(drafted);
                }
            }
        }
        Ok(drafted)
    }

    /// Appends to the chain of row `row` what a drafter lets stand of a smaller one's, and its own
    /// token behind it.
    fn step(
        &mut self,
        chain: &mut Chain<'_, '_, T>,
        (row, drafter): (usize, usize),
        room: usize,
        rule: &mut ChainRule,
    ) -> Result<Vec<CascadeCandidate>, DecodeError> {
        let (slot, num_standing) = (chain.round.slot, chain.round.tokens.len());
        let proposed = self.draft(chain, drafter + 1, room - 1)?;
        let (needs, num_before) = (rule.needs(), rule.num_candidates());
        let model = &mut self.models[drafter];
        if needs.acceptance_prob {
            model.begin_round(chain.target, slot, num_standing - num_before, 1);
        }
        let num_candidates = num_before + proposed.len();
        let step = DraftStep {
            num_rows: proposed.len() + 1,
            ..DraftStep::in_chain(slot, chain.round.tokens, num_candidates, needs)
        };
        let decoding = chain.round.decoding;
        let rows = draft_rows(&mut **model, chain.target, &[step], [decoding])?;
        chain.forwards.add(model.id(), 1);
        let lenience = self.config.lenience;
        let is_over = rule.stops_before_draw(&rows[0].signals());
        let mut stands = match decoding.choice {
            _ if is_over => Vec::new(),
            TokenChoice::Greedy => review_greedy(&proposed, |row| rows[row].logits(), lenience),
            TokenChoice::Sampled(sampling) => {
                let probs_after = |row: usize| sampling.probs(rows[row].logits());
                review_sampled(&proposed, probs_after, lenience, &mut *chain.round.draws)
            }
        };
        let num_siblings = self.config.leading - 1;
        if let Some(CascadeCandidate { token_id, drawn_from, .. }) = stands.first()
            && (row, num_standing) == (0, chain.num_standing)
            && num_siblings > 0
        {
            let logits = rows[0].logits();
            chain.siblings = Some(Children::beside(*token_id, drawn_from, logits, num_siblings));
        }
        let num_accepted = stands.len().saturating_sub(1);
        chain.round.tokens.truncate(num_standing);
        for (row, (token, drafted)) in stands.iter().zip(&rows).enumerate() {
            // Tokens of one step are drawn already, whatever is answered in between.
            if row > 0 {
                rule.stops_before_draw(&drafted.signals());
            }
            chain.round.tokens.push(token.token_id);
            // One that ends the text is asked about no more.
            if chain.is_over() {
                break;
            }
            let candidate_prob = needs.candidate_prob.then(|| prob_of(token, drafted.logits()));
            let signals = DraftSignals { candidate_prob, ..drafted.signals() };
            let predicted = match needs.acceptance_prob {
                true => {
                    let (token, logits) = (token.token_id, drafted.own_logits());
                    model.predict_acceptance(chain.target, (slot, row), logits, token)?
                }
                false => None,
            };
            rule.drew(token.token_id, signals, predicted);
        }
        // What was drawn behind the end of a text could not be kept.
        stands.truncate(chain.round.tokens.len() - num_standing);
        if !proposed.is_empty() {
            let num_kept = stands.len();
            let end = RoundEnd { num_accepted: num_accepted.min(num_kept), num_kept };
            self.rules[slot].reviewed(drafter + 1, end);
            let path: Vec<usize> = (0..num_kept.saturating_sub(1)).collect();
            chain.target.commit(slot, num_standing, &path);
            self.forget(slot, num_standing, &path);
        }
        Ok(stands)
    }

    /// Appends what is looked up.
    fn look_up(
        &mut self,
        chain: &mut Chain<'_, '_, T>,
        most: usize,
        rule: &mut ChainRule,
    ) -> Result<Vec<CascadeCandidate>, DecodeError> {
        let Some(lookup) = &mut self.lookup else { return Ok(Vec::new()) };
        let eos_token_ids = chain.round.limits.eos_token_ids;
        let found = lookup.look_up(chain.round.slot, chain.round.tokens, most, eos_token_ids);
        chain.forwards.add(DrafterId::MaxGram, found.len());
        found.iter().for_each(|token| rule.drew(*token, DraftSignals::default(), None));
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
    /// Whether nothing behind what was drafted last could be kept.
    fn is_over(&self) -> bool {
        self.round.limits.is_end(self.round.tokens)
    }

    /// Whether the round's rule ends the chain here.
    fn stops(&mut self, drafted: &[CascadeCandidate]) -> bool {
        let DraftRound { tokens, rule, .. } = &mut *self.round;
        let candidates = &tokens[tokens.len() - drafted.len()..];
        let stops = rule.stops(candidates, &Default::default());
        stops && drafted.len() >= rule.bounds().min
    }
}

/// The probability of a token under what it was drawn from, raw where it is greedy.
fn prob_of(token: &CascadeCandidate, logits: &[f32]) -> f64 {
    match &token.drawn_from {
        DrawnFrom::Probs(probs) => probs[token.token_id as usize],
        DrawnFrom::OneHot => {
            SoftmaxSummary::of(logits).log_prob(logits[token.token_id as usize]).exp()
        }
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

    /// Rounds one after the other: their chains take forwards of their own.
    fn propose(
        &mut self,
        target: &mut T,
        rounds: &mut [DraftRound<'_>],
    ) -> Result<(), DecodeError> {
        for round in rounds {
            let DraftRound { rule, limits, .. } = round;
            if !rule.needs().is_nothing() || self.lacks_signals(round.decoding) {
                return Err(DecodeError::NoSignals { drafter: self.id });
            }
            rule.begin_round();
            let most = if rule.skips_drafting() { 0 } else { rule.bounds().max };
            let room = most.min(limits.room);
            let (num_standing, forwards) = (round.tokens.len(), Forwards::default());
            let mut chain = Chain { target, round, num_standing, forwards, siblings: None };
            let drafted = self.draft(&mut chain, 0, room)?;
            let Chain { forwards, siblings, .. } = chain;
            let proposal = &mut round.proposal;
            drafted.into_iter().for_each(|it| proposal.push_next(it.token_id, it.drawn_from));
            proposal.forwards = forwards;
            if let Some(siblings) = siblings {
                let num_behind = self.num_behind_siblings(round.decoding).min(room - 1);
                let num = self.config.leading - 1;
                leading::branch(siblings, [num, num_behind], self.lookup.as_mut(), round);
            }
        }
        Ok(())
    }

    /// Drafters keep what stands of their chain; of a sibling's look-ups they have read nothing.
    fn commit(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        let in_chain = path.iter().enumerate().take_while(|(at, node)| at == *node);
        let own: Vec<usize> = in_chain.map(|(at, _)| at).collect();
        self.forget(slot, num_standing, &own);
        let end = RoundEnd { num_accepted: own.len(), num_kept: path.len() + 1 };
        self.rules[slot].reviewed(0, end);
    }

    fn context(&self) -> usize {
        self.models.iter().map(|model| model.context()).min().unwrap_or(usize::MAX)
    }
}
