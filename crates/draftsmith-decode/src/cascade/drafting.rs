//! Drafting the rounds of a cascade: nested chains, each drafted as far as possible without a model, and
//! one forward for all rounds that wait for the same model.

use draftsmith_theory::{
    CascadeCandidate, DraftSignals, DrafterId, DrawnFrom, Forwards, RoundEnd, SoftmaxSummary,
    TokenChoice, review_greedy, review_sampled,
};

use super::Cascade;
use super::chain_rules::ChainRule;
use crate::draft_row::{DraftRow, draft_rows};
use crate::drafter::{DraftRound, DraftStep, Drafter};
use crate::error::DecodeError;
use crate::target::Target;

/// A round whose chain is being drafted.
pub(super) struct Drafting<'c, 'r> {
    pub(super) round: &'c mut DraftRound<'r>,
    pub(super) forwards: Forwards,
    /// The target's chain and the chains nested in it; the last is the one that is being drafted.
    chains: Vec<Chain>,
    /// The drafter whose forward is next; None when the target's chain is drafted.
    waits_for: Option<usize>,
    /// The target's chain once it is drafted.
    pub(super) drafted: Vec<CascadeCandidate>,
}

/// A chain for a reviewer.
struct Chain {
    /// The reviewer's row of K.
    row: usize,
    /// The most tokens that it may have.
    room: usize,
    rule: ChainRule,
    /// Whose step is next.
    drafter: usize,
    /// Tokens that are asked for up to that drafter's.
    most: usize,
    /// Whether that drafter's last step gave something.
    has_more: bool,
    /// Whether nothing is drafted after it.
    is_over: bool,
    drafted: Vec<CascadeCandidate>,
    /// What is proposed to the drafter, which is to review it.
    proposed: Vec<CascadeCandidate>,
}

impl Chain {
    /// Whose step is next by the row's lengths; None where the chain is drafted.
    fn next(&mut self, lengths: &[usize]) -> Option<usize> {
        while !self.is_over && self.drafter < lengths.len() {
            let is_short = self.drafted.len() < self.most.min(self.room);
            if self.has_more && is_short && !self.rule.is_over() {
                return Some(self.drafter);
            }
            self.drafter += 1;
            self.most += lengths.get(self.drafter).unwrap_or(&0);
            self.has_more = true;
        }
        None
    }
}

impl<'c, 'r> Drafting<'c, 'r> {
    fn begin(round: &'c mut DraftRound<'r>) -> Self {
        let (chains, drafted) = (Vec::new(), Vec::new());
        Self { round, forwards: Forwards::default(), chains, waits_for: None, drafted }
    }

    /// The chain that is being drafted.
    fn chain(&self) -> &Chain {
        self.chains.last().expect("a round that waits has a chain")
    }

    /// Whether no token after the last drafted one could be kept.
    fn is_over(&self) -> bool {
        self.round.limits.is_end(self.round.tokens)
    }

    /// The step that is waited for, which reads the proposed tokens.
    fn step(&self) -> DraftStep<'_> {
        let (Chain { rule, proposed, .. }, round) = (self.chain(), &self.round);
        let num_candidates = rule.num_candidates() + proposed.len();
        let step = DraftStep::in_chain(round.slot, round.tokens, num_candidates, rule.needs());
        DraftStep { num_rows: proposed.len() + 1, ..step }
    }

    /// Adds a step's candidates, whose tokens the sequence has already.
    fn took(&mut self, step: Vec<CascadeCandidate>) {
        let is_over = self.is_over();
        let chain = self.chains.last_mut().expect("a step is one of a chain");
        chain.has_more = !step.is_empty();
        chain.drafted.extend(step);
        if !chain.has_more {
            return;
        }
        let DraftRound { tokens, rule, .. } = &mut *self.round;
        // The round's own rule ends the target's chain.
        let mut stops = || {
            let num_drafted = chain.drafted.len();
            let candidates = &tokens[tokens.len() - num_drafted..];
            rule.stops(candidates, &DraftSignals::default()) && num_drafted >= rule.bounds().min
        };
        chain.is_over = is_over || (chain.row == 0 && stops());
    }
}

impl<T: Target> Cascade<'_, T> {
    /// Drafts the chains of rounds, each with its greatest number of tokens.
    ///
    /// # Errors
    /// If a model fails. Then these sequences cannot go on: rules of their chains are lost.
    pub(super) fn draft<'c, 'r>(
        &mut self,
        target: &mut T,
        rounds: impl IntoIterator<Item = (&'c mut DraftRound<'r>, usize)>,
    ) -> Result<Vec<Drafting<'c, 'r>>, DecodeError>
    where
        'r: 'c,
    {
        let begin = |(round, room)| {
            let mut drafting = Drafting::begin(round);
            self.begin_chain(&mut drafting, 0, room);
            self.go_on(&mut drafting);
            drafting
        };
        let mut all: Vec<Drafting<'c, 'r>> = rounds.into_iter().map(begin).collect();
        // The smallest first, so that those that wait for a larger one are joined by others.
        while let Some(drafter) = all.iter().filter_map(|it| it.waits_for).max() {
            let waiting = all.iter_mut().filter(|it| it.waits_for == Some(drafter));
            let mut waiting: Vec<&mut Drafting<'c, 'r>> = waiting.collect();
            let mut rows = self.forward(target, drafter, &waiting)?.into_iter();
            for drafting in &mut waiting {
                let num_rows = drafting.step().num_rows;
                let rows: Vec<DraftRow> = rows.by_ref().take(num_rows).collect();
                self.review(target, drafting, &rows)?;
                self.go_on(drafting);
            }
        }
        Ok(all)
    }

    fn begin_chain(&mut self, drafting: &mut Drafting<'_, '_>, row: usize, room: usize) {
        let rule = self.rules[drafting.round.slot].begin(row);
        // No drafter comes after the last row's.
        let lengths = self.config.lengths(drafting.round.decoding).get(row);
        drafting.chains.push(Chain {
            row,
            room: rule.most(room),
            rule,
            drafter: row,
            most: lengths.map_or(0, |lengths| lengths[row]),
            has_more: true,
            is_over: false,
            drafted: Vec::new(),
            proposed: Vec::new(),
        });
    }

    /// Goes on with a round until it waits for a model, or its chain is drafted.
    fn go_on(&mut self, drafting: &mut Drafting<'_, '_>) {
        drafting.waits_for = None;
        while let Some(chain) = drafting.chains.last_mut() {
            let lengths = self.config.lengths(drafting.round.decoding).get(chain.row);
            match lengths.and_then(|lengths| chain.next(lengths)) {
                Some(drafter) if drafter == self.models.len() => self.look_up(drafting),
                Some(drafter) => {
                    // One token of the step is the drafter's own.
                    let room = chain.room - chain.drafted.len() - 1;
                    self.begin_chain(drafting, drafter + 1, room);
                }
                None => {
                    let Some(Chain { row, rule, drafted, .. }) = drafting.chains.pop() else {
                        break;
                    };
                    self.rules[drafting.round.slot].end(row, rule);
                    let Some(reviewing) = drafting.chains.last_mut() else {
                        drafting.drafted = drafted;
                        break;
                    };
                    reviewing.proposed = drafted;
                    drafting.waits_for = Some(reviewing.drafter);
                    break;
                }
            }
        }
    }

    /// Appends what is looked up.
    fn look_up(&mut self, drafting: &mut Drafting<'_, '_>) {
        let (slot, limits) = (drafting.round.slot, drafting.round.limits);
        let tokens = &mut *drafting.round.tokens;
        let chain = drafting.chains.last_mut().expect("a look-up is of a chain");
        let most = chain.most.min(chain.room) - chain.drafted.len();
        let found = match &mut self.lookup {
            Some(lookup) => lookup.look_up(slot, tokens, most, limits.eos_token_ids),
            None => Vec::new(),
        };
        drafting.forwards.add(DrafterId::MaxGram, found.len());
        found.iter().for_each(|token| chain.rule.drew(*token, DraftSignals::default(), None));
        drafting.took(found.into_iter().map(CascadeCandidate::looked_up).collect());
    }

    /// One forward of a drafter over the chains proposed to it in all waiting rounds. Returns the rows,
    /// round by round.
    fn forward(
        &mut self,
        target: &mut T,
        drafter: usize,
        waiting: &[&mut Drafting<'_, '_>],
    ) -> Result<Vec<DraftRow>, DecodeError> {
        let model = &mut self.models[drafter];
        let steps: Vec<DraftStep<'_>> = waiting.iter().map(|drafting| drafting.step()).collect();
        let decodings = waiting.iter().map(|drafting| drafting.round.decoding);
        draft_rows(&mut **model, target, &steps, decodings)
    }

    /// Reviews the chain proposed to a drafter by the rows of its forward, and appends the accepted tokens
    /// and the drafter's next one.
    fn review(
        &mut self,
        target: &mut T,
        drafting: &mut Drafting<'_, '_>,
        rows: &[DraftRow],
    ) -> Result<(), DecodeError> {
        let chain = drafting.chains.last_mut().expect("a round that waits has a chain");
        let (drafter, proposed) = (chain.drafter, std::mem::take(&mut chain.proposed));
        let (rule, round) = (&mut chain.rule, &mut *drafting.round);
        let num_standing = round.tokens.len() - proposed.len();
        let (slot, needs) = (round.slot, rule.needs());
        let model = &mut self.models[drafter];
        drafting.forwards.add(model.id(), 1);
        let lenience = self.config.lenience;
        let is_over = rule.stops_before_draw(&rows[0].signals());
        let mut stands = match round.decoding.choice {
            _ if is_over => Vec::new(),
            TokenChoice::Greedy => review_greedy(&proposed, |row| rows[row].logits(), lenience),
            TokenChoice::Sampled(sampling) => {
                let probs_after = |row: usize| sampling.probs(rows[row].logits());
                review_sampled(&proposed, probs_after, lenience, &mut *round.draws)
            }
        };
        let num_accepted = stands.len().saturating_sub(1);
        round.tokens.truncate(num_standing);
        for (row, (token, drafted)) in stands.iter().zip(rows).enumerate() {
            // All tokens of a step are drawn already, so an answer here cannot take them back.
            if row > 0 {
                rule.stops_before_draw(&drafted.signals());
            }
            round.tokens.push(token.token_id);
            // No rule is asked about a token that ends the text.
            if round.limits.is_end(round.tokens) {
                break;
            }
            let candidate_prob = needs.candidate_prob.then(|| prob_of(token, drafted.logits()));
            let signals = DraftSignals { candidate_prob, ..drafted.signals() };
            let predicted = match needs.acceptance_prob {
                true => {
                    let (token, logits) = (token.token_id, drafted.own_logits());
                    model.predict_acceptance(target, (slot, row), logits, token)?
                }
                false => None,
            };
            rule.drew(token.token_id, signals, predicted);
        }
        // Tokens after the end of the text could not be kept.
        stands.truncate(round.tokens.len() - num_standing);
        if !proposed.is_empty() {
            let num_kept = stands.len();
            let end = RoundEnd { num_accepted: num_accepted.min(num_kept), num_kept };
            self.rules[slot].reviewed(drafter + 1, end);
            let path: Vec<usize> = (0..num_kept.saturating_sub(1)).collect();
            target.commit(slot, num_standing, &path);
            self.forget(slot, num_standing, &path);
        }
        drafting.took(stands);
        Ok(())
    }

    /// Lets drafters keep only the accepted tokens of those they have read.
    pub(super) fn forget(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.models.iter_mut().for_each(|model| model.commit(slot, num_standing, path));
        let lookup = self.lookup.as_mut();
        lookup.into_iter().for_each(|it| Drafter::<T>::commit(it, slot, num_standing, path));
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
