//! Drafting of a cascade's rounds, whose chains are nested.
//!
//! Each round proceeds until it needs a model's forward. Then the smallest model that any round
//! waits for runs once, for all rounds that wait for it.
//!
//! The siblings of the first token need no forward, because they come from the distribution of that
//! token. There are always as many as the settings ask for, unless the distribution has no more
//! tokens: leaving one out for its value would bias the output.

use std::iter;

use draftsmith_theory::{
    CascadeCandidate, Children, DraftSignals, DrawnFrom, Draws, Forwards, Node, RoundEnd,
    SoftmaxSummary, TokenChoice, review_greedy, review_sampled,
};

use super::Cascade;
use super::chain_rules::ChainRule;
use crate::drafter::{DraftRound, DraftRow, DraftStep};
use crate::error::Result;
use crate::target::Target;

/// The state of one round while its chain is drafted.
pub(super) struct CascadeRound<'c, 'r> {
    pub(super) round: &'c mut DraftRound<'r>,
    /// The maximum length of the target's chain.
    pub(super) room: usize,
    pub(super) forwards: Forwards,
    /// The stack of unfinished chains: first the chain that the target will read, last the chain
    /// that is drafted now.
    chains: Vec<Chain>,
    /// The index of the drafter whose forward is next; `None` when the target's chain is complete.
    waits_for: Option<usize>,
    /// The chain for the target, once it is complete; empty before.
    pub(super) drafted: Vec<CascadeCandidate>,
    /// The siblings of that chain's first token, each with the distribution it was drawn from.
    pub(super) siblings: Vec<(u32, DrawnFrom)>,
}

/// An unfinished chain, which a reviewer will read.
struct Chain {
    /// The row of the matrix K that belongs to the reviewer.
    row: usize,
    /// The maximum length of the chain.
    room: usize,
    rule: ChainRule,
    /// The index of the drafter whose step is next.
    drafter: usize,
    /// The length that the chain should reach by the end of this drafter's turn: the sum of the
    /// row's entries up to and including this drafter.
    most: usize,
    /// Whether this drafter's last step gave a token; true before its first step.
    has_more: bool,
    /// Whether the chain has ended early: by the end of the text, or by the round's stop rule if
    /// the target reads it.
    is_over: bool,
    drafted: Vec<CascadeCandidate>,
    /// The smaller drafters' candidates that this drafter will review.
    proposed: Vec<CascadeCandidate>,
}

impl Chain {
    /// Advances to the drafter whose step is next according to the row's lengths, and returns its
    /// index; `None` if the chain is complete.
    fn next(&mut self, lengths: &[usize]) -> Option<usize> {
        while !self.is_over && self.drafter < lengths.len() {
            let is_short = self.drafted.len() < self.most.min(self.room);
            if self.has_more && is_short && !self.rule.is_over {
                return Some(self.drafter);
            }
            self.drafter += 1;
            self.most += lengths.get(self.drafter).unwrap_or(&0);
            self.has_more = true;
        }
        None
    }
}

impl<'c, 'r> CascadeRound<'c, 'r> {
    fn begin(round: &'c mut DraftRound<'r>, room: usize) -> Self {
        let (chains, drafted, siblings) = (Vec::new(), Vec::new(), Vec::new());
        let forwards = Forwards::default();
        Self { round, room, forwards, chains, waits_for: None, drafted, siblings }
    }

    /// Returns the chain that is drafted now.
    fn chain(&self) -> &Chain {
        self.chains.last().expect("a round that waits has a chain")
    }

    /// Returns whether the last drafted token ends the text.
    fn is_over(&self) -> bool {
        self.round.limits.is_end(self.round.tokens)
    }

    /// Builds the draft step that the round waits for, in which a drafter reads the candidates that
    /// it reviews.
    fn step(&self) -> DraftStep<'_> {
        let (Chain { rule, drafted, proposed, .. }, round) = (self.chain(), &self.round);
        let num_candidates = drafted.len() + proposed.len();
        let needs = rule.needs();
        let (slot, tokens, decoding) = (round.slot, &round.tokens[..], round.decoding);
        let step = DraftStep::in_chain(slot, tokens, num_candidates, needs, decoding);
        DraftStep { num_rows: proposed.len() + 1, ..step }
    }

    /// Appends a step's candidates to the chain. Their tokens are already in the sequence.
    fn took(&mut self, step: Vec<CascadeCandidate>) {
        let is_over = self.is_over();
        let chain = self.chains.last_mut().expect("a step belongs to a chain");
        chain.has_more = !step.is_empty();
        chain.drafted.extend(step);
        if !chain.has_more {
            return;
        }
        let DraftRound { tokens, rule, .. } = &mut *self.round;
        // The round's own stop rule applies to the chain that the target reads.
        let mut stops = || {
            let num_drafted = chain.drafted.len();
            let candidates = &tokens[tokens.len() - num_drafted..];
            rule.stops(candidates, &DraftSignals::default()) && num_drafted >= rule.bounds().min
        };
        chain.is_over = is_over || (chain.row == 0 && stops());
    }
}

impl<T: Target> Cascade<'_, T> {
    /// Drafts the chains of several rounds. Each round comes with its maximum chain length.
    ///
    /// # Errors
    /// If a model fails. The sequences then cannot continue, because the state of their chains'
    /// rules is lost.
    pub(super) fn draft<'c, 'r>(
        &mut self,
        target: &mut T,
        rounds: impl IntoIterator<Item = (&'c mut DraftRound<'r>, usize)>,
    ) -> Result<Vec<CascadeRound<'c, 'r>>>
    where
        'r: 'c,
    {
        let begin = |(round, room)| {
            let mut drafting = CascadeRound::begin(round, room);
            self.begin_chain(&mut drafting, 0, room);
            self.go_on(&mut drafting);
            drafting
        };
        let mut all: Vec<CascadeRound<'c, 'r>> = rounds.into_iter().map(begin).collect();
        // The smallest model runs first, so that a larger model serves more rounds when it runs.
        while let Some(drafter) = all.iter().filter_map(|it| it.waits_for).max() {
            let waiting = all.iter_mut().filter(|it| it.waits_for == Some(drafter));
            let mut waiting: Vec<&mut CascadeRound<'c, 'r>> = waiting.collect();
            let steps: Vec<DraftStep<'_>> =
                waiting.iter().map(|drafting| drafting.step()).collect();
            let mut rows = self.models[drafter].draft(target, &steps)?.into_iter();
            for drafting in &mut waiting {
                let num_rows = drafting.step().num_rows;
                let rows: Vec<DraftRow> = rows.by_ref().take(num_rows).collect();
                self.review(target, drafting, &rows)?;
                self.go_on(drafting);
            }
        }
        Ok(all)
    }

    fn begin_chain(&mut self, drafting: &mut CascadeRound<'_, '_>, row: usize, room: usize) {
        let rule = self.rules[drafting.round.slot].begin(row);
        // A chain below the last drafter has no row in K and stays empty.
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

    /// Continues a round until it needs a model's forward or the target's chain is complete.
    fn go_on(&mut self, drafting: &mut CascadeRound<'_, '_>) {
        drafting.waits_for = None;
        while let Some(chain) = drafting.chains.last_mut() {
            let lengths = self.config.lengths(drafting.round.decoding).get(chain.row);
            match lengths.and_then(|lengths| chain.next(lengths)) {
                Some(drafter) if drafter == self.models.len() => self.look_up(drafting),
                Some(drafter) => {
                    // One place is left for the token that the drafter itself adds.
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

    /// Appends tokens found by prompt lookup to the chain.
    fn look_up(&mut self, drafting: &mut CascadeRound<'_, '_>) {
        let (slot, limits) = (drafting.round.slot, drafting.round.limits);
        let tokens = &mut *drafting.round.tokens;
        let chain = drafting.chains.last_mut().expect("a look-up belongs to a chain");
        let most = chain.most.min(chain.room) - chain.drafted.len();
        let lookup = self.lookup.as_mut().expect("the last drafter looks up");
        let found = lookup.look_up(slot, tokens, most, limits.eos_token_ids);
        drafting.forwards.add(lookup.id(), found.len());
        found.iter().for_each(|token| chain.rule.drew(*token, DraftSignals::default(), None));
        drafting.took(found.into_iter().map(CascadeCandidate::looked_up).collect());
    }

    /// Reviews the candidates proposed to a drafter, given the rows of its forward. Appends the
    /// accepted ones and the drafter's own next token to its chain.
    fn review(
        &mut self,
        target: &mut T,
        drafting: &mut CascadeRound<'_, '_>,
        rows: &[DraftRow],
    ) -> Result<()> {
        let chain = drafting.chains.last_mut().expect("a round that waits has a chain");
        let (drafter, proposed) = (chain.drafter, std::mem::take(&mut chain.proposed));
        let (rule, round) = (&mut chain.rule, &mut *drafting.round);
        let num_standing = round.tokens.len() - proposed.len();
        let (slot, needs) = (round.slot, rule.needs());
        let model = &mut self.models[drafter];
        drafting.forwards.add(model.id(), rows.iter().map(|row| row.num_forwards).sum());
        let lenience = self.config.lenience;
        let is_over = rule.stops_before_draw(&rows[0].signals);
        let mut stands = match round.decoding.choice {
            _ if is_over => Vec::new(),
            TokenChoice::Greedy => review_greedy(&proposed, |row| rows[row].logits(), lenience),
            TokenChoice::Sampled(sampling) => {
                let probs_after = |row: usize| sampling.probs(rows[row].logits());
                review_sampled(&proposed, probs_after, lenience, &mut *round.draws)
            }
        };
        let num_siblings = self.config.num_first_tokens - 1;
        if let Some(first) = stands.first()
            && num_siblings > 0
            && chain.row == 0
            && chain.drafted.is_empty()
        {
            drafting.siblings = siblings(first, rows[0].logits(), num_siblings, &mut *round.draws);
        }
        let num_accepted = stands.len().saturating_sub(1);
        round.tokens.truncate(num_standing);
        for (row, (token, drafted)) in stands.iter().zip(rows).enumerate() {
            // All tokens of the step are already drawn, so the rule can only end the chain after
            // them.
            if row > 0 {
                rule.stops_before_draw(&drafted.signals);
            }
            round.tokens.push(token.token_id);
            // Stop rules do not see a token that ends the text.
            if round.limits.is_end(round.tokens) {
                break;
            }
            let candidate_prob = needs.candidate_prob.then(|| prob_of(token, drafted.logits()));
            let signals = DraftSignals { candidate_prob, ..drafted.signals };
            let predicted = match needs.acceptance_prob {
                true => {
                    model.predict_acceptance((slot, row), &drafted.own_logits, token.token_id)?
                }
                false => None,
            };
            rule.drew(token.token_id, signals, predicted);
        }
        // Tokens after the end of the text are dropped.
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

    /// Adds siblings of the chain's first token to a round's proposal, after the chain. Unless
    /// `bare_siblings` is set, each is followed by up to `room` looked-up tokens, but no more than
    /// the target's row asks for. They depend only on the text up to the sibling.
    pub(super) fn propose_siblings(
        &mut self,
        siblings: Vec<(u32, DrawnFrom)>,
        room: usize,
        round: &mut DraftRound<'_>,
    ) {
        let DraftRound { slot, tokens, proposal, limits, decoding, .. } = round;
        let num_standing = tokens.len() - proposal.len();
        let num_after = self.config.lengths(decoding)[0].get(self.models.len());
        let num_after = num_after.filter(|_| !self.config.bare_siblings);
        let num_after = num_after.map_or(0, |length| room.min(*length));
        let mut lookup = self.lookup.as_mut().filter(|_| num_after > 0);
        // Prompt lookup may have read the chain.
        lookup.iter_mut().for_each(|it| it.commit(*slot, num_standing, &[]));
        let mut text = tokens[..num_standing].to_vec();
        for (rank, (token_id, drawn_from)) in (1..).zip(siblings) {
            text.push(token_id);
            let mut last = proposal.push(Node { parent: None, token_id, drawn_from, rank });
            if let Some(lookup) = lookup.as_mut().filter(|_| !limits.is_end(&text)) {
                let found = lookup.look_up(*slot, &mut text, num_after, limits.eos_token_ids);
                lookup.commit(*slot, num_standing, &[]);
                proposal.forwards.add(lookup.id(), found.len());
                for token_id in found {
                    let (parent, drawn_from) = (Some(last), DrawnFrom::OneHot);
                    last = proposal.push(Node { parent, token_id, drawn_from, rank: 0 });
                }
            }
            tokens.extend(text.drain(num_standing..));
        }
    }

    /// Rolls all drafters back to the first `num_standing` tokens and the accepted candidates on
    /// `path`.
    pub(super) fn forget(&mut self, slot: usize, num_standing: usize, path: &[usize]) {
        self.models.iter_mut().for_each(|model| model.commit(slot, num_standing, path));
        self.lookup.iter_mut().for_each(|it| it.commit(slot, num_standing, path));
    }
}

/// Draws `num` siblings of a chain's first token, or as many as there are. The first token was
/// chosen from `logits`.
fn siblings(
    first: &CascadeCandidate,
    logits: &[f32],
    num: usize,
    draws: &mut dyn Draws,
) -> Vec<(u32, DrawnFrom)> {
    let mut siblings = Children::beside(first.token_id, &first.drawn_from, logits, num);
    let next = iter::from_fn(|| siblings.next(draws)).take(num);
    next.map(|(token, drawn_from, _)| (token, drawn_from)).collect()
}

/// Returns the probability of a token under the distribution that it was drawn from. For a greedy
/// token that is the softmax of `logits`.
fn prob_of(token: &CascadeCandidate, logits: &[f32]) -> f64 {
    match &token.drawn_from {
        DrawnFrom::Probs(probs) => probs[token.token_id as usize],
        DrawnFrom::OneHot => {
            SoftmaxSummary::of(logits).log_prob(logits[token.token_id as usize]).exp()
        }
    }
}
