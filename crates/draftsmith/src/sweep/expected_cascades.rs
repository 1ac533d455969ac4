//! What CS-Drafting's closed form expects of a cascade (EWIF), and the lengths that it expects the
//! most of.
//!
//! It takes each candidate to stand, and each look-up to find something, with a fixed chance, independently.

use std::collections::BTreeMap;

use anyhow::Result;
use draftsmith_decode::CascadeLengths;
use draftsmith_theory::{
    CascadeAcceptance, DrafterId, Emitted, RoundCosts, expected_cascade_round,
};
use serde::{Deserialize, Serialize};

use crate::costs::Costs;

/// Candidates that are tried at each place of a matrix.
pub(super) const LENGTHS: [usize; 10] = [0, 1, 2, 3, 4, 5, 6, 8, 10, 14];
/// A gain in speed over the target alone that is smaller than this is rounding.
const LEAST_GAIN: f64 = 1e-9;

/// What the closed form says of cascades that are replayed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClosedFormCascade {
    /// The matrix of greatest expected speed.
    pub(crate) lengths: CascadeLengths,
    /// EWIF there: the expected speed over the target alone.
    pub(crate) ewif: f64,
    /// What replay says of that matrix.
    pub(crate) replayed: f64,
}

/// How often tokens of a cascade's drafters stand, and look-ups find some.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MeasuredAcceptance {
    /// Of those that were met.
    pub(crate) accepted: Vec<AcceptedBy>,
    /// The share of places at which a look-up finds something; null where nothing is looked up.
    pub(crate) found: Option<f64>,
}

impl MeasuredAcceptance {
    /// What was measured of these drafters.
    pub(crate) fn new(acceptance: &CascadeAcceptance, drafters: &[DrafterId]) -> Self {
        let one = |(reviewer, token, prob): (usize, Emitted, f64)| AcceptedBy {
            reviewer: reviewer.checked_sub(1).map(|at| drafters[at]),
            drafter: drafters[token.drafter],
            instead_of: token.instead_of.map(|at| drafters[at]),
            prob,
        };
        let looks_up = drafters.iter().position(|id| *id == DrafterId::MaxGram);
        Self {
            accepted: acceptance.probs().map(one).collect(),
            found: looks_up.map(|drafter| acceptance.found_prob(drafter)),
        }
    }
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

/// Seconds of a drafter's forward, by its rows.
type ForwardSeconds<'c> = Box<dyn Fn(usize) -> f64 + 'c>;

/// What forwards of a cascade's models cost.
pub(crate) struct CascadePrices<'c> {
    /// Seconds of a token of the target alone.
    plain: f64,
    /// Of the target.
    rounds: &'c RoundCosts,
    /// Of each drafter by its rows; None of one that looks up, which is taken to cost nothing.
    forward_seconds: Vec<Option<ForwardSeconds<'c>>>,
}

impl<'c> CascadePrices<'c> {
    /// The prices of drafters from the largest on, None being one that looks up, in rounds of changing
    /// lengths, as cascades make them. The target's are the first one's.
    ///
    /// # Errors
    /// If one has no price.
    pub(crate) fn new(
        first: &'c Costs,
        others: impl IntoIterator<Item = Option<&'c Costs>>,
    ) -> Result<Self> {
        let mut prices = Self::of_one(first, &first.mixed_rounds)?;
        for costs in others {
            let seconds = costs.map(Costs::review_seconds).transpose()?;
            prices.forward_seconds.push(seconds.map(|seconds| Box::new(seconds) as _));
        }
        Ok(prices)
    }

    /// The prices of one drafter alone, in rounds of one length.
    ///
    /// # Errors
    /// If it has none.
    pub(crate) fn of_chains(costs: &'c Costs) -> Result<Self> {
        Self::of_one(costs, &costs.rounds)
    }

    fn of_one(costs: &'c Costs, rounds: &'c RoundCosts) -> Result<Self> {
        let own: ForwardSeconds<'c> = Box::new(costs.forward_seconds(rounds)?);
        let plain = costs.rounds.verify_seconds(1);
        Ok(Self { plain, rounds, forward_seconds: vec![Some(own)] })
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

/// What is expected of a matrix where tokens stand so often.
pub(crate) fn expected(
    lengths: &CascadeLengths,
    acceptance: &CascadeAcceptance,
    prices: &CascadePrices<'_>,
) -> Expected {
    let prob = |reviewer, token| acceptance.prob(reviewer, token);
    let found = |drafter| acceptance.found_prob(drafter);
    expected_by(lengths, prob, found, prices)
}

/// The same by chances.
fn expected_by(
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
        speedup: prices.plain * round.num_tokens / (verify + draft),
        verification_rate: 1.0 / round.num_tokens,
        discard_rate: (num_drafted + 1.0 - round.num_tokens) / round.num_tokens,
    }
}

/// The matrix of the greatest speed of so many drafters, and how many were tried. Among them is a chain
/// of the first one alone, of `fixed` candidates.
pub(crate) fn best_lengths(
    num_drafters: usize,
    fixed: usize,
    speed: impl Fn(&CascadeLengths) -> f64,
) -> (CascadeLengths, usize) {
    let mut all = LENGTHS.to_vec();
    if !all.contains(&fixed) {
        all.push(fixed);
    }
    best_of(&all, num_drafters, fixed, speed)
}

/// The matrix of a chain of the first of so many drafters.
pub(crate) fn chain_alone(num_drafters: usize, candidate_length: usize) -> CascadeLengths {
    let mut lengths = vec![vec![0; num_drafters]; num_drafters];
    lengths[0][0] = candidate_length;
    lengths
}

/// The best of these lengths.
///
/// A matrix of three drafters has six of them, and a million combinations of ten; so two are
/// changed at a time, to the best of all values of both, until no two make it faster. That begins at
/// several matrices, of which the best result is taken.
fn best_of(
    all: &[usize],
    num_drafters: usize,
    fixed: usize,
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
    let all_of = |is_used: fn(usize, usize) -> bool| {
        let mut lengths = vec![vec![0; num_drafters]; num_drafters];
        let used = places.iter().filter(|(row, column)| is_used(*row, *column));
        used.for_each(|(row, column)| lengths[*row][*column] = 2);
        lengths
    };
    // The first drafter alone, all one below the other, all in turn, and both.
    let begins = [
        chain_alone(num_drafters, fixed),
        all_of(|row, column| row == column),
        all_of(|row, _| row == 0),
        all_of(|_, _| true),
    ];
    let mut best = (chain_alone(num_drafters, fixed), f64::NEG_INFINITY);
    for mut lengths in begins {
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
                        if is_faster(speed, reached) {
                            (lengths, reached) = (tried, speed);
                        }
                    }
                }
            }
            if !is_faster(reached, before) {
                break;
            }
        }
        if is_faster(reached, best.1) {
            best = (lengths, reached);
        }
    }
    (best.0, known.len())
}

/// Whether a speed is greater than another by more than rounding.
fn is_faster(speed: f64, other: f64) -> bool {
    speed - other > LEAST_GAIN
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
            let others = [Some(&small), None].into_iter().skip(3 - num_drafters);
            let prices = CascadePrices::new(&first, others).expect("prices");
            let found = |drafter| if drafter + 1 == num_drafters { 0.7 } else { 1.0 };
            let speed =
                |lengths: &CascadeLengths| expected_by(lengths, prob, found, &prices).speedup;
            let num_places = num_drafters * (num_drafters + 1) / 2;
            let matrices = (0..ALL.len().pow(num_places as u32)).map(|number| {
                let places = (0..num_places).map(|at| ALL[number >> (2 * at) & 3]);
                matrix(num_drafters, places)
            });
            let drafts = matrices.filter(|lengths| lengths[0].iter().any(|length| *length > 0));
            let best = drafts.map(|lengths| speed(&lengths)).fold(0.0, f64::max);
            let (found, num_tried) = best_of(&ALL, num_drafters, 3, speed);
            assert!(speed(&found) > best * (1.0 - 1e-6), "{found:?} {} {best}", speed(&found));
            // Nothing is said of drafters that take no part.
            for drafter in 0..num_drafters - 1 {
                let takes_part = found.iter().any(|row| row[drafter] > 0);
                assert!(takes_part || found[drafter + 1].iter().all(|length| *length == 0));
            }
            assert!((2..ALL.len().pow(num_places as u32)).contains(&num_tried), "{num_tried}");
        }
    }

    #[test]
    fn what_is_expected_of_one_drafter_is_its_closed_form() {
        let first = costs(DrafterId::Draft, 1.5);
        let prices = CascadePrices::new(&first, [None]).expect("prices");
        let of = |lengths: [[usize; 2]; 2], found: f64| {
            let lengths = lengths.map(|row| row.to_vec()).to_vec();
            expected_by(&lengths, |_, _| 0.5, |_| found, &prices)
        };
        let found = of([[3, 0], [0, 0]], 1.0);
        // 1.875 tokens for three draft forwards and a verification of four rows.
        assert!((found.speedup - 9.0 * 1.875 / (10.4 + 4.5)).abs() < 1e-12, "{found:?}");
        assert!((found.verification_rate - 1.0 / 1.875).abs() < 1e-12);
        // Of three candidates 0.875 stand.
        assert!((found.discard_rate - 2.125 / 1.875).abs() < 1e-12);
        // A look-up costs its row alone, and nothing where it finds nothing.
        let found = [1.0, 0.4].map(|found| of([[0, 1], [0, 0]], found).speedup);
        assert!((found[0] - 9.0 * 1.5 / 9.3).abs() < 1e-12, "{found:?}");
        assert!((found[1] - 9.0 * 1.2 / 9.12).abs() < 1e-12, "{found:?}");
    }

    #[test]
    fn chains_are_priced_as_rounds_of_one_length_and_cascades_as_others() {
        let slow = costs(DrafterId::Draft, 3.0);
        let first = Costs { mixed_rounds: slow.rounds, ..costs(DrafterId::Draft, 1.5) };
        let speed = |prices: Result<CascadePrices<'_>>, lengths: &CascadeLengths| {
            expected_by(lengths, |_, _| 0.5, |_| 1.0, &prices.expect("prices")).speedup
        };
        let chain = speed(CascadePrices::of_chains(&first), &chain_alone(1, 2));
        assert!((chain - 9.0 * 1.75 / (9.7 + 3.0)).abs() < 1e-12, "{chain}");
        // The target alone is the same.
        let cascade = speed(CascadePrices::new(&first, [None]), &chain_alone(2, 2));
        assert!((cascade - 9.0 * 1.75 / (9.7 + 6.0)).abs() < 1e-12, "{cascade}");
    }

    #[test]
    fn a_search_ends_where_nothing_is_known_and_knows_the_fixed_length() {
        let (found, _) = best_lengths(3, 7, |_| f64::NAN);
        assert_eq!(found, chain_alone(3, 7));
        let (found, _) = best_lengths(2, 13, |lengths| f64::from(u8::from(lengths[0][0] == 13)));
        assert_eq!(found, chain_alone(2, 13));
    }
}
