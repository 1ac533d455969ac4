//! The fixture of every family, written as llama.cpp's converter writes it, computes the same
//! logits. Cut, changed and foreign files cause an error that names them.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::Gguf;
use crate::causal_lm::tests::cached_logits;
use crate::config::ModelConfig;
use crate::fixtures::{FIXTURES, expected, fixture};
use crate::spec::RopeScaling;
use crate::{CausalLm, WeightReader, hash_model_dir, read_json};

/// A GGUF file to be written.
#[derive(Default)]
struct Writing {
    num_keys: u64,
    keys: Vec<u8>,
    num_tensors: u64,
    tensors: Vec<u8>,
    data: Vec<u8>,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Writing {
    fn key(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.num_keys += 1;
        self.keys.extend([&text(key), &kind.to_le_bytes()[..], value].concat());
    }

    /// Writes a whole number as u32, another as f32.
    fn number(&mut self, key: &str, value: &Value) {
        match value.as_u64() {
            Some(number) => self.key(key, 4, &(number as u32).to_le_bytes()),
            None => {
                let number = value.as_f64().expect("a number");
                self.key(key, 6, &(number as f32).to_le_bytes());
            }
        }
    }

    fn tensor(&mut self, name: &str, shape: &[usize], kind: u32, bytes: &[u8]) {
        self.num_tensors += 1;
        let dims = shape.iter().rev().flat_map(|size| (*size as u64).to_le_bytes());
        self.tensors.extend([text(name), (shape.len() as u32).to_le_bytes().to_vec()].concat());
        self.tensors.extend(dims);
        self.tensors.extend(kind.to_le_bytes());
        self.tensors.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
    }

    fn bytes(&self) -> Vec<u8> {
        let counts = [self.num_tensors, self.num_keys].map(u64::to_le_bytes).concat();
        let mut bytes = [b"GGUF\x03\0\0\0", &*counts, &self.keys, &self.tensors].concat();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        [bytes, self.data.clone()].concat()
    }
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A tensor type of ggml.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    F32,
    F16,
    Bf16,
    /// Multiples of 1/64 in f32.
    Rounded,
    /// The same numbers with a scale of 1/64 for each 32 of a row.
    Q8,
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Self::F32 | Self::Rounded => 0,
            Self::Q8 => 8,
            Self::F16 => 1,
            Self::Bf16 => 30,
        }
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 | Self::Rounded => f32s(values),
            Self::Q8 => {
                let scale = f16::from_f32(1.0 / 64.0).to_le_bytes();
                let quantised = |block: &[f32]| {
                    let weights = block.iter().map(|it| (it * 64.0) as i8 as u8);
                    scale.into_iter().chain(weights).collect::<Vec<u8>>()
                };
                values.chunks(32).flat_map(quantised).collect()
            }
            Self::F16 => values.iter().flat_map(|it| f16::from_f32(*it).to_le_bytes()).collect(),
            Self::Bf16 => values.iter().flat_map(|it| bf16::from_f32(*it).to_le_bytes()).collect(),
        }
    }
}

/// The name in GGUF of a Hugging Face tensor's last parts.
fn part(name: &str, is_gemma: bool) -> &'static str {
    match name {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" if is_gemma => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" | "attention.query_key_value" => "attn_qkv",
        "self_attn.o_proj" | "attention.dense" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" | "mlp.dense_h_to_4h" => "ffn_up",
        "mlp.down_proj" | "mlp.dense_4h_to_h" => "ffn_down",
        other => panic!("unknown part {other}"),
    }
}

/// Returns the GGUF name of a Hugging Face tensor.
fn gguf_name(name: &str, is_gemma: bool) -> String {
    let (stem, end) = name.rsplit_once('.').expect("a weight or a bias");
    let stem = stem.trim_start_matches("gpt_neox.").trim_start_matches("model.");
    let own = match stem {
        "embed_tokens" | "embed_in" => "token_embd".to_owned(),
        "norm" | "final_layer_norm" => "output_norm".to_owned(),
        "lm_head" | "embed_out" => "output".to_owned(),
        _ => {
            let (layer, rest) = stem["layers.".len()..].split_once('.').expect("a layer");
            format!("blk.{layer}.{}", part(rest, is_gemma))
        }
    };
    format!("{own}.{end}")
}

/// Reorders rows seen as `[.., b, c, ..]`, with `a` blocks, so that `c` comes before `b`.
fn swapped(values: &[f32], [a, b, c]: [usize; 3]) -> Vec<f32> {
    let row = values.len() / (a * b * c);
    let mut out = Vec::new();
    for block in 0..a {
        for second in 0..c {
            for first in 0..b {
                let at = ((block * b + first) * c + second) * row;
                out.extend(&values[at..at + row]);
            }
        }
    }
    out
}

/// Makes a copy of a fixture with the settings that llama.cpp knows no others of.
fn as_in_llama_cpp(name: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(fixture(name)).expect("a fixture") {
        let path = entry.expect("an entry").path();
        let to = dir.path().join(path.file_name().expect("a name"));
        std::fs::copy(path, to).expect("copied");
    }
    let path = dir.path().join("config.json");
    let mut config: Map<String, Value> = read_json(&path).expect("a config");
    match config["model_type"].as_str().expect("a family") {
        "mistral" => {
            config["model_type"] = json!("llama");
            config["sliding_window"] = Value::Null;
        }
        "qwen2" => config["use_sliding_window"] = json!(false),
        "gemma2" | "gemma3_text" => {
            config.remove("layer_types");
            config["query_pre_attn_scalar"] = config["head_dim"].clone();
        }
        "gpt_neox" => config["hidden_act"] = json!("gelu"),
        _ => {}
    }
    if name.contains("dynamic") {
        config["rope_parameters"]["rope_type"] = json!("default");
    }
    std::fs::write(path, Value::Object(config).to_string()).expect("written");
    dir
}

/// Writes the keys of a fixture's `config.json` as the converter does.
fn write_keys(writing: &mut Writing, config: &Map<String, Value>) {
    let family = config["model_type"].as_str().expect("a family");
    let own = match family {
        "gemma3_text" => "gemma3",
        "gpt_neox" => "gptneox",
        "mistral" => "llama",
        other => other,
    };
    writing.key("general.architecture", 8, &text(own));
    let mut number = |key: &str, value: &Value| writing.number(&format!("{own}.{key}"), value);
    for (key, name) in [
        ("vocab_size", "vocab_size"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("context_length", "max_position_embeddings"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("attention.layer_norm_epsilon", "layer_norm_eps"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        if let Some(value) = config.get(name).filter(|value| !value.is_null()) {
            number(key, value);
        }
    }
    if matches!(family, "phi3" | "gemma2" | "gemma3_text") {
        number("attention.sliding_window", &config["sliding_window"]);
    }
    let rope = config.get("rope_parameters").or(config.get("rope_scaling")).expect("rotary keys");
    let full = rope.get("full_attention").unwrap_or(rope);
    number("rope.freq_base", full.get("rope_theta").unwrap_or(&config["max_position_embeddings"]));
    if let Some(theta) = rope.get("sliding_attention").map(|it| &it["rope_theta"]) {
        number("rope.freq_base_swa", theta);
    }
    let size = |key: &str| config[key].as_u64().expect("a size");
    let head_dim = config.get("head_dim").and_then(Value::as_u64);
    let head_dim = head_dim.unwrap_or(size("hidden_size") / size("num_attention_heads"));
    let share = full.get("partial_rotary_factor").and_then(Value::as_f64).unwrap_or(1.0);
    number("rope.dimension_count", &json!((share * head_dim as f64) as u64));
    let kind = full["rope_type"].as_str().expect("a type");
    if matches!(kind, "linear" | "yarn") {
        number("rope.scaling.factor", &full["factor"]);
    }
    if let Some(original) = full.get("original_max_position_embeddings")
        && kind != "llama3"
    {
        number("rope.scaling.original_context_length", original);
    }
    if kind == "longrope" {
        let (context, original) = (384_f64, 96_f64);
        let factor = (1.0 + (context / original).ln() / original.ln()).sqrt();
        number("rope.scaling.attn_factor", &json!(factor));
    } else if matches!(kind, "linear" | "yarn") {
        writing.key(&format!("{own}.rope.scaling.type"), 8, &text(kind));
    }
    if let Some(parallel) = config.get("use_parallel_residual") {
        let parallel = u8::from(*parallel == true);
        writing.key(&format!("{own}.use_parallel_residual"), 7, &[parallel]);
    }
    writing.number("tokenizer.ggml.bos_token_id", &config["bos_token_id"]);
    writing.number("tokenizer.ggml.eos_token_id", &config["eos_token_id"]);
    let tokens: Vec<u8> = (0..96).flat_map(|id| text(&format!("t{id}"))).collect();
    let head = [&8_u32.to_le_bytes()[..], &96_u64.to_le_bytes()].concat();
    writing.key("tokenizer.ggml.tokens", 9, &[head, tokens].concat());
}

/// Writes the factors of rotary frequencies as the converter does.
fn write_factors(writing: &mut Writing, config: &Map<String, Value>) {
    let rope = config.get("rope_parameters").or(config.get("rope_scaling")).expect("rotary keys");
    let numbers = |key: &str| -> Vec<f32> {
        let numbers = rope[key].as_array().expect("a list");
        numbers.iter().map(|it| it.as_f64().expect("a number") as f32).collect()
    };
    if rope["rope_type"] == "longrope" {
        for (name, key) in [("short", "short_factor"), ("long", "long_factor")] {
            let name = format!("rope_factors_{name}.weight");
            writing.tensor(&name, &[numbers(key).len()], 0, &f32s(&numbers(key)));
        }
    }
    if rope["rope_type"] == "llama3" {
        let get = |key: &str| rope[key].as_f64().expect("a number");
        let head_dim = config["head_dim"].as_u64().expect("a width") as usize;
        let theta = config["rope_theta"].as_f64().expect("a base");
        let original = get("original_max_position_embeddings");
        let factor = |n: usize| {
            let turns =
                original / std::f64::consts::TAU / theta.powf(2.0 * n as f64 / head_dim as f64);
            let smooth = (turns - get("low_freq_factor"))
                / (get("high_freq_factor") - get("low_freq_factor"));
            (1.0 / ((1.0 - smooth.clamp(0.0, 1.0)) / get("factor") + smooth.clamp(0.0, 1.0))) as f32
        };
        let factors: Vec<f32> = (0..head_dim / 2).map(factor).collect();
        writing.tensor("rope_freqs.weight", &[head_dim / 2], 0, &f32s(&factors));
    }
}

/// Writes a fixture as llama.cpp's converter does, with matrices of this type.
fn written(name: &str, kind: Kind) -> Writing {
    let mut config: Map<String, Value> =
        read_json(&fixture(name).join("config.json")).expect("a config");
    if let Some(theta) = config.get("rope_theta").cloned() {
        config["rope_scaling"]["rope_theta"] = theta;
    }
    let mut writing = Writing::default();
    write_keys(&mut writing, &config);
    write_factors(&mut writing, &config);
    let family = config["model_type"].as_str().expect("a family").to_owned();
    let heads = |key: &str| config[key].as_u64().expect("a number") as usize;
    let mut reader = WeightReader::open_dir(&fixture(name)).expect("opens");
    let names: Vec<String> = reader.names().map(str::to_owned).collect();
    for name in names {
        if name.ends_with("attention.bias") || name.ends_with("masked_bias") {
            continue;
        }
        let shape = reader.shape(&name).expect("a shape").to_vec();
        let mut values = reader.take(&name, &shape).expect("reads");
        let is_llama = matches!(&*family, "llama" | "mistral");
        for (part, key) in [("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")] {
            if is_llama && name.contains(part) {
                values = swapped(&values, [heads(key), 2, shape[0] / heads(key) / 2]);
            }
        }
        if name.contains("query_key_value") {
            values = swapped(&values, [1, heads("num_attention_heads"), 3]);
        }
        let is_gemma = family.starts_with("gemma");
        if is_gemma && name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        let mut kind = if shape.len() == 1 { Kind::F32 } else { kind };
        if matches!(kind, Kind::Rounded | Kind::Q8) {
            values.iter_mut().for_each(|it| *it = (*it * 64.0).round().clamp(-127.0, 127.0) / 64.0);
            let is_whole = shape[1].is_multiple_of(32);
            kind = if is_whole { kind } else { Kind::Rounded };
        }
        let own = gguf_name(&name, is_gemma);
        writing.tensor(&own, &shape, kind.number(), &kind.bytes(&values));
    }
    writing
}

/// Writes a file into a directory.
fn put(dir: &Path, bytes: &[u8]) -> PathBuf {
    let path = dir.join("model.gguf");
    std::fs::write(&path, bytes).expect("written");
    path
}

/// Computes logits as a decoder does.
fn logits(model: &CausalLm, ids: &[u32]) -> Vec<f32> {
    cached_logits(model, &[ids])
}

#[test]
fn every_familys_gguf_computes_what_its_checkpoint_computes() {
    for name in FIXTURES {
        let dir = as_in_llama_cpp(name);
        let ids = expected(name).ids;
        let reference = CausalLm::from_model_dir(dir.path(), &Device::flex()).expect("loads");
        let expected = logits(&reference, &ids);
        let kinds: &[Kind] = match name.rsplit('-').next() {
            Some("f32") => &[Kind::F32],
            Some("f16") => &[Kind::F32, Kind::F16],
            _ => &[Kind::F32, Kind::Bf16],
        };
        for kind in kinds {
            let path = put(dir.path(), &written(name, *kind).bytes());
            let model = CausalLm::from_model_dir(&path, &Device::flex()).expect(name);
            let found = logits(&model, &ids);
            // Factors of frequencies are stored in f32.
            let has_factors =
                matches!(model.config().spec.rope.scaling, RopeScaling::LongRope { .. });
            if has_factors {
                let close = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4);
                assert!(close, "{name}: as close as factors in f32 allow");
            } else {
                assert_eq!(model.config(), reference.config(), "{name}");
                assert_eq!(found, expected, "{name}: the same to the last bit");
            }
            assert_eq!(model.shape(), reference.shape(), "{name}");
            assert_eq!(logits(&model.to_tensors(), &ids).len(), expected.len());
            CausalLm::notes(&path, model.config()).expect("read");
        }
    }
}

#[test]
fn quantised_weights_compute_as_the_numbers_that_they_stand_for() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    for name in ["llama-v5-untied-f32", "gemma2-bf16", "gpt-neox-serial-bf16"] {
        let ids = expected(name).ids;
        let found = [Kind::Rounded, Kind::Q8].map(|kind| {
            let path = put(dir.path(), &written(name, kind).bytes());
            let model = CausalLm::from_model_dir(&path, &Device::flex()).expect("loads");
            let dtype = WeightReader::open_dir(&path).expect("opens").dtype();
            assert_eq!(dtype.as_deref() == Some("Q8_0"), kind == Kind::Q8);
            let whole = logits(&model, &ids);
            // Each row is the same to the last bit in every number of rows.
            let width = whole.len() / ids.len();
            for num in 1..ids.len() {
                assert_eq!(logits(&model, &ids[..num]), whole[..num * width], "{name}, {num} rows");
            }
            [whole, logits(&model.to_tensors(), &ids)]
        });
        let [rounded, quantised] = found;
        assert_eq!(rounded[1], quantised[1], "{name}: widened weights have the same bits");
        let size = |logits: &[f32]| logits.iter().map(|it| it * it).sum::<f32>().sqrt();
        let difference: Vec<f32> =
            rounded[0].iter().zip(&quantised[0]).map(|(a, b)| a - b).collect();
        let relative = size(&difference) / size(&rounded[0]);
        // The layers' inputs are rounded to 8 bits.
        assert!(relative > 0.0 && relative < 0.05, "{name}: {relative}");
    }
}

#[test]
fn a_part_of_the_layers_and_the_ends_alone_are_read_too() {
    let (name, device) = ("llama-v5-untied-f32", Device::flex());
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = put(dir.path(), &written(name, Kind::F32).bytes());
    let first = CausalLm::load(&path, crate::WeightDtype::F32, Some(1), &device).expect("loads");
    assert_eq!(first.num_here(), 1);
    let ends = CausalLm::load_ends(&path, crate::WeightDtype::F32, &device).expect("loads");
    let whole = CausalLm::from_model_dir(&fixture(name), &device).expect("loads");
    let weight = |model: &CausalLm| model.lm_head_weight().into_data();
    assert_eq!(weight(&ends), weight(&whole));
    let hash = |path: &Path| hash_model_dir(path, &mut |_, _| ()).expect("hashed");
    let other = dir.path().join("other.GGUF");
    std::fs::copy(&path, &other).expect("copied");
    assert_eq!(hash(&path), hash(&other), "the hash is of the file's bytes");
}

#[test]
fn the_published_settings_of_llama_3_are_recognised() {
    let mut writing = Writing::default();
    let config = json!({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 256, "num_hidden_layers": 1,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0
        }
    });
    let Value::Object(mut config) = config else { panic!("an object") };
    write_keys(&mut writing, &config);
    write_factors(&mut writing, &config);
    let mut in_part = Writing::default();
    config["rope_scaling"]["partial_rotary_factor"] = json!(0.5);
    write_keys(&mut in_part, &config);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = put(dir.path(), &writing.bytes());
    let found = ModelConfig::from_model_dir(&path).expect("reads");
    let expected = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192.0,
    };
    assert_eq!(found.spec.rope.scaling, expected);
    // llama.cpp rotates other channels then.
    let path = put(dir.path(), &in_part.bytes());
    let error = ModelConfig::from_model_dir(&path).expect_err("refused").to_string();
    assert!(
        error.contains("`llama.rope.dimension_count` is not 128, the width of a head"),
        "{error}"
    );
}

#[test]
fn what_a_model_here_cannot_be_is_one_error_that_names_the_key() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let fails = |add: &dyn Fn(&mut Writing), parts: &[&str]| {
        let mut writing = written("llama-v5-untied-f32", Kind::F32);
        add(&mut writing);
        let path = put(dir.path(), &writing.bytes());
        let error = CausalLm::from_model_dir(&path, &Device::flex()).expect_err("refused");
        let error = error.to_string();
        for part in parts.iter().chain(&["model.gguf"]) {
            assert!(error.contains(part), "{error} names {part}");
        }
    };
    let one = 1_u32.to_le_bytes();
    let two = 2_u32.to_le_bytes();
    fails(&|it| it.key("llama.expert_count", 4, &two), &["`llama.expert_count`", "is 2"]);
    fails(&|it| it.key("llama.logit_scale", 4, &two), &["`llama.logit_scale`", "not known here"]);
    fails(&|it| it.key("split.count", 4, &two), &["`split.count`", "llama-gguf-split --merge"]);
    fails(&|it| it.key("general.type", 8, &text("adapter")), &["`general.type`", "`adapter`"]);
    let alpha = text("alpha");
    fails(&|it| it.key("llama.rope.scaling.type", 8, &alpha), &["`llama.rope.scaling.type`"]);
    fails(
        &|it| it.key("llama.attention.sliding_window", 6, &[0, 0, 192, 127]),
        &["sliding_window"],
    );
    fails(&|it| it.key("general.alignment", 4, &[3, 0, 0, 0]), &["general.alignment"]);
    fails(&|it| it.key("x", 77, &one), &["`x`", "unknown type 77"]);
    fails(&|it| it.key("llama.block_count", 4, &one), &["`llama.block_count` twice"]);
    fails(&|it| it.tensor("blk.0.attn_sinks.weight", &[4], 0, &[0; 16]), &["attn_sinks"]);
    fails(&|it| it.tensor("more", &[256], 10, &[0; 84]), &["`more`", "Q2_K", "Q4_K_M"]);
    fails(&|it| it.tensor("more", &[1, 31], 8, &[0; 34]), &["`more`", "not whole blocks"]);
    fails(&|it| it.tensor("more", &[1 << 40, 1 << 40], 0, &[]), &["`more`", "ends after"]);
    fails(&|it| it.tensor("blk.9.attn_q.weight", &[3, 32], 0, &[0; 384]), &["its heads"]);
    fails(&|it| it.tensor("output.weight", &[1], 0, &[0; 4]), &["`output.weight` twice"]);
    let overlapping = |it: &mut Writing| {
        (0..400).for_each(|nth| it.tensor(&format!("more.{nth}"), &[64], 0, &[]));
        it.data.extend([0; 256]);
    };
    fails(&overlapping, &["overlaps"]);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut foreign = Writing::default();
    foreign.key("general.architecture", 8, &text("mamba"));
    let path = put(dir.path(), &foreign.bytes());
    let error = ModelConfig::from_model_dir(&path).expect_err("refused").to_string();
    let named = ["`general.architecture`", "`mamba`", "`llama`, `qwen2`"];
    assert!(named.iter().all(|part| error.contains(part)), "{error}");
    let config = fixture("llama-v5-untied-f32").join("config.json");
    let mut config: Map<String, Value> = read_json(&config).expect("a config");
    config["num_key_value_heads"] = json!(3);
    let mut uneven = Writing::default();
    write_keys(&mut uneven, &config);
    let path = put(dir.path(), &uneven.bytes());
    let error = ModelConfig::from_model_dir(&path).expect_err("refused").to_string();
    assert!(error.contains("`llama.attention.head_count_kv`"), "{error}");
    assert!(!error.contains("num_"), "{error}");
}

#[test]
fn a_tokenizer_with_scores_and_long_tokens_is_refused_at_once() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let list = |kind: u32, num: u64, values: Vec<u8>| {
        [kind.to_le_bytes().to_vec(), num.to_le_bytes().to_vec(), values].concat()
    };
    let error = |num: u64, len: usize| {
        let mut writing = Writing::default();
        writing.key("general.architecture", 8, &text("gemma3"));
        writing.key("tokenizer.ggml.model", 8, &text("llama"));
        writing.key("tokenizer.ggml.add_space_prefix", 7, &[0]);
        let tokens = (0..num).flat_map(|id| text(&format!("{id:0len$}"))).collect();
        writing.key("tokenizer.ggml.tokens", 9, &list(8, num, tokens));
        let ones = (0..num).flat_map(|_| 1_u32.to_le_bytes()).collect();
        writing.key("tokenizer.ggml.token_type", 9, &list(5, num, ones));
        let zeros = vec![0; 4 * num as usize];
        writing.key("tokenizer.ggml.scores", 9, &list(6, num, zeros));
        let path = put(dir.path(), &writing.bytes());
        Gguf::read(&path).expect("a header").text_files().err().map(|error| error.to_string())
    };
    assert_eq!(error(20, 3000), None);
    let error = error(32, 4000).expect("refused");
    assert!(error.contains("model.gguf") && error.contains("too long"), "{error}");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let whole = written("llama-v5-untied-f32", Kind::F16).bytes();
    for cut in (0..whole.len() - 32).step_by(37) {
        let path = put(dir.path(), &whole[..cut]);
        let error = CausalLm::from_model_dir(&path, &Device::flex()).expect_err("refused");
        assert!(error.to_string().contains("model.gguf"), "{error}");
    }
}

#[test]
fn a_file_that_llama_cpps_package_wrote_is_a_model() {
    let model = CausalLm::from_model_dir(&fixture("model.gguf"), &Device::flex()).expect("loads");
    let found = logits(&model, &[3, 1, 4]);
    assert!(found.iter().all(|it| it.is_finite()) && found.len() == 3 * 16);
    let factors = vec![1.0, 1.0, 2.0, 4.0];
    let expected = RopeScaling::LongRope {
        short_factor: factors.clone(),
        long_factor: factors,
        attention_factor: 1.0,
        original_max_position_embeddings: 64.0,
    };
    assert_eq!(model.config().spec.rope.scaling, expected);
    assert!(model.config().spec.tie_word_embeddings);
    assert_eq!(model.shape().eos_token_ids, [2]);
}
