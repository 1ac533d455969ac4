//! Adapter directories: `config.json` and `model.safetensors`.
//!
//! Tensor names on disk are a one-layer Llama's without its first `model.`, as Kangaroo's are. The
//! paper's adapter is written as Kangaroo writes it, but for our keys beside a Llama's; the others,
//! which Kangaroo's class would take for it and read in part, name their `architecture`.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Adapter, AdapterArchitecture, AdapterConfig, LAYER, NORM, PackedAdapter};
use crate::config::ModelConfig;
use crate::decoder::source::{Stored, named_linears};
use crate::error::{ModelError, read_json};
use crate::packed;
use crate::shape::ModelShape;
use crate::weights::{
    NamedTensor, WeightDtype, WeightReader, check_weights, write_config, write_safetensors,
};

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
        let model = ModelConfig::from_model_dir(dir)?;
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
        if model.shape.num_layers != 1 {
            return Err(ModelError::Config {
                path,
                key: "num_hidden_layers",
                problem: format!(
                    "is {}, expected 1: this is no adapter's directory",
                    model.shape.num_layers
                ),
            });
        }
        Ok(Self { exit_layer, architecture, model, target_hash, training })
    }
}

impl Adapter {
    /// Loads an adapter directory for a target of shape `target`. On an autodiff device the
    /// adapter can be trained further.
    ///
    /// # Errors
    /// If a file is missing, broken or not as it was exported, a tensor missing, extra or
    /// misshapen, or the adapter does not fit the target.
    pub fn from_dir(
        dir: &Path,
        target: &ModelShape,
        device: &Device,
    ) -> Result<(AdapterConfig, Self), ModelError> {
        Self::from_dir_in(dir, target, WeightDtype::F32, device)
    }

    /// [`Adapter::from_dir`], computing in `dtype`, which must be that of the target beside it.
    ///
    /// # Errors
    /// As [`Adapter::from_dir`].
    pub fn from_dir_in(
        dir: &Path,
        target: &ModelShape,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<(AdapterConfig, Self), ModelError> {
        let config = AdapterConfig::from_dir(dir)?;
        config.check_target(dir, target)?;
        let mut reader = WeightReader::open_dir(dir)?;
        let dtype = dtype.float_dtype();
        let mut adapter = config.build(&mut Stored { reader: &mut reader, device, dtype })?;
        let ignored = config.model.spec.names.ignored;
        reader.ignore(|name| ignored.iter().any(|end| name.ends_with(end)));
        reader.finish()?;
        check_weights(dir)?;
        if dtype == FloatDType::F32 && packed::runs_on(device) {
            adapter.packed = Some(Arc::new(PackedAdapter::of(&adapter)));
        }
        Ok((config, adapter))
    }

    /// Writes `model.safetensors` in f32, then `config.json`, each under a temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &AdapterConfig) -> Result<(), ModelError> {
        let path = dir.join("model.safetensors");
        let hash = write_safetensors(&path, &self.named(config), WeightDtype::F32, &[])?;
        let mut json = config.model.to_json(WeightDtype::F32.config_name());
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
        write_config(dir, json, hash)
    }

    /// The tensors as a checkpoint keeps them.
    pub(super) fn named(&self, config: &AdapterConfig) -> Vec<NamedTensor> {
        let mut tensors = self.layer.named(&config.layer(), &self.shape, LAYER);
        tensors.extend(self.norm.named(&config.model.spec.norm, NORM));
        tensors.extend(named_linears("", config.own_head().into_iter().zip(&self.lm_head)));
        tensors
    }
}
