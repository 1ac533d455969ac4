//! The drafter computes what torch computes, packed, as tensors and in training. `tests/fixtures/make_eagle.py` makes
//! the authors' files and torch's logits.

use std::path::Path;

use burn::tensor::Device;

use super::*;
use crate::WeightDtype;
use crate::buckets::Lengths;
use crate::fixtures::{expected, fixture, ids_tensor, load};
use crate::state_network::{CachedNetwork, StateNetwork};
use crate::weights::WeightReader;

const TARGET: &str = "llama-v5-untied-f32";
const NUM_KNOWN: usize = 6;
const NUM_STEPS: usize = 3;

fn read(dir: &Path, target: &CausalLm) -> Result<(EagleConfig, Eagle)> {
    Eagle::from_dir(dir, target.shape(), WeightDtype::F32, &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Compares logits with torch's after this number of drafted tokens.
fn check(logits: &[f32], step: usize, what: &str) {
    let path = fixture("eagle").join("torch.safetensors");
    let mut reader = WeightReader::open_file(&path).expect("it opens");
    let torchs = reader.take("logits", &[NUM_STEPS, 96]).expect("it has logits");
    assert_eq!(logits.len(), 96);
    for (found, expected) in logits.iter().zip(&torchs[step * 96..]) {
        // f32 sums in another order.
        assert!((found - expected).abs() < 1e-4, "{what}, step {step}: {found} for {expected}");
    }
}

#[test]
fn drafted_logits_equal_torchs_when_packed_and_as_tensors() {
    let target = load(TARGET);
    let ids = expected(TARGET).ids;
    let (config, packed) = read(&fixture("eagle"), &target).expect("it reads");
    assert_eq!((config.has_bias, &*config.target_layers), (true, &[3][..]));
    let states = target.exit_states(ids_tensor(&ids[..NUM_KNOWN]), 3);
    for (what, drafter) in [("packed", packed.clone()), ("tensors", packed.to_tensors())] {
        let mut cache = drafter.new_cache(16, 1);
        let features = drafter.features(&target, &[states.clone().into()]);
        let embedded = target.embed_ids(&ids[1..=NUM_KNOWN]);
        let mut output = drafter.forward_cached(embedded, features, &mut cache).last(1);
        for step in 0..NUM_STEPS {
            let logits = drafter.logits(&drafter.normed(output.clone()), &target);
            check(&values(logits.into_tensor(&Device::flex())), step, what);
            let embedded = target.embed_ids(&ids[NUM_KNOWN + 1 + step..][..1]);
            output = drafter.forward_cached(embedded, output, &mut cache);
        }
    }
}

#[test]
fn training_computes_what_decoding_computes() {
    let target = load(TARGET);
    let num_positions = NUM_KNOWN + NUM_STEPS - 1;
    let ids = expected(TARGET).ids;
    let drafter = read(&fixture("eagle"), &target).expect("it reads").1;
    let drafter = drafter.unpacked().with_norm_of(&target);
    let next_ids = ids_tensor(&ids[1..=num_positions]);
    for (first, lengths) in [(0, Lengths::AsGiven), (3, Lengths::InBuckets)] {
        let steps = drafter.unrolled(UnrolledInputs {
            states: vec![target.exit_states(ids_tensor(&ids[..num_positions]), 3)],
            next_ids: next_ids.clone(),
            embedded: Some(target.embed(next_ids.clone())),
            begun: std::slice::from_ref(&(first..num_positions)),
            num_steps: NUM_STEPS,
            lengths,
        });
        for (step, output) in steps.into_iter().enumerate() {
            let row = output.narrow(0, NUM_KNOWN - 1 + step - first, 1);
            check(&values(row.matmul(target.lm_head_weight())), step, "training");
        }
    }
}

#[test]
fn files_are_those_of_each_server_and_damaged_ones_are_refused_by_name() {
    let target = load(TARGET);
    let (config, drafter) = read(&fixture("eagle"), &target).expect("it reads");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let write = |drafter: Eagle, has_bias| {
        let config = config.clone().with(|it| it.has_bias = has_bias);
        drafter.with_bias(has_bias).write_dir(dir.path(), &config).expect("written");
        let keys: Map<String, Value> =
            crate::read_json(&dir.path().join("config.json")).expect("it reads");
        assert!(EagleConfig::is_of(&keys));
        let read = read(dir.path(), &target).expect("it reads").1;
        let bias = read.projection().bias.as_ref().map(|bias| values(bias.val()));
        (keys["architectures"][0].clone(), bias)
    };
    let (class, bias) = write(drafter.clone(), true);
    assert_eq!((class, bias.map(|it| it.len())), ("LlamaForCausalLMEagle".into(), Some(32)));
    let names: Vec<String> = drafter.named(&config).into_iter().map(|it| it.name).collect();
    assert_eq!(names.len(), 2 + 4 + 3 + 1, "{names:?}");
    assert!(!names.iter().any(|name| name.contains("input_layernorm") || name == "norm.weight"));
    assert_eq!(write(drafter.clone(), false), ("LlamaForCausalLM".into(), None));
    let without = drafter.with_bias(false);
    assert_eq!(write(without, true).1, Some(vec![0.0; 32]), "zeros change nothing");

    let path = dir.path().join("config.json");
    let keys: Map<String, Value> = crate::read_json(&path).expect("it reads");
    let fails = |key: &str, value: Value| {
        let mut keys = keys.clone();
        keys.remove("weights_hash");
        keys.insert(key.to_owned(), value);
        std::fs::write(&path, json!(keys).to_string()).expect("written");
        read(dir.path(), &target).expect_err("refused").to_string()
    };
    assert!(fails("num_hidden_layers", json!(2)).contains("`num_hidden_layers` is 2"));
    assert!(fails("bias", json!(false)).contains("fc.bias"));
    assert!(fails("vocab_size", json!(95)).contains("`vocab_size` is 95"));
    assert!(fails("draft_vocab_size", json!(5)).contains("draft_vocab_size"));
    assert!(fails("hidden_size", json!(64)).contains("hidden_size"));
}
