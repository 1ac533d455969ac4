//! The frozen draft's hidden states at labelled positions: all that a head sees of a row.

use burn::tensor::{Int, Tensor, TensorData};
use draftsmith_model::CausalLm;

use crate::rows::Mixture;

/// The final hidden states (after the final norm) at each mixture's labelled positions.
///
/// Rows go through the draft `batch_size` at a time, those of like length together, padded on the
/// right: the model is causal, so padding changes nothing to its left.
///
/// # Shapes
/// - output: for each mixture, in the order given, `[labels, hidden]`
pub(crate) fn labelled_features(
    draft: &CausalLm,
    mixtures: &[Mixture],
    batch_size: usize,
) -> Vec<Tensor<2>> {
    let mut by_length: Vec<usize> = (0..mixtures.len()).collect();
    by_length.sort_by_key(|row| mixtures[*row].input_ids.len());
    let mut features: Vec<Option<Tensor<2>>> = vec![None; mixtures.len()];
    for rows in by_length.chunks(batch_size) {
        let batch: Vec<&Mixture> = rows.iter().map(|row| &mixtures[*row]).collect();
        let hidden = batch_features(draft, &batch);
        let mut start = 0;
        for (row, mixture) in rows.iter().zip(&batch) {
            let end = start + mixture.labelled.len();
            features[*row] = Some(hidden.clone().slice(start..end));
            start = end;
        }
    }
    features.into_iter().map(|row| row.expect("every row is in one batch")).collect()
}

/// The hidden states at the labelled positions of one padded batch, row after row.
///
/// # Shapes
/// - output: `[labels, hidden]`
fn batch_features(draft: &CausalLm, batch: &[&Mixture]) -> Tensor<2> {
    let vocab_size = draft.config().vocab_size as u32;
    let seq = batch.iter().map(|mixture| mixture.input_ids.len()).max().unwrap_or(0);
    let mut ids: Vec<i32> = Vec::with_capacity(batch.len() * seq);
    let mut positions: Vec<i32> = Vec::new();
    for (row, mixture) in batch.iter().enumerate() {
        positions.extend(mixture.labelled.iter().map(|position| (row * seq + position) as i32));
        // A token that the draft has no embedding for becomes token 0, as when it drafts.
        let readable = |id: &u32| if *id < vocab_size { *id as i32 } else { 0 };
        ids.extend(mixture.input_ids.iter().map(readable));
        ids.resize((row + 1) * seq, 0);
    }
    let device = draft.device();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [batch.len(), seq]), &device);
    let hidden = draft.hidden_states(ids);
    let [rows, seq, width] = hidden.dims();
    let num_labels = positions.len();
    let positions = Tensor::<1, Int>::from_data(TensorData::new(positions, [num_labels]), &device);
    hidden.reshape([rows * seq, width]).select(0, positions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::TrainingRow;
    use crate::test_pair::{responses, tiny_draft};

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    #[test]
    fn features_are_those_of_each_row_alone_at_the_candidates_own_positions() {
        let draft = tiny_draft(16, 64);
        let mixtures: Vec<Mixture> = responses(9, 20, 8)
            .iter()
            .map(|row| TrainingRow::new(row, 64).unwrap().unwrap().mixture(2, 1, 0.3))
            .collect();
        let features = labelled_features(&draft, &mixtures, 4);
        assert_eq!(features.len(), mixtures.len());
        for (mixture, features) in mixtures.iter().zip(features) {
            let len = mixture.input_ids.len();
            let ids: Vec<i32> = mixture.input_ids.iter().map(|id| *id as i32).collect();
            let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, len]), &draft.device());
            let all = values(draft.hidden_states(ids));
            let expected: Vec<f32> = mixture
                .labelled
                .iter()
                .flat_map(|at| all[at * 16..(at + 1) * 16].to_vec())
                .collect();
            assert_eq!(features.dims(), [mixture.labels.len(), 16]);
            for (found, expected) in values(features).into_iter().zip(expected) {
                // Another batch shape may sum in another order: f32 rounding of numbers near 1.
                assert!((found - expected).abs() < 1e-5, "{found} != {expected}");
            }
        }
    }

    #[test]
    fn a_token_the_draft_does_not_know_is_read_as_token_0() {
        let draft = tiny_draft(16, 64);
        let mixture = |id: u32| Mixture {
            input_ids: vec![3, id, 5],
            labelled: vec![1, 2],
            labels: vec![0.5; 2],
        };
        let [known, unknown] =
            [0, 1_000_000].map(|id| values(labelled_features(&draft, &[mixture(id)], 1).remove(0)));
        assert_eq!(known, unknown);
    }
}
