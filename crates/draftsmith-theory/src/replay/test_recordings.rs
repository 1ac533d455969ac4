//! Synthetic recordings.

use super::{RecordedCandidate, RecordedPlace, Recording, Recordings};
use crate::{DrafterId, Draws, HeadTiming, SeededDraws};

/// The end token.
const END: u32 = 9;
/// A rejected token.
const REJECTED: u32 = 8;

/// Draws responses of 1 to 40 tokens. Each token is accepted with a probability that varies around
/// `mean`. The head's prediction and the confidence are correlated with this probability.
pub(crate) fn random(seed: u64, num_responses: usize, mean: f64) -> Recordings {
    let max_length = 8;
    let mut draws = SeededDraws::new(seed, &["recordings"]);
    let responses = (0..num_responses)
        .map(|_| {
            let len = 1 + draws.categorical(&[1.0; 40]);
            let limit = len + draws.categorical(&[1.0, 1.0]);
            let places = (0..len)
                .map(|at| {
                    let chance = (mean + 0.6 * (draws.uniform() - 0.5)).clamp(0.02, 0.98);
                    let accepted = draws.bernoulli(chance) || at + 1 == limit;
                    let rollout = (!accepted).then(|| {
                        let next = |n| candidate(&mut draws, if n == 0 { chance } else { mean });
                        let mut rollout: Vec<RecordedCandidate> =
                            (0..max_length).map(next).collect();
                        rollout[0].token_id = REJECTED;
                        rollout
                    });
                    let mut candidate = candidate(&mut draws, chance);
                    if at + 1 == len && len < limit {
                        candidate.token_id = END;
                    }
                    RecordedPlace { candidate, rollout }
                })
                .collect();
            Recording::new(vec![1], places, limit)
        })
        .collect();
    Recordings {
        drafter: DrafterId::DRAFT,
        max_length,
        eos_token_ids: vec![END],
        head: Some(HeadTiming::AfterRead),
        responses,
        answers: None,
    }
}

fn candidate(draws: &mut SeededDraws, chance: f64) -> RecordedCandidate {
    let mut near = || (chance + 0.1 * (draws.uniform() - 0.5)).clamp(0.01, 0.99);
    let (candidate_prob, confidence) = (near(), near());
    RecordedCandidate {
        token_id: 7,
        candidate_prob,
        confidence,
        confidence_of_ten: confidence.sqrt(),
        entropy: 2.0 * (1.0 - near()),
        predicted_acceptance_prob: Some(near()),
        draft_log_prob: -1.0,
        target_log_prob: -1.0 + chance.ln(),
    }
}
