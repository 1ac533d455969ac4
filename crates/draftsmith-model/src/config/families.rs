//! What each family computes, how it names its tensors, and the defaults of its keys, which are
//! those of transformers.

use std::path::Path;

use super::keys::{Given, Keys, TokenIds, fail, positive};
use super::{Architecture, ModelConfig, rope, sizes};
use crate::error::ModelError;
use crate::shape::ModelShape;
use crate::spec::{
    AttentionNames, AttentionSpec, DecoderSpec, MlpNames, MlpSpec, ModelNames, NormForm, NormSpec,
    RopeScaling, WindowSpec,
};

/// A family's values for absent keys.
struct Defaults {
    context: usize,
    head_dim: Option<usize>,
    epsilon: f64,
    activation: &'static str,
    is_tied: bool,
}

impl Architecture {
    fn defaults(self) -> Defaults {
        let llama = Defaults {
            context: 2048,
            head_dim: None,
            epsilon: 1e-6,
            activation: "silu",
            is_tied: false,
        };
        let gemma = || Defaults {
            head_dim: Some(256),
            activation: "gelu_pytorch_tanh",
            is_tied: true,
            ..Self::Llama.defaults()
        };
        match self {
            Self::Llama => llama,
            Self::Mistral => Defaults { context: 131_072, ..llama },
            Self::Qwen2 => Defaults { context: 32_768, ..llama },
            Self::Qwen3 => Defaults { context: 32_768, head_dim: Some(128), ..llama },
            Self::Phi3 => Defaults { context: 4096, epsilon: 1e-5, ..llama },
            Self::Gemma2 => Defaults { context: 8192, ..gemma() },
            Self::Gemma3 => Defaults { context: 131_072, ..gemma() },
            Self::GptNeox => Defaults { epsilon: 1e-5, activation: "gelu", ..llama },
        }
    }
}

/// Reads a family's `config.json`.
pub(super) fn read(architecture: Architecture, path: &Path) -> Result<ModelConfig, ModelError> {
    let keys = Keys::read(path)?;
    let defaults = architecture.defaults();
    let mut shape = shape_of(&keys, &defaults, path)?;
    let (epsilon_key, epsilon) = match architecture {
        Architecture::GptNeox => ("layer_norm_eps", keys.layer_norm_eps),
        _ => ("rms_norm_eps", keys.rms_norm_eps),
    };
    let epsilon = positive(path, epsilon_key, Some(epsilon.unwrap_or(defaults.epsilon)))?;
    let (act_key, act) = match architecture {
        Architecture::Gemma2 | Architecture::Gemma3 => {
            ("hidden_activation", &keys.hidden_activation)
        }
        _ => ("hidden_act", &keys.hidden_act),
    };
    let act = act.as_deref().unwrap_or(defaults.activation);
    let rope = rope::read(architecture, &keys, &shape, path)?;
    if let RopeScaling::LongRope { original_max_position_embeddings: original, .. } =
        &rope.full.scaling
    {
        shape.context = shape.context.min(*original as usize);
    }
    // Llama's, of which each family below says what differs.
    let llama = DecoderSpec {
        norm: NormSpec { form: NormForm::Rms, epsilon },
        attention: AttentionSpec::llama(false),
        mlp: MlpSpec {
            activation: Keys::activation(path, act_key, act)?,
            ..MlpSpec::llama(keys.intermediate_size, false)
        },
        is_parallel: false,
        rope: rope.full,
        window: None,
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: keys.tie_word_embeddings.unwrap_or(defaults.is_tied),
        names: ModelNames::LLAMA,
    };
    let bias = |default: bool| keys.attention_bias.unwrap_or(default);
    let biased = |bias: bool| AttentionSpec::llama(bias);
    let spec = match architecture {
        Architecture::Llama => DecoderSpec {
            attention: biased(bias(false)),
            mlp: MlpSpec { bias: keys.mlp_bias.unwrap_or(false), ..llama.mlp },
            ..llama
        },
        Architecture::Mistral => {
            let window = window(path, keys.sliding_window.unwrap_or(Some(4096)), |_| true, &shape)?;
            DecoderSpec { window, ..llama }
        }
        Architecture::Qwen2 => DecoderSpec {
            attention: AttentionSpec { qkv_bias: true, ..biased(false) },
            window: qwen_window(&keys, &shape, path)?,
            ..llama
        },
        Architecture::Qwen3 => DecoderSpec {
            attention: AttentionSpec {
                names: AttentionNames { head_norms: HEAD_NORMS, ..AttentionNames::LLAMA },
                ..biased(bias(false))
            },
            window: qwen_window(&keys, &shape, path)?,
            ..llama
        },
        Architecture::Phi3 => DecoderSpec {
            attention: AttentionSpec {
                names: AttentionNames {
                    query: "self_attn.qkv_proj",
                    key: "self_attn.qkv_proj",
                    value: "self_attn.qkv_proj",
                    ..AttentionNames::LLAMA
                },
                ..biased(false)
            },
            mlp: MlpSpec {
                names: MlpNames {
                    gate: Some("mlp.gate_up_proj"),
                    up: "mlp.gate_up_proj",
                    ..MlpNames::LLAMA
                },
                ..llama.mlp
            },
            window: window(path, keys.sliding_window.flatten(), |_| true, &shape)?,
            ..llama
        },
        Architecture::Gemma2 | Architecture::Gemma3 => {
            let is_third = architecture == Architecture::Gemma3;
            let pattern = if is_third { keys.sliding_window_pattern.unwrap_or(6) } else { 2 };
            if pattern == 0 {
                let problem = "is 0, expected a number of layers".to_owned();
                return Err(fail(path, "sliding_window_pattern", problem));
            }
            let slides =
                layer_types(&keys, &shape, path, |layer| !(layer + 1).is_multiple_of(pattern))?;
            let size = keys.sliding_window.unwrap_or(Some(4096));
            let window = window(path, size, |layer| slides[layer], &shape)?;
            let caps = if is_third { [None; 2] } else { [Some(50.0), Some(30.0)] };
            let [score_cap, logit_cap] = [
                soft_cap(path, "attn_logit_softcapping", keys.attn_logit_softcapping, caps[0])?,
                soft_cap(path, "final_logit_softcapping", keys.final_logit_softcapping, caps[1])?,
            ];
            if is_third && score_cap.is_some() {
                // transformers reads this key for Gemma 3 but does not apply it.
                let problem = "is there: no published Gemma 3 has one".to_owned();
                return Err(fail(path, "attn_logit_softcapping", problem));
            }
            let query_scalar = keys.query_pre_attn_scalar.unwrap_or(256.0);
            let query_scalar = positive(path, "query_pre_attn_scalar", Some(query_scalar))?;
            DecoderSpec {
                norm: NormSpec { form: NormForm::RmsPlusOne, epsilon },
                attention: AttentionSpec {
                    query_scalar: Some(query_scalar),
                    soft_cap: score_cap,
                    names: AttentionNames {
                        head_norms: if is_third { HEAD_NORMS } else { None },
                        post_norm: Some("post_attention_layernorm"),
                        ..AttentionNames::LLAMA
                    },
                    ..biased(bias(false))
                },
                mlp: MlpSpec {
                    names: MlpNames {
                        norm: "pre_feedforward_layernorm",
                        post_norm: Some("post_feedforward_layernorm"),
                        ..MlpNames::LLAMA
                    },
                    ..llama.mlp
                },
                window: window.map(|window| WindowSpec { rope: rope.in_window, ..window }),
                embedding_scale: Some((shape.hidden_size as f32).sqrt()),
                logit_soft_cap: logit_cap,
                ..llama
            }
        }
        Architecture::GptNeox => DecoderSpec {
            norm: NormSpec { form: NormForm::Layer, epsilon },
            attention: AttentionSpec {
                names: AttentionNames {
                    query: "attention.query_key_value",
                    key: "attention.query_key_value",
                    value: "attention.query_key_value",
                    is_by_head: true,
                    output: "attention.dense",
                    ..AttentionNames::LLAMA
                },
                ..biased(bias(true))
            },
            mlp: MlpSpec {
                bias: true,
                names: MlpNames {
                    gate: None,
                    up: "mlp.dense_h_to_4h",
                    down: "mlp.dense_4h_to_h",
                    ..MlpNames::LLAMA
                },
                ..llama.mlp
            },
            is_parallel: keys.use_parallel_residual.unwrap_or(true),
            names: ModelNames {
                embedding: "gpt_neox.embed_in",
                layers: "gpt_neox.layers",
                norm: "gpt_neox.final_layer_norm",
                lm_head: "embed_out",
                // The causal mask, and the value of masked scores.
                ignored: &["rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"],
            },
            ..llama
        },
    };
    Ok(ModelConfig { architecture, shape, spec })
}

const HEAD_NORMS: Option<[&str; 2]> = Some(["self_attn.q_norm", "self_attn.k_norm"]);

/// The sizes, after checks.
fn shape_of(keys: &Keys, defaults: &Defaults, path: &Path) -> Result<ModelShape, ModelError> {
    let context = keys.max_position_embeddings.unwrap_or(defaults.context);
    sizes::check(
        path,
        &[
            ("vocab_size", keys.vocab_size),
            ("hidden_size", keys.hidden_size),
            ("intermediate_size", keys.intermediate_size),
            ("num_hidden_layers", keys.num_hidden_layers),
            ("num_attention_heads", keys.num_attention_heads),
            ("num_key_value_heads", keys.num_key_value_heads.unwrap_or(1)),
            ("head_dim", keys.head_dim.unwrap_or(2)),
            ("max_position_embeddings", context),
        ],
    )?;
    let num_heads = keys.num_attention_heads;
    let num_kv_heads = keys.num_key_value_heads.unwrap_or(num_heads);
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(fail(
            path,
            "num_key_value_heads",
            format!("is {num_kv_heads}, which does not divide `num_attention_heads` = {num_heads}"),
        ));
    }
    let head_dim = match keys.head_dim.or(defaults.head_dim) {
        Some(dim) => dim,
        None if keys.hidden_size.is_multiple_of(num_heads) => keys.hidden_size / num_heads,
        None => {
            return Err(fail(
                path,
                "hidden_size",
                format!(
                    "is {}, which `num_attention_heads` = {num_heads} does not divide; give \
                     `head_dim`",
                    keys.hidden_size
                ),
            ));
        }
    };
    if !head_dim.is_multiple_of(2) {
        let problem = format!("is {head_dim}; rotary embedding needs it even");
        return Err(fail(path, "head_dim", problem));
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

/// The window of the layers that slide; `None` if there is no window size, or no such layer.
fn window(
    path: &Path,
    size: Option<usize>,
    slides: impl Fn(usize) -> bool,
    shape: &ModelShape,
) -> Result<Option<WindowSpec>, ModelError> {
    let Some(size) = size else { return Ok(None) };
    sizes::check(path, &[("sliding_window", size)])?;
    let layers: Vec<bool> = (0..shape.num_layers).map(slides).collect();
    let is_any = layers.contains(&true);
    Ok(is_any.then_some(WindowSpec { size, layers, rope: None }))
}

/// A Qwen's window, which covers the last layers and only if `use_sliding_window` is set.
fn qwen_window(
    keys: &Keys,
    shape: &ModelShape,
    path: &Path,
) -> Result<Option<WindowSpec>, ModelError> {
    if !keys.use_sliding_window.unwrap_or(false) {
        return Ok(None);
    }
    let first = keys.max_window_layers.unwrap_or(28);
    let slides = layer_types(keys, shape, path, |layer| layer >= first)?;
    window(path, keys.sliding_window.unwrap_or(Some(4096)), |layer| slides[layer], shape)
}

/// Whether each layer has a window, from `layer_types` or else by the family's rule.
fn layer_types(
    keys: &Keys,
    shape: &ModelShape,
    path: &Path,
    rule: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, ModelError> {
    let Some(types) = &keys.layer_types else {
        return Ok((0..shape.num_layers).map(rule).collect());
    };
    if types.len() != shape.num_layers {
        let problem = format!("lists {} layers, not {}", types.len(), shape.num_layers);
        return Err(fail(path, "layer_types", problem));
    }
    let slides = |name: &String| match name.as_str() {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => {
            let known = "`full_attention` and `sliding_attention` are known";
            Err(fail(path, "layer_types", format!("names `{other}`: {known}")))
        }
    };
    types.iter().map(slides).collect()
}

fn soft_cap(
    path: &Path,
    key: &'static str,
    given: Given<f32>,
    default: Option<f32>,
) -> Result<Option<f32>, ModelError> {
    match given.unwrap_or(default) {
        None => Ok(None),
        Some(cap) => positive(path, key, Some(f64::from(cap))).map(|_| Some(cap)),
    }
}
