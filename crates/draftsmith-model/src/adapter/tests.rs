//! Adapters round-trip through files, give the same for any split of a sequence, have the parts of
//! a Llama layer, and are refused by targets that they do not fit.

use std::path::Path;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::activation::silu;
use burn::tensor::{Device, Distribution, Int, TensorData};
use half::bf16;

use serde_json::Map;

use super::*;
use crate::decoder::attention::Positions;
use crate::decoder::layer::DecoderLayer;
use crate::decoder::norm::Norm;
use crate::decoder::soft_capped;
use crate::error::read_json;
use crate::fixtures::{FIXTURES, load};
use crate::rows::HostRows;
use crate::spec::NamedLayer;
use crate::state_network::{CachedNetwork, StateNetwork};
use crate::weights::WeightReader;
use crate::{ModelShape, WeightDtype};

fn target() -> CausalLm {
    load(FIXTURES[0])
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("f32")
}

fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1.0_f32, |most, b| most.max(b.abs()));
    for (a, b) in found.iter().zip(expected) {
        // Sums in another order.
        assert!((a - b).abs() < 1e-5 * scale, "{a} for {b}");
    }
}

fn config_for(
    target: &CausalLm,
    architecture: AdapterArchitecture,
    num_layers: usize,
) -> AdapterConfig {
    let config = AdapterConfig::new(target.config(), 1).expect("a valid exit layer");
    config.with(|it| it.architecture = architecture).with_layers(num_layers)
}

/// Every architecture, with one layer and with two.
fn architectures() -> impl Iterator<Item = (AdapterArchitecture, usize)> {
    AdapterArchitecture::ALL.into_iter().flat_map(|all| [(all, 1), (all, 2)])
}

/// Norms of ones would hide a norm that is not applied.
struct RandomNorms;

impl ModuleMapper for RandomNorms {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D != 1 {
            return param;
        }
        param.map(|gamma| gamma.random_like(Distribution::Uniform(0.5, 1.5)))
    }
}

/// A directory with a random adapter for the fixture.
fn written(architecture: AdapterArchitecture) -> (tempfile::TempDir, AdapterConfig, Adapter) {
    written_for(&target(), architecture, 1)
}

/// The same for a given target.
fn written_for(
    target: &CausalLm,
    architecture: AdapterArchitecture,
    num_layers: usize,
) -> (tempfile::TempDir, AdapterConfig, Adapter) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut config = config_for(target, architecture, num_layers);
    config.target_hash = Some("abc".to_owned());
    config.training.insert("seed".to_owned(), 7.into());
    let adapter = config.init(&Device::flex()).map(&mut RandomNorms);
    adapter.write_dir(dir.path(), &config).expect("written");
    (dir, config, adapter)
}

#[test]
fn an_adapter_round_trips_and_any_split_of_a_sequence_gives_the_same() {
    for name in FIXTURES {
        an_adapter_round_trips(&load(name));
    }
}

fn an_adapter_round_trips(target: &CausalLm) {
    let device = Device::flex();
    let ids: Vec<i32> = (0..30).map(|i| i * 7 % 40).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 30]), &device);
    let features = target.exit_states(ids, 1);
    let [_, _, width] = features.dims();
    let on_device: Rows = features.clone().into();
    let on_host = Rows::of_slot_0(HostRows { values: values(features.clone()), width });
    for (architecture, num_layers) in architectures() {
        let (dir, config, adapter) = written_for(target, architecture, num_layers);
        let (read_config, read) =
            Adapter::from_dir(dir.path(), target.shape(), WeightDtype::F32, &device)
                .expect("reads");
        assert_eq!(read_config, config);
        let expected = values(adapter.forward(features.clone()));
        assert_close(&values(read.forward(features.clone())), &expected);
        let mut all_logits = Vec::new();
        // The adapter that was read is packed, the other is not; each takes rows in both places.
        for (adapter, features) in
            [(&adapter, &on_device), (&adapter, &on_host), (&read, &on_device), (&read, &on_host)]
        {
            let forward = |from: usize, to: usize, cache: &mut KvCache| {
                let rows = adapter.forward_cached(features.slice(from..to), cache);
                assert_eq!(cache.len(0, 0), to);
                let [logits] = Rows::to_host([adapter.logits(&rows, target)]).expect("brought");
                (values(rows.into_tensor(&device)), logits)
            };
            let mut cache = adapter.new_cache(30, 1);
            let (mut found, mut logits) = (Vec::new(), Vec::new());
            for (from, to) in [(0, 1), (1, 4), (4, 25), (25, 26), (26, 30)] {
                let (more, more_logits) = forward(from, to, &mut cache);
                found.extend(more);
                logits.extend(more_logits);
            }
            assert_close(&found, &expected);
            all_logits.push(logits);
            cache.truncate(0, 0);
            adapter.fill_cache(features.slice(0..9), &mut cache);
            assert_eq!(cache.len(0, 0), 9);
            assert_close(&forward(9, 30, &mut cache).0, &expected[9 * width..]);
            // The same next to another sequence, which begins later in a filled cache.
            let mut cache = adapter.new_cache(30, 2);
            let part = |from, to, slot| features.slice(from..to).in_slot(slot);
            adapter.fill_cache(part(0, 3, 1), &mut cache);
            let (mut found, mut beside) = (Vec::new(), Vec::new());
            for (from, to) in [(0, 4), (4, 5), (5, 20)] {
                let both = Rows::cat([part(from, to, 0), part(3 + from, 3 + to, 1)]);
                let rows = adapter.forward_cached(both, &mut cache);
                assert!(rows.runs().map(|run| run.slot).eq([0, 1]));
                let mut rows = values(rows.into_tensor(&device));
                beside.extend(rows.split_off(rows.len() / 2));
                found.extend(rows);
            }
            assert_eq!((cache.len(0, 0), cache.len(1, 0)), (20, 23));
            assert_close(&found, &expected[..20 * width]);
            assert_close(&beside, &expected[3 * width..23 * width]);
        }
        let head = adapter.own_head().unwrap_or_else(|| target.lm_head_weight());
        let expected = Tensor::<1>::from_floats(expected.as_slice(), &device).reshape([30, width]);
        let cap = target.config().spec.logit_soft_cap;
        let expected = values(soft_capped(expected.matmul(head), cap));
        for logits in all_logits {
            assert_close(&logits, &expected);
        }
    }
}

#[test]
fn weights_of_16_bits_keep_the_files_numbers() {
    let (target, device) = (target(), Device::flex());
    let features =
        Tensor::random([1, 9, target.shape().hidden_size], Distribution::Default, &device);
    for (architecture, num_layers) in architectures() {
        let (dir, config, adapter) = written_for(&target, architecture, num_layers);
        let config = AdapterConfig { dtype: WeightDtype::Bf16, ..config };
        adapter.write_dir(dir.path(), &config).expect("written again");
        let reader = WeightReader::open_dir(dir.path()).expect("readable");
        assert_eq!(reader.dtype().as_deref(), Some("BF16"));
        let (read_config, read) =
            Adapter::from_dir(dir.path(), target.shape(), WeightDtype::F32, &device)
                .expect("reads");
        assert_eq!(read_config, config);
        let (found, written) = (read.named(&config), adapter.named(&config));
        for (found, written) in found.iter().zip(&written) {
            let rounded = written.values.iter().map(|value| bf16::from_f32(*value).to_f32());
            assert!(found.values.iter().copied().eq(rounded), "{}", found.name);
        }
        // Packed weights and tensors.
        let normed = read.forward_cached(features.clone().into(), &mut read.new_cache(9, 1));
        assert_close(&values(normed.into_tensor(&device)), &values(read.forward(features.clone())));
    }
}

#[test]
fn the_parts_are_those_of_a_targets_layer() {
    for name in FIXTURES {
        the_parts_are_those_of_a_layer(&load(name));
    }
}

fn the_parts_are_those_of_a_layer(target: &CausalLm) {
    let features = || Tensor::<3>::random([2, 9, 32], Distribution::Default, &Device::flex());
    let [_, _, width] = features().dims();
    assert_eq!(width, target.shape().hidden_size);
    let adapter = |architecture| {
        config_for(target, architecture, 1)
            .init(&Device::flex())
            .with_layers_of(target, 1)
            .with_head_of(target)
    };
    let x = features();
    // A decoder layer with the target's weights is the target's layer and final norm.
    let positions = Positions::whole(
        &adapter(AdapterArchitecture::MlpOnly).stack.reaches,
        false,
        &x,
        &Device::flex(),
    );
    let layer = target.layer(1).unwrap();
    let attention = layer.attention.as_ref().expect("a model's layer has both");
    let attended =
        x.clone() + attention.forward(attention.normed_input(x.clone()), &positions, None);
    let mlp = layer.mlp.as_ref().expect("a model's layer has both");
    let with_mlp = |h: Tensor<3>| {
        let read = if layer.is_parallel { x.clone() } else { h.clone() };
        h + mlp.forward(read)
    };
    for (architecture, expected) in [
        (AdapterArchitecture::Attention, attended.clone()),
        (AdapterArchitecture::AttentionWithHead, attended.clone()),
        (AdapterArchitecture::DecoderLayer, with_mlp(attended)),
    ] {
        let found = adapter(architecture).forward(x.clone());
        assert_close(&values(found), &values(target.final_norm(expected)));
    }
}

#[test]
fn initial_weights_from_the_target_are_exact_copies() {
    for name in FIXTURES {
        first_weights_are_its_layers(&load(name));
    }
}

fn first_weights_are_its_layers(target: &CausalLm) {
    let last = target.shape().num_layers - 1;
    let (theirs, norm) = (target.layer(last).unwrap(), target.last_norm());
    for device in [Device::flex(), Device::flex().autodiff()] {
        for architecture in AdapterArchitecture::ALL {
            let config = config_for(target, architecture, 1);
            let drawn = config.init(&device);
            let adapter = drawn.clone().with_layers_of(target, last).with_head_of(target);
            assert_eq!(adapter.stack.device(), device);
            let mut expected = drawn.stack.layers[0].clone();
            expected.attention = expected.attention.and(theirs.attention.clone());
            // No layer of the target has an MLP like that of "MLP only".
            if architecture == AdapterArchitecture::DecoderLayer {
                expected.mlp = theirs.mlp.clone();
            }
            let tensors = |layer: &DecoderLayer| -> Vec<(String, Vec<f32>)> {
                let named = layer.named(NamedLayer {
                    spec: &config.layer(),
                    shape: target.shape(),
                    name: "layer",
                });
                named.into_iter().map(|tensor| (tensor.name, tensor.values)).collect()
            };
            assert_eq!(tensors(&adapter.stack.layers[0]), tensors(&expected));
            let weights = |norm: &Norm| (values(norm.gamma()), norm.beta().map(values));
            assert_eq!(weights(&adapter.stack.norm), weights(&norm));
            if let Some(head) = adapter.own_head() {
                assert_eq!(values(head), values(target.lm_head_weight()));
            }
            assert_eq!(adapter.num_parameters(), drawn.num_parameters());
        }
    }
}

#[test]
fn layers_start_from_the_targets_next_layers_and_repeat_its_last() {
    let target = target();
    let last = target.shape().num_layers - 1;
    let config = config_for(&target, AdapterArchitecture::DecoderLayer, 3);
    let adapter = config.init(&Device::flex()).with_layers_of(&target, last - 1);
    for (layer, number) in adapter.stack.layers.iter().zip([last - 1, last, last]) {
        let expected = target.layer(number).unwrap();
        let [found, expected] = [layer, &expected].map(|layer| {
            let attention = layer.attention.as_ref().expect("it has one");
            attention.projections().map(|linear| values(linear.weight.val()))
        });
        assert_eq!(found, expected);
    }
}

#[test]
fn parameters_are_counted_in_closed_form() {
    for (architecture, num_layers) in architectures() {
        let config = config_for(&target(), architecture, num_layers);
        assert_eq!(config.num_parameters(), config.init(&Device::flex()).num_parameters());
    }
    // Kangaroo's two sizes (its Table 2 and code), without their tensors.
    let count = |hidden_size: usize, mlp_width: usize, num_heads: usize, architecture| {
        let shape = ModelShape {
            hidden_size,
            vocab_size: 32_000,
            num_heads,
            num_kv_heads: num_heads,
            head_dim: 128,
            num_layers: 32,
            ..target().shape().clone()
        };
        let config = AdapterConfig::new(&ModelConfig::llama(shape, mlp_width), 2);
        let config = config.expect("a valid exit layer");
        config.with(|it| it.architecture = architecture).num_parameters()
    };
    assert_eq!(count(5120, 13_824, 40, AdapterArchitecture::Attention), 104_867_840);
    let of_7b = AdapterArchitecture::ALL.map(|kind| count(4096, 11_008, 32, kind));
    let of_mlp_only = 2 * 4096 * 4096 + 4096 * 32_000 + 2 * 4096;
    assert_eq!(of_7b, [67_117_056, of_mlp_only, 198_189_056, 202_387_456]);
}

#[test]
fn files_have_kangaroos_names_and_others_those_of_a_llama_layer() {
    let attention = [
        "layers.0.input_layernorm.weight",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.v_proj.weight",
    ];
    let mlp_only =
        ["layers.0.input_layernorm.weight", "layers.0.mlp.fc1.weight", "layers.0.mlp.fc2.weight"];
    let gated_mlp = [
        "layers.0.mlp.down_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.post_attention_layernorm.weight",
    ];
    for architecture in AdapterArchitecture::ALL {
        let (dir, ..) = written(architecture);
        let reader = WeightReader::open_dir(dir.path()).expect("opens");
        let mut expected = vec!["norm.weight"];
        if architecture.has_attention() {
            expected.extend(attention);
        }
        if architecture == AdapterArchitecture::MlpOnly {
            expected.extend(mlp_only);
        } else if architecture == AdapterArchitecture::DecoderLayer {
            expected.extend(gated_mlp);
        }
        if architecture.has_head() {
            expected.push("lm_head.weight");
        }
        expected.sort_unstable();
        assert_eq!(reader.names().collect::<Vec<_>>(), expected);
        let json: Value = read_json(&dir.path().join("config.json")).expect("JSON");
        assert_eq!((&json["num_hidden_layers"], &json["exit_layer"]), (&1.into(), &1.into()));
        let named = match architecture {
            // Kangaroo's files have no such key.
            AdapterArchitecture::Attention => Value::Null,
            other => other.to_string().into(),
        };
        assert_eq!(json["architecture"], named);
        assert_eq!(serde_json::json!(architecture), architecture.to_string());
    }
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_with_the_reason() {
    let (dir, ..) = written(AdapterArchitecture::DecoderLayer);
    let target = target();
    let refused = |dir: &Path, shape: &ModelShape| {
        Adapter::from_dir(dir, shape, WeightDtype::F32, &Device::flex())
            .expect_err("refused")
            .to_string()
    };
    let wider = ModelShape { hidden_size: 4096, ..target.shape().clone() };
    assert!(refused(dir.path(), &wider).contains("another target"));
    let shallow = ModelShape { num_layers: 1, ..target.shape().clone() };
    assert!(refused(dir.path(), &shallow).contains("exit_layer"));
    assert!(AdapterConfig::new(target.config(), target.shape().num_layers).is_err());
    let path = dir.path().join("config.json");
    let json: Value = read_json(&path).expect("JSON");
    let rewritten = |change: &dyn Fn(&mut Map<String, Value>)| {
        let mut json = json.clone();
        change(json.as_object_mut().expect("an object"));
        std::fs::write(&path, json.to_string()).expect("written");
        refused(dir.path(), target.shape())
    };
    // Another architecture has more or fewer tensors.
    let message = rewritten(&|json| drop(json.remove("architecture")));
    assert!(message.contains("layers.0.mlp"), "{message}");
    let message = rewritten(&|json| json["architecture"] = "attention-with-head".into());
    assert!(message.contains("lm_head.weight"), "{message}");
    let message = rewritten(&|json| json["architecture"] = "transformer".into());
    assert!(message.contains("decoder-layer"), "{message}");
    assert!(rewritten(&|json| drop(json.remove("exit_layer"))).contains("exit_layer"));
}

#[test]
fn the_papers_mlp_is_two_matrices_in_the_residual_stream() {
    let (_, _, adapter) = written(AdapterArchitecture::MlpOnly);
    let x = Tensor::<3>::random([1, 5, 32], Distribution::Default, &Device::flex());
    let mlp = adapter.stack.layers[0].mlp.as_ref().expect("it has one");
    assert!(mlp.gate.is_none());
    let normed = mlp.norm.forward(x.clone()).reshape([5, 32]);
    let between = silu(normed.matmul(mlp.up.weight.val()));
    let output = between.matmul(mlp.down.weight.val()).reshape([1, 5, 32]);
    let expected = values(adapter.stack.norm.forward(x.clone() + output));
    assert_close(&values(adapter.forward(x)), &expected);
}

#[test]
fn initial_weights_are_uniform_within_one_over_the_root_of_the_inputs() {
    let mut model = target().config().clone();
    (model.shape.hidden_size, model.shape.head_dim) = (128, 24);
    model.spec.mlp.width = 300;
    for architecture in AdapterArchitecture::ALL {
        let config = AdapterConfig::new(&model, 1).expect("a valid exit layer");
        let config = config.with(|it| it.architecture = architecture);
        let device = Device::flex();
        // Numbers that fill [0, 1) evenly (golden ratio).
        let mut nth = 0.0_f64;
        let draw = || {
            nth += 1.0;
            (nth * 0.618_033_988_749_895).fract()
        };
        for adapter in [config.init(&device), config.init_from(&device, draw)] {
            for tensor in adapter.named(&config) {
                let [_, inputs] = tensor.shape[..] else {
                    assert!(tensor.values.iter().all(|gamma| *gamma == 1.0));
                    continue;
                };
                let bound = 1.0 / (inputs as f32).sqrt();
                let largest = tensor.values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
                // The bound may be rounded down.
                let is_near = (0.99 * bound..=1.000_001 * bound).contains(&largest);
                assert!(is_near, "{}: {largest}", tensor.name);
                // Uniform: each tenth of the range has a tenth of the values. For a normal
                // distribution the shares would be a hundredth to a sixth.
                let mut tenths = [0; 10];
                for x in &tensor.values {
                    let place = 5.0 * (x / bound + 1.0);
                    tenths[(place as usize).min(9)] += 1;
                }
                let share = |count: i32| f64::from(count) / tensor.values.len() as f64;
                let name = &tensor.name;
                // Nearly six standard deviations for the smallest matrix, of 6,144 numbers.
                let fair = tenths.iter().all(|count| (share(*count) - 0.1).abs() < 0.022);
                assert!(fair, "{name}: {tenths:?}");
            }
        }
    }
}

#[test]
fn a_draft_vocabulary_round_trips_and_errors_name_a_broken_one() {
    let target = target();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let vocabulary = DraftVocabulary::new(vec![2, 9, 30]);
    let config = AdapterConfig {
        draft_vocabulary: Some(vocabulary.clone()),
        ..AdapterConfig::new(target.config(), 1).expect("a valid exit layer")
    };
    let write = |config: &AdapterConfig| {
        config.init(&Device::flex()).write_dir(dir.path(), config).expect("written");
    };
    let read = || Adapter::from_dir(dir.path(), target.shape(), WeightDtype::F32, &Device::flex());
    write(&config);
    let (found, adapter) = read().expect("reads");
    assert_eq!(found.draft_vocabulary.as_ref(), Some(&vocabulary));
    assert_eq!(adapter.draft_vocabulary(), Some(&vocabulary));

    let path = dir.path().join("config.json");
    let refused = |key: &str, value: Value, words: &[&str]| {
        let mut json: Value = read_json(&path).expect("JSON");
        json[key] = value;
        std::fs::write(&path, json.to_string()).expect("written");
        let message = read().expect_err("refused").to_string();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        write(&config);
    };
    let file = "model.safetensors";
    refused("draft_vocabulary", 4.into(), &[file, "draft_vocabulary", "[3]", "[4]"]);
    refused("draft_vocabulary", 0.into(), &["config.json", "draft_vocabulary", "is 0"]);
    let own_head = "attention-with-head".into();
    refused("architecture", own_head, &["draft_vocabulary", "attention-with-head"]);
    refused("draft_vocabulary", Value::Null, &[file, "draft_vocabulary"]);
    let unknown = AdapterConfig {
        draft_vocabulary: Some(DraftVocabulary::new(vec![2, 1_000_000])),
        ..config.clone()
    };
    write(&unknown);
    let message = read().expect_err("refused").to_string();
    assert!(message.contains("1000000") && message.contains("draft_vocabulary"), "{message}");
}
