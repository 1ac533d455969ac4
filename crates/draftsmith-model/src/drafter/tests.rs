//! Every drafter equals its parts, gives the same over whole sequences and over a cache in any
//! pieces, and reads a token without an embedding as token 0.

mod families;

use std::iter::once;

use super::*;
use crate::adapter::{AdapterArchitecture, AdapterConfig};
use crate::draft_vocabulary::DraftVocabulary;
use crate::fixtures::{FIXTURES, load};

const EXIT_LAYER: usize = 1;

fn adapter(target: &CausalLm) -> Adapter {
    let config = AdapterConfig::new(target.config(), EXIT_LAYER)
        .expect("a valid exit layer")
        .with(|it| it.architecture = AdapterArchitecture::AttentionWithHead);
    config.init(&Device::flex())
}

/// A draft model, and a self-draft with its LM head.
fn drafters() -> [DrafterModel; 2] {
    let target = load(FIXTURES[0]);
    let adapter = adapter(&target);
    [(&target).into(), DrafterModel::self_draft(target, adapter, EXIT_LAYER)]
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("f32")
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        // f32 sums of numbers near 1, in another order.
        assert!((found - expected).abs() < 1e-5 * (1.0 + expected.abs()), "{found} {expected}");
    }
}

fn ids() -> Vec<u32> {
    (0..12).map(|i| 3 + i * 7 % 40).collect()
}

#[test]
fn a_self_draft_is_the_targets_first_layers_then_the_adapter_and_its_head() {
    let [_, drafter] = drafters();
    let Exit { layer, adapter } = drafter.exit.as_ref().expect("a self-draft");
    let ids = ids();
    let tensor: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let tensor = Tensor::<2, Int>::from_data(TensorData::new(tensor, [1, 12]), &Device::flex());
    let hidden = adapter.forward(drafter.model.exit_states(tensor, *layer));
    assert_close(
        &values(drafter.hidden_states(&[&ids], Lengths::AsGiven)),
        &values(hidden.clone()),
    );

    let expected = adapter.logits(&hidden.clone().into(), &drafter.model);
    let of_target = drafter.model.logits(&hidden.clone().into());
    let [found, expected, of_target] =
        Rows::to_host([drafter.logits(&hidden.into()), expected, of_target]).expect("brought");
    assert_close(&found, &expected);
    assert_eq!(found.len(), 12 * drafter.vocab_size());
    assert!(found.iter().zip(&of_target).any(|(own, target)| (own - target).abs() > 0.01));
}

#[test]
fn any_pieces_over_a_cache_give_the_same_as_whole_sequences() {
    for drafter in drafters() {
        let (ids, width) = (ids(), drafter.hidden_size());
        let longer: Vec<u32> = ids.iter().rev().chain(&ids).copied().collect();
        // Next to a longer sequence, hence padded.
        let whole = drafter.hidden_states(&[&ids, &longer], Lengths::AsGiven);
        let expected = values(whole.slice([0..1, 0..12, 0..width]));
        let (mut features, mut cache) =
            (drafter.new_feature_cache(12, 1), drafter.new_cache(12, 1));
        for (start, end) in [(0, 9), (9, 12), (4, 5), (5, 12), (0, 12)] {
            for num_rows in [end - start, 1] {
                cache.truncate(0, start);
                features.iter_mut().for_each(|cache| cache.truncate(0, start));
                let read = drafter.features(&ids[start..end], features.as_mut());
                let normed = drafter.forward_cached(read, once(num_rows), &mut cache);
                let [found] = Rows::to_host([normed]).expect("brought");
                assert_close(&found, &expected[(end - num_rows) * width..end * width]);
            }
        }
        // A cache filled for keys and values only serves as one that was read.
        cache.truncate(0, 0);
        features.iter_mut().for_each(|cache| cache.truncate(0, 0));
        let filled = drafter.features(&ids[..8], features.as_mut());
        drafter.fill_cache(filled, &mut cache);
        let read = drafter.features(&ids[8..], features.as_mut());
        let [found] =
            Rows::to_host([drafter.forward_cached(read, once(4), &mut cache)]).expect("brought");
        assert_close(&found, &expected[8 * width..]);
    }
}

#[test]
fn a_token_without_an_embedding_is_read_as_token_0() {
    for drafter in drafters() {
        let unknown = drafter.vocab_size() as u32;
        let [known, found] =
            [0, unknown].map(|id| values(drafter.hidden_states(&[&[3, id, 5]], Lengths::AsGiven)));
        assert_eq!(found, known);
        let [known, found] = [[3, 0, 5], [3, unknown, 5]]
            .map(|ids| Rows::to_host([drafter.embed_ids(&ids)]).expect("brought"));
        assert_eq!(found, known);
    }
}

#[test]
fn a_draft_vocabulary_keeps_its_tokens_logits_and_gives_others_probability_0() {
    for fixture in [FIXTURES[0], "gemma2-bf16"] {
        let target = load(fixture);
        let vocabulary = DraftVocabulary::new(vec![3, 4, 17, 40]);
        let config = AdapterConfig::new(target.config(), EXIT_LAYER).expect("a valid exit layer");
        let narrow = AdapterConfig { draft_vocabulary: Some(vocabulary.clone()), ..config.clone() };
        Device::flex().seed(7);
        let adapter = narrow.init(&Device::flex());
        let drafter = DrafterModel::self_draft(target.clone(), adapter.clone(), EXIT_LAYER);
        let of_tensors = DrafterModel::self_draft(target.to_tensors(), adapter.clone(), EXIT_LAYER);
        let hidden = drafter.hidden_states(&[&ids()], Lengths::AsGiven);
        let expected = adapter.logits(&hidden.clone().into(), &target);
        let [found, of_tensors, expected] = Rows::to_host([
            drafter.logits(&hidden.clone().into()),
            of_tensors.logits(&hidden.into()),
            expected,
        ])
        .expect("brought");
        assert_eq!(found.len(), expected.len());
        let pairs = found.iter().zip(&of_tensors).zip(&expected);
        for (place, ((found, of_tensors), expected)) in pairs.enumerate() {
            if vocabulary.contains((place % drafter.vocab_size()) as u32) {
                assert_close(&[*found, *of_tensors], &[*expected; 2]);
            } else {
                assert_eq!([found.exp(), of_tensors.exp()], [0.0; 2]);
            }
        }
    }
}
