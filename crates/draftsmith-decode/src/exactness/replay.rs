//! The proof that replay gives the counts of decoding for every rule, for each drafter and with
//! prompt lookup in front. Greedy counts are equal, and sampled counts have the same distribution.

use std::ops::ControlFlow;
use std::sync::Arc;

use draftsmith_theory::{
    Counts, Decoding, Draws, HeadTiming, LookupFirst, Oracle, Recordings, RoundCosts, SeededDraws,
    StopRule, distribution_of, enumerate,
};

use super::max_gram::stored;
use super::tables::{Advanced, Advancing, Drafting, Table};
use super::{Case, HEADS, STOPS, assert_same_distribution, penalised, rules_with};
use crate::decode::{decode_plain, decode_speculative};
use crate::drafter::{Drafter, StepDrafter};
use crate::lookup_first::LookupFirstDraft;
use crate::record::{RecordOptions, RecordRequest, record};
use crate::sequence::{Request, RoundTokens};
use crate::target::Target;

/// The largest number of candidates that is recorded.
pub(super) const MAX_LENGTH: usize = 3;

/// A target and its drafter.
pub(super) struct Models<'a, T, D> {
    case: &'a Case,
    pub(super) head: HeadTiming,
    decoding: Decoding,
    target: T,
    pub(super) drafter: D,
}

impl<T: Target + Clone, D: StepDrafter<T> + Clone + 'static> Models<'_, T, D> {
    /// Decodes with the drafter, and returns the tokens and counts.
    fn decode(&self, rule: &mut dyn StopRule, draws: &mut dyn Draws) -> (Vec<u32>, Counts) {
        self.decode_with(&mut self.drafter.clone(), rule, draws)
    }

    pub(super) fn decode_with(
        &self,
        drafter: &mut dyn Drafter<T>,
        rule: &mut dyn StopRule,
        draws: &mut dyn Draws,
    ) -> (Vec<u32>, Counts) {
        let generation = decode_speculative(
            &mut self.target.clone(),
            drafter,
            Request {
                prompt: &[0],
                decoding: self.decoding,
                limits: &self.case.limits,
                rule: Some(rule),
                draws,
            },
            &mut go_on,
        )
        .expect("tables do not fail");
        let counts = generation.trace.counts();
        (generation.token_ids, counts)
    }

    /// Decodes plainly, and returns the tokens and the drafter's recording along them.
    pub(super) fn record(&self, draws: &mut dyn Draws) -> (Vec<u32>, Recordings) {
        self.record_with(true, draws)
    }

    fn record_with(&self, has_head: bool, draws: &mut dyn Draws) -> (Vec<u32>, Recordings) {
        let (limits, target) = (&self.case.limits, &mut self.target.clone());
        let plain = decode_plain(target, &self.decoding, &[0], limits, draws, &mut go_on)
            .expect("tables do not fail");
        let options = RecordOptions {
            decoding: self.decoding,
            limits: limits.clone(),
            max_length: MAX_LENGTH,
            has_head,
            labels: false,
            is_target_here: true,
        };
        let drafter = &mut self.drafter.clone();
        let response = &plain.token_ids;
        // Recording another response concurrently must change nothing.
        let beside = &mut SeededDraws::new(0, &["beside"]);
        let requests = [
            RecordRequest { prompt: &[0], response, draws },
            RecordRequest { prompt: &[0, 1], response, draws: beside },
        ];
        let recording =
            record(target, drafter, &options, requests, &mut |_| ControlFlow::Continue(()))
                .expect("tables do not fail")
                .remove(0);
        let recordings = Recordings {
            drafter: StepDrafter::id(drafter),
            max_length: MAX_LENGTH,
            eos_token_ids: limits.eos_token_ids.clone(),
            head: Some(self.head),
            responses: vec![recording],
            answers: Some(stored()),
        };
        (plain.token_ids, recordings)
    }

    /// Decodes with look-ups before the drafter, and returns the tokens and counts.
    fn decode_after(
        &self,
        first: LookupFirst,
        rule: &mut dyn StopRule,
        draws: &mut dyn Draws,
    ) -> (Vec<u32>, Counts) {
        let mut drafter = LookupFirstDraft::new(self.drafter.clone(), (first, Some(&stored())), 1);
        self.decode_with(&mut drafter, rule, draws)
    }

    fn assert_same_counts(&self) {
        let unused = &mut SeededDraws::new(0, &["unused"]);
        let (tokens, recordings) = self.record(unused);
        // Labels and a head's predictions change nothing else.
        let (_, mut unlabelled) = self.record_with(false, unused);
        let with = &recordings.responses[0].places;
        let without = Arc::make_mut(&mut unlabelled.responses[0].places);
        for (with, without) in with.iter().zip(&mut *without) {
            let with = std::iter::once(&with.candidate).chain(with.rollout.iter().flatten());
            let rollout = without.rollout.iter_mut().flatten();
            for (with, without) in with.zip(std::iter::once(&mut without.candidate).chain(rollout))
            {
                assert!(without.target_log_prob.is_nan() && !with.target_log_prob.is_nan());
                without.target_log_prob = with.target_log_prob;
                without.predicted_acceptance_prob = with.predicted_acceptance_prob;
            }
        }
        assert_eq!(**with, *without);
        for config in rules_with(self.head, MAX_LENGTH) {
            let decoded = self.decode(&mut *config.init().expect("valid"), unused);
            let replayed = recordings.replay_counts(&config).expect("recorded").remove(0);
            assert_eq!(decoded, (tokens.clone(), replayed), "{config:?}");
            for first in firsts() {
                let decoded = self.decode_after(first, &mut *config.init().expect("valid"), unused);
                let recordings = recordings.with_look_ups(first);
                let replayed = recordings.replay_counts(&config).expect("recorded").remove(0);
                assert_eq!(decoded, (tokens.clone(), replayed), "{first}, {config:?}");
            }
        }
        let response = &recordings.responses[0];
        let num_accepted = (0..tokens.len()).map(|start| response.num_accepted(start)).collect();
        let decoded = self.decode(&mut Oracle::new(num_accepted), unused);
        let free = RoundCosts::new([(recordings.drafter, 0.0)].into(), vec![0.0]).expect("times");
        let replayed = recordings.replay_oracle(&free).expect("a price").remove(0).counts;
        assert_eq!(decoded, (tokens, replayed));
    }

    /// Checks that decoding and replay have the same joint distribution of tokens and counts.
    fn assert_same_distributions(&self) {
        let recorded = enumerate(|draws| self.record(draws));
        for config in rules_with(self.head, MAX_LENGTH) {
            for first in std::iter::once(None).chain(firsts().map(Some)) {
                let decoded = distribution_of(enumerate(|draws| {
                    let rule = &mut *config.init().expect("valid");
                    joint(match first {
                        None => self.decode(rule, draws),
                        Some(first) => self.decode_after(first, rule, draws),
                    })
                }));
                let replayed =
                    distribution_of(recorded.iter().map(|((tokens, recordings), prob)| {
                        let recordings = match first {
                            None => recordings.clone(),
                            Some(first) => recordings.with_look_ups(first),
                        };
                        let counts = recordings.replay_counts(&config).expect("recorded").remove(0);
                        (joint((tokens.clone(), counts)), *prob)
                    }));
                assert_same_distribution(&decoded, &replayed);
            }
        }
    }
}

/// Iterates over settings of look-ups before the drafter.
fn firsts() -> impl Iterator<Item = LookupFirst> {
    ["1x2", "2x3", "answers:1x2"].into_iter().map(|first| first.parse().expect("one"))
}

fn go_on(_: RoundTokens<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Appends counts to the tokens, so that both are compared as one outcome.
fn joint((mut tokens, counts): (Vec<u32>, Counts)) -> Vec<u32> {
    let Counts {
        num_tokens,
        num_target_forwards,
        num_draft_forwards,
        num_drafted,
        num_accepted,
        num_discarded,
    } = counts;
    tokens.extend(
        [
            num_tokens,
            num_target_forwards,
            num_draft_forwards,
            num_drafted,
            num_accepted,
            num_discarded,
        ]
        .map(|count| count as u32),
    );
    tokens
}

pub(super) fn separate(
    case: &Case,
    head: HeadTiming,
    decoding: Decoding,
) -> Models<'_, Table, Drafting> {
    Models {
        case,
        head,
        decoding,
        target: case.target.clone(),
        drafter: Drafting::from(&case.draft),
    }
}

/// Returns a target with a drafter whose candidates depend on where their round began.
fn by_round(case: &Case, head: HeadTiming, decoding: Decoding) -> Models<'_, Table, Drafting> {
    let mut models = separate(case, head, decoding);
    models.drafter.by_round = true;
    models
}

/// Returns the same target with a drafter that drafts a whole round in one forward.
fn at_once(case: &Case, head: HeadTiming, decoding: Decoding) -> Models<'_, Table, Drafting> {
    let mut models = by_round(case, head, decoding);
    models.drafter.at_once = true;
    models
}

pub(super) fn self_draft(
    case: &Case,
    head: HeadTiming,
    decoding: Decoding,
) -> Models<'_, Advanced, Advancing> {
    let (target, drafter) = (Advanced::from(&case.target), Advancing::from(&case.draft));
    Models { case, head, decoding, target, drafter }
}

#[test]
fn greedy_replay_has_the_counts_of_decoding() {
    for seed in 0..30 {
        for (max_new_tokens, eos) in [(1, None), (2, Some(2)), (14, Some(2)), (20, None)] {
            for head in HEADS {
                let case = Case::new(3, max_new_tokens, eos, 1000 + seed).with_head(head);
                let decoding = Decoding::GREEDY.penalising([1.0, 1.7, 0.6][seed as usize % 3]);
                separate(&case, head, decoding).assert_same_counts();
                self_draft(&case, head, decoding).assert_same_counts();
                by_round(&case, head, decoding).assert_same_counts();
                at_once(&case, head, decoding).assert_same_counts();
            }
        }
    }
}

#[test]
fn the_context_limits_replay_and_decoding_alike() {
    for seed in 0..10 {
        for head in HEADS {
            let mut case = Case::new(3, 20, Some(2), 1100 + seed).with_head(head);
            case.draft.context = 9;
            separate(&case, head, Decoding::GREEDY).assert_same_counts();
            by_round(&case, head, Decoding::GREEDY).assert_same_counts();
        }
    }
}

#[test]
fn replay_ends_at_stop_strings() {
    for stop in STOPS {
        for head in HEADS {
            for seed in 0..10 {
                let case = Case::new(2, 14, None, 1220 + seed).with_head(head).stopping(stop);
                separate(&case, head, Decoding::GREEDY).assert_same_counts();
                self_draft(&case, head, Decoding::GREEDY).assert_same_counts();
                by_round(&case, head, Decoding::GREEDY).assert_same_counts();
            }
            let case = Case::new(2, 4, None, 1230).with_head(head).stopping(stop);
            separate(&case, head, case.decoding).assert_same_distributions();
            self_draft(&case, head, case.decoding).assert_same_distributions();
            by_round(&case, head, case.decoding).assert_same_distributions();
        }
    }
}

#[test]
fn sampled_replay_has_the_distribution_of_decoding() {
    for (vocab_size, max_new_tokens, eos) in [(2, 4, None), (2, 4, Some(1)), (3, 3, Some(1))] {
        for head in HEADS {
            let case = Case::new(vocab_size, max_new_tokens, eos, 1200).with_head(head);
            separate(&case, head, case.decoding).assert_same_distributions();
            self_draft(&case, head, case.decoding).assert_same_distributions();
            by_round(&case, head, case.decoding).assert_same_distributions();
        }
    }
}

#[test]
fn sampled_replay_has_the_distribution_of_decoding_under_a_repetition_penalty() {
    for decoding in penalised() {
        for head in HEADS {
            let case = Case::new(2, 4, Some(1), 1210).with_head(head);
            separate(&case, head, decoding).assert_same_distributions();
            self_draft(&case, head, decoding).assert_same_distributions();
            by_round(&case, head, decoding).assert_same_distributions();
        }
    }
}
