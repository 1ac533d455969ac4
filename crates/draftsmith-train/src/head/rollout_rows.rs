//! Conversion between recordings and the rows of a rollouts file.

use draftsmith_data::{ResponseRow, RolloutCandidates, RolloutRow};
use draftsmith_theory::{RecordedCandidate, RecordedPlace, Recording, Recordings};

/// Converts the recordings of `responses` to the rows that heads are trained on.
///
/// # Panics
/// If the numbers of responses and recordings differ.
pub fn rollout_rows(responses: &[ResponseRow], recordings: &Recordings) -> Vec<RolloutRow> {
    assert_eq!(responses.len(), recordings.responses.len(), "one recording for each response");
    let has_head = recordings.head.is_some();
    let recorded = responses.iter().zip(&recordings.responses);
    recorded.flat_map(|(row, recording)| rows_of_recording(&row.id, recording, has_head)).collect()
}

/// Converts a recording to rows. The first row is the response. Each further row is the
/// rollout that was recorded at one position of the response.
pub fn rows_of_recording(id: &str, recording: &Recording, has_head: bool) -> Vec<RolloutRow> {
    let row = |start: usize, is_response, candidates: &[&RecordedCandidate]| RolloutRow {
        id: id.to_owned(),
        prompt_ids: if is_response { recording.prompt.clone() } else { Vec::new() },
        start: start as u32,
        limit: recording.limit as u32,
        candidates: columns(candidates, has_head),
        is_response,
    };
    let tokens: Vec<_> = recording.places.iter().map(|place| &place.candidate).collect();
    let mut rows = vec![row(0, true, &tokens)];
    for (start, place) in recording.places.iter().enumerate() {
        if let Some(rollout) = &place.rollout {
            rows.push(row(start, false, &rollout.iter().collect::<Vec<_>>()));
        }
    }
    rows
}

/// Converts valid rows back to recordings. Returns the ids of the responses and their recordings.
pub fn recordings_of(rows: &[RolloutRow]) -> (Vec<String>, Vec<Recording>) {
    let recorded = rows.chunk_by(|one, next| one.id == next.id).map(|rows| {
        let (response, rollouts) = rows.split_first().expect("a chunk has a row");
        let place = |candidate| RecordedPlace { candidate, rollout: None };
        let mut places: Vec<RecordedPlace> = candidates(&response.candidates).map(place).collect();
        for rollout in rollouts {
            places[rollout.start as usize].rollout =
                Some(candidates(&rollout.candidates).collect());
        }
        let prompt = response.prompt_ids.clone();
        (response.id.clone(), Recording::new(prompt, places, response.limit as usize))
    });
    recorded.unzip()
}

fn columns(candidates: &[&RecordedCandidate], has_head: bool) -> RolloutCandidates {
    let list = |value: fn(&RecordedCandidate) -> f64| {
        candidates.iter().map(|candidate| value(candidate)).collect::<Vec<f64>>()
    };
    // The last candidate of a row needs no prediction.
    let predicted = || list(|candidate| candidate.predicted_acceptance_prob.unwrap_or(f64::NAN));
    RolloutCandidates {
        candidate_ids: candidates.iter().map(|candidate| candidate.token_id).collect(),
        candidate_prob: list(|candidate| candidate.candidate_prob),
        confidence: list(|candidate| candidate.confidence),
        confidence_of_ten: list(|candidate| candidate.confidence_of_ten),
        draft_entropy: list(|candidate| candidate.entropy),
        predicted_acceptance_prob: has_head.then(predicted),
        draft_log_prob: list(|candidate| candidate.draft_log_prob),
        target_log_prob: list(|candidate| candidate.target_log_prob),
    }
}

fn candidates(columns: &RolloutCandidates) -> impl Iterator<Item = RecordedCandidate> {
    let predicted = columns.predicted_acceptance_prob.as_ref();
    (0..columns.candidate_ids.len()).map(move |at| RecordedCandidate {
        token_id: columns.candidate_ids[at],
        candidate_prob: columns.candidate_prob[at],
        confidence: columns.confidence[at],
        confidence_of_ten: columns.confidence_of_ten[at],
        entropy: columns.draft_entropy[at],
        predicted_acceptance_prob: predicted.map(|of| of[at]).filter(|prob| !prob.is_nan()),
        draft_log_prob: columns.draft_log_prob[at],
        target_log_prob: columns.target_log_prob[at],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(token_id: u32, predicted: Option<f64>) -> RecordedCandidate {
        let share = f64::from(token_id) / 97.0;
        RecordedCandidate {
            token_id,
            candidate_prob: share,
            confidence: share.sqrt(),
            confidence_of_ten: share.cbrt(),
            entropy: 1.0 + share,
            predicted_acceptance_prob: predicted,
            draft_log_prob: share.ln(),
            target_log_prob: f64::NEG_INFINITY,
        }
    }

    fn recording(has_head: bool) -> Recording {
        let predicted = |prob: f64| has_head.then_some(prob);
        let rollout = vec![candidate(9, predicted(0.25)), candidate(8, None)];
        let place = |candidate, rollout| RecordedPlace { candidate, rollout };
        let places = vec![
            place(candidate(3, predicted(0.5)), None),
            place(candidate(4, predicted(0.75)), Some(rollout)),
            place(candidate(5, None), None),
        ];
        Recording::new(vec![6, 7], places, 4)
    }

    #[test]
    fn recordings_come_back_from_rows() {
        for has_head in [false, true] {
            let one = recording(has_head);
            let other = Recording::new(vec![6], one.places.to_vec(), 7);
            let mut rows = rows_of_recording("set#0", &one, has_head);
            let starts: Vec<(u32, bool)> =
                rows.iter().map(|row| (row.start, row.is_response)).collect();
            assert_eq!(starts, [(0, true), (1, false)]);
            rows.extend(rows_of_recording("set#0#1", &other, has_head));
            draftsmith_data::validate_rollouts(&rows).expect("rows keep their rules");
            let (ids, recordings) = recordings_of(&rows);
            assert_eq!(ids, ["set#0", "set#0#1"]);
            assert_eq!(recordings, [one, other]);
        }
    }
}
