mod game;

use self::game::{Game, node};
use super::*;
use crate::{
    DraftSignals, Draws, HeadEstimate, RejectionThreshold, SeededDraws, StopRule, enumerate,
    expected_tokens_per_round,
};

const BOTH: [Predicted; 2] = [Predicted::All, Predicted::AllButNewest];

// SpecDec++'s fitted times, section 5: a 7B draft and a 70B target.
const PAPER: CostModel =
    CostModel { draft_seconds: 0.0234, target_seconds: 0.112, row_seconds: 0.0 };

#[track_caller]
fn close(found: f64, expected: f64) {
    // Sums of at most a few thousand f64 products of numbers below 100.
    assert!((found - expected).abs() < 1e-11 * expected.abs().max(1.0), "{found} != {expected}");
}

fn levels(pairs: &[(f64, f64)]) -> Vec<AcceptanceLevel> {
    let level = |&(weight, acceptance_prob)| AcceptanceLevel { weight, acceptance_prob };
    pairs.iter().map(level).collect()
}

fn mean_prob(levels: &[AcceptanceLevel]) -> f64 {
    let total: f64 = levels.iter().map(|level| level.weight).sum();
    levels.iter().map(|level| level.weight * level.acceptance_prob).sum::<f64>() / total
}

/// Levels, costs and bounds of all kinds, the paper's costs among them.
fn instances(num_levels: usize, max: usize) -> Vec<(Vec<AcceptanceLevel>, CostModel, Bounds)> {
    let mut rng = SeededDraws::new(1, &["threshold-policy"]);
    let mut instances = Vec::new();
    for case in 0..40 {
        let levels = (0..num_levels)
            .map(|_| AcceptanceLevel {
                weight: 0.1 + rng.uniform(),
                acceptance_prob: 1.0 - rng.uniform().powi(2),
            })
            .collect();
        let costs = CostModel {
            draft_seconds: 0.01 + 0.4 * rng.uniform(),
            target_seconds: 1.0,
            row_seconds: if case % 2 == 0 { 0.0 } else { 0.05 * rng.uniform() },
        };
        let min = 1 + rng.categorical(&[3.0, 1.0]);
        let costs = if case % 5 == 0 { PAPER } else { costs };
        instances.push((levels, costs, Bounds { min, max }));
    }
    instances
}

/// Runs `check` on games of independent levels, with their optimal policies.
fn for_each_game(max: usize, check: impl Fn(&Game, &OptimalPolicy)) {
    for (levels, costs, bounds) in instances(2, max) {
        for predicted in BOTH {
            let policy = optimal_stopping(&levels, predicted, &costs, bounds);
            let game = Game {
                probs: [levels[0].acceptance_prob, levels[1].acceptance_prob],
                weights: &|_| [levels[0].weight, levels[1].weight],
                num_unpredicted: usize::from(predicted == Predicted::AllButNewest),
                costs,
                bounds,
            };
            check(&game, &policy);
        }
    }
}

fn decision(policy: &OptimalPolicy, game: &Game, predicted: &[usize]) -> Decision {
    let num_candidates = predicted.len() + game.num_unpredicted;
    let product = game.product(predicted);
    let mut decisions = policy.decisions.iter().copied();
    // Products of up to four numbers in another order.
    decisions
        .find(|d| {
            d.num_candidates == num_candidates && (d.all_accepted_prob - product).abs() < 1e-15
        })
        .expect("a decision in every state")
}

#[test]
fn no_map_of_stops_is_better() {
    for_each_game(3, |game, policy| {
        close(game.best_of_all_maps().0, policy.seconds_per_token);
        close(
            game.seconds_per_token(|predicted| decision(policy, game, predicted).continues),
            policy.seconds_per_token,
        );
    });
}

#[test]
fn no_fixed_length_is_better() {
    for (levels, costs, bounds) in instances(3, 12) {
        let [all, lagged] = BOTH.map(|predicted| {
            optimal_stopping(&levels, predicted, &costs, bounds).seconds_per_token
        });
        // Knowing more never hurts.
        assert!(all <= lagged + 1e-12);
        for candidate_length in bounds.min..=bounds.max {
            let seconds = costs.target_seconds
                + costs.row_seconds
                + candidate_length as f64 * (costs.draft_seconds + costs.row_seconds);
            let fixed = seconds / expected_tokens_per_round(mean_prob(&levels), candidate_length);
            // Equal where the policy is the fixed length, up to rounding.
            assert!(lagged <= fixed + 1e-12, "{lagged} against {fixed} at {candidate_length}");
        }
    }
}

#[test]
fn the_policy_is_a_threshold_on_the_product() {
    for (levels, costs, bounds) in instances(3, 8) {
        for predicted in BOTH {
            let policy = optimal_stopping(&levels, predicted, &costs, bounds);
            let mut decisions = policy.decisions.clone();
            decisions.sort_by(|d, other| d.all_accepted_prob.total_cmp(&other.all_accepted_prob));
            // One threshold for all candidate counts, so for each as well.
            assert!(decisions.is_sorted_by_key(|decision| decision.continues));
        }
    }
}

#[test]
fn it_continues_while_the_next_candidate_is_worth_its_seconds() {
    let (mut num_continued, mut num_stopped) = (0, 0);
    for (levels, costs, bounds) in instances(3, 8) {
        for predicted in BOTH {
            let policy = optimal_stopping(&levels, predicted, &costs, bounds);
            let mean = mean_prob(&levels);
            for decision in &policy.decisions {
                let next = match predicted {
                    Predicted::All => decision.all_accepted_prob * mean,
                    Predicted::AllButNewest => decision.all_accepted_prob * mean * mean,
                };
                let worth = next * policy.seconds_per_token;
                let cost = costs.draft_seconds + costs.row_seconds;
                // Nearer than this, rounding decides.
                if (worth - cost).abs() > 1e-12 {
                    assert_eq!(decision.continues, worth >= cost);
                    assert_eq!(
                        decision.continues,
                        decision.all_accepted_prob >= policy.least_product
                    );
                    *(if decision.continues { &mut num_continued } else { &mut num_stopped }) += 1;
                }
            }
        }
    }
    assert!(num_continued > 100 && num_stopped > 100, "both were met");
}

#[test]
fn theorem_3_1_stops_exactly_where_the_policy_does() {
    let (mut num_continued, mut num_stopped) = (0, 0);
    for (levels, costs, bounds) in instances(3, 8) {
        for predicted in BOTH {
            let policy = optimal_stopping(&levels, predicted, &costs, bounds);
            for decision in &policy.decisions {
                let rejection_prob = 1.0 - decision.all_accepted_prob;
                // Nearer than this, rounding decides.
                if (rejection_prob - decision.rejection_threshold).abs() > 1e-12 {
                    let stops = rejection_prob >= decision.rejection_threshold;
                    assert_eq!(decision.continues, !stops, "{decision:?}");
                }
                if decision.continues {
                    assert!(decision.rejection_threshold >= 1.0 - policy.least_product - 1e-12);
                    num_continued += 1;
                } else {
                    close(decision.rejection_threshold, 1.0 - policy.least_product);
                    num_stopped += 1;
                }
            }
        }
    }
    assert!(num_continued > 100 && num_stopped > 100, "both were met");
}

#[test]
fn delta_is_the_difference_of_the_costs_to_go() {
    for_each_game(4, |game, policy| {
        let candidate_seconds = game.costs.draft_seconds + game.costs.row_seconds;
        let verification_seconds = game.costs.target_seconds - game.costs.draft_seconds;
        // What a token costs in the theorem's accounts, where only discards and verifications cost:
        // each one this round keeps is one that later rounds need not make.
        let token_seconds = policy.seconds_per_token - candidate_seconds;
        let cost = |goes_on: bool, predicted: &[usize]| -> f64 {
            let rounds = enumerate(|draws| {
                let mut drawn = predicted.to_vec();
                if game.num_unpredicted == 1 {
                    drawn.push(draws.categorical(&(game.weights)(&drawn)));
                }
                if goes_on {
                    drawn.push(draws.categorical(&(game.weights)(&drawn)));
                    let mut continues = |later: &[usize]| decision(policy, game, later).continues;
                    drawn = game.draft(drawn, &mut continues, draws);
                }
                let unsure = drawn[predicted.len()..].iter();
                let accepted = unsure.take_while(|&&level| draws.bernoulli(game.probs[level]));
                let num_accepted = predicted.len() + accepted.count();
                let num_discarded = drawn.len() - num_accepted;
                candidate_seconds * num_discarded as f64 + verification_seconds
                    - token_seconds * (num_accepted + 1) as f64
            });
            rounds.into_iter().map(|(cost, prob)| prob * cost).sum()
        };
        for predicted in [&[][..], &[0], &[1], &[0, 0], &[0, 1], &[1, 1], &[1, 1, 0]] {
            let num_candidates = predicted.len() + game.num_unpredicted;
            if (game.bounds.min..game.bounds.max).contains(&num_candidates) {
                let Decision { delta_seconds, rejection_threshold, .. } =
                    decision(policy, game, predicted);
                close(
                    delta_seconds,
                    cost(false, predicted) - cost(true, predicted) - verification_seconds,
                );
                let saved = verification_seconds + delta_seconds;
                close(rejection_threshold, saved / (candidate_seconds + saved));
            }
        }
    });
}

#[test]
fn the_head_s_rule_at_this_threshold_is_the_optimal_policy() {
    for_each_game(4, |game, policy| {
        let Some(stop_threshold) = policy.stop_threshold() else { return };
        if game.num_unpredicted == 0 {
            return;
        }
        let mut rule = RejectionThreshold::new(stop_threshold, game.bounds).expect("a valid rule");
        let shipped = game.seconds_per_token(|predicted| {
            rule.begin_round();
            let mut stops = rule.stops(&[0], &DraftSignals::default());
            for (index, &level) in predicted.iter().enumerate() {
                let acceptance_prob = Some(HeadEstimate::OfRead(game.probs[level]));
                let signals = DraftSignals { acceptance_prob, ..DraftSignals::default() };
                stops = rule.stops(&vec![0; index + 2], &signals);
            }
            !stops
        });
        close(shipped, policy.seconds_per_token);
    });
}

#[test]
fn one_candidate_ahead_is_too_short_where_a_level_tells_of_later_ones() {
    // The second candidate is accepted for certain or not at all, and all later ones like it.
    let game = Game {
        probs: [1.0, 0.0],
        weights: &|drawn| match drawn {
            [] => [1.0, 0.0],
            [_] => [0.15, 0.85],
            [.., 0] => [1.0, 0.0],
            [.., _] => [0.0, 1.0],
        },
        num_unpredicted: 0,
        costs: CostModel { draft_seconds: 1.0, target_seconds: 10.0, row_seconds: 0.0 },
        bounds: Bounds { min: 1, max: 3 },
    };
    let (seconds, map) = game.best_of_all_maps();
    assert!(0.15 * seconds < 1.0, "the second candidate alone is not worth its second");
    assert_eq!(map >> node(&[0]) & 1, 1, "yet it is drawn");
}

#[test]
fn one_candidate_ahead_is_enough_where_the_chance_never_rises() {
    let weights = |drawn: &[usize]| [[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]][drawn.len()];
    for draft_seconds in [0.05, 0.2, 0.35, 0.5] {
        let costs = CostModel { draft_seconds, target_seconds: 1.0, row_seconds: 0.0 };
        let bounds = Bounds { min: 1, max: 3 };
        let probs = [0.95, 0.3];
        let game = Game { probs, weights: &weights, num_unpredicted: 0, costs, bounds };
        let (seconds, _) = game.best_of_all_maps();
        let one_ahead = game.seconds_per_token(|predicted| {
            let [first, second] = weights(predicted);
            let next = game.product(predicted) * (first * probs[0] + second * probs[1]);
            next * seconds >= draft_seconds
        });
        close(one_ahead, seconds);
    }
}

#[test]
fn seconds_per_token_are_the_cost_model_s() {
    for (levels, costs, bounds) in instances(2, 10) {
        for predicted in BOTH {
            let policy = optimal_stopping(&levels, predicted, &costs, bounds);
            let (tokens, candidates) = (policy.tokens_per_round, policy.candidates_per_round);
            let discard_rate = (candidates + 1.0 - tokens) / tokens;
            close(costs.latency_per_token(discard_rate, 1.0 / tokens), policy.seconds_per_token);
            assert!((bounds.min as f64 - 1e-12..=bounds.max as f64 + 1e-12).contains(&candidates));
        }
    }
}

#[test]
fn one_level_is_the_best_fixed_length() {
    let best = (1..=30)
        .map(|k| {
            (PAPER.target_seconds + k as f64 * PAPER.draft_seconds)
                / expected_tokens_per_round(0.8, k)
        })
        .fold(f64::INFINITY, f64::min);
    for predicted in BOTH {
        let policy =
            optimal_stopping(&levels(&[(2.0, 0.8)]), predicted, &PAPER, Bounds { min: 1, max: 30 });
        close(policy.seconds_per_token, best);
        close(policy.candidates_per_round, policy.candidates_per_round.round());
    }
}

#[test]
fn hopeless_candidates_are_not_drawn() {
    for predicted in BOTH {
        let policy = optimal_stopping(&levels(&[(1.0, 0.0)]), predicted, &PAPER, Bounds::default());
        assert_eq!((policy.candidates_per_round, policy.tokens_per_round), (1.0, 1.0));
        assert_eq!(policy.least_product, f64::INFINITY);
        assert_eq!(policy.stop_threshold(), None);
        assert!(policy.decisions.iter().all(|decision| !decision.continues));
    }
}

#[test]
#[should_panic(expected = "an acceptance probability lies between 0 and 1")]
fn a_level_above_one_is_a_bug() {
    optimal_stopping(&levels(&[(1.0, 1.1)]), Predicted::All, &PAPER, Bounds::default());
}
