//! Rotary keys of `config.json`, as transformers 4 (`rope_theta`, `rope_scaling`) and transformers 5
//! (`rope_parameters`) lay them out.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::ModelError;
use crate::spec::{RopeConfig, RopeScaling};

/// `rope_parameters`, or `rope_scaling`.
#[derive(Deserialize)]
pub(super) struct RopeKeys {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

/// Joins the two layouts' keys.
pub(super) fn read(
    top_level_theta: Option<f64>,
    keys: Option<RopeKeys>,
    path: &Path,
) -> Result<RopeConfig, ModelError> {
    let fail = |key, problem: String| ModelError::Config { path: path.to_path_buf(), key, problem };
    let theta = keys.as_ref().and_then(|keys| keys.rope_theta).or(top_level_theta);
    let theta = theta.unwrap_or(10_000.0);
    if theta.is_nan() || theta <= 0.0 || theta.is_infinite() {
        return Err(fail("rope_theta", format!("is {theta}, expected a positive number")));
    }
    let Some(keys) = keys else { return Ok(RopeConfig { theta, scaling: RopeScaling::None }) };
    let need = |key: &'static str, value: Option<f64>| match value {
        Some(value) if value > 0.0 && value.is_finite() => Ok(value),
        Some(value) => Err(fail(key, format!("is {value}, expected a positive number"))),
        None => Err(fail(key, "is missing, expected a positive number".to_owned())),
    };
    let scaling = match keys.rope_type.as_deref() {
        None | Some("default") => RopeScaling::None,
        Some("linear") => {
            RopeScaling::Linear { factor: need("rope_parameters.factor", keys.factor)? }
        }
        Some("llama3") => RopeScaling::Llama3 {
            factor: need("rope_parameters.factor", keys.factor)?,
            low_freq_factor: need("rope_parameters.low_freq_factor", keys.low_freq_factor)?,
            high_freq_factor: need("rope_parameters.high_freq_factor", keys.high_freq_factor)?,
            original_max_position_embeddings: need(
                "rope_parameters.original_max_position_embeddings",
                keys.original_max_position_embeddings,
            )?,
        },
        Some(other) => {
            return Err(fail(
                "rope_parameters.rope_type",
                format!("is `{other}`: `default`, `linear` and `llama3` are known"),
            ));
        }
    };
    Ok(RopeConfig { theta, scaling })
}

/// `rope_parameters`.
pub(super) fn to_json(rope: &RopeConfig) -> Value {
    match &rope.scaling {
        RopeScaling::None => json!({"rope_type": "default", "rope_theta": rope.theta}),
        RopeScaling::Linear { factor } => {
            json!({"rope_type": "linear", "rope_theta": rope.theta, "factor": factor})
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3", "rope_theta": rope.theta, "factor": factor,
            "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
    }
}
