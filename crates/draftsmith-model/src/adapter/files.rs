//! Adapter directories: `config.json` and `model.safetensors`.
//!
//! Tensor names on disk are a one-layer Llama's without its first `model.`, as Kangaroo's are. The
//! paper's adapter is written as Kangaroo writes it, but for our keys beside a Llama's; the others,
//! which Kangaroo's class would take for it and read in part, name their `architecture`.

use std::path::Path;
use std::sync::Arc;

use burn::nn::{Linear, RmsNorm};
use burn::tensor::Device;
use draftsmith_files::write_whole;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{
    Adapter, AdapterArchitecture, AdapterConfig, NormedAttention, NormedMlp, PackedAdapter,
};
use crate::config::LlamaConfig;
use crate::error::{ModelError, read_json};
use crate::llama::attention::Attention;
use crate::llama::rope::Rope;
use crate::llama::{Mlp, build_from, linear, pretty, read_norm, transposed};
use crate::packed;
use crate::weights::{NamedTensor, WeightDtype, WeightReader, write_safetensors};

const LAYER: &str = "layers.0";

/// Our keys of an adapter's `config.json`.
#[derive(Deserialize)]
struct OwnKeys {
    exit_layer: Option<usize>,
    #[serde(default)]
    architecture: AdapterArchitecture,
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

impl AdapterConfig {
    /// Reads an adapter's `config.json`.
    ///
    /// # Errors
    /// If it is missing, not of a one-layer Llama's shape, or has no `exit_layer`.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let llama = LlamaConfig::from_model_dir(dir)?;
        let OwnKeys { exit_layer, architecture, target_hash, training } = read_json(&path)?;
        let Some(exit_layer) = exit_layer else {
            return Err(ModelError::Config {
                path,
                key: "exit_layer",
                problem: "is missing: give the number of the target's layers that run before the \
                          adapter (Kangaroo's own adapters: 2 for 7B, 3 for 13B models)"
                    .to_owned(),
            });
        };
        if llama.num_hidden_layers != 1 {
            return Err(ModelError::Config {
                path,
                key: "num_hidden_layers",
                problem: format!(
                    "is {}, expected 1: this is no adapter's directory",
                    llama.num_hidden_layers
                ),
            });
        }
        Ok(Self { exit_layer, architecture, llama, target_hash, training })
    }
}

impl Adapter {
    /// Loads an adapter directory for a target of shape `target`. On an autodiff device the
    /// adapter can be trained further.
    ///
    /// # Errors
    /// If a file is missing or broken, a tensor missing, extra or misshapen, or the adapter does
    /// not fit the target.
    pub fn from_dir(
        dir: &Path,
        target: &LlamaConfig,
        device: &Device,
    ) -> Result<(AdapterConfig, Self), ModelError> {
        let config = AdapterConfig::from_dir(dir)?;
        config.check_target(dir, target)?;
        let mut reader = WeightReader::open_dir(dir)?;
        let (llama, architecture) = (&config.llama, config.architecture);
        let (self_attn, mlp) = build_from(LAYER, &mut reader, device, |mut linear| {
            let attention =
                architecture.has_attention().then(|| Attention::new(llama, &mut linear));
            (attention, architecture.has_mlp().then(|| Mlp::new(llama, &mut linear)))
        })?;
        let norm = |name: &str, reader: &mut WeightReader| read_norm(llama, name, reader, device);
        let attention = match self_attn {
            Some(self_attn) => {
                let input_layernorm =
                    norm(&format!("{LAYER}.input_layernorm.weight"), &mut reader)?;
                Some(NormedAttention { input_layernorm, self_attn })
            }
            None => None,
        };
        let mlp = match mlp {
            Some(mlp) => {
                let name = format!("{LAYER}.post_attention_layernorm.weight");
                Some(NormedMlp { post_attention_layernorm: norm(&name, &mut reader)?, mlp })
            }
            None => None,
        };
        let lm_head = if architecture.has_head() {
            let (vocab, hidden) = (llama.vocab_size, llama.hidden_size);
            let weight = reader.take("lm_head.weight", &[vocab, hidden])?;
            Some(linear(transposed(&weight, vocab, hidden), [hidden, vocab], None, device))
        } else {
            None
        };
        let norm = norm("norm.weight", &mut reader)?;
        reader.ignore(|name| name.ends_with("rotary_emb.inv_freq"));
        reader.finish()?;
        let rope = Rope::new(llama, device);
        let mut adapter =
            Self { attention, mlp, norm, lm_head, rope, packed: None, config: llama.clone() };
        if packed::runs_on(device) {
            adapter.packed = Some(Arc::new(PackedAdapter::of(&adapter)));
        }
        Ok((config, adapter))
    }

    /// Writes `model.safetensors` in f32, then `config.json`, each under a temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &AdapterConfig) -> Result<(), ModelError> {
        write_safetensors(&dir.join("model.safetensors"), &self.named(), WeightDtype::F32, &[])?;
        let mut json = config.llama.to_json(WeightDtype::F32.config_name());
        json["exit_layer"] = config.exit_layer.into();
        if config.architecture != AdapterArchitecture::Attention {
            json["architecture"] = config.architecture.to_string().into();
        }
        if let Some(hash) = &config.target_hash {
            json["target_hash"] = hash.as_str().into();
        }
        if !config.training.is_empty() {
            json["training"] = Value::Object(config.training.clone());
        }
        Ok(write_whole(&dir.join("config.json"), pretty(&json).as_bytes())?)
    }

    /// The weights as they are named and laid out on disk.
    fn named(&self) -> Vec<NamedTensor> {
        let of_norm = |name: &str, norm: &RmsNorm| {
            NamedTensor::from_tensor(&format!("{name}.weight"), norm.gamma.val())
        };
        let of_linear = |name: &str, linear: &Linear| {
            NamedTensor::from_tensor(&format!("{name}.weight"), linear.weight.val().transpose())
        };
        let mut tensors = Vec::new();
        if let Some(NormedAttention { input_layernorm, self_attn }) = &self.attention {
            tensors.push(of_norm(&format!("{LAYER}.input_layernorm"), input_layernorm));
            for (name, linear) in
                ["q_proj", "k_proj", "v_proj", "o_proj"].iter().zip(self_attn.projections())
            {
                tensors.push(of_linear(&format!("{LAYER}.self_attn.{name}"), linear));
            }
        }
        if let Some(NormedMlp { post_attention_layernorm, mlp }) = &self.mlp {
            let name = format!("{LAYER}.post_attention_layernorm");
            tensors.push(of_norm(&name, post_attention_layernorm));
            for (name, linear) in
                ["gate_proj", "up_proj", "down_proj"].iter().zip(mlp.projections())
            {
                tensors.push(of_linear(&format!("{LAYER}.mlp.{name}"), linear));
            }
        }
        tensors.push(of_norm("norm", &self.norm));
        tensors.extend(self.lm_head.as_ref().map(|head| of_linear("lm_head", head)));
        tensors
    }
}
