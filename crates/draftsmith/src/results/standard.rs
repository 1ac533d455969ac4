//! What is compared of drafters apart from a machine's clock: CS-Drafting's standardised improvement,
//! its formulas' expectation, and unconditional acceptance by position (Chen et al. 2023, Tables 1 to 4
//! and Figure 2).

use std::collections::BTreeMap;

use draftsmith_theory::{
    DraftProfile, DrafterId, HorizontalPlan, Trace, VerticalPlan, best_horizontal_cascade,
    best_vertical_cascade,
};
use serde::{Deserialize, Serialize};

/// How many positions of a round are told apart.
const NUM_POSITIONS: usize = 30;
/// A share of fewer rounds than this is noise.
const MIN_ROUNDS: usize = 20;
/// The most candidates of an expected round, and of an inner one.
const MOST_CANDIDATES: usize = 20;

/// What a forward of a drafter costs, in forwards of the target.
pub(crate) type CostRatios = BTreeMap<DrafterId, f64>;

/// What forwards are taken to cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CostBasis {
    /// The parameters that they read, over the target's.
    Size,
    /// Their time here, over that of a target forward of one row.
    Time,
}

impl CostBasis {
    /// In words.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Size => "by size",
            Self::Time => "by time",
        }
    }
}

/// The best round of some drafters if every candidate were accepted independently.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ExpectedRound {
    /// What forwards are taken to cost.
    pub(crate) costs: CostBasis,
    /// How the drafters work together; alone, if there is one.
    pub(crate) form: CascadeForm,
    /// Who drafts, from the one of the first candidates on, or from the reviewer on.
    pub(crate) drafters: Vec<DrafterId>,
    /// The chance that a candidate of each is accepted by who reviews it, as it was measured.
    pub(crate) acceptance_probs: Vec<f64>,
    /// What a forward of each costs, in forwards of the target.
    pub(crate) cost_ratios: Vec<f64>,
    /// Candidates of each; of a vertical cascade the reviewer's steps, and candidates in each.
    pub(crate) lengths: Vec<usize>,
    /// EWIF: the expected improvement over the target alone.
    pub(crate) improvement: f64,
}

/// How drafters work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CascadeForm {
    /// One drafter, or several that take turns.
    Horizontal,
    /// The first reviews what the second proposes.
    Vertical,
}

/// A drafter as the formulas see it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Profiled {
    pub(crate) drafter: DrafterId,
    pub(crate) acceptance_prob: f64,
}

/// A cascade of two as it was measured: the reviewer by the target, the inner drafter by the reviewer.
pub(crate) type ProfiledPair = [Profiled; 2];

/// For each position of a round, the share of rounds that drafted so far in which its candidate and
/// all before it were accepted (Figure 2); it ends before the first position of fewer than 20 rounds.
pub(crate) fn unconditional_acceptance(trace: &Trace) -> Vec<f64> {
    let share = |position: usize| {
        let drafted = trace.rounds.iter().filter(|round| round.depth >= position);
        let (num_rounds, num_accepted) = drafted.fold((0, 0), |(rounds, accepted), round| {
            (rounds + 1, accepted + usize::from(round.num_accepted >= position))
        });
        (num_rounds >= MIN_ROUNDS).then(|| num_accepted as f64 / num_rounds as f64)
    };
    (1..=NUM_POSITIONS).map_while(share).collect()
}

/// α: the share accepted of the candidates that were judged; None where none was.
pub(crate) fn acceptance_prob<'a>(traces: impl IntoIterator<Item = &'a Trace>) -> Option<f64> {
    let rounds = traces.into_iter().flat_map(|trace| &trace.rounds);
    let (num_accepted, num_judged) = rounds.fold((0, 0), |(accepted, judged), round| {
        let rejected = usize::from(round.num_accepted < round.depth);
        (accepted + round.num_accepted, judged + round.num_accepted + rejected)
    });
    (num_judged > 0).then(|| num_accepted as f64 / num_judged as f64)
}

/// The rounds that the formulas expect the most of: each drafter alone, every two that take turns, and
/// the vertical cascades of `pairs`.
pub(crate) fn expected_rounds(
    drafters: &[Profiled],
    pairs: &[ProfiledPair],
    ratios: &CostRatios,
    costs: CostBasis,
) -> Vec<ExpectedRound> {
    let profile = |it: &Profiled| {
        let cost_ratio = *ratios.get(&it.drafter)?;
        Some(DraftProfile { acceptance_prob: it.acceptance_prob, cost_ratio })
    };
    let told = |all: &[Profiled], form, lengths, improvement| ExpectedRound {
        costs,
        form,
        drafters: all.iter().map(|it| it.drafter).collect(),
        acceptance_probs: all.iter().map(|it| it.acceptance_prob).collect(),
        cost_ratios: all.iter().filter_map(|it| ratios.get(&it.drafter).copied()).collect(),
        lengths,
        improvement,
    };
    let horizontal = |all: &[Profiled]| {
        let profiles: Vec<DraftProfile> = all.iter().map(profile).collect::<Option<_>>()?;
        let HorizontalPlan { candidate_lengths, improvement } =
            best_horizontal_cascade(&profiles, MOST_CANDIDATES);
        Some(told(all, CascadeForm::Horizontal, candidate_lengths, improvement))
    };
    let vertical = |pair: &ProfiledPair| {
        let [outer, inner] = [profile(&pair[0])?, profile(&pair[1])?];
        let VerticalPlan { num_steps, candidate_length, improvement } =
            best_vertical_cascade(outer, inner, MOST_CANDIDATES, MOST_CANDIDATES);
        let lengths = vec![num_steps, candidate_length];
        Some(told(pair, CascadeForm::Vertical, lengths, improvement))
    };
    let alone = drafters.iter().map(std::slice::from_ref).filter_map(horizontal);
    // The dearer one first, which is accepted more often where its candidate matters most.
    let dearer = |a: &&Profiled, b: &&Profiled| {
        let cost = |it: &Profiled| ratios.get(&it.drafter).copied().unwrap_or(0.0);
        cost(b).total_cmp(&cost(a))
    };
    let mut by_cost: Vec<&Profiled> = drafters.iter().collect();
    by_cost.sort_by(dearer);
    let turns = (0..by_cost.len()).flat_map(|first| {
        by_cost[first + 1..].iter().map(|second| [*by_cost[first], **second]).collect::<Vec<_>>()
    });
    let turns: Vec<ExpectedRound> = turns.filter_map(|pair| horizontal(&pair)).collect();
    alone.chain(turns).chain(pairs.iter().filter_map(vertical)).collect()
}

/// α′ of a vertical cascade of two: the chance with which the reviewer accepts an inner candidate that
/// explains how many tokens its steps gave, of `candidate_length` candidates each. None where there
/// was no step, or a step gave no more than its own token.
pub(crate) fn inner_acceptance_prob(
    traces: &[&Trace],
    reviewer: DrafterId,
    candidate_length: usize,
) -> Option<f64> {
    let rounds = || traces.iter().flat_map(|trace| &trace.rounds);
    let forwards = rounds().flat_map(|round| round.forwards.iter());
    let num_steps: usize = forwards.filter(|(id, _)| *id == reviewer).map(|(_, count)| count).sum();
    let num_tokens: usize = rounds().map(|round| round.num_drafted).sum();
    let tokens_per_step = num_tokens as f64 / num_steps as f64;
    let expected = |prob| draftsmith_theory::expected_tokens_per_round(prob, candidate_length);
    if !(tokens_per_step > 1.0 && tokens_per_step < expected(1.0)) {
        return None;
    }
    let (mut low, mut high) = (0.0, 1.0);
    // As many halvings as a number between 0 and 1 has digits.
    for _ in 0..53 {
        let middle = (low + high) / 2.0;
        if expected(middle) < tokens_per_step { low = middle } else { high = middle }
    }
    Some(low)
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::{Forwards, Round};

    use super::*;

    fn round(num_drafted: usize, num_accepted: usize) -> Round {
        Round { num_drafted, depth: num_drafted, num_accepted, ..Round::default() }
    }

    fn trace(rounds: Vec<Round>) -> Trace {
        Trace { rounds, ..Trace::default() }
    }

    #[test]
    fn unconditional_acceptance_is_of_all_rounds_that_drafted_so_far() {
        let rounds = [vec![round(3, 3); 10], vec![round(3, 1); 10], vec![round(1, 0); 20]].concat();
        assert_eq!(unconditional_acceptance(&trace(rounds)), [0.5, 0.5, 0.5]);
        assert_eq!(unconditional_acceptance(&trace(vec![round(40, 40); 20])), [1.0; 30]);
        assert_eq!(unconditional_acceptance(&trace(vec![round(2, 2); 19])), [0.0; 0]);
        // Nine candidates stand, of eleven that were judged.
        let one = trace(vec![round(4, 4), round(4, 3), round(9, 2)]);
        assert_eq!(acceptance_prob([&one]), Some(9.0 / 11.0));
        assert_eq!(acceptance_prob([&trace(vec![round(0, 0)])]), None);
    }

    /// The paper's Table 1, with the profiles that give its numbers.
    #[test]
    fn the_papers_simulated_improvements_come_out() {
        let (base, small) = (DrafterId::Draft, DrafterId::SmallDraft);
        let profiled = |drafter, acceptance_prob| Profiled { drafter, acceptance_prob };
        let ratios = CostRatios::from([(base, 0.022), (small, 0.0069)]);
        for (probs, alone, in_turns) in [
            ([0.73, 0.65], [(8, 2.96), (9, 2.65)], 3.03),
            ([0.80, 0.75], [(11, 3.75), (12, 3.61)], 3.93),
        ] {
            let drafters = [profiled(base, probs[0]), profiled(small, probs[1])];
            let found = expected_rounds(&drafters, &[], &ratios, CostBasis::Size);
            for (found, (length, improvement)) in found.iter().zip(alone) {
                assert_eq!(found.lengths, [length]);
                // It is printed with two decimals.
                assert!((found.improvement - improvement).abs() < 0.005, "{found:?}");
            }
            // The lengths that the paper prints are near the best ones.
            let best = &found[2];
            assert_eq!((&best.drafters[..], found.len()), (&[base, small][..], 3));
            assert!((-0.005..0.02).contains(&(best.improvement - in_turns)), "{best:?}");
        }
    }

    #[test]
    fn an_inner_drafters_acceptance_is_read_off_the_length_of_steps() {
        let of = |num_drafted, num_steps, candidate_length| {
            let mut one = round(num_drafted, 0);
            one.forwards = Forwards::of(DrafterId::Draft, num_steps);
            inner_acceptance_prob(&[&trace(vec![one])], DrafterId::Draft, candidate_length)
        };
        // A step of two candidates gives 1 + α + α² tokens: 1.75 with α = 0.5.
        let found = of(175, 100, 2).expect("steps gave more than their own tokens");
        assert!((found - 0.5).abs() < 1e-12, "{found}");
        assert_eq!([of(100, 100, 2), of(300, 100, 2), of(5, 0, 2)], [None; 3]);
        // It is what a vertical cascade is expected by.
        let profiled = |drafter| Profiled { drafter, acceptance_prob: 0.7 };
        let pair = [profiled(DrafterId::Draft), profiled(DrafterId::MaxGram)];
        let ratios = CostRatios::from([(DrafterId::Draft, 0.2), (DrafterId::MaxGram, 0.0)]);
        let found = expected_rounds(&[pair[0]], &[pair], &ratios, CostBasis::Time);
        assert_eq!(found.len(), 2);
        assert!(found[1].improvement > found[0].improvement, "{found:?}");
        // Without a price nothing is expected.
        let none = CostRatios::default();
        assert_eq!(expected_rounds(&[pair[0]], &[pair], &none, CostBasis::Time), []);
    }
}
