//! How long it takes to replay 1,000 settings of stop rules over 100,000 response tokens.
//!
//! ```text
//! cargo bench -p xtask --bench replay
//! ```
//!
//! The recordings are made up: responses of 100 tokens, candidates that are accepted with probability 0.8,
//! and 20 candidates after every rejection, in the form that `draftsmith record` writes.

use std::time::Instant;

use draftsmith_theory::{
    Bounds, Counts, DrafterId, Draws, EntropyThresholdConfig, FixedLengthConfig, HeadTiming,
    JointConfidenceConfig, RecordedCandidate, RecordedPlace, Recording, Recordings,
    RejectionThresholdConfig, SeededDraws, StopRuleConfig,
};
use rayon::prelude::*;

const NUM_RESPONSES: usize = 1000;
const RESPONSE_LEN: usize = 100;
const MAX_LENGTH: usize = 20;
const NUM_SETTINGS: usize = 1000;
const NUM_ROUNDS: usize = 3;

fn main() {
    let recordings = recordings();
    let settings = settings();
    println!(
        "{} settings, {} response tokens, {} threads",
        settings.len(),
        recordings.num_tokens(),
        rayon::current_num_threads()
    );
    let mut times: Vec<f64> = (0..NUM_ROUNDS)
        .map(|_| {
            let begun = Instant::now();
            let totals: Vec<Counts> = settings
                .par_iter()
                .map(|config| {
                    let counts = recordings
                        .replay_counts(config)
                        .expect("settings are within what was recorded");
                    counts.into_iter().sum()
                })
                .collect();
            assert!(totals.iter().all(|counts| counts.num_tokens == recordings.num_tokens()));
            begun.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("median of {NUM_ROUNDS}: {:.2} s", times[NUM_ROUNDS / 2]);
}

fn settings() -> Vec<StopRuleConfig> {
    let settings = (0..NUM_SETTINGS).map(|number| {
        let threshold = (1 + number / 5 % 100) as f64 / 101.0;
        let bounds = Bounds { min: 1, max: 4 + number % 17 };
        match number % 5 {
            0 => StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
                stop_threshold: threshold,
                without_lag: false,
                bounds,
            }),
            1 => StopRuleConfig::RejectionThreshold(RejectionThresholdConfig {
                stop_threshold: threshold,
                without_lag: true,
                bounds,
            }),
            2 => StopRuleConfig::JointConfidence(JointConfidenceConfig {
                confidence_threshold: threshold,
                bounds,
            }),
            3 => StopRuleConfig::EntropyThreshold(EntropyThresholdConfig {
                entropy_threshold: threshold,
                entropy_scale: 0.15,
                check_interval: 1,
                bounds,
            }),
            _ => StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length: bounds.max }),
        }
    });
    settings.collect()
}

fn recordings() -> Recordings {
    let mut draws = SeededDraws::new(7, &["bench"]);
    let mut responses = Vec::with_capacity(NUM_RESPONSES);
    for _ in 0..NUM_RESPONSES {
        let mut places = Vec::with_capacity(RESPONSE_LEN);
        for at in 0..RESPONSE_LEN {
            let is_accepted = draws.bernoulli(0.8) || at + 1 == RESPONSE_LEN;
            let room = MAX_LENGTH.min(RESPONSE_LEN - at - 1);
            let rollout = (!is_accepted).then(|| {
                let mut rollout: Vec<RecordedCandidate> =
                    (0..room).map(|_| candidate(&mut draws)).collect();
                // A rejected candidate is another token.
                rollout.iter_mut().take(1).for_each(|first| first.token_id += 1);
                rollout
            });
            places.push(RecordedPlace { candidate: candidate(&mut draws), rollout });
        }
        responses.push(Recording::new(Vec::new(), places, RESPONSE_LEN));
    }
    Recordings {
        drafter: DrafterId::DRAFT,
        max_length: MAX_LENGTH,
        eos_token_ids: Vec::new(),
        head: Some(HeadTiming::AfterRead),
        responses,
        answers: None,
    }
}

fn candidate(draws: &mut SeededDraws) -> RecordedCandidate {
    let prob = draws.uniform();
    RecordedCandidate {
        token_id: 3,
        candidate_prob: prob,
        confidence: prob.max(0.3),
        confidence_of_ten: prob.max(0.3),
        entropy: 2.0 * (1.0 - prob),
        predicted_acceptance_prob: Some(draws.uniform().sqrt()),
        draft_log_prob: -1.0,
        target_log_prob: -1.2,
    }
}
