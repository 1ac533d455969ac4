//! Reads the rotary keys of `config.json`, in the layout of transformers 4 (`rope_theta`,
//! `rope_scaling`) or of transformers 5 (`rope_parameters`).

use serde_json::{Value, json};

use super::Architecture;
use super::keys::{Keys, RopeKeys};
use crate::error::Result;
use crate::spec::{ModelShape, RopeConfig, RopeScaling};

/// The rotary embedding of a model's layers, and that of its sliding-window layers if it differs.
pub(super) struct Ropes {
    pub(super) full: RopeConfig,
    pub(super) in_window: Option<RopeConfig>,
}

/// Reads the rotary keys in either layout.
pub(super) fn read(architecture: Architecture, keys: &Keys, shape: &ModelShape) -> Result<Ropes> {
    let none = RopeKeys::default();
    let parameters = keys.rope_parameters.as_ref();
    let of_all = parameters.map(|all| all.full_attention.as_deref().unwrap_or(all));
    let of_all = of_all.unwrap_or(&none);
    let (theta, default_theta, share) = match architecture {
        Architecture::GptNeox => {
            (keys.rotary_emb_base, 10_000.0, Some(keys.rotary_pct.unwrap_or(0.25)))
        }
        Architecture::Gemma3 => (keys.rope_theta, 1e6, keys.partial_rotary_factor),
        _ => (keys.rope_theta, 10_000.0, keys.partial_rotary_factor),
    };
    let reading = RopeReading { architecture, keys, shape };
    let full = reading.full(of_all, theta.unwrap_or(default_theta), share)?;
    if architecture != Architecture::Gemma3 {
        return Ok(Ropes { full, in_window: None });
    }
    let in_window = parameters.and_then(|all| all.sliding_attention.as_deref()).unwrap_or(&none);
    let theta = keys.rope_local_base_freq.unwrap_or(10_000.0);
    let in_window = Some(reading.one(in_window, theta, share)?);
    Ok(Ropes { full, in_window })
}

/// The other keys of the file that the rotary keys depend on.
#[derive(Clone, Copy)]
struct RopeReading<'a> {
    architecture: Architecture,
    keys: &'a Keys,
    shape: &'a ModelShape,
}

impl RopeReading<'_> {
    /// Reads the rotary embedding of layers that attend to all tokens. A file may have `rope_scaling` beside
    /// `rope_parameters`; as in transformers 5, the older key then decides if the newer one does not scale.
    fn full(self, parameters: &RopeKeys, theta: f64, share: Option<f64>) -> Result<RopeConfig> {
        let new = self.one(parameters, theta, share)?;
        let Some(scaling) = &self.keys.rope_scaling else { return Ok(new) };
        let old = self.one(scaling, new.theta, share)?;
        if new.scaling != RopeScaling::None && old.scaling != new.scaling {
            let problem = "contradicts `rope_parameters`; hint: remove the one that is not meant";
            return Err(self.keys.fail("rope_scaling", problem));
        }
        Ok(RopeConfig { scaling: old.scaling, ..new })
    }

    /// Reads one rotary embedding. `theta` and `share` (the rotated fraction of a head's channels)
    /// are defaults from the outer keys.
    fn one(self, rope: &RopeKeys, theta: f64, share: Option<f64>) -> Result<RopeConfig> {
        let theta = self.keys.positive("rope_theta", Some(rope.rope_theta.unwrap_or(theta)))?;
        if theta < 1.0 {
            // Channels would turn faster the later they come, and overflow soon.
            return Err(self.keys.fail("rope_theta", format!("is {theta}, expected at least 1")));
        }
        let share = rope.partial_rotary_factor.or(share).unwrap_or(1.0);
        let head_dim = self.shape.head_dim;
        let width = (head_dim as f64 * share) as usize;
        if !(share > 0.0 && share <= 1.0) || width < 2 || !width.is_multiple_of(2) {
            let problem =
                format!("is {share}, but an even number of the {head_dim} channels must rotate");
            return Err(self.keys.fail("partial_rotary_factor", problem));
        }
        let scaling = self.scaling(rope, width)?;
        Ok(RopeConfig { theta, width: (width < head_dim).then_some(width), scaling })
    }

    fn scaling(self, rope: &RopeKeys, width: usize) -> Result<RopeScaling> {
        let Self { architecture, keys, shape } = self;
        let need = |key, value| keys.positive(key, value);
        let factor = || need("rope_parameters.factor", rope.factor);
        let context = shape.context as f64;
        // Phi-3 has this key outside the rotary keys, where it takes precedence.
        let beside = keys.original_max_position_embeddings;
        let beside = beside.filter(|_| architecture == Architecture::Phi3);
        let original = beside.or(rope.original_max_position_embeddings).unwrap_or(context);
        let original = need("rope_parameters.original_max_position_embeddings", Some(original))?;
        // Without a factor, the ratio of the context lengths is used.
        let stretch = rope.factor.unwrap_or(context / original);
        let stretch = || need("rope_parameters.factor", Some(stretch));
        let name = rope.rope_type.as_deref().or(rope.r#type.as_deref()).unwrap_or("default");
        Ok(match name {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: factor()? },
            "dynamic" => RopeScaling::Dynamic { factor: factor()? },
            "llama3" => RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: need("rope_parameters.low_freq_factor", rope.low_freq_factor)?,
                high_freq_factor: need("rope_parameters.high_freq_factor", rope.high_freq_factor)?,
                original_max_position_embeddings: original,
            },
            // `su` is the name of LongRoPE in the first Phi-3 files.
            "longrope" | "su" => self.long_rope(rope, width, original, stretch()?)?,
            "yarn" if architecture == Architecture::Phi3 => {
                self.long_rope(rope, width, original, stretch()?)?
            }
            "yarn" => {
                let factor = stretch()?;
                let attention_factor =
                    match (rope.attention_factor, rope.mscale, rope.mscale_all_dim) {
                        (Some(given), ..) => given,
                        (None, Some(a), Some(b)) if a != 0.0 && b != 0.0 => {
                            magnitude(factor, a) / magnitude(factor, b)
                        }
                        _ => magnitude(factor, 1.0),
                    };
                let or =
                    |value: Option<f64>, default| value.filter(|v| *v != 0.0).unwrap_or(default);
                RopeScaling::Yarn {
                    factor,
                    beta_fast: need("rope_parameters.beta_fast", Some(or(rope.beta_fast, 32.0)))?,
                    beta_slow: need("rope_parameters.beta_slow", Some(or(rope.beta_slow, 1.0)))?,
                    truncate: rope.truncate.unwrap_or(true),
                    attention_factor: need(
                        "rope_parameters.attention_factor",
                        Some(attention_factor),
                    )?,
                    original_max_position_embeddings: original,
                }
            }
            other => {
                let known =
                    "expected `default`, `linear`, `dynamic`, `llama3`, `yarn` or `longrope`";
                return Err(
                    keys.fail("rope_parameters.rope_type", format!("is `{other}`, {known}"))
                );
            }
        })
    }

    fn long_rope(
        self,
        rope: &RopeKeys,
        width: usize,
        original: f64,
        stretch: f64,
    ) -> Result<RopeScaling> {
        let factors = |key, factors: &Option<Vec<f64>>| {
            let factors = factors.clone().unwrap_or_default();
            let is_good = factors.iter().all(|factor| *factor > 0.0 && factor.is_finite());
            if factors.len() == width / 2 && is_good {
                return Ok(factors);
            }
            let problem = format!("has {} numbers, expected {} above 0", factors.len(), width / 2);
            Err(self.keys.fail(key, problem))
        };
        let default =
            if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / original.ln()).sqrt() };
        let attention_factor = rope.attention_factor.unwrap_or(default);
        Ok(RopeScaling::LongRope {
            short_factor: factors("rope_parameters.short_factor", &rope.short_factor)?,
            long_factor: factors("rope_parameters.long_factor", &rope.long_factor)?,
            attention_factor: self
                .keys
                .positive("rope_parameters.attention_factor", Some(attention_factor))?,
            original_max_position_embeddings: original,
        })
    }
}

/// Computes YaRN's scale of cosines and sines.
fn magnitude(stretch: f64, scale: f64) -> f64 {
    if stretch <= 1.0 { 1.0 } else { 0.1 * scale * stretch.ln() + 1.0 }
}

/// Returns the value of the `rope_parameters` key.
pub(super) fn to_json(rope: &RopeConfig, shape: &ModelShape) -> Value {
    let mut json = json!(rope.scaling);
    // A length is an integer, which other programs' readers insist on.
    if let Some(length) = json.get_mut("original_max_position_embeddings")
        && let Some(whole) = length.as_f64().filter(|it| it.fract() == 0.0)
    {
        *length = (whole as u64).into();
    }
    if let Value::Object(keys) = &mut json {
        keys.shift_insert(1, "rope_theta".to_owned(), rope.theta.into());
        if let RopeScaling::Yarn { factor, attention_factor, .. } = rope.scaling
            && attention_factor == magnitude(factor, 1.0)
        {
            keys.shift_remove("attention_factor");
        }
    }
    if let Some(width) = rope.width {
        json["partial_rotary_factor"] = (width as f64 / shape.head_dim as f64).into();
    }
    json
}
