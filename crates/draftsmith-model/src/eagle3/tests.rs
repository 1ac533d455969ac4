//! Training reads what decoding computes.

use std::ops::Range;
use std::sync::Arc;

use burn::nn::Linear;
use burn::tensor::{Device, Int, TensorData};

use super::*;
use crate::WeightDtype;
use crate::buckets::{Lengths, padded_rows};
use crate::draft_vocabulary::narrowed;
use crate::drafter::DrafterModel;
use crate::rows::DeviceRows;
use crate::state_network::{CachedNetwork, StateNetwork};
use crate::weights::{NamedTensor, write_with_ids};

/// Numbers in [0, 1), the same in every run.
fn draws(mut state: u64) -> impl FnMut() -> f64 {
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// A target, and a drafter whose key and value heads are shared.
fn models(norm_before_residual: bool) -> (CausalLm, Eagle3) {
    models_with(|it| it.norm_before_residual = norm_before_residual)
}

fn models_with(change: impl FnOnce(&mut Eagle3Config)) -> (CausalLm, Eagle3) {
    let shape = ModelShape {
        vocab_size: 24,
        hidden_size: 16,
        num_layers: 4,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 4,
        context: 64,
        bos_token_id: None,
        eos_token_ids: vec![],
    };
    let config = ModelConfig::llama(shape, 24);
    let target = config.init(&Device::flex());
    let config = Eagle3Config::new(&config).with(change);
    (target, config.init_from(&Device::flex(), draws(5)))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

#[test]
fn unrolled_steps_equal_those_of_decoding() {
    const SEQ: usize = 9;
    const STEPS: usize = 4;
    let forms: [fn(&mut Eagle3Config); 9] = [
        |_| {},
        |it| it.norm_before_residual = true,
        |it| it.norm_output = true,
        |it| it.state_norms = StateNorms::OfAll,
        |it| it.state_norms = StateNorms::OfEach,
        Eagle3Config::add_head_norms,
        |it| it.set_window(Some(1)),
        |it| it.set_window(Some(3)),
        |it| {
            it.set_window(Some(5));
            it.add_head_norms();
        },
    ];
    for change in forms {
        let (target, drafter) = models_with(change);
        let device = Device::flex();
        let ids: Vec<u32> = (0..SEQ as u32).map(|n| (n * 7 + 3) % 24).collect();
        let mut draw = draws(6);
        let states = [(); 3].map(|()| {
            let values: Vec<f32> = (0..2 * SEQ * 16).map(|_| draw() as f32 - 0.5).collect();
            Tensor::<3>::from_data(TensorData::new(values, [2, SEQ, 16]), &device)
        });
        let tokens: Vec<i32> = ids.iter().chain(&ids).map(|id| *id as i32).collect();
        let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [2, SEQ]), &device);
        let flat = states.clone().map(|states| states.reshape([2 * SEQ, 16]));
        let features = part(&drafter.fc).forward(drafter.normed_states(flat.to_vec()));
        let features = features.reshape([2, SEQ, 16]);
        // The first sequence has no position, the others belong to one that is longer and one that ends early.
        for (begun, lengths) in [
            ([0..0, 0..SEQ], Lengths::AsGiven),
            ([0..SEQ, 3..7], Lengths::AsGiven),
            ([3..7, 0..SEQ], Lengths::InBuckets),
        ] {
            let embedded = target.embed(tokens.clone());
            let unrolled = drafter.unrolled(UnrolledInputs {
                states: states.to_vec(),
                next_ids: tokens.clone(),
                embedded: Some(embedded),
                begun: &begun,
                num_steps: STEPS,
                lengths,
            });
            let mut first = 0;
            for (row, begun) in begun.iter().enumerate() {
                let trained: Vec<Vec<Vec<f32>>> = unrolled
                    .iter()
                    .map(|rows| {
                        let each = begun.clone().zip(first..);
                        each.map(|(_, nth)| values(rows.clone().narrow(0, nth, 1))).collect()
                    })
                    .collect();
                first += begun.len();
                let features = features.clone().narrow(0, row, 1);
                check_drafts((&target, &drafter), &ids, features, begun.clone(), &trained);
            }
        }
    }
}

/// Drafts from each of these positions, and compares the LM head's inputs with those of training, by step and
/// position.
fn check_drafts(
    (target, drafter): (&CausalLm, &Eagle3),
    ids: &[u32],
    features: Tensor<3>,
    begun: Range<usize>,
    trained: &[Vec<Vec<f32>>],
) {
    let device = Device::flex();
    for start in begun.clone() {
        let known = start + 1;
        let mut cache = drafter.new_cache(ids.len(), 1);
        let given = features.clone().narrow(1, 0, known);
        let padding = Tensor::zeros([1, padded_rows(known), 16], &device);
        let tensor = Box::new(padding.slice_assign([0..1, 0..known, 0..16], given));
        let embedded = target.embed_ids(&ids[..known]);
        let given = embedded.with_place(DeviceRows { tensor, num_rows: known });
        let mut output = drafter.forward_cached(embedded, given, &mut cache).last(1);
        for (step, trained) in trained.iter().enumerate() {
            let position = start + step;
            let DeviceRows { tensor, .. } =
                drafter.normed(output.clone()).into_parts().0.into_device(&device);
            let decoded = values(tensor.narrow(1, 0, 1));
            for (one, other) in decoded.iter().zip(&trained[position - begun.start]) {
                assert!((one - other).abs() < 2e-5, "round {start}, step {step}: {one} {other}");
            }
            if position + 1 == begun.end {
                break;
            }
            let embedded = target.embed_ids(&ids[position + 1..position + 2]);
            output = drafter.forward_cached(embedded, output, &mut cache);
        }
    }
}

#[test]
fn a_drafter_begins_with_what_fits_of_the_target() {
    let (target, drafter) = models(false);
    let vocabulary = DraftVocabulary::new([1, 2, 5]);
    let config = Eagle3Config {
        draft_vocabulary: Some(vocabulary.clone()),
        ..Eagle3Config::new(target.config())
    };
    let config = Arc::new(config);
    let begun = Eagle3 { config, ..drafter.clone() }.with_weights_of(&target);
    let theirs = target.layer(3).unwrap().attention.unwrap();
    let layer = |drafter: &Eagle3| drafter.stack.layers[0].attention.clone().unwrap();
    let (own, drawn) = (layer(&begun), layer(&drafter));
    let halves = |linear: &Linear| {
        let weight = linear.weight.val();
        [values(weight.clone().narrow(0, 0, 16)), values(weight.narrow(0, 16, 16))]
    };
    let [first, second] = halves(own.projections()[1]);
    assert_eq!(first, halves(drawn.projections()[1])[0]);
    assert_eq!(second, values(theirs.projections()[1].weight.val()));
    assert_eq!(
        values(own.projections()[3].weight.val()),
        values(theirs.projections()[3].weight.val())
    );
    assert_eq!(
        values(begun.own_head().unwrap()),
        values(narrowed(target.lm_head_weight(), &vocabulary))
    );
    let fc = values(part(&begun.fc).weight.val());
    let before = values(part(&drafter.fc).weight.val());
    assert!((fc[32 * 16] - (1.0 + before[32 * 16] / 10.0)).abs() < 1e-6);
    assert!((fc[1] - before[1] / 10.0).abs() < 1e-6);
}

#[test]
fn a_heads_states_are_those_of_training() {
    const LAYERS: [usize; 3] = [1, 2, 3];
    let (target, drafter) = models(false);
    let ids: Vec<u32> = (0..9).map(|n| (n * 7 + 3) % 24).collect();
    let tokens: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let tokens = Tensor::<2, Int>::from_data(TensorData::new(tokens, [1, 9]), &Device::flex());
    let states = target.exit_states_at(tokens.clone(), &LAYERS, std::slice::from_ref(&(0..9)));
    let states: Vec<_> = states.into_iter().map(|state| state.narrow(1, 0, 8)).collect();
    let given: Vec<Vec<f32>> = states.iter().cloned().map(values).collect();
    let embedded = target.embed(tokens.clone()).narrow(1, 1, 8);
    let steps = drafter.unrolled(UnrolledInputs {
        states,
        next_ids: tokens.narrow(1, 1, 8),
        embedded: Some(embedded),
        begun: std::slice::from_ref(&(0..8)),
        num_steps: 4,
        lengths: Lengths::AsGiven,
    });
    let rounds = [(2, &ids[2..5]), (5, &ids[5..8])];
    let drafter = DrafterModel::eagle3(target, drafter, LAYERS.to_vec());
    let [found, of_given] = [None, Some(given)].map(|given| {
        values(drafter.round_states(&ids, &rounds, given).into_tensor(&Device::flex()))
    });
    assert!(found.iter().zip(&of_given).all(|(one, other)| (one - other).abs() < 1e-5));
    // After token t of the text the drafter is at position t − 1, in its first step; after a candidate in a later one.
    let along = (1..9).map(|token| (token, 0, token - 1));
    let of_rounds = rounds.iter().flat_map(|(start, candidates)| {
        (0..candidates.len()).map(move |nth| (nth + 1, start - 1 + nth))
    });
    let of_rounds = of_rounds.zip(9..).map(|((step, position), row)| (row, step, position));
    for (row, step, position) in along.chain(of_rounds) {
        let expected = values(steps[step].clone().narrow(0, position, 1));
        for (one, other) in found[row * 16..(row + 1) * 16].iter().zip(&expected) {
            assert!((one - other).abs() < 2e-5, "row {row}: {one} {other}");
        }
    }
}

/// What is changed in a drafter's files.
struct Change {
    /// What is wrong.
    name: &'static str,
    /// The tensor to leave out.
    without: Option<&'static str>,
    /// A tensor of ids to add.
    ids: Option<(&'static str, &'static [u32])>,
    /// Keys of `config.json`.
    keys: Value,
    /// What the error names.
    named: &'static [&'static str],
}

/// A drafter of 24 tokens, or of 3 of them if `narrow`, written with a change, read back.
fn read_changed(change: &Change, narrow: bool) -> Result<(Eagle3Config, Eagle3)> {
    let (target, _) = models(false);
    let draft_vocabulary = narrow.then(|| DraftVocabulary::new([1, 2, 5]));
    let config = Eagle3Config { draft_vocabulary, ..Eagle3Config::new(target.config()) };
    let drafter = config.init_from(&Device::flex(), draws(9));
    let dir = tempfile::tempdir().unwrap();
    drafter.write_dir(dir.path(), &config).unwrap();
    let mut tensors = drafter.named(&config);
    tensors.retain(|tensor| Some(tensor.name.as_str()) != change.without);
    let wide = |ids: &[u32]| ids.iter().map(|id| i64::from(*id)).collect::<Vec<i64>>();
    let mut ids: Vec<(&str, Vec<i64>)> =
        change.ids.into_iter().map(|(name, ids)| (name, wide(ids))).collect();
    if narrow && change.without != Some("d2t") {
        ids.push(("d2t", vec![1, 1, 3]));
    }
    let path = dir.path().join("model.safetensors");
    write_with_ids(&path, &tensors, &ids, WeightDtype::F32, &[]).unwrap();
    let path = dir.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let json_keys = json.as_object_mut().unwrap();
    json_keys.remove("weights_hash");
    for (key, value) in change.keys.as_object().into_iter().flatten() {
        match value {
            Value::Null => json_keys.remove(key),
            other => json_keys.insert(key.clone(), other.clone()),
        };
    }
    std::fs::write(&path, json.to_string()).unwrap();
    Eagle3::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex())
}

const NOTHING: Change =
    Change { name: "nothing", without: None, ids: None, keys: Value::Null, named: &[] };

#[test]
fn damaged_drafters_are_refused_by_name() {
    let all = [
        (
            Change {
                name: "offsets of a drafter of all tokens",
                ids: Some(("d2t", &[0; 24])),
                named: &["draft_vocab_size", "all tokens", "`d2t`", "remove it"],
                ..NOTHING
            },
            false,
        ),
        (
            Change {
                name: "no offsets",
                without: Some("d2t"),
                named: &["draft_vocab_size", "3 of 24", "`d2t`"],
                ..NOTHING
            },
            true,
        ),
        (
            Change { name: "no fc", without: Some("fc.weight"), named: &["fc.weight"], ..NOTHING },
            false,
        ),
        (
            Change {
                name: "no norm",
                without: Some("midlayer.hidden_norm.weight"),
                named: &["midlayer.hidden_norm.weight"],
                ..NOTHING
            },
            true,
        ),
        (
            Change {
                name: "an unknown tensor",
                ids: Some(("medusa", &[1])),
                named: &["medusa"],
                ..NOTHING
            },
            false,
        ),
        (
            Change {
                name: "layers that do not ascend",
                keys: serde_json::json!({ "eagle_aux_hidden_state_layer_ids": [3, 2, 1] }),
                named: &["eagle_aux_hidden_state_layer_ids", "[3, 2, 1]", "sort the columns"],
                ..NOTHING
            },
            false,
        ),
        (
            Change {
                name: "a layer that the target lacks",
                keys: serde_json::json!({ "eagle_aux_hidden_state_layer_ids": [1, 2, 5] }),
                named: &["names layer 5", "4 layers"],
                ..NOTHING
            },
            false,
        ),
        (
            Change {
                name: "another width without embeddings",
                keys: serde_json::json!({ "target_hidden_size": 32 }),
                named: &["target_hidden_size", "is 32", "16"],
                ..NOTHING
            },
            false,
        ),
    ];
    for (change, narrow) in all {
        let error = read_changed(&change, narrow).map(|_| ()).expect_err(change.name).to_string();
        for part in change.named {
            assert!(error.contains(part), "{}: `{part}` is not in: {error}", change.name);
        }
    }
}

#[test]
fn forms_that_some_runtimes_lack_are_read_and_written_as_all_know_them() {
    let keys = serde_json::json!({
        "draft_vocab_size": null,
        "eagle_config": { "eagle_aux_hidden_state_layer_ids": [1, 2, 3] },
    });
    let (config, drafter) = read_changed(&Change { keys, ..NOTHING }, true).unwrap();
    assert_eq!((config.target_layers.clone(), config.num_draft_tokens()), (vec![1, 2, 3], 3));
    let dir = tempfile::tempdir().unwrap();
    drafter.write_dir(dir.path(), &config).unwrap();
    let json = std::fs::read(dir.path().join("config.json")).unwrap();
    let json: Value = serde_json::from_slice(&json).unwrap();
    assert_eq!(json["draft_vocab_size"], 3);
    assert_eq!(json["eagle_aux_hidden_state_layer_ids"], serde_json::json!([1, 2, 3]));
    assert!(json.get("eagle_config").is_none());
    // The defaults of four layers are not written.
    let defaults =
        Eagle3Config { target_layers: Eagle3Config::default_layers(4).to_vec(), ..config };
    drafter.write_dir(dir.path(), &defaults).unwrap();
    let json = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    assert!(!json.contains("eagle_aux_hidden_state_layer_ids"));
}

#[test]
fn drafters_of_other_trainers_are_read() {
    let (target, drafter) = models(true);
    let config = Eagle3Config::new(target.config()).with(|it| it.norm_before_residual = true);
    let dir = tempfile::tempdir().unwrap();
    let (path, weights) = (dir.path().join("config.json"), dir.path().join("model.safetensors"));
    drafter.write_dir(dir.path(), &config).unwrap();
    let mut tensors = drafter.named(&config);
    for tensor in &mut tensors {
        tensor.name = tensor.name.replace("midlayer.", "layers.0.");
    }
    write_with_ids(&weights, &tensors, &[], WeightDtype::F32, &[]).unwrap();
    let json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let mut of_layer = json.clone();
    of_layer.as_object_mut().unwrap().remove("norm_before_residual");
    let write = |method: &str, norm_before_fc: bool| {
        let speculators = serde_json::json!({
            "model_type": "speculator_model",
            "speculators_model_type": method,
            "draft_vocab_size": 24,
            "norm_before_fc": norm_before_fc,
            "transformer_layer_config": of_layer.clone(),
        });
        std::fs::write(&path, speculators.to_string()).unwrap();
        Eagle3::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex())
    };
    let mut plain = json.clone();
    plain.as_object_mut().unwrap().remove("weights_hash");
    std::fs::write(&path, plain.to_string()).unwrap();
    let read = || Eagle3::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex());
    for (found, other) in [read().unwrap(), write("eagle3", false).unwrap()] {
        assert!(found.norm_before_residual);
        let pairs = other.named(&found).into_iter().zip(drafter.named(&config));
        for (found, expected) in pairs {
            assert_eq!((found.name, found.values), (expected.name, expected.values));
        }
    }
    let error = |method, norm_before_fc| write(method, norm_before_fc).unwrap_err().to_string();
    assert!(error("eagle", false).contains("speculators_model_type"));
    assert!(error("eagle3", true).contains("input_norm.weight"));
}

/// Writes a drafter of three of 24 tokens, whose LM head has its rows in the order of `ids`, and reads it.
fn read_in_order(target: &CausalLm, drafter: &Eagle3, ids: [u32; 3]) -> (Eagle3Config, Eagle3) {
    let sorted = [1, 2, 5];
    let config = Eagle3Config {
        draft_vocabulary: Some(DraftVocabulary::new(sorted)),
        ..Eagle3Config::new(target.config())
    };
    let own = Arc::new(config.clone());
    let drafter = Eagle3 { config: own, ..drafter.clone() }.with_weights_of(target);
    let mut tensors = drafter.named(&config);
    let head = tensors.iter_mut().find(|tensor| tensor.name == "lm_head.weight").unwrap();
    let rows: Vec<Vec<f32>> = head.values.chunks_exact(16).map(<[f32]>::to_vec).collect();
    let row_of = |id: &u32| rows[sorted.iter().position(|it| it == id).unwrap()].clone();
    head.values = ids.iter().flat_map(row_of).collect();
    let dir = tempfile::tempdir().unwrap();
    drafter.write_dir(dir.path(), &config).unwrap();
    let weights = dir.path().join("model.safetensors");
    let offsets = (0..).zip(ids).map(|(at, id)| i64::from(id) - at).collect();
    write_with_ids(&weights, &tensors, &[("d2t", offsets)], WeightDtype::F32, &[]).unwrap();
    let path = dir.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("weights_hash");
    std::fs::write(&path, json.to_string()).unwrap();
    let read = || Eagle3::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex());
    let (config, drafter) = read().unwrap();
    drafter.write_dir(dir.path(), &config).unwrap();
    assert_eq!(read().unwrap().0.draft_vocabulary, config.draft_vocabulary, "it is written back");
    (config, drafter)
}

#[test]
fn a_draft_vocabulary_in_any_order_gives_the_same_logits() {
    let (target, drafter) = models(false);
    let rows = target.embed_ids(&[3, 4]);
    let logits = |ids: [u32; 3]| {
        let (config, drafter) = read_in_order(&target, &drafter, ids);
        let vocabulary = config.draft_vocabulary.clone().unwrap();
        assert_eq!(vocabulary.ids(), ids);
        assert_eq!([1, 2, 5].map(|id| vocabulary.contains(id)), [true; 3]);
        assert_eq!(vocabulary.number_of(ids[2]), Some(2));
        [drafter.to_tensors(), drafter]
            .map(|drafter| values(drafter.logits(&rows, &target).into_tensor(&Device::flex())))
    };
    let sorted = logits([1, 2, 5]);
    for ids in [[5, 1, 2], [2, 1, 5]] {
        assert_eq!(logits(ids), sorted, "{ids:?}");
    }
}

#[test]
fn what_other_trainers_store_beside_the_weights_is_ignored() {
    let (target, drafter) = models_with(|it| it.norm_output = true);
    let config = Eagle3Config::new(target.config()).with(|it| it.norm_output = true);
    let dir = tempfile::tempdir().unwrap();
    drafter.write_dir(dir.path(), &config).unwrap();
    let mut tensors = drafter.named(&config);
    tensors.push(NamedTensor {
        name: "midlayer.self_attn.rotary_emb.inv_freq".to_owned(),
        shape: vec![2],
        values: vec![1.0, 0.01],
    });
    let weights = dir.path().join("model.safetensors");
    write_with_ids(&weights, &tensors, &[], WeightDtype::F32, &[]).unwrap();
    let path = dir.path().join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json.as_object_mut().unwrap().remove("weights_hash");
    std::fs::write(&path, json.to_string()).unwrap();
    let found = Eagle3::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex());
    let (found, _) = found.unwrap();
    assert!(found.norm_output, "EAGLE-3.1's key is read");
    assert_eq!(found.to_json()["norm_output"], true, "and written");
    let files = DraftFiles::<Eagle3Form>::read(dir.path(), 4).unwrap();
    assert_eq!(files.faults_beside(target.shape()).len(), 0);
}
