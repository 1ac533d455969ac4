//! Turns the keys of a GGUF file into those of a `config.json`, from which the families read.
//!
//! llama.cpp fixes some settings in its code, and so does this module: the activations, the scale of
//! Gemma's scores, and the order of layers with windows. llama.cpp's converter drops the windows of a
//! Mistral, which is a Llama there, and of a Qwen, so they are not known here. A key that we do not
//! know may change what the model computes and is refused.

use std::f64::consts::TAU;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

use serde_json::{Map, Value, json};

use super::{Architecture, ModelConfig};
use crate::error::{ModelError, Result};
use crate::gguf::Gguf;

/// The architecture's keys that have one in `config.json`.
const RENAMED: [(&str, &str); 17] = [
    ("embedding_length", "hidden_size"),
    ("block_count", "num_hidden_layers"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("attention.layer_norm_epsilon", "layer_norm_eps"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("use_parallel_residual", "use_parallel_residual"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("vocab_size", "vocab_size"),
];
/// How many of the first renamed keys a file must have.
const NUM_REQUIRED: usize = 4;
/// Further keys that are read here, and keys that do not change what a text model computes.
const KNOWN: [&str; 11] = [
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",
    "tensor_data_layout",
];
/// The beginnings of the keys of a vision model beside the text model.
const VISION: [&str; 2] = ["vision.", "mm."];
/// The keys of tokens that end a response.
const ENDS: [&str; 3] = ["eos_token_id", "eot_token_id", "eom_token_id"];
/// The factors of Llama 3's and of LongRoPE's frequencies.
const LLAMA3_FACTORS: &str = "rope_freqs.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";
const LONG_FACTORS: &str = "rope_factors_long.weight";

impl Architecture {
    /// Returns the architecture's name in GGUF files.
    fn gguf_name(self) -> &'static str {
        match self {
            // llama.cpp does not distinguish them.
            Self::Llama | Self::Mistral => "llama",
            Self::Gemma3 => "gemma3",
            Self::GptNeox => "gptneox",
            _ => self.model_type(),
        }
    }

    /// Returns whether channels that are rotated together are neighbours in a GGUF file, instead of
    /// half a head apart.
    pub(crate) fn has_gguf_pairs(self) -> bool {
        self.gguf_name() == "llama"
    }
}

impl ModelConfig {
    /// Reads the keys of a GGUF file.
    ///
    /// # Errors
    /// If the file has no whole model of a supported family, or a key has a bad value.
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let architecture = architecture_of(gguf)?;
        check_keys(gguf)?;
        let mut keys = Map::new();
        for (nth, (own, key)) in RENAMED.into_iter().enumerate() {
            match gguf.own(own) {
                Some(value) if value.is_number() || value.is_boolean() => {
                    keys.insert(key.to_owned(), value.clone());
                }
                Some(_) => return Err(gguf.fail(own, "is not one finite number")),
                None if nth < NUM_REQUIRED => return Err(gguf.fail(own, "is missing")),
                None => {}
            }
        }
        let embedding = gguf.tensors.get("token_embd.weight").and_then(|it| it.shape.last());
        keys.extend(embedding.map(|num| ("vocab_size".to_owned(), json!(num))));
        add_tokens(gguf, &mut keys);
        add_shape(gguf, architecture, &mut keys)?;
        add_rope(gguf, &mut keys)?;
        let has = |tensor: &str| gguf.tensors.contains_key(tensor);
        let has_any = |parts: &[&str]| parts.iter().any(|it| has(&format!("blk.0.{it}.bias")));
        let theta = keys.get("rope_theta").cloned().unwrap_or(json!(10_000.0));
        keys.extend([
            ("tie_word_embeddings".to_owned(), json!(!has("output.weight"))),
            ("attention_bias".to_owned(), json!(has_any(&["attn_q", "attn_qkv", "attn_output"]))),
            ("mlp_bias".to_owned(), json!(has_any(&["ffn_up"]))),
            ("rotary_emb_base".to_owned(), theta.clone()),
            ("rope_theta".to_owned(), theta),
        ]);
        super::families::read(architecture, &gguf.path, &keys).map_err(|error| match error {
            ModelError::Invalid(text) => ModelError::Invalid(with_own_keys(gguf, text)),
            error => error,
        })
    }
}

/// Replaces the keys of a `config.json` in an error by those of the file.
fn with_own_keys(gguf: &Gguf, text: String) -> String {
    RENAMED.iter().fold(text, |text, (own, key)| {
        text.replace(&format!("`{key}`"), &format!("`{}.{own}`", gguf.architecture))
    })
}

/// Finds the family, and checks that the file has a whole model of it.
fn architecture_of(gguf: &Gguf) -> Result<Architecture> {
    let general = |key: &str, problem: &str| ModelError::config(&gguf.path, key, problem);
    let kind = gguf.values.get("general.type").and_then(Value::as_str).unwrap_or("model");
    if kind != "model" {
        let problem = format!("is `{kind}`; hint: give the GGUF file of a whole model");
        return Err(general("general.type", &problem));
    }
    if gguf.values.get("split.count").and_then(Value::as_u64).is_some_and(|num| num > 1) {
        let problem = "is above 1: this is a part of a model; hint: merge the parts with `llama-gguf-split --merge \
                       FIRST-PART MODEL.gguf`";
        return Err(general("split.count", problem));
    }
    let known = |it: &Architecture| it.gguf_name() == gguf.architecture;
    Architecture::ALL.into_iter().find(known).ok_or_else(|| {
        let mut known = Architecture::ALL.map(|known| format!("`{}`", known.gguf_name())).to_vec();
        known.dedup();
        let (name, known) = (&gguf.architecture, known.join(", "));
        let problem = format!("is `{name}`, which is not supported; expected one of {known}");
        general("general.architecture", &problem)
    })
}

/// Checks that the file has no keys with an effect that we do not know.
fn check_keys(gguf: &Gguf) -> Result<()> {
    let prefix = format!("{}.", gguf.architecture);
    let own = gguf.values.iter().filter_map(|(key, it)| Some((key.strip_prefix(&prefix)?, it)));
    for (key, value) in own {
        let is_known = RENAMED.iter().any(|(own, _)| *own == key)
            || KNOWN.contains(&key)
            || VISION.iter().any(|vision| key.starts_with(vision))
            || key.starts_with("expert_") && *value == 0;
        if !is_known {
            let problem = format!("is {value}, and how it changes the model is not known here");
            return Err(gguf.fail(key, problem));
        }
    }
    Ok(())
}

/// Adds the special tokens.
fn add_tokens(gguf: &Gguf, keys: &mut Map<String, Value>) {
    let token = |key: &str| gguf.values.get(&format!("tokenizer.ggml.{key}"));
    let mut ends: Vec<&Value> = Vec::new();
    for end in ENDS.into_iter().filter_map(token) {
        if !ends.contains(&end) {
            ends.push(end);
        }
    }
    keys.insert("eos_token_id".to_owned(), json!(ends));
    keys.extend(token("bos_token_id").map(|id| ("bos_token_id".to_owned(), id.clone())));
}

/// Adds the width of a head, the share of it that rotates, and what depends on the model's size in
/// llama.cpp.
fn add_shape(gguf: &Gguf, family: Architecture, keys: &mut Map<String, Value>) -> Result<()> {
    let size = |key: &str| keys.get(key).and_then(Value::as_u64).filter(|size| *size > 0);
    let of_heads = size("hidden_size").zip(size("num_attention_heads"));
    let of_heads = of_heads.map(|(width, heads)| width / heads);
    let Some(head_dim) = size("head_dim").or(of_heads).filter(|width| *width > 0) else {
        return Err(gguf.fail("attention.key_length", "is missing or 0"));
    };
    if gguf.own("attention.value_length").is_some_and(|width| *width != head_dim) {
        let problem = format!("is not {head_dim}, the width of queries and keys");
        return Err(gguf.fail("attention.value_length", problem));
    }
    let rotated = gguf.own("rope.dimension_count").map_or(Some(head_dim), Value::as_u64);
    // llama.cpp would rotate the neighbours among the first channels, which no family here does.
    let least = if family.has_gguf_pairs() { head_dim } else { 1 };
    let Some(rotated) = rotated.filter(|rotated| (least..=head_dim).contains(rotated)) else {
        let expected = match family.has_gguf_pairs() {
            true => {
                format!("{head_dim}, the width of a head: rotating a part of it is not supported")
            }
            false => format!("a number from 1 to {head_dim}, the width of a head"),
        };
        let problem = format!("is not {expected}");
        return Err(gguf.fail("rope.dimension_count", problem));
    };
    // Half a channel more, since the share is rounded down to channels.
    let share = (rotated as f64 + 0.5) / head_dim as f64;
    let share = if rotated == head_dim { 1.0 } else { share };
    let is_27b = match family {
        Architecture::Gemma2 => size("num_hidden_layers") == Some(46),
        Architecture::Gemma3 => size("num_hidden_layers") == Some(62),
        _ => false,
    };
    let query_scalar = of_heads.filter(|_| is_27b).unwrap_or(head_dim);
    let window = keys.get("sliding_window").cloned().filter(|window| *window != 0);
    keys.remove("sliding_window");
    if family != Architecture::Gemma2 || window.is_some() {
        keys.insert("sliding_window".to_owned(), window.unwrap_or(Value::Null));
    }
    keys.extend([
        ("head_dim".to_owned(), json!(head_dim)),
        ("partial_rotary_factor".to_owned(), json!(share)),
        ("rotary_pct".to_owned(), json!(share)),
        ("query_pre_attn_scalar".to_owned(), json!(query_scalar)),
    ]);
    Ok(())
}

/// Adds the scaling of the rotary embedding.
fn add_rope(gguf: &Gguf, keys: &mut Map<String, Value>) -> Result<()> {
    let own = |key: &str| gguf.own(&format!("rope.scaling.{key}"));
    let has = |tensor: &str| gguf.tensors.contains_key(tensor);
    let factor = own("factor").filter(|factor| factor.as_f64() != Some(0.0));
    let kind = match own("type") {
        // llama.cpp's default is linear scaling, by 1 without a factor.
        None if factor.is_none() => "none",
        None => "linear",
        Some(kind) => kind.as_str().unwrap_or("unknown"),
    };
    let original = own("original_context_length").or(keys.get("max_position_embeddings"));
    let attention_factor = own("attn_factor").cloned().unwrap_or(json!(1.0));
    let is_scaled = attention_factor.as_f64() != Some(1.0);
    let scaling = match (kind, has(LLAMA3_FACTORS), has(SHORT_FACTORS)) {
        ("none" | "longrope", false, true) => json!({
            "rope_type": "longrope",
            "attention_factor": attention_factor,
            "original_max_position_embeddings": original,
            "short_factor": factors(gguf, SHORT_FACTORS)?,
            "long_factor": factors(gguf, LONG_FACTORS)?,
        }),
        _ if is_scaled => {
            return Err(gguf.fail("rope.scaling.attn_factor", "is set without LongRoPE's factors"));
        }
        ("none", true, false) => {
            let theta = keys.get("rope_theta").and_then(Value::as_f64).unwrap_or(10_000.0);
            llama3_scaling(theta, &factors(gguf, LLAMA3_FACTORS)?)
        }
        ("none", false, false) => return Ok(()),
        ("linear", false, false) => json!({ "rope_type": kind, "factor": factor }),
        ("yarn", false, false) => json!({
            "rope_type": kind,
            "factor": factor,
            "attention_factor": own("yarn_attn_factor"),
            "beta_fast": own("yarn_beta_fast"),
            "beta_slow": own("yarn_beta_slow"),
            "original_max_position_embeddings": original,
        }),
        ("linear" | "yarn", ..) => {
            let problem = format!("is `{kind}` beside a tensor with factors of its frequencies");
            return Err(gguf.fail("rope.scaling.type", problem));
        }
        _ => {
            let problem = format!(
                "is `{kind}`; expected `none`, `linear` or `yarn`, or `longrope` with tensor `{SHORT_FACTORS}`"
            );
            return Err(gguf.fail("rope.scaling.type", problem));
        }
    };
    keys.insert("rope_scaling".to_owned(), scaling);
    Ok(())
}

/// Returns the scaling with these factors: that of Llama 3 if its published settings give them.
fn llama3_scaling(theta: f64, factors: &[f64]) -> Value {
    let (low, high, original) = (1.0, 4.0, 8192.0);
    let factor = factors.iter().copied().fold(1.0, f64::max);
    let is_llama3 = factors.iter().enumerate().all(|(n, found)| {
        let wavelength = TAU * theta.powf(n as f64 / factors.len() as f64);
        let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
        let expected = 1.0 / ((1.0 - smooth) / factor + smooth);
        // The converter computes in f32.
        (found - expected).abs() <= 1e-4 * expected
    });
    if is_llama3 {
        return json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        });
    }
    // Factors for all lengths, which only LongRoPE can name.
    json!({
        "rope_type": "longrope",
        "attention_factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
    })
}

/// Reads the factors of a rotary embedding, which are stored in f32.
fn factors(gguf: &Gguf, name: &str) -> Result<Vec<f64>> {
    let fail = |problem: &str| gguf.broken(format!("tensor `{name}` {problem}"));
    let tensor = gguf.tensors.get(name).ok_or_else(|| fail("is missing"))?;
    let (&[len @ 1..=4096], 0) = (&*tensor.shape, tensor.kind) else {
        return Err(fail("is not a list of up to 4096 numbers in F32"));
    };
    let mut bytes = vec![0; len as usize * size_of::<f32>()];
    let start = gguf.data_start.saturating_add(tensor.offset);
    let read = File::open(&gguf.path).and_then(|mut file| {
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut bytes)
    });
    read.map_err(|_| fail("is not whole"))?;
    let numbers = bytes.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it));
    // The shortest decimals are what was meant, as of the header's numbers.
    Ok(numbers.map(|it| it.to_string().parse().unwrap_or(f64::NAN)).collect())
}
