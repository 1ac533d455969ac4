//! Directories of EAGLE-3 drafters, `config.json` and `model.safetensors`, in the format that vLLM,
//! SGLang and llama.cpp load.
//!
//! The tensor `d2t` contains each draft token's id in the target minus its number in the draft
//! vocabulary. It exists if and only if the drafter drafts only some tokens. The numbers of the
//! target's layers are stored only if they are not the defaults.
//!
//! Drafters from other trainers are read in two more forms: with the layer named `layers.0`, and
//! with the keys of the speculators library, which nests the layer's keys in
//! `transformer_layer_config`.

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType};
use draftsmith_files::parse_json_value;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::packed_eagle3::PackedEagle3;
use super::{
    EMBEDDING, EMBEDDING_NORM, Eagle3, Eagle3Config, FC, LAYER, LM_HEAD, NORM, NUM_TARGET_STATES,
};
use crate::config::ModelConfig;
use crate::decoder::source::{CheckpointSource, named_linears, parameter};
use crate::draft_vocabulary::{DraftVocabulary, NarrowHead};
use crate::error::{ModelError, read_json};
use crate::packed;
use crate::spec::ModelShape;
use crate::weights::{
    NamedTensor, WeightDtype, WeightReader, check_weights, write_config, write_with_ids,
};

/// The key for the numbers of the target's layers.
pub(super) const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
/// The prefix of the layer's tensors in files of other trainers.
const OTHER_LAYER: &str = "layers.0.";
/// The keys of the speculators library: the drafting method, and the keys of the layer.
const METHOD: &str = "speculators_model_type";
const LAYER_KEYS: &str = "transformer_layer_config";
/// The tensor with the offsets of the draft vocabulary, and a mask that some files also contain.
const OFFSETS: &str = "d2t";
const MASK: &str = "t2d";

/// The keys of a drafter's `config.json` that a Llama does not have.
#[derive(Deserialize)]
struct OwnKeys {
    draft_vocab_size: Option<usize>,
    target_hidden_size: Option<usize>,
    #[serde(default)]
    norm_before_residual: bool,
    #[serde(default)]
    norm_before_fc: bool,
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    eagle_config: Option<NestedKeys>,
    /// The type of the weights. transformers 5 calls the key `dtype`, earlier versions
    /// `torch_dtype`.
    dtype: Option<String>,
    torch_dtype: Option<String>,
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

/// The table in which some files store the numbers of the target's layers.
#[derive(Deserialize)]
struct NestedKeys {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
}

impl Eagle3Config {
    /// Returns whether a `config.json` belongs to an EAGLE-3 drafter.
    pub fn is_of(config: &Map<String, Value>) -> bool {
        config.contains_key("draft_vocab_size")
    }

    /// Reads the configuration of a drafter for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If a file is missing or malformed, or a key contradicts the tensors.
    pub fn from_dir(dir: &Path, num_layers: usize) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let keys = plain_keys(&path, read_json(&path)?)?;
        let model = ModelConfig::from_keys(&path, &keys)?;
        let keys: OwnKeys = parse_json_value(&path, "", Value::Object(keys))?;
        let fail =
            |key, problem: String| Err(ModelError::Config { path: path.clone(), key, problem });
        if keys.norm_before_fc {
            let problem = "is true, and such drafters cannot be computed".to_owned();
            return fail("norm_before_fc", problem);
        }
        if model.shape.num_layers != 1 {
            let problem = format!("is {}, but a drafter has one layer", model.shape.num_layers);
            return fail("num_hidden_layers", problem);
        }
        let nested = keys.eagle_config.and_then(|nested| nested.eagle_aux_hidden_state_layer_ids);
        let target_layers = match keys.eagle_aux_hidden_state_layer_ids.or(nested) {
            None => Self::default_layers(num_layers),
            Some(layers) => match <[usize; NUM_TARGET_STATES]>::try_from(layers) {
                Ok(layers) if layers.is_sorted() => layers,
                Ok(layers) => {
                    let problem = format!(
                        "is {layers:?}: runtimes take layers that do not ascend in different orders; hint: \
                         sort them, and the columns of `{FC}` with them"
                    );
                    return fail(LAYERS, problem);
                }
                Err(layers) => {
                    let problem = format!("is {layers:?}, expected {NUM_TARGET_STATES} layers");
                    return fail(LAYERS, problem);
                }
            },
        };
        let mut reader = open(dir)?;
        let has = |reader: &WeightReader, name: &str| {
            let tensor = format!("{name}.weight");
            reader.names().any(|name| *name == tensor)
        };
        let (has_embedding, has_head) = (has(&reader, EMBEDDING), has(&reader, LM_HEAD));
        let vocab_size = model.shape.vocab_size;
        let offsets = reader.shape(OFFSETS).map(|shape| shape.iter().product::<usize>());
        let draft_vocab_size = keys.draft_vocab_size.or(offsets).unwrap_or(vocab_size);
        let draft_vocabulary = match (draft_vocab_size < vocab_size, offsets) {
            (false, None) => None,
            (true, Some(_)) => Some(read_offsets(&mut reader, draft_vocab_size, vocab_size)?),
            (true, None) => {
                let problem = format!(
                    "is {draft_vocab_size} of {vocab_size} tokens, but the weights have no tensor `{OFFSETS}` \
                     that says which"
                );
                return fail("draft_vocab_size", problem);
            }
            (false, Some(_)) => {
                let problem = format!(
                    "is {draft_vocab_size}, all tokens, but the weights have a tensor `{OFFSETS}`; hint: remove it"
                );
                return fail("draft_vocab_size", problem);
            }
        };
        if draft_vocabulary.is_some() && !has_head {
            let problem = format!("needs the tensor `{LM_HEAD}.weight`, and the weights have none");
            return fail("draft_vocab_size", problem);
        }
        Ok(Self {
            target_layers,
            num_target_layers: num_layers,
            target_hidden_size: keys.target_hidden_size.unwrap_or(model.shape.hidden_size),
            draft_vocabulary,
            norm_before_residual: keys.norm_before_residual,
            has_embedding,
            has_head,
            dtype: WeightDtype::of_config(keys.dtype.or(keys.torch_dtype).as_deref()),
            target_hash: keys.target_hash,
            training: keys.training,
            model,
        })
    }

    fn to_json(&self) -> Value {
        let mut config = self.model.to_json(self.dtype.config_name());
        config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
        config["draft_vocab_size"] = self.num_draft_tokens().into();
        config["target_hidden_size"] = self.target_hidden_size.into();
        config["tie_word_embeddings"] = false.into();
        if self.norm_before_residual {
            config["norm_before_residual"] = true.into();
        }
        if self.target_layers != Self::default_layers(self.num_target_layers) {
            config[LAYERS] = json!(self.target_layers);
        }
        if let Some(hash) = &self.target_hash {
            config["target_hash"] = hash.as_str().into();
        }
        if !self.training.is_empty() {
            config["training"] = Value::Object(self.training.clone());
        }
        config
    }
}

/// Opens the tensors of a directory, under their usual names.
fn open(dir: &Path) -> Result<WeightReader, ModelError> {
    Ok(WeightReader::open_dir(dir)?.with_prefix(OTHER_LAYER, &format!("{LAYER}.")))
}

/// Merges the nested keys of the layer, if there are any, into the other keys of a `config.json`.
fn plain_keys(path: &Path, mut keys: Map<String, Value>) -> Result<Map<String, Value>, ModelError> {
    if let Some(method) = keys.get(METHOD).filter(|method| **method != "eagle3") {
        let problem = format!("is {method}, expected \"eagle3\"");
        return Err(ModelError::Config { path: path.to_path_buf(), key: METHOD, problem });
    }
    if let Some(Value::Object(layer)) = keys.remove(LAYER_KEYS) {
        keys.extend(layer);
        keys.entry("norm_before_residual").or_insert(true.into());
    }
    Ok(keys)
}

/// Reads the draft vocabulary from its offsets.
fn read_offsets(
    reader: &mut WeightReader,
    len: usize,
    vocab_size: usize,
) -> Result<DraftVocabulary, ModelError> {
    let offsets = reader.take_ids(OFFSETS, len, vocab_size)?;
    let ids: Vec<u32> = (0..).zip(offsets).map(|(at, offset)| at + offset).collect();
    let is_known = ids.last().is_some_and(|last| (*last as usize) < vocab_size);
    if !is_known || !ids.is_sorted_by(|one, next| one < next) {
        return Err(ModelError::Safetensors {
            path: reader.path.clone(),
            problem: format!(
                "tensor `{OFFSETS}` has offsets whose target ids do not ascend below {vocab_size}"
            ),
        });
    }
    Ok(DraftVocabulary::new(ids))
}

impl Eagle3 {
    /// Loads a drafter for a target of shape `target`. `dtype` is the type of computation, which
    /// must be the target's. On an autodiff device the drafter can be trained.
    ///
    /// # Errors
    /// If a file is missing, broken or changed since its export, a tensor is missing, extra or misshapen, or
    /// the drafter does not fit the target.
    pub fn from_dir(
        dir: &Path,
        target: &ModelShape,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<(Eagle3Config, Self), ModelError> {
        let config = Eagle3Config::from_dir(dir, target.num_layers)?;
        config.check_target(dir, target)?;
        let mut reader = open(dir)?;
        let dtype = dtype.float_dtype();
        let ModelShape { vocab_size, hidden_size, .. } = config.model.shape;
        let embedding = match config.has_embedding {
            false => None,
            true => {
                let values =
                    reader.take(&format!("{EMBEDDING}.weight"), &[vocab_size, hidden_size])?;
                Some(parameter(values, [vocab_size, hidden_size], device, dtype))
            }
        };
        let mut source = CheckpointSource { reader: &mut reader, device, dtype };
        let mut drafter = config.build(embedding, &mut source)?;
        if dtype == FloatDType::F32 && packed::runs_on(device) {
            drafter.packed = Some(Arc::new(PackedEagle3::read(&config, &mut reader)?));
        }
        drafter.layer.join();
        reader.ignore(|name| name == MASK || name == OFFSETS);
        reader.finish()?;
        check_weights(dir)?;
        drafter.narrow_head = drafter.narrow_head_of(&config);
        Ok((config, drafter))
    }

    /// Returns the same drafter with its weights as tensors, for comparison.
    #[must_use]
    pub fn to_tensors(&self, config: &Eagle3Config) -> Self {
        let mut own = Self { packed: None, narrow_head: None, ..self.clone() };
        own.narrow_head = own.narrow_head_of(config);
        own
    }

    /// Combines the drafter's own LM head with the tokens that it may draft. `None` if the drafter
    /// uses the target's LM head.
    fn narrow_head_of(&self, config: &Eagle3Config) -> Option<NarrowHead> {
        let vocab_size = config.model.shape.vocab_size;
        let all = || DraftVocabulary::new((0..vocab_size as u32).collect::<Vec<u32>>());
        let vocabulary = || config.draft_vocabulary.clone().unwrap_or_else(all);
        if let Some(packed) = &self.packed {
            let head = packed.lm_head.clone()?;
            return Some(NarrowHead::of_packed(head, vocabulary(), vocab_size));
        }
        let head = self.lm_head.as_ref()?;
        Some(NarrowHead::of_tensor(head.weight.val(), vocabulary(), vocab_size))
    }

    /// Writes `model.safetensors` in the configuration's type, then `config.json`, each under a temporary name
    /// first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &Eagle3Config) -> Result<(), ModelError> {
        let vocabulary = config.draft_vocabulary.as_ref();
        let offsets: Option<Vec<u32>> = vocabulary
            .map(|vocabulary| (0..).zip(vocabulary.ids()).map(|(at, id)| id - at).collect());
        let lists: Vec<(&str, &[u32])> =
            offsets.iter().map(|offsets| (OFFSETS, offsets.as_slice())).collect();
        let path = dir.join("model.safetensors");
        let hash = write_with_ids(&path, &self.named(config), &lists, config.dtype, &[])?;
        write_config(dir, config.to_json(), hash)
    }

    /// Lists the drafter's tensors in the layout of its file.
    pub(super) fn named(&self, config: &Eagle3Config) -> Vec<NamedTensor> {
        let norm = &config.model.spec.norm;
        let mut tensors = named_linears("", [(config.fc(), &self.fc)]);
        tensors.extend(self.embedding_norm.named(norm, EMBEDDING_NORM));
        tensors.extend(self.layer.named(&config.layer(), &self.shape, LAYER));
        tensors.extend(self.norm.named(norm, NORM));
        tensors.extend(named_linears("", config.own_head().into_iter().zip(&self.lm_head)));
        let table = self
            .embedding
            .as_ref()
            .map(|table| NamedTensor::from_tensor(&format!("{EMBEDDING}.weight"), table.val()));
        tensors.extend(table);
        tensors
    }
}
