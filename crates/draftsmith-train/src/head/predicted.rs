//! What heads predict along recordings that were made without them.

use draftsmith_model::{AcceptanceHead, DrafterModel, Lengths, vectors};
use draftsmith_theory::{Recording, Recordings};
use rayon::prelude::*;

use crate::head::features::{Frozen, LabelledRows};
use crate::head::rows::{Branch, Mixture};
use crate::run::devices::PerDevice;

/// The predictions of heads that read the same of a drafter, for every candidate of the drafter's recordings, in
/// the order of [`Recordings::with_head`]. The drafter reads each candidate once for all heads.
///
/// # Panics
/// If a head belongs to another drafter, or heads do not read the same.
pub fn predictions_along(
    draft: &DrafterModel,
    heads: &[&AcceptanceHead],
    recordings: &Recordings,
) -> Vec<Vec<f32>> {
    let Some(first) = heads.first() else { return Vec::new() };
    assert!(heads.iter().all(|head| head.reads() == first.reads()), "heads read the same");
    let device = draft.device();
    let lengths = Lengths::on(&device);
    let drafts: PerDevice<DrafterModel> = draft.clone().into();
    let of_response = |response: &Recording| -> Vec<Vec<f32>> {
        let mixture = candidates_of(response);
        let frozen =
            Frozen { drafts: &drafts, reads: first.reads(), batch_size: 1, lengths, stored: None };
        let rows = frozen.labelled_rows(std::slice::from_ref(&mixture));
        let features = LabelledRows::cat(&rows, lengths.padded(mixture.num_labels()), &device);
        let predicted = |head: &&AcceptanceHead| {
            let logits = head.acceptance_logit(features.clone());
            let logits: Vec<f32> = vectors::values(logits.unsqueeze::<2>());
            let chance = |logit: &f32| 1.0 / (1.0 + (-logit).exp());
            logits[..mixture.num_labels()].iter().map(chance).collect()
        };
        heads.iter().map(predicted).collect()
    };
    let responses = &recordings.responses;
    let all: Vec<Vec<Vec<f32>>> = match vectors::reach(&device) {
        true => responses.par_iter().map(of_response).collect(),
        false => responses.iter().map(of_response).collect(),
    };
    let of_head = |nth: usize| all.iter().flat_map(|response| &response[nth]).copied().collect();
    (0..heads.len()).map(of_head).collect()
}

/// A recorded response's tokens and rollouts, as candidates without labels.
fn candidates_of(response: &Recording) -> Mixture {
    let first = response.prompt.len();
    let mut mixture = Mixture { input_ids: response.prompt.clone(), ..Mixture::default() };
    for (at, place) in response.places.iter().enumerate() {
        mixture.input_ids.push(place.candidate.token_id);
        mixture.labelled.push(first + at);
        mixture.labels.push(0.0);
        mixture.branches.extend(place.rollout.as_ref().map(|rollout| Branch {
            start: first + at,
            token_ids: rollout.iter().map(|candidate| candidate.token_id).collect(),
            labels: vec![0.0; rollout.len()],
        }));
    }
    mixture
}
