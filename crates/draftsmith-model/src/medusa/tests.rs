//! Heads compute what the authors' class computes in torch, from the files of each program, in training as in
//! decoding. `tests/fixtures/make_medusa.py` makes the files and torch's logits.

use std::path::PathBuf;

use burn::tensor::Int;

use super::*;
use crate::buckets::Lengths;
use crate::fixtures::{expected, fixture, ids_tensor, load};
use crate::weights::write_safetensors;

/// The directories of heads, each with its target.
const FORMS: [(&str, &str); 3] = [
    ("v1.3", "llama-v5-untied-f32"),
    ("version-2", "gemma2-bf16"),
    ("whole-model", "llama-v5-untied-f32"),
];
/// f32 sums in another order than torch's.
const TOLERANCE: f32 = 1e-4;

fn dir_of(name: &str) -> PathBuf {
    fixture("medusa").join(name)
}

fn read(dir: &Path, target: &CausalLm) -> Result<(MedusaConfig, Medusa)> {
    Medusa::from_dir(dir, target.shape(), WeightDtype::F32, &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// Computes the target's last states of a fixture's text, `[1, seq, hidden]`, and its token ids.
fn states_of(target: &CausalLm, name: &str) -> (Tensor<3>, Tensor<2, Int>) {
    let ids = ids_tensor(&expected(name).ids);
    (target.exit_states(ids.clone(), target.shape().num_layers), ids)
}

fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < TOLERANCE, "{what}: {found} for {expected}");
    }
}

/// Reads torch's logits of a head at the last positions.
fn torchs(name: &str, head: usize) -> Vec<f32> {
    let mut reader = WeightReader::open_file(&dir_of("expected.safetensors")).expect("it opens");
    reader.take(&format!("{name}.{head}"), &[4, 96]).expect("it has the head")
}

#[test]
fn logits_of_every_file_form_equal_torchs_when_packed_and_as_tensors() {
    for (name, of_target) in FORMS {
        let target = load(of_target);
        let (config, packed) = read(&dir_of(name), &target).expect("it reads");
        assert_eq!((config.num_heads, config.num_target_layers), (3, 3), "the tensors decide");
        assert_eq!(config.vocab_size.is_some(), name != "version-2");
        let (states, _) = states_of(&target, of_target);
        let unpacked = |head: Head| Head {
            blocks: head.blocks.into_iter().map(Packable::unpacked).collect(),
            lm_head: head.lm_head.map(Packable::unpacked),
        };
        let heads = packed.heads.clone().into_iter().map(unpacked);
        let tensors = Medusa { heads: heads.collect(), norm: None };
        for heads in [&packed, &tensors] {
            let logits = heads.logits(states.clone().into(), 3, &target);
            for (head, logits) in logits.into_iter().enumerate() {
                let found = values(logits.last(4).into_tensor(&Device::flex()));
                assert_near(&found, &torchs(name, head), &format!("{name} {head}"));
            }
        }
        assert_eq!(packed.logits(states.into(), 2, &target).len(), 2, "only the first heads run");
    }
}

#[test]
fn training_computes_each_heads_logits_as_decoding_does() {
    for (name, of_target) in FORMS {
        let target = load(of_target);
        let heads = read(&dir_of(name), &target).expect("it reads").1.with_norm_of(&target);
        let (states, ids) = states_of(&target, of_target);
        let [_, seq, width] = states.dims();
        let logits = heads.logits(states.clone().into(), 3, &target);
        let begun = 5..seq;
        let inputs = UnrolledInputs {
            states: vec![states],
            next_ids: ids,
            embedded: None,
            begun: std::slice::from_ref(&begun),
            num_steps: 3,
            lengths: Lengths::AsGiven,
        };
        let own_head = heads.own_head();
        for (step, outputs) in heads.unrolled(inputs).into_iter().enumerate() {
            let found = match &own_head {
                Some(all) => outputs.matmul(all.clone().narrow(0, step * width, width)),
                None => target.lm_head(outputs.unsqueeze()).squeeze_dim(0),
            };
            let decoded = logits[step].slice(5 - step..seq - step).into_tensor(&Device::flex());
            assert_near(&values(found), &values(decoded), &format!("{name}, head {step}"));
        }
    }
}

#[test]
fn heads_are_written_and_read_again_in_our_form_the_authors_and_model_optimizers() {
    let target = load(FORMS[0].1);
    let (config, heads) = read(&dir_of("v1.3"), &target).expect("it reads");
    let place = tempfile::tempdir().expect("a directory");
    let at = |name: &str| {
        std::fs::create_dir_all(place.path().join(name)).expect("created");
        place.path().join(name)
    };
    let of_training = MedusaConfig {
        dtype: WeightDtype::F16,
        target_hash: Some("beef".to_owned()),
        training: Map::from_iter([("seed".to_owned(), 3.into())]),
        ..config.clone()
    };
    heads.write_dir(&at("own"), &of_training).expect("written");
    heads.write_authors(&at("authors"), &config, "some/llama").expect("written");
    // Model-Optimizer saves the whole model.
    let named = heads.named(&config).into_iter();
    let prefixed =
        named.map(|tensor| NamedTensor { name: format!("medusa_heads.{}", tensor.name), ..tensor });
    let of_target =
        NamedTensor { name: "lm_head.weight".to_owned(), shape: vec![1], values: vec![0.0] };
    let tensors: Vec<NamedTensor> = prefixed.chain([of_target]).collect();
    let path = at("whole").join("model.safetensors");
    write_safetensors(&path, &tensors, WeightDtype::F16, &[]).expect("written");
    let keys = r#"{ "medusa": { "num_medusa_heads": 3, "num_medusa_layers": 1 } }"#;
    std::fs::write(at("whole").join("config.json"), keys).expect("written");
    for name in ["own", "authors", "whole"] {
        let (found, again) = read(&at(name), &target).expect("it reads");
        let parts = |tensor: NamedTensor| (tensor.name, tensor.shape, tensor.values);
        let tensors = again.named(&found).into_iter().map(parts);
        assert!(tensors.eq(heads.named(&config).into_iter().map(parts)), "{name}");
        if name == "own" {
            // The type of a file is found again as one of 16 bits.
            assert_eq!(MedusaConfig { dtype: WeightDtype::F16, ..found }, of_training);
        }
    }
    let authors: Value = read_json(&at("authors").join("config.json")).expect("it reads");
    assert_eq!(
        (&authors["medusa_num_heads"], &authors["base_model_name_or_path"]),
        (&json!(3), &json!("some/llama"))
    );
    // An export that was changed is refused.
    let path = at("own").join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("it reads");
    *bytes.last_mut().expect("it has bytes") ^= 1;
    std::fs::write(&path, bytes).expect("written");
    let changed = read(&at("own"), &target).expect_err("it was changed").to_string();
    assert!(changed.contains("was changed"), "{changed}");
}

#[test]
fn first_heads_predict_what_the_target_does_but_for_their_biases() {
    let target = load(FORMS[0].1);
    let config = MedusaConfig { num_blocks: 2, ..MedusaConfig::new(target.shape(), 2) };
    let mut state = 1_u64;
    let draw = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let heads = config.init_from(&Device::flex(), draw).with_heads_of(&target);
    assert_eq!(config.num_parameters(), heads.num_params());
    let (mut largest, bound) = (0.0_f32, 32_f32.powf(-0.5));
    for block in heads.heads.iter().flat_map(|head| &head.blocks) {
        assert!(values(block.weight.val()).iter().all(|weight| *weight == 0.0));
        let bias = values(block.bias.as_ref().expect("it has one").val());
        largest = bias.iter().fold(largest, |most, bias| most.max(bias.abs()));
    }
    assert!(largest <= bound && largest > 0.8 * bound, "{largest}");
    // Without biases, a head gives the target's logits.
    let heads = config.init_from(&Device::flex(), || 0.5).with_heads_of(&target);
    let (states, _) = states_of(&target, FORMS[0].1);
    let of_target = values(target.lm_head(target.final_norm(states.clone())));
    for logits in heads.logits(states.into(), 2, &target) {
        assert_near(&values(logits.into_tensor(&Device::flex())), &of_target, "the target's");
    }
}

#[test]
fn files_that_are_not_a_targets_heads_are_refused_by_file_and_tensor() {
    let target = load(FORMS[0].1);
    let place = tempfile::tempdir().expect("a directory");
    let (config, heads) = read(&dir_of("v1.3"), &target).expect("it reads");
    let tensors = heads.named(&config);
    let refused = |change: &dyn Fn(&mut Vec<NamedTensor>)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        let path = place.path().join("medusa_lm_head.safetensors");
        write_safetensors(&path, &tensors, WeightDtype::F32, &[]).expect("written");
        read(place.path(), &target).expect_err("it is refused").to_string()
    };
    let missing = refused(&|_| ());
    assert!(missing.contains("config.json"), "{missing}");
    std::fs::write(place.path().join("config.json"), r#"{ "training": 5 }"#).expect("written");
    let wrong = refused(&|_| ());
    assert!(wrong.contains("config.json") && wrong.contains("training"), "{wrong}");
    std::fs::write(place.path().join("config.json"), "{}").expect("written");
    let tensor = |name: &str, shape: &[usize]| NamedTensor {
        name: name.to_owned(),
        shape: shape.to_vec(),
        values: vec![0.0; shape.iter().product()],
    };
    let other = |name: &'static str, shape: &'static [usize]| {
        refused(&move |all| {
            all.retain(|tensor| tensor.name != name);
            all.push(tensor(name, shape));
        })
    };
    let cases = [
        (refused(&|all| drop(all.remove(0))), "0.0.linear.weight"),
        (refused(&|all| all.retain(|it| it.name != "1.1.weight")), "1.1.weight"),
        (refused(&|all| all.retain(|it| it.name != "2.0.linear.bias")), "2.0.linear.bias"),
        (
            other("0.0.linear.weight", &[16, 16]),
            "vocabulary are (16, 96), but the target's are (32, 96)",
        ),
        (other("0.0.linear.weight", &[32, 16]), "0.0.linear.weight"),
        (other("0.1.weight", &[97, 32]), "vocabulary are (32, 97), but the target's are (32, 96)"),
        (other("1.0.linear.bias", &[1]), "1.0.linear.bias"),
        (other("1.1.weight", &[96, 31]), "1.1.weight"),
        (other("4.0.linear.weight", &[32, 32]), "unexpected tensor `4.0.linear.weight`"),
        (other("norm.weight", &[32]), "unexpected tensor `norm.weight`"),
        (
            refused(&|all| {
                all.extend((0..9).map(|nth| tensor(&format!("0.{nth}.linear.weight"), &[32, 32])));
                all.sort_by(|one, next| one.name.cmp(&next.name));
                all.dedup_by(|one, next| one.name == next.name);
            }),
            "0.1.linear.bias",
        ),
    ];
    for (message, part) in cases {
        assert!(message.contains(part), "{message}");
        assert!(message.contains(&*place.path().to_string_lossy()), "{message}");
    }
    // A pickle that is no archive of tensors causes an error, and so does one cut short.
    std::fs::remove_file(place.path().join("medusa_lm_head.safetensors")).expect("removed");
    let whole = std::fs::read(dir_of("v1.3/medusa_lm_head.pt")).expect("it reads");
    for bytes in [&b"\x80\x02cos\nsystem\n"[..], &whole[..whole.len() / 2]] {
        std::fs::write(place.path().join("medusa_lm_head.pt"), bytes).expect("written");
        let message = read(place.path(), &target).expect_err("it is refused").to_string();
        assert!(message.contains("medusa_lm_head.pt"), "{message}");
    }
}
