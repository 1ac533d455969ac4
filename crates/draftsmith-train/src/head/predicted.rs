//! Predictions of heads along recordings that were made without these heads.

use draftsmith_data::ResponseRow;
use draftsmith_model::{AcceptanceHead, DrafterModel, Lengths, vectors};
use draftsmith_theory::{Recording, Recordings};
use rayon::prelude::*;

use crate::error::Result;
use crate::head::features::{Frozen, LabelledRows, StatesOrigin};
use crate::head::rows::{Branch, Mixture, TrainingRow};
use crate::head::settings::MixedLabels;
use crate::run::devices::PerDevice;
use crate::states::{StatesRow, StatesSource};

/// Computes each head's predictions for every candidate of the drafter's recordings, in the order
/// of [`Recordings::with_head`]. The drafter reads each candidate once for all heads, because all
/// heads read the same inputs. `source` gives the target's hidden states, if its layers do not run
/// here.
///
/// # Errors
/// If the source fails.
///
/// # Panics
/// If a head belongs to another drafter, or if the heads read different inputs.
pub fn predictions_along(
    draft: &DrafterModel,
    heads: &[&AcceptanceHead],
    recordings: &Recordings,
    source: Option<&dyn StatesSource>,
) -> Result<Vec<Vec<f32>>> {
    let Some(first) = heads.first() else { return Ok(Vec::new()) };
    assert!(heads.iter().all(|head| head.reads() == first.reads()), "heads read the same");
    let device = draft.device();
    let drafts: PerDevice<DrafterModel> = draft.clone().into();
    // As in training, the heads then read scaled embeddings; exported heads read unscaled ones.
    let gain = 1.0 / draft.embedding_gain();
    let heads: Vec<AcceptanceHead> =
        heads.iter().map(|head| (*head).clone().with_embedding_gain(gain)).collect();
    let of_response = |response: &Recording| {
        predicted(&drafts, &heads, &candidates_of(response), StatesOrigin::Drafter)
    };
    let responses = &recordings.responses;
    let all: Vec<Vec<Vec<f32>>> = match (source, vectors::reach(&device)) {
        (Some(source), _) => predicted_with(source, &drafts, &heads, responses)?,
        (None, true) => responses.par_iter().map(of_response).collect(),
        (None, false) => responses.iter().map(of_response).collect(),
    };
    let of_head = |nth: usize| all.iter().flat_map(|response| &response[nth]).copied().collect();
    Ok((0..heads.len()).map(of_head).collect())
}

/// Computes each head's predictions along each response, with hidden states from `source`.
fn predicted_with(
    source: &dyn StatesSource,
    drafts: &PerDevice<DrafterModel>,
    heads: &[AcceptanceHead],
    responses: &[Recording],
) -> Result<Vec<Vec<Vec<f32>>>> {
    let mixtures: Vec<Mixture> = responses.iter().map(candidates_of).collect();
    let rows = mixtures.iter().map(Mixture::read_ids);
    let rows: Vec<StatesRow<'_>> =
        rows.map(|ids| StatesRow::of_layers("a held-out response", ids)).collect();
    let mut all = Vec::with_capacity(responses.len());
    source.states(drafts.first().target_layers(), &rows, &mut |nth, states| {
        all.push(predicted(drafts, heads, &mixtures[nth], StatesOrigin::Target(&states.layers)));
        Ok(())
    })?;
    Ok(all)
}

/// Computes each head's predictions for the labels of a mixture. All heads read the same inputs,
/// with scaled embeddings.
fn predicted(
    drafts: &PerDevice<DrafterModel>,
    heads: &[AcceptanceHead],
    mixture: &Mixture,
    origin: StatesOrigin<'_>,
) -> Vec<Vec<f32>> {
    let device = drafts.first().device();
    let (lengths, reads) = (Lengths::on(&device), heads[0].reads());
    let frozen = Frozen { drafts, reads, batch_size: 1, lengths, origin };
    let rows = frozen.labelled_rows(std::slice::from_ref(mixture));
    let features = LabelledRows::cat(&rows, lengths.padded_numbers(mixture.num_labels()), &device);
    let predicted = |head: &AcceptanceHead| {
        let logits = head.acceptance_logit(features.clone());
        let logits: Vec<f32> = vectors::values(logits.unsqueeze::<2>());
        let chance = |logit: &f32| 1.0 / (1.0 + (-logit).exp());
        logits[..mixture.num_labels()].iter().map(chance).collect()
    };
    heads.iter().map(predicted).collect()
}

/// The training input that a head gets for a row in the first epoch (SpecDec++, section 3.3).
#[derive(Debug, Clone, PartialEq)]
pub struct TrainingInput {
    /// The mixed sequence Z: some tokens of the target's response X are kept, the others are
    /// replaced by the draft's tokens Y.
    pub token_ids: Vec<u32>,
    /// The label of each token of Z: min(1, p/q) for a token of Y, `None` for a kept token of X.
    pub labels: Vec<Option<f32>>,
}

impl TrainingInput {
    /// Builds the input of a row, cut to `context` tokens. Returns `None` if no position fits, or
    /// if the row has no prompt.
    ///
    /// # Errors
    /// If the row has no draft columns.
    pub fn of(
        row: &ResponseRow,
        context: usize,
        seed: u64,
        mixing_ratio: f64,
    ) -> Result<Option<Self>> {
        let training = TrainingRow::new(row, context, MixedLabels::Sampled)?;
        Ok(training.map(|training| {
            let mixture = training.mixture(seed, 1, mixing_ratio);
            let first = row.prompt_ids.len();
            let mut labels = vec![None; mixture.input_ids.len() - first];
            for (at, label) in mixture.labelled.iter().zip(&mixture.labels) {
                labels[at - first] = Some(*label);
            }
            Self { token_ids: mixture.input_ids[first..].to_vec(), labels }
        }))
    }
}

/// Converts a recorded response and its rollouts to a mixture whose candidates have no labels.
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
