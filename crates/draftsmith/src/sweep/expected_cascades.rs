//! What CS-Drafting's closed form expects of a cascade (EWIF), and the lengths that it expects the
//! most of.
//!
//! It takes every candidate to be accepted, and every look-up to be found, independently.

use std::collections::BTreeMap;

use anyhow::Result;
use draftsmith_decode::CascadeLengths;
use draftsmith_theory::{
    CascadeAcceptance, DrafterId, Emitted, RoundCosts, expected_cascade_round,
};
use serde::{Deserialize, Serialize};

use crate::costs::Costs;

/// Candidates that are tried at each place of a matrix.
const LENGTHS: [usize; 10] = [0, 1, 2, 3, 4, 5, 6, 8, 10, 14];
/// A gain that is smaller than this is rounding.
const LEAST_GAIN: f64 = 1e-9;

/// What the closed form says of cascades of some drafters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClosedFormCascade {
    /// How often candidates stand.
    pub(crate) acceptance: Vec<AcceptedBy>,
    /// How often a look-up finds something; null where nothing is looked up.
    pub(crate) found: Option<f64>,
    /// The matrix of greatest expected speed.
    pub(crate) lengths: CascadeLengths,
    /// EWIF there: the expected speed over the target alone.
    pub(crate) ewif: f64,
    /// What replay says of that matrix; null where it is not replayed.
    pub(crate) replayed: Option<f64>,
}

/// How often a drafter's tokens stand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AcceptedBy {
    /// Who reviews them; null is the target.
    pub(crate) reviewer: Option<DrafterId>,
    /// Whose they are.
    pub(crate) drafter: DrafterId,
    /// Whose candidates those are that the drafter itself reviewed, leniently; null of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) instead_of: Option<DrafterId>,
    /// The chance.
    pub(crate) prob: f64,
}

impl AcceptedBy {
    /// All that was judged of a cascade's drafters.
    pub(crate) fn all(acceptance: &CascadeAcceptance, drafters: &[DrafterId]) -> Vec<Self> {
        let one = |(reviewer, token, prob): (usize, Emitted, f64)| Self {
            reviewer: reviewer.checked_sub(1).map(|at| drafters[at]),
            drafter: drafters[token.drafter],
            instead_of: token.instead_of.map(|at| drafters[at]),
            prob,
        };
        acceptance.probs().map(one).collect()
    }
}

/// Seconds of a drafter's forward, by its rows.
type ForwardSeconds<'c> = Box<dyn Fn(usize) -> f64 + 'c>;

/// What forwards of a cascade's models cost.
pub(crate) struct CascadePrices<'c> {
    /// Of the target, in rounds of changing lengths.
    rounds: &'c RoundCosts,
    /// Of each drafter by its rows; None of one that looks up, which is taken to cost nothing.
    forward_seconds: Vec<Option<ForwardSeconds<'c>>>,
}

impl<'c> CascadePrices<'c> {
    /// The prices of drafters from the largest on, None being one that looks up; the target's are the
    /// first one's.
    ///
    /// # Errors
    /// If one has no price.
    pub(crate) fn new(first: &'c Costs, others: &'c [Option<Costs>]) -> Result<Self> {
        let all = std::iter::once(Some(first)).chain(others.iter().map(Option::as_ref));
        let forward_seconds = all.map(|costs| {
            let seconds = costs.map(Costs::review_seconds).transpose()?;
            Ok(seconds.map(|seconds| Box::new(seconds) as ForwardSeconds<'c>))
        });
        let rounds = &first.mixed_rounds;
        Ok(Self { rounds, forward_seconds: forward_seconds.collect::<Result<_>>()? })
    }
}

/// What is expected of a cascade.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Expected {
    /// EWIF: the speed over the target alone.
    pub(crate) speedup: f64,
    /// Target forwards a token.
    pub(crate) verification_rate: f64,
    /// Discarded candidates a token.
    pub(crate) discard_rate: f64,
}

/// What is expected of a matrix where tokens stand so often, and drafters that look up find so.
pub(crate) fn expected(
    lengths: &CascadeLengths,
    acceptance_prob: impl Fn(usize, Emitted) -> f64,
    found_prob: impl Fn(usize) -> f64,
    prices: &CascadePrices<'_>,
) -> Expected {
    let round = expected_cascade_round(lengths, acceptance_prob, found_prob);
    let by_length = || round.length_probs.iter().enumerate();
    let verify: f64 =
        by_length().map(|(len, prob)| prob * prices.rounds.verify_seconds(len + 1)).sum();
    let forwards = round.num_forwards.iter().zip(&prices.forward_seconds);
    let draft: f64 = forwards
        .filter_map(|(by_rows, seconds)| {
            let seconds = seconds.as_ref()?;
            let all = by_rows.iter().zip(1..).filter(|(num, _)| **num > 0.0);
            Some(all.map(|(num, rows)| num * seconds(rows)).sum::<f64>())
        })
        .sum();
    let num_drafted: f64 = by_length().map(|(length, prob)| length as f64 * prob).sum();
    Expected {
        speedup: prices.rounds.verify_seconds(1) * round.num_tokens / (verify + draft),
        verification_rate: 1.0 / round.num_tokens,
        discard_rate: (num_drafted + 1.0 - round.num_tokens) / round.num_tokens,
    }
}

/// The matrix of the greatest speed of so many drafters, and how many were tried.
pub(crate) fn best_lengths(
    num_drafters: usize,
    speed: impl Fn(&CascadeLengths) -> f64,
) -> (CascadeLengths, usize) {
    best_of(&LENGTHS, num_drafters, speed)
}

/// The same of these lengths.
///
/// A matrix of three drafters has six of them, and a million combinations of ten; so two are
/// changed at a time, to the best of all values of both, until no two make it faster. That begins at
/// several matrices, of which the best result is taken.
fn best_of(
    all: &[usize],
    num_drafters: usize,
    speed: impl Fn(&CascadeLengths) -> f64,
) -> (CascadeLengths, usize) {
    let places: Vec<(usize, usize)> = (0..num_drafters)
        .flat_map(|row| (row..num_drafters).map(move |column| (row, column)))
        .collect();
    let mut known: BTreeMap<CascadeLengths, f64> = BTreeMap::new();
    let mut speed_of = |lengths: &CascadeLengths| {
        if let Some(speed) = known.get(lengths) {
            return *speed;
        }
        let speed = speed(lengths);
        known.insert(lengths.clone(), speed);
        speed
    };
    // The first drafter alone, all one below the other, all in turn, and both.
    let begins: [fn(usize, usize) -> bool; 4] = [
        |row, column| row + column == 0,
        |row, column| row == column,
        |row, _| row == 0,
        |_, _| true,
    ];
    let mut best: Option<(CascadeLengths, f64)> = None;
    for is_used in begins {
        let mut lengths = vec![vec![0; num_drafters]; num_drafters];
        places.iter().filter(|(row, column)| is_used(*row, *column)).for_each(|(row, column)| {
            lengths[*row][*column] = 2;
        });
        let mut reached = speed_of(&lengths);
        loop {
            let before = reached;
            let pairs = places.iter().enumerate();
            for (first, second) in
                pairs.flat_map(|(at, first)| places[at + 1..].iter().map(move |it| (first, it)))
            {
                let both = all.iter().flat_map(|one| all.iter().map(move |it| (*one, *it)));
                for (one, other) in both {
                    let mut tried = lengths.clone();
                    tried[first.0][first.1] = one;
                    tried[second.0][second.1] = other;
                    let tried = reachable(tried);
                    // A round without candidates is no cascade.
                    if tried[0].iter().any(|length| *length > 0) {
                        let speed = speed_of(&tried);
                        if speed > reached * (1.0 + LEAST_GAIN) {
                            (lengths, reached) = (tried, speed);
                        }
                    }
                }
            }
            if reached <= before * (1.0 + LEAST_GAIN) {
                break;
            }
        }
        if best.as_ref().is_none_or(|(_, best)| reached > best * (1.0 + LEAST_GAIN)) {
            best = Some((reachable(lengths), reached));
        }
    }
    let lengths = best.map(|(lengths, _)| lengths).unwrap_or_default();
    (lengths, known.len())
}

/// The same matrix with nothing in the rows of drafters that take no part.
fn reachable(mut lengths: CascadeLengths) -> CascadeLengths {
    let mut takes_part = vec![false; lengths.len()];
    for row in 0..lengths.len() {
        if row > 0 && !takes_part[row - 1] {
            lengths[row].fill(0);
        }
        let used = lengths[row].iter().enumerate().filter(|(_, length)| **length > 0);
        used.for_each(|(column, _)| takes_part[column] = true);
    }
    lengths
}

#[cfg(test)]
mod tests {
    use draftsmith_theory::{Draws, SeededDraws};

    use super::*;
    use crate::recipe::GivenCosts;

    fn costs(drafter: DrafterId, draft_ms: f64) -> Costs {
        let text = format!("draft_ms = {draft_ms}\nrows_ms = [9.0, 9.3, 9.7, 10.4]");
        let given: GivenCosts = toml::from_str(&text).expect("costs");
        Costs::given(&given, drafter, 1).expect("one drafter").expect("given")
    }

    /// A matrix with these lengths on and above its diagonal.
    fn matrix(num_drafters: usize, mut lengths: impl Iterator<Item = usize>) -> CascadeLengths {
        let mut row = |row: usize| {
            let own = (row..num_drafters).map(|_| lengths.next().expect("one for each place"));
            std::iter::repeat_n(0, row).chain(own.collect::<Vec<_>>()).collect()
        };
        (0..num_drafters).map(&mut row).collect()
    }

    #[test]
    fn the_lengths_that_are_found_are_the_best_of_all() {
        const ALL: [usize; 4] = [0, 1, 3, 6];
        let mut rng = SeededDraws::new(1, &["lengths"]);
        let uniform = |rng: &mut SeededDraws| (rng.categorical(&[1.0; 64]) as f64 + 0.5) / 64.0;
        for case in 0..24 {
            let num_drafters = 2 + case % 2;
            // By reviewer and drafter.
            let probs: Vec<f64> = (0..9).map(|_| uniform(&mut rng)).collect();
            let prob = |reviewer: usize, token: Emitted| probs[3 * reviewer + token.drafter];
            let first = costs(DrafterId::Draft, 3.0 * uniform(&mut rng));
            let small = costs(DrafterId::SmallDraft, uniform(&mut rng));
            let others = [[Some(small), None], [None, None]];
            let others = &others[1 - case % 2][..num_drafters - 1];
            let prices = CascadePrices::new(&first, others).expect("prices");
            let found = |drafter| if drafter + 1 == num_drafters { 0.7 } else { 1.0 };
            let speed = |lengths: &CascadeLengths| expected(lengths, prob, found, &prices).speedup;
            let num_places = num_drafters * (num_drafters + 1) / 2;
            let matrices = (0..ALL.len().pow(num_places as u32)).map(|number| {
                let places = (0..num_places).map(|at| ALL[number >> (2 * at) & 3]);
                matrix(num_drafters, places)
            });
            let drafts = matrices.filter(|lengths| lengths[0].iter().any(|length| *length > 0));
            let best = drafts.map(|lengths| speed(&lengths)).fold(0.0, f64::max);
            let (found, num_tried) = best_of(&ALL, num_drafters, speed);
            assert!(speed(&found) > best * (1.0 - 1e-6), "{found:?} {} {best}", speed(&found));
            assert_eq!(reachable(found.clone()), found);
            assert!(num_tried < 4096);
        }
    }

    #[test]
    fn what_is_expected_of_one_drafter_is_its_closed_form() {
        let first = costs(DrafterId::Draft, 1.5);
        let prices = CascadePrices::new(&first, &[None]).expect("prices");
        let found = expected(&vec![vec![3, 0], vec![0, 0]], |_, _| 0.5, |_| 1.0, &prices);
        // 1.875 tokens for three draft forwards and a verification of four rows.
        assert!((found.speedup - 9.0 * 1.875 / (10.4 + 4.5)).abs() < 1e-12, "{found:?}");
        assert!((found.verification_rate - 1.0 / 1.875).abs() < 1e-12);
        // Of three candidates 0.875 stand.
        assert!((found.discard_rate - 2.125 / 1.875).abs() < 1e-12);
        // A look-up costs its row alone, and nothing where it finds nothing.
        let found = |prob| expected(&vec![vec![0, 1], vec![0, 0]], |_, _| 0.5, |_| prob, &prices);
        assert!((found(1.0).speedup - 9.0 * 1.5 / 9.3).abs() < 1e-12, "{:?}", found(1.0));
        assert!((found(0.4).speedup - 9.0 * 1.2 / 9.12).abs() < 1e-12, "{:?}", found(0.4));
    }
}
