//! Adapter directories: `config.json` and `model.safetensors`.
//!
//! Tensors are named as in Kangaroo: a one-layer Llama's names without the first `model.`. The
//! paper's adapter has Kangaroo's format plus our keys in `config.json`. Files of the other
//! architectures have the key `architecture`, because Kangaroo's class would silently load only a
//! part of their tensors.
//!
//! Adapters are written in bf16 if their target's files have 16 bits per number, otherwise in f32.

use std::path::Path;

use burn::tensor::{Device, FloatDType};
use draftsmith_files::parse_json_value;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Adapter, AdapterArchitecture, AdapterConfig};
use crate::config::ModelConfig;
use crate::decoder::source::{CheckpointSource, named_linears};
use crate::draft_vocabulary::{DRAFT_VOCABULARY, DraftVocabulary};
use crate::drafter_keys::{DrafterDir, DrafterKeys, FoundKeys};
use crate::error::ModelError;
use crate::spec::ModelShape;
use crate::weights::{
    NamedTensor, WeightDtype, WeightReader, check_weights, write_config, write_with_ids,
};

/// The keys that are read, the same as in [`OwnKeys`].
pub(crate) const KEYS: DrafterKeys = DrafterKeys {
    own: "architecture draft_vocabulary dtype exit_layer target_hash torch_dtype training",
    table: "",
    has_families: true,
};

/// The keys of an adapter's `config.json` that a Llama does not have.
#[derive(Deserialize)]
pub(crate) struct OwnKeys {
    exit_layer: Option<usize>,
    #[serde(default)]
    architecture: AdapterArchitecture,
    /// The number of tokens in the tensor `draft_vocabulary`.
    draft_vocabulary: Option<usize>,
    /// The type of the weights. transformers 5 calls the key `dtype`, earlier versions
    /// `torch_dtype`.
    dtype: Option<String>,
    torch_dtype: Option<String>,
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

impl AdapterConfig {
    /// Reads the adapter's tensors. The file must not contain others.
    ///
    /// # Errors
    /// If a tensor is missing, extra or misshapen, or the file is broken.
    pub(super) fn take(&self, mut reader: WeightReader) -> Result<Adapter, ModelError> {
        let device = &Device::flex();
        let mut source = CheckpointSource { reader: &mut reader, device, dtype: FloatDType::F32 };
        let adapter = self.build(&mut source)?;
        self.finish(reader)?;
        Ok(adapter)
    }

    /// Ends reading.
    ///
    /// # Errors
    /// If the file contains a tensor that was not read.
    fn finish(&self, mut reader: WeightReader) -> Result<(), ModelError> {
        let ignored = self.model.spec.names.ignored;
        let has_vocabulary = self.draft_vocabulary.is_some();
        reader.ignore(|name| {
            // The draft vocabulary was read together with the configuration.
            let is_read = has_vocabulary && name == DRAFT_VOCABULARY;
            is_read || ignored.iter().any(|end| name.ends_with(end))
        });
        reader.finish()
    }

    /// Reads an adapter's `config.json`.
    ///
    /// # Errors
    /// If it is missing, is not a model's configuration, has a key that may change the network, or has
    /// no `exit_layer`.
    pub fn from_dir(dir: impl Into<DrafterDir>) -> Result<Self, ModelError> {
        let dir = dir.into();
        let path = dir.join("config.json");
        let FoundKeys { keys, refused } = dir.read_keys(&KEYS)?;
        let model = ModelConfig::from_keys(&path, &keys)?;
        let OwnKeys {
            exit_layer,
            architecture,
            draft_vocabulary,
            dtype,
            torch_dtype,
            target_hash,
            training,
        } = parse_json_value(&path, "", Value::Object(keys))?;
        let Some(exit_layer) = exit_layer else {
            let problem = "is missing: give the number of the target's layers that run before the \
                           adapter (in Kangaroo: 2 for 7B, 3 for 13B models)";
            return Err(ModelError::Config {
                path,
                key: "exit_layer",
                problem: problem.to_owned(),
            });
        };
        refused.into_iter().next().map_or(Ok(()), Err)?;
        let dtype = WeightDtype::of_config(dtype.or(torch_dtype).as_deref());
        let mut config = Self {
            exit_layer,
            architecture,
            model,
            draft_vocabulary: None,
            dtype,
            target_hash,
            training,
        };
        if let Some(len) = draft_vocabulary {
            config.draft_vocabulary = Some(read_draft_vocabulary(&dir, len, &config)?);
        }
        Ok(config)
    }
}

/// Reads the draft vocabulary of an adapter's directory, which must have `len` tokens.
fn read_draft_vocabulary(
    dir: &Path,
    len: usize,
    config: &AdapterConfig,
) -> Result<DraftVocabulary, ModelError> {
    let refused = |problem: String| ModelError::Config {
        path: dir.join("config.json"),
        key: DRAFT_VOCABULARY,
        problem,
    };
    if len == 0 {
        return Err(refused("is 0: give the number of tokens, or leave it out".to_owned()));
    }
    if config.architecture.has_head() {
        return Err(refused(format!(
            "needs an adapter with the target's LM head, but `{}` has a separate one",
            config.architecture
        )));
    }
    let vocab_size = config.model.shape.vocab_size;
    DraftVocabulary::take(&mut WeightReader::open_dir(dir)?, len, vocab_size)
}

impl Adapter {
    /// Loads an adapter directory for a target of shape `target`. `dtype` is the type of
    /// computation, which must be the target's. On an autodiff device the adapter can be trained.
    ///
    /// # Errors
    /// If a file is missing, broken or changed since its export, a tensor is missing, extra or
    /// misshapen, or the adapter does not fit the target.
    pub fn from_dir(
        dir: impl Into<DrafterDir>,
        target: &ModelShape,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<(AdapterConfig, Self), ModelError> {
        let dir = dir.into();
        let config = AdapterConfig::from_dir(&dir)?;
        config.check_target(&dir, target)?;
        let mut reader = WeightReader::open_dir(&dir)?;
        let dtype = dtype.float_dtype();
        let mut adapter =
            config.build(&mut CheckpointSource { reader: &mut reader, device, dtype })?;
        adapter.stack.tensors.join();
        config.finish(reader)?;
        check_weights(&dir)?;
        Ok((config, adapter))
    }

    /// Writes `model.safetensors` in the configuration's type, then `config.json`, each under a
    /// temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &AdapterConfig) -> Result<(), ModelError> {
        let path = dir.join("model.safetensors");
        let vocabulary = config.draft_vocabulary.as_ref();
        let wide = |all: &DraftVocabulary| all.ids().iter().map(|id| i64::from(*id)).collect();
        let ids: Vec<(&str, Vec<i64>)> =
            vocabulary.map(|all| (DRAFT_VOCABULARY, wide(all))).into_iter().collect();
        let hash = write_with_ids(&path, &self.named(config), &ids, config.dtype, &[])?;
        let mut json = config.model.to_json(config.dtype.config_name());
        json["exit_layer"] = config.exit_layer.into();
        if config.architecture != AdapterArchitecture::Attention {
            json["architecture"] = config.architecture.to_string().into();
        }
        if let Some(vocabulary) = vocabulary {
            json[DRAFT_VOCABULARY] = vocabulary.ids().len().into();
        }
        if let Some(hash) = &config.target_hash {
            json["target_hash"] = hash.as_str().into();
        }
        if !config.training.is_empty() {
            json["training"] = Value::Object(config.training.clone());
        }
        write_config(dir, json, hash)
    }

    /// Lists the adapter's tensors in the layout of its file.
    pub(super) fn named(&self, config: &AdapterConfig) -> Vec<NamedTensor> {
        let mut tensors = self.stack.named(&config.stack());
        let head = config.own_head().into_iter().zip(self.lm_head.as_deref());
        tensors.extend(named_linears("", head));
        tensors
    }
}
