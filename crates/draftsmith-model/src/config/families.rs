//! The specification of each family: its computations, its tensor names, and the defaults of its
//! keys. The defaults are those of transformers.

use std::path::Path;

use serde_json::{Map, Value};

use super::keys::{Given, Keys, TokenIds};
use super::rope::{self, Ropes};
use super::{Architecture, ModelConfig};
use crate::error::Result;
use crate::spec::{
    AttentionNames, AttentionSpec, DecoderSpec, MlpNames, MlpSpec, ModelNames, ModelShape,
    NormForm, NormSpec, RopeConfig, RopeScaling, SessionFaults, WindowSpec,
};

/// The properties of a family: default values of absent keys, the kind of norm, and tensor names.
struct Family {
    context: usize,
    head_dim: Option<usize>,
    epsilon: f64,
    activation: &'static str,
    is_tied: bool,
    /// The default of the key `attention_bias`. `None` if the family has no such key and no bias in
    /// the output projection of attention.
    attention_bias: Option<bool>,
    norm: NormForm,
    names: ModelNames,
    attention: AttentionNames,
    mlp: MlpNames,
}

const LLAMA: Family = Family {
    context: 2048,
    head_dim: None,
    epsilon: 1e-6,
    activation: "silu",
    is_tied: false,
    attention_bias: Some(false),
    norm: NormForm::Rms,
    names: ModelNames::LLAMA,
    attention: AttentionNames::LLAMA,
    mlp: MlpNames::LLAMA,
};

const MISTRAL: Family = Family { context: 131_072, attention_bias: None, ..LLAMA };

const QWEN2: Family = Family { context: 32_768, attention_bias: None, ..LLAMA };

const QWEN3: Family = Family {
    context: 32_768,
    head_dim: Some(128),
    attention: AttentionNames { head_norms: HEAD_NORMS, ..AttentionNames::LLAMA },
    ..LLAMA
};

const PHI3: Family = Family {
    context: 4096,
    epsilon: 1e-5,
    attention_bias: None,
    attention: AttentionNames {
        query: "self_attn.qkv_proj",
        key: "self_attn.qkv_proj",
        value: "self_attn.qkv_proj",
        ..AttentionNames::LLAMA
    },
    mlp: MlpNames { gate: Some("mlp.gate_up_proj"), up: "mlp.gate_up_proj", ..MlpNames::LLAMA },
    ..LLAMA
};

const GEMMA2: Family = Family {
    context: 8192,
    head_dim: Some(256),
    activation: "gelu_pytorch_tanh",
    is_tied: true,
    norm: NormForm::RmsPlusOne,
    attention: AttentionNames {
        post_norm: Some("post_attention_layernorm"),
        ..AttentionNames::LLAMA
    },
    mlp: MlpNames {
        norm: "pre_feedforward_layernorm",
        post_norm: Some("post_feedforward_layernorm"),
        ..MlpNames::LLAMA
    },
    ..LLAMA
};

const GEMMA3: Family = Family {
    context: 131_072,
    attention: AttentionNames { head_norms: HEAD_NORMS, ..GEMMA2.attention },
    ..GEMMA2
};

const GPT_NEOX: Family = Family {
    epsilon: 1e-5,
    activation: "gelu",
    attention_bias: Some(true),
    norm: NormForm::Layer,
    names: ModelNames {
        embedding: "gpt_neox.embed_in",
        layers: "gpt_neox.layers",
        norm: "gpt_neox.final_layer_norm",
        lm_head: "embed_out",
        // Tensors of the causal mask and of the value of masked scores are ignored.
        ignored: &["rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"],
    },
    attention: AttentionNames {
        query: "attention.query_key_value",
        key: "attention.query_key_value",
        value: "attention.query_key_value",
        is_by_head: true,
        output: "attention.dense",
        ..AttentionNames::LLAMA
    },
    mlp: MlpNames {
        gate: None,
        up: "mlp.dense_h_to_4h",
        down: "mlp.dense_4h_to_h",
        ..MlpNames::LLAMA
    },
    ..LLAMA
};

pub(super) const HEAD_NORMS: Option<[&str; 2]> = Some(["self_attn.q_norm", "self_attn.k_norm"]);

impl Architecture {
    fn family(self) -> Family {
        match self {
            Self::Llama => LLAMA,
            Self::Mistral => MISTRAL,
            Self::Qwen2 => QWEN2,
            Self::Qwen3 => QWEN3,
            Self::Phi3 => PHI3,
            Self::Gemma2 => GEMMA2,
            Self::Gemma3 => GEMMA3,
            Self::GptNeox => GPT_NEOX,
        }
    }
}

/// Reads the keys of a family's `config.json`.
pub(super) fn read(
    architecture: Architecture,
    path: &Path,
    keys: &Map<String, Value>,
) -> Result<ModelConfig> {
    let keys = Keys::read(path, keys)?;
    let family = architecture.family();
    let mut shape = shape_of(&keys, &family)?;
    let Ropes { full, in_window } = rope::read(architecture, &keys, &shape)?;
    if let RopeScaling::LongRope { original_max_position_embeddings: original, .. } = &full.scaling
    {
        shape.context = shape.context.min(*original as usize);
    }
    let mut spec = common_spec(architecture, &family, &keys, full)?;
    match architecture {
        Architecture::Llama => spec.mlp.bias = keys.mlp_bias.unwrap_or(false),
        Architecture::Mistral => {
            let size = keys.sliding_window.unwrap_or(Some(4096));
            spec.window = window(&keys, size, vec![true; shape.num_layers])?;
        }
        Architecture::Qwen2 => {
            spec.attention.qkv_bias = true;
            spec.window = qwen_window(&keys, &shape)?;
        }
        Architecture::Qwen3 => spec.window = qwen_window(&keys, &shape)?,
        Architecture::Phi3 => {
            let size = keys.sliding_window.flatten();
            spec.window = window(&keys, size, vec![true; shape.num_layers])?;
        }
        Architecture::Gemma2 => {
            add_gemma(&mut spec, &keys, &shape, 2)?;
            spec.attention.soft_cap =
                soft_cap(&keys, "attn_logit_softcapping", keys.attn_logit_softcapping, Some(50.0))?;
            spec.logit_soft_cap = soft_cap(
                &keys,
                "final_logit_softcapping",
                keys.final_logit_softcapping,
                Some(30.0),
            )?;
        }
        Architecture::Gemma3 => {
            add_gemma(&mut spec, &keys, &shape, keys.sliding_window_pattern.unwrap_or(6))?;
            spec.window = spec.window.map(|window| WindowSpec { rope: in_window, ..window });
            if keys.attn_logit_softcapping.flatten().is_some() {
                // transformers reads this key for Gemma 3 but does not apply it.
                let problem = "is set, but no published Gemma 3 has it";
                return Err(keys.fail("attn_logit_softcapping", problem));
            }
            spec.logit_soft_cap =
                soft_cap(&keys, "final_logit_softcapping", keys.final_logit_softcapping, None)?;
        }
        Architecture::GptNeox => {
            spec.mlp.bias = true;
            spec.is_parallel = keys.use_parallel_residual.unwrap_or(true);
        }
    }
    Ok(ModelConfig { architecture, shape, spec })
}

/// Reads the part of the spec that all families write in the same way.
fn common_spec(
    architecture: Architecture,
    family: &Family,
    keys: &Keys,
    rope: RopeConfig,
) -> Result<DecoderSpec> {
    let (epsilon_key, epsilon) = match architecture {
        Architecture::GptNeox => ("layer_norm_eps", keys.layer_norm_eps),
        _ => ("rms_norm_eps", keys.rms_norm_eps),
    };
    let (activation_key, activation) = match architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => {
            ("hidden_activation", &keys.hidden_activation)
        }
        _ => ("hidden_act", &keys.hidden_act),
    };
    let activation = activation.as_deref().unwrap_or(family.activation);
    let bias = family.attention_bias.is_some_and(|bias| keys.attention_bias.unwrap_or(bias));
    Ok(DecoderSpec {
        norm: NormSpec {
            form: family.norm,
            epsilon: keys.positive(epsilon_key, epsilon.or(Some(family.epsilon)))?,
        },
        attention: AttentionSpec { names: family.attention.clone(), ..AttentionSpec::llama(bias) },
        mlp: MlpSpec {
            width: keys.intermediate_size,
            bias: false,
            activation: keys.activation(activation_key, activation)?,
            names: family.mlp.clone(),
        },
        is_parallel: false,
        rope,
        window: None,
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: keys.tie_word_embeddings.unwrap_or(family.is_tied),
        faults: SessionFaults::default(),
        names: family.names.clone(),
    })
}

/// Reads the sizes and checks them.
fn shape_of(keys: &Keys, family: &Family) -> Result<ModelShape> {
    let context = keys.max_position_embeddings.unwrap_or(family.context);
    keys.check_sizes(&[
        ("vocab_size", keys.vocab_size),
        ("hidden_size", keys.hidden_size),
        ("intermediate_size", keys.intermediate_size),
        ("num_hidden_layers", keys.num_hidden_layers),
        ("num_attention_heads", keys.num_attention_heads),
        ("num_key_value_heads", keys.num_key_value_heads.unwrap_or(1)),
        ("head_dim", keys.head_dim.unwrap_or(2)),
        ("max_position_embeddings", context),
    ])?;
    let num_heads = keys.num_attention_heads;
    let num_kv_heads = keys.num_key_value_heads.unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        let problem =
            format!("is {num_kv_heads}, which does not divide `num_attention_heads` = {num_heads}");
        return Err(keys.fail("num_key_value_heads", problem));
    }
    let head_dim = match keys.head_dim.or(family.head_dim) {
        Some(dim) => dim,
        None if keys.hidden_size.is_multiple_of(num_heads) => keys.hidden_size / num_heads,
        None => {
            let problem = format!(
                "is {}, which `num_attention_heads` = {num_heads} does not divide; set `head_dim`",
                keys.hidden_size
            );
            return Err(keys.fail("hidden_size", problem));
        }
    };
    if !head_dim.is_multiple_of(2) {
        let problem = format!("is {head_dim}, but rotary embedding needs an even number");
        return Err(keys.fail("head_dim", problem));
    }
    Ok(ModelShape {
        vocab_size: keys.vocab_size,
        hidden_size: keys.hidden_size,
        num_layers: keys.num_hidden_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        context,
        bos_token_id: keys.bos_token_id,
        eos_token_ids: keys.eos_token_id.clone().map(TokenIds::into_vec).unwrap_or_default(),
    })
}

/// Adds the settings that both Gemmas share. Every `pattern`th layer attends to all tokens.
fn add_gemma(
    spec: &mut DecoderSpec,
    keys: &Keys,
    shape: &ModelShape,
    pattern: usize,
) -> Result<()> {
    if pattern == 0 {
        return Err(keys.fail("sliding_window_pattern", "is 0, expected a number of layers"));
    }
    let slides = sliding_layers(keys, shape, |layer| !(layer + 1).is_multiple_of(pattern))?;
    spec.window = window(keys, keys.sliding_window.unwrap_or(Some(4096)), slides)?;
    let query_scalar = keys.query_pre_attn_scalar.unwrap_or(256.0);
    spec.attention.query_scalar = Some(keys.positive("query_pre_attn_scalar", Some(query_scalar))?);
    spec.embedding_scale = Some((shape.hidden_size as f32).sqrt());
    Ok(())
}

/// Reads the sliding window of a Qwen, which covers the last layers; `None` unless
/// `use_sliding_window` is set.
fn qwen_window(keys: &Keys, shape: &ModelShape) -> Result<Option<WindowSpec>> {
    if !keys.use_sliding_window.unwrap_or(false) {
        return Ok(None);
    }
    let first = keys.max_window_layers.unwrap_or(28);
    let slides = sliding_layers(keys, shape, |layer| layer >= first)?;
    window(keys, keys.sliding_window.unwrap_or(Some(4096)), slides)
}

/// Builds the spec of the sliding window; `None` without a window size or without a layer that has
/// one.
fn window(keys: &Keys, size: Option<usize>, layers: Vec<bool>) -> Result<Option<WindowSpec>> {
    let Some(size) = size else { return Ok(None) };
    keys.check_sizes(&[("sliding_window", size)])?;
    let spec = WindowSpec { size, layers, sees_ahead: false, rope: None };
    Ok(spec.layers.contains(&true).then_some(spec))
}

/// Reads the windows of a drafter's layers, as vLLM does: `layer_types` decides. `use_swa` gives a window
/// to all layers if none is listed with one, and a Qwen 3 has its own rule without the list.
///
/// # Errors
/// If a key has a bad value, or keys contradict each other.
pub(crate) fn draft_window(
    path: &Path,
    keys: &Map<String, Value>,
    model: &ModelConfig,
) -> Result<Option<WindowSpec>> {
    let keys = Keys::read(path, keys)?;
    let is_on = keys.use_sliding_window;
    let first = keys.max_window_layers.unwrap_or(28);
    let has_rule = model.architecture == Architecture::Qwen3 && is_on == Some(true);
    let mut slides = sliding_layers(&keys, &model.shape, |layer| has_rule && layer >= first)?;
    if keys.use_swa == Some(true) && !slides.contains(&true) {
        slides.fill(true);
    }
    let size = keys.swa_window_size.or(keys.sliding_window.flatten());
    let problem = match (slides.contains(&true), size, is_on) {
        (true, _, Some(false)) => "is false, but layers have a window",
        (true, None, _) => {
            return Err(keys.fail("sliding_window", "is missing, but layers have a window"));
        }
        (false, Some(_), None) if keys.layer_types.is_none() => {
            let problem =
                "is given, but no key says which layers have a window; hint: write `layer_types`";
            return Err(keys.fail("sliding_window", problem));
        }
        (false, _, Some(true)) if keys.layer_types.is_none() && !has_rule => {
            "is true, but only `layer_types` says which layers of such a drafter have a window"
        }
        _ => return window(&keys, size, slides),
    };
    Err(keys.fail("use_sliding_window", problem))
}

/// Returns for each layer whether it has a window. The key `layer_types` decides, or else the
/// family's rule.
fn sliding_layers(
    keys: &Keys,
    shape: &ModelShape,
    rule: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let Some(types) = &keys.layer_types else {
        return Ok((0..shape.num_layers).map(rule).collect());
    };
    if types.len() != shape.num_layers {
        let problem = format!("lists {} layers, expected {}", types.len(), shape.num_layers);
        return Err(keys.fail("layer_types", problem));
    }
    let slides = |name: &String| match name.as_str() {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => {
            let known = "expected `full_attention` and `sliding_attention`";
            Err(keys.fail("layer_types", format!("lists `{other}`, {known}")))
        }
    };
    types.iter().map(slides).collect()
}

fn soft_cap(
    keys: &Keys,
    key: &'static str,
    given: Given<f32>,
    default: Option<f32>,
) -> Result<Option<f32>> {
    match given.unwrap_or(default) {
        None => Ok(None),
        Some(cap) => keys.positive(key, Some(f64::from(cap))).map(|_| Some(cap)),
    }
}
