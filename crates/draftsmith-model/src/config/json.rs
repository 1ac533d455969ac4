//! Writes `config.json` in the layout of transformers 5, plus the keys that transformers 4 needs.

use serde_json::{Map, Value, json};

use super::keys::activation_name;
use super::{Architecture, ModelConfig, rope};
use crate::spec::RopeScaling;

impl ModelConfig {
    /// Returns the `config.json` for weights stored as `dtype`.
    pub fn to_json(&self, dtype: &str) -> Value {
        let ModelConfig { architecture, shape, spec } = self;
        let rope = rope::to_json(&spec.rope, shape);
        let scaling =
            if spec.rope.scaling == RopeScaling::None { Value::Null } else { rope.clone() };
        let eos = match shape.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let mut json = json!({
            "architectures": [architecture.class()],
            "model_type": architecture.model_type(),
            "attention_bias": spec.attention.output_bias,
            "attention_dropout": 0.0,
            "bos_token_id": shape.bos_token_id,
            "dtype": dtype,
            "eos_token_id": eos,
            "head_dim": shape.head_dim,
            "hidden_act": activation_name(spec.mlp.activation),
            "hidden_size": shape.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": spec.mlp.width,
            "max_position_embeddings": shape.context,
            "mlp_bias": spec.mlp.bias,
            "num_attention_heads": shape.num_heads,
            "num_hidden_layers": shape.num_layers,
            "num_key_value_heads": shape.num_kv_heads,
            "rms_norm_eps": spec.norm.epsilon,
            "rope_parameters": rope,
            "rope_scaling": scaling,
            "rope_theta": spec.rope.theta,
            "tie_word_embeddings": spec.tie_word_embeddings,
            "torch_dtype": dtype,
            "use_cache": true,
            "vocab_size": shape.vocab_size,
        });
        if let (false, Value::Object(keys)) = (*architecture == Architecture::Llama, &mut json) {
            add_own(self, keys);
        }
        json
    }
}

/// Turns the keys of a Llama into those of another family.
fn add_own(config: &ModelConfig, keys: &mut Map<String, Value>) {
    let ModelConfig { architecture, shape, spec } = config;
    // Only Llama has this key.
    keys.shift_remove("mlp_bias");
    if let Architecture::Mistral | Architecture::Qwen2 | Architecture::Phi3 = architecture {
        keys.shift_remove("attention_bias");
    }
    let size = spec.window.as_ref().map(|window| window.size);
    let slides = spec.window.iter().flat_map(|window| window.layers.iter().copied());
    let slides = slides.chain(std::iter::repeat(false)).take(shape.num_layers);
    let kind = |slides| if slides { "sliding_attention" } else { "full_attention" };
    let layer_types: Vec<&str> = slides.map(kind).collect();
    let mut own = match architecture {
        Architecture::Llama => json!({}),
        Architecture::Mistral | Architecture::Phi3 => json!({ "sliding_window": size }),
        Architecture::Qwen2 | Architecture::Qwen3 => json!({
            "layer_types": layer_types,
            "sliding_window": size,
            "use_sliding_window": size.is_some(),
        }),
        Architecture::Gemma2 | Architecture::Gemma3 => json!({
            "attn_logit_softcapping": spec.attention.soft_cap,
            "final_logit_softcapping": spec.logit_soft_cap,
            "hidden_activation": activation_name(spec.mlp.activation),
            "layer_types": layer_types,
            "query_pre_attn_scalar": spec.attention.query_scalar,
            "sliding_window": size,
        }),
        Architecture::GptNeox => {
            for key in ["head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta"] {
                keys.shift_remove(key);
            }
            json!({
                "layer_norm_eps": spec.norm.epsilon,
                "rotary_emb_base": spec.rope.theta,
                "rotary_pct": keys["rope_parameters"].get("partial_rotary_factor").cloned()
                    .unwrap_or(json!(1.0)),
                "use_parallel_residual": spec.is_parallel,
            })
        }
    };
    if let Some(share) = keys["rope_parameters"].get("partial_rotary_factor").cloned() {
        own["partial_rotary_factor"] = share;
    }
    if let RopeScaling::LongRope { original_max_position_embeddings: original, .. } =
        &spec.rope.scaling
    {
        // transformers expects an integer here.
        own["original_max_position_embeddings"] = json!(*original as usize);
    }
    if *architecture == Architecture::Gemma3 {
        let full = keys["rope_parameters"].take();
        let in_window = spec.window.as_ref().and_then(|window| window.rope.as_ref());
        let in_window = in_window.unwrap_or(&spec.rope);
        own["rope_local_base_freq"] = json!(in_window.theta);
        own["rope_parameters"] = json!({
            "full_attention": full,
            "sliding_attention": rope::to_json(in_window, shape),
        });
    }
    if let Value::Object(own) = own {
        keys.extend(own);
    }
}
