//! Replays of synthetic recordings.

use super::test_recordings::random;
use super::*;
use crate::{
    Bounds, ConfidenceThresholdConfig, CostModel, FixedLengthConfig, HeuristicConfig,
    JointConfidenceConfig, OnlineAcceptanceConfig, RejectionThresholdConfig,
};

fn total(counts: Vec<Counts>) -> Counts {
    counts.into_iter().sum()
}

fn of(runs: Vec<TimedCounts>) -> Counts {
    runs.into_iter().map(|run| run.counts).sum()
}

fn free() -> RoundCosts {
    RoundCosts::new([(DrafterId::DRAFT, 0.0)].into(), vec![0.0]).expect("times")
}

#[test]
fn rounds_cost_as_much_as_their_forwards_and_rows() {
    let recordings = random(9, 30, 0.7);
    let model = CostModel { draft_seconds: 0.02, target_seconds: 0.1, row_seconds: 0.03 };
    let costs = RoundCosts::from_line(DrafterId::DRAFT, model).expect("times");
    for run in recordings.replay(&fixed(3), &costs).expect("replays") {
        let expected = model.seconds(&run.counts);
        // Some tens of rounds, summed in a different order.
        assert!((run.seconds - expected).abs() < 1e-12 * expected.max(1.0));
    }
}

fn fixed(candidate_length: usize) -> StopRuleConfig {
    StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length })
}

#[test]
fn an_unknown_drafter_is_an_error() {
    let drafter = DrafterId::named("exit3");
    let recordings = Recordings { drafter, ..random(9, 3, 0.7) };
    let refused = recordings.replay(&fixed(3), &free()).expect_err("no price");
    assert!(refused.to_string().contains("`exit3`"), "{refused}");
    assert_eq!(recordings.replay_oracle(&free()), Err(refused.clone()));
    let bounds = Bounds { min: 1, max: 4 };
    let found = cost_optimal(&recordings, crate::AcceptanceSignal::Entropy, &free(), bounds);
    assert_eq!(found, Err(refused));
    // Counts need no costs.
    assert!(recordings.replay_counts(&fixed(3)).is_ok());
}

#[test]
fn traced_rounds_match_the_counts() {
    let recordings = random(5, 30, 0.7);
    let rule = StopRuleConfig::ConfidenceThreshold(ConfidenceThresholdConfig {
        confidence_threshold: 0.5,
        before_draw: true,
        bounds: Bounds { min: 0, max: 6 },
    });
    for config in [rule, fixed(3)] {
        let counts = total(recordings.replay_counts(&config).expect("replays"));
        let rounds = recordings.trace(&config).expect("replays").rounds;
        let lengths: Vec<usize> = rounds.iter().map(|round| round.num_drafted).collect();
        assert_eq!(lengths.len(), counts.num_target_forwards);
        let total = |of: fn(&Round) -> usize| rounds.iter().map(of).sum::<usize>();
        assert_eq!(total(|round| round.num_accepted), counts.num_accepted);
        assert_eq!(total(Round::num_draft_forwards), counts.num_draft_forwards);
        assert_eq!(lengths.iter().sum::<usize>(), counts.num_drafted);
        let longest = config.init().expect("valid").bounds().max;
        assert!(lengths.iter().all(|length| *length <= longest));
        assert!(lengths.windows(2).any(|two| two[0] != two[1]), "rounds differ: {lengths:?}");
    }
}

#[test]
fn every_token_is_emitted_once_and_forwards_add_up() {
    let recordings = random(1, 40, 0.7);
    let bounds = Bounds { min: 1, max: 8 };
    let mut rules: Vec<StopRuleConfig> = (1..=8).map(fixed).collect();
    rules.push(StopRuleConfig::Heuristic(HeuristicConfig { initial_length: 3, bounds }));
    for threshold in [0.2, 0.5, 0.9] {
        rules.push(StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
            stop_threshold: threshold,
            without_lag: false,
            bounds,
        }));
        rules.push(StopRuleConfig::JointConfidence(JointConfidenceConfig {
            confidence_threshold: threshold,
            bounds,
        }));
        let start = recordings.learned_acceptance();
        rules.push(StopRuleConfig::OnlineAcceptance(OnlineAcceptanceConfig {
            survival_threshold: threshold,
            start,
            bounds,
        }));
    }
    for rule in &rules {
        let counts = total(recordings.replay_counts(rule).expect("replays"));
        assert_eq!(counts.num_tokens, recordings.num_tokens());
        counts.check_forward_identity().expect("a forward a candidate");
        assert!(counts.num_accepted + counts.num_target_forwards >= counts.num_tokens);
    }
    let plain = of(recordings.plain(&free()));
    assert_eq!((plain.verification_rate(), plain.discard_rate()), (1.0, 0.0));
    plain.check_forward_identity().expect("a forward a token");
}

#[test]
fn first_candidates_are_counted_by_their_position_in_the_text() {
    let mut recordings = random(3, 4, 0.7);
    let whole = recordings.by_text_position();
    let sum = |counts: &[[usize; 2]]| counts.iter().map(|[_, accepted]| accepted).sum::<usize>();
    assert_eq!(whole.keys().copied().collect::<Vec<_>>(), [512], "short texts have one range");
    // K = 1 from every token: a plain loop over the recorded places.
    let accepted = recordings.responses.iter().map(|it| {
        let places = it.places.iter().take(it.limit - 1);
        places.filter(|place| place.rejected().is_none()).count()
    });
    assert_eq!(sum(&whole[&512]), accepted.sum::<usize>());
    // The token after 511 others is the last one of its range.
    let num_places = recordings.responses[0].places.len();
    recordings.responses[0].prompt = vec![7; 511];
    recordings.responses[1].prompt = vec![7; 2048];
    let moved = recordings.by_text_position();
    assert_eq!(moved.keys().copied().collect::<Vec<_>>(), [512, 2048, 8192]);
    assert_eq!((moved[&512].len(), moved[&512][0][0]), (3, 1));
    let drafted = num_places.min(recordings.responses[0].limit - 1) - 1;
    assert_eq!((moved[&2048].len(), moved[&2048][0][0]), (1, drafted));
    let all: usize = moved.values().map(|counts| sum(counts)).sum();
    assert_eq!(all, sum(&whole[&512]));
}

#[test]
fn without_lag_the_same_forwards_verify_fewer_rows() {
    let recordings = random(2, 40, 0.7);
    let bounds = Bounds { min: 1, max: 8 };
    let counts = |without_lag| {
        let rule = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
            stop_threshold: 0.4,
            without_lag,
            bounds,
        });
        total(recordings.replay_counts(&rule).expect("replays"))
    };
    let (late, own) = (counts(false), counts(true));
    assert!(own.num_drafted < own.num_draft_forwards);
    assert!(own.num_verified_rows() < late.num_verified_rows());
    assert!(own.discard_rate() < late.discard_rate());
}

#[test]
fn a_look_ahead_head_saves_the_forwards_without_a_draw() {
    let late = random(2, 40, 0.7);
    let ahead = Recordings { head: Some(HeadTiming::AtDraw), ..late.clone() };
    let bounds = Bounds { min: 1, max: 8 };
    let counts = |recordings: &Recordings, without_lag| {
        let rule = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
            stop_threshold: 0.4,
            without_lag,
            bounds,
        });
        total(recordings.replay_counts(&rule).expect("replays"))
    };
    let (own, early) = (counts(&late, true), counts(&ahead, true));
    assert_eq!(early, counts(&ahead, false));
    // The same rounds, except those at the bound, each without the forward that only asked.
    assert_eq!(early.num_drafted, own.num_drafted);
    assert_eq!(early.num_accepted, own.num_accepted);
    assert!(early.num_draft_forwards < own.num_draft_forwards);
    early.check_forward_identity().expect("a forward a candidate");
}

#[test]
fn longer_rounds_verify_less_often_and_discard_more() {
    let recordings = random(3, 60, 0.6);
    let counts: Vec<Counts> =
        (1..=8).map(|k| total(recordings.replay_counts(&fixed(k)).expect("replays"))).collect();
    assert!(counts.windows(2).all(|two| two[1].num_target_forwards <= two[0].num_target_forwards));
    assert!(counts.windows(2).all(|two| two[1].num_discarded >= two[0].num_discarded));
}

#[test]
fn the_oracle_discards_nothing_and_verifies_once_more_than_it_is_rejected() {
    let recordings = random(4, 40, 0.9);
    let oracle = of(recordings.replay_oracle(&free()).expect("a price"));
    // After an accepted end token the target's own token is discarded.
    let ends = |response: &&Recording| {
        let last = response.places.last().expect("a token");
        last.rollout.is_none() && last.candidate.token_id == recordings.eos_token_ids[0]
    };
    let num_behind_the_end = recordings.responses.iter().filter(ends).count();
    assert!(num_behind_the_end > 0);
    assert_eq!(oracle.num_discarded, num_behind_the_end);
    oracle.check_forward_identity().expect("a forward a candidate");
    // Lemma 2.1: |S| + 1 target forwards, where the last token needs no candidate.
    let forwards = |response: &Recording| {
        let (_, before) = response.places.split_last().expect("a token");
        before.iter().filter(|place| place.rejected().is_some()).count() + 1
    };
    assert_eq!(oracle.num_target_forwards, recordings.responses.iter().map(forwards).sum());
    // Also where more candidates are accepted in a row than a rule may draft.
    let longest =
        |response: &Recording| (0..response.places.len()).map(|at| response.num_accepted(at)).max();
    assert!(recordings.responses.iter().filter_map(longest).any(|len| len > recordings.max_length));
}

#[test]
fn a_perfect_head_predicts_the_acceptance_probability() {
    let recordings = random(5, 3, 0.5).with_perfect_head();
    for place in recordings.responses.iter().flat_map(|response| &*response.places) {
        for candidate in place.rollout.iter().flatten().chain([&place.candidate]) {
            let expected = Some(candidate.acceptance_prob());
            assert_eq!(candidate.predicted_acceptance_prob, expected);
        }
    }
}

#[test]
fn replays_beyond_the_recording_are_errors() {
    let mut recordings = random(6, 2, 0.5);
    let refused = recordings.replay_counts(&fixed(9));
    let message =
        "the rule may draft `9` candidates a round, but `8` were recorded: record longer rollouts";
    assert_eq!(refused.unwrap_err().to_string(), message);
    recordings.head = None;
    let rule = StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
        stop_threshold: 0.5,
        without_lag: false,
        bounds: Bounds { min: 1, max: 4 },
    });
    assert_eq!(
        recordings.replay_counts(&rule).unwrap_err().to_string(),
        "the rule reads an acceptance head, but the rollouts were recorded without one"
    );
}
