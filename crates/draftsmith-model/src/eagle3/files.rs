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

use burn::tensor::Device;
use draftsmith_files::parse_json_value;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    EMBEDDING, EMBEDDING_NORM, Eagle3, Eagle3Config, FC, LAYER, LM_HEAD, NUM_TARGET_STATES,
};
use crate::block_drafter::BlockDrafterConfig;
use crate::config::ModelConfig;
use crate::decoder::source::{
    CheckpointSource, ShapeSource, WeightSource, named_linears, parameter,
};
use crate::draft_vocabulary::{DraftVocabulary, MASK, NarrowHead, OFFSETS};
use crate::drafter_keys::{DrafterDir, DrafterKeys, FoundKeys, LAYER_KEYS};
use crate::error::ModelError;
use crate::frozen::Packable;
use crate::spec::{LinearSpec, ModelShape};
use crate::weights::{
    NamedTensor, WeightDtype, WeightReader, check_weights, write_config, write_with_ids,
};

/// The key for the numbers of the target's layers.
pub(super) const LAYERS: &str = "eagle_aux_hidden_state_layer_ids";
/// The prefix of the layer's tensors in files of other trainers.
const OTHER_LAYER: &str = "layers.0.";
/// The key of the speculators library for the drafting method.
const METHOD: &str = "speculators_model_type";
/// The keys that are read, the same as in [`OwnKeys`].
pub(crate) const KEYS: DrafterKeys = DrafterKeys {
    own: "draft_vocab_size dtype eagle_aux_hidden_state_layer_ids norm_before_residual norm_output \
          speculators_model_type target_hash target_hidden_size torch_dtype training",
    table: "eagle_config",
    has_families: false,
};
/// Keys that add tensors to a drafter, with a part of the names of these. An ignored key's tensors are
/// ignored.
const TENSORS_OF: [(&str, &str); 4] = [
    ("norm_before_fc", "input_norm."),
    ("fc_norm", "fc_norm."),
    (FAMILY, ".q_norm."),
    (FAMILY, ".k_norm."),
];
/// The key that names the family of the layer.
const FAMILY: &str = "model_type";

/// The keys of a drafter's `config.json` that a Llama does not have.
#[derive(Deserialize)]
pub(crate) struct OwnKeys {
    draft_vocab_size: Option<usize>,
    target_hidden_size: Option<usize>,
    #[serde(default)]
    norm_before_residual: bool,
    #[serde(default)]
    norm_output: bool,
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    /// The type of the weights. transformers 5 calls the key `dtype`, earlier versions
    /// `torch_dtype`.
    dtype: Option<String>,
    torch_dtype: Option<String>,
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

impl Eagle3Config {
    /// Returns whether a `config.json` belongs to an EAGLE-3 drafter.
    pub fn is_of(config: &Map<String, Value>) -> bool {
        config.contains_key("draft_vocab_size") && !BlockDrafterConfig::is_of(config)
    }

    /// Reads the configuration of a drafter for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If a file is missing or malformed, or a key contradicts the tensors.
    pub fn from_dir(dir: impl Into<DrafterDir>, num_layers: usize) -> Result<Self, ModelError> {
        let Eagle3Files { config, faults, .. } = Eagle3Files::read(dir, num_layers)?;
        faults.into_iter().next().map_or(Ok(config), |fault| Err(fault.error))
    }

    /// Lists the tensors of the drafter's file with their shapes, without the draft vocabulary's.
    fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let ModelShape { vocab_size, hidden_size, .. } = self.model.shape;
        let mut source = ShapeSource::default();
        let Ok(_) = self.build(None, &mut source);
        if self.has_embedding {
            source.shapes.push((format!("{EMBEDDING}.weight"), vec![vocab_size, hidden_size]));
        }
        source.shapes
    }

    pub(super) fn to_json(&self) -> Value {
        let mut config = self.model.to_json(self.dtype.config_name());
        config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
        config["draft_vocab_size"] = self.num_draft_tokens().into();
        config["target_hidden_size"] = self.target_hidden_size.into();
        config["tie_word_embeddings"] = false.into();
        if self.norm_before_residual {
            config["norm_before_residual"] = true.into();
        }
        if self.norm_output {
            config["norm_output"] = true.into();
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

/// What keeps a drafter from being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eagle3FaultKind {
    /// A key that changes the network in a way that is not computed, or is unknown.
    RefusedKey,
    /// More than one layer, or none.
    SeveralLayers,
    /// The target's layers are not three, or the target has fewer.
    WrongLayers,
    /// The target's layers do not ascend.
    DescendingLayers,
    /// A draft vocabulary without `d2t`.
    NoOffsets,
    /// `d2t` without a draft vocabulary.
    SurplusOffsets,
    /// `d2t` holds the target's ids.
    IdsForOffsets,
    /// `d2t` does not lead to different ids of the target.
    WrongOffsets,
    /// A draft vocabulary without an LM head.
    NoHead,
    /// Another width than the target's hidden states have.
    OtherWidth,
    /// Another vocabulary than the target's.
    OtherVocabulary,
    /// A context shorter than the target's.
    ShortContext,
    /// A missing tensor.
    MissingTensor,
    /// A tensor of another shape than `config.json` says.
    WrongShape,
    /// A tensor that belongs to no drafter.
    UnknownTensor,
}

/// A fault that keeps a drafter from being read.
#[derive(Debug)]
pub struct Eagle3Fault {
    /// Its kind.
    pub kind: Eagle3FaultKind,
    /// What is wrong, with the file and the key or tensor.
    pub error: ModelError,
}

/// A drafter's directory, read as far as possible.
pub struct Eagle3Files {
    /// The configuration. Where a key is at fault, it has the usual value.
    pub config: Eagle3Config,
    /// The keys of `config.json`, with those of the layer beside the others.
    pub keys: Map<String, Value>,
    /// The faults of the configuration and the draft vocabulary.
    faults: Vec<Eagle3Fault>,
    dir: DrafterDir,
    reader: WeightReader,
}

impl Eagle3Files {
    /// Reads the directory of a drafter for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If `config.json` or the weights cannot be read.
    pub fn read(dir: impl Into<DrafterDir>, num_layers: usize) -> Result<Self, ModelError> {
        let dir = dir.into();
        let path = dir.join("config.json");
        let FoundKeys { keys, mut refused } = dir.read_keys(&KEYS)?;
        let keys = complete(&path, keys)?;
        let model = ModelConfig::from_keys(&path, &keys)?;
        let own: OwnKeys = parse_json_value(&path, "", Value::Object(keys.clone()))?;
        let reader = open(&dir)?;
        let has = |name: &str| reader.shape(&format!("{name}.weight")).is_some();
        let config = Eagle3Config {
            target_layers: Eagle3Config::default_layers(num_layers),
            num_target_layers: num_layers,
            target_hidden_size: own.target_hidden_size.unwrap_or(model.shape.hidden_size),
            draft_vocabulary: None,
            norm_before_residual: own.norm_before_residual,
            norm_output: own.norm_output,
            has_embedding: has(EMBEDDING),
            has_head: has(LM_HEAD),
            dtype: WeightDtype::of_config(own.dtype.or(own.torch_dtype).as_deref()),
            target_hash: own.target_hash,
            training: own.training,
            model,
        };
        let ModelConfig { architecture, spec, .. } = &config.model;
        if spec.window.is_some() || spec.attention.names.head_norms.is_some() {
            let problem = format!(
                "is `{}`, whose layers have windows or norms of queries and keys, which are not computed here",
                architecture.model_type()
            );
            let is_nested = keys.get(LAYER_KEYS).is_some_and(|layer| layer.get(FAMILY).is_some());
            let table = if is_nested { format!("{LAYER_KEYS}.") } else { String::new() };
            refused.push(dir.refuse(table + FAMILY, problem));
        }
        let fault = |error| Eagle3Fault { kind: Eagle3FaultKind::RefusedKey, error };
        let faults = refused.into_iter().map(fault).collect();
        let mut files = Self { config, keys, faults, dir, reader };
        let num_own = files.config.model.shape.num_layers;
        if num_own != 1 {
            let problem = format!("is {num_own}, but a drafter has one layer");
            files.fault(Eagle3FaultKind::SeveralLayers, "num_hidden_layers", problem);
        }
        // Model-Optimizer writes an empty list for the default.
        let given = own.eagle_aux_hidden_state_layer_ids.filter(|layers| !layers.is_empty());
        given.into_iter().for_each(|layers| files.read_layers(layers));
        files.read_vocabulary(own.draft_vocab_size);
        Ok(files)
    }

    fn fault(&mut self, kind: Eagle3FaultKind, key: &'static str, problem: String) {
        let error = ModelError::Config { path: self.dir.join("config.json"), key, problem };
        self.faults.push(Eagle3Fault { kind, error });
    }

    fn read_layers(&mut self, layers: Vec<usize>) {
        match <[usize; NUM_TARGET_STATES]>::try_from(layers) {
            Ok(layers) if layers.is_sorted() => self.config.target_layers = layers,
            Ok(layers) => {
                let problem = format!(
                    "is {layers:?}: runtimes take layers that do not ascend in different orders; hint: \
                     sort them, and the columns of `{FC}` with them"
                );
                self.fault(Eagle3FaultKind::DescendingLayers, LAYERS, problem);
            }
            Err(layers) => {
                let problem = format!("is {layers:?}, expected {NUM_TARGET_STATES} layers");
                self.fault(Eagle3FaultKind::WrongLayers, LAYERS, problem);
            }
        }
    }

    /// Reads the draft vocabulary, of which `config.json` gives the size.
    fn read_vocabulary(&mut self, given: Option<usize>) {
        const KEY: &str = "draft_vocab_size";
        let vocab_size = self.config.model.shape.vocab_size;
        let offsets = self.reader.shape(OFFSETS).map(|shape| shape.iter().product::<usize>());
        let size = given.or(offsets).unwrap_or(vocab_size);
        if size >= vocab_size {
            if offsets.is_some() {
                let problem = format!(
                    "is {size}, all tokens, but the weights have a tensor `{OFFSETS}`; hint: remove it"
                );
                self.fault(Eagle3FaultKind::SurplusOffsets, KEY, problem);
            }
            return;
        }
        if offsets.is_none() {
            let problem = format!(
                "is {size} of {vocab_size} tokens, but the weights have no tensor `{OFFSETS}` that says which"
            );
            self.fault(Eagle3FaultKind::NoOffsets, KEY, problem);
        } else if let Err(fault) = self.read_offsets(size) {
            self.faults.push(fault);
        }
        if !self.config.has_head {
            let problem = format!("needs the tensor `{LM_HEAD}.weight`, and the weights have none");
            self.fault(Eagle3FaultKind::NoHead, KEY, problem);
        }
        // Any tokens of that number give the LM head its shape.
        let any = || DraftVocabulary::new((0..size.max(1) as u32).collect::<Vec<u32>>());
        self.config.draft_vocabulary.get_or_insert_with(any);
    }

    /// Reads the draft vocabulary from its offsets, which may be in any order of tokens.
    fn read_offsets(&mut self, size: usize) -> Result<(), Eagle3Fault> {
        let vocab_size = self.config.model.shape.vocab_size;
        let read = DraftVocabulary::take_offsets(&mut self.reader, size, vocab_size);
        let vocabulary = read.map_err(|(are_ids, error)| {
            let kind = match are_ids {
                true => Eagle3FaultKind::IdsForOffsets,
                false => Eagle3FaultKind::WrongOffsets,
            };
            Eagle3Fault { kind, error }
        })?;
        self.config.draft_vocabulary = Some(vocabulary);
        Ok(())
    }

    /// Finds everything for which the drafter is not read beside a target of this shape.
    pub fn faults_beside(self, target: &ModelShape) -> Vec<Eagle3Fault> {
        let Self { config, dir, mut faults, mut reader, .. } = self;
        faults.extend(config.target_faults(&dir.join("config.json"), target));
        reader.ignore(|name| is_beside(name, &dir));
        for (name, shape) in config.tensor_shapes() {
            let Err(error) = reader.check_shape(&name, &shape) else { continue };
            let kind = match reader.shape(&name) {
                None => Eagle3FaultKind::MissingTensor,
                Some(_) => Eagle3FaultKind::WrongShape,
            };
            faults.push(Eagle3Fault { kind, error });
            reader.ignore(|it| it == name);
        }
        let known: Vec<String> = config.tensor_shapes().into_iter().map(|(name, _)| name).collect();
        reader.ignore(|name| known.iter().any(|it| it == name));
        if let Err(error) = reader.finish() {
            faults.push(Eagle3Fault { kind: Eagle3FaultKind::UnknownTensor, error });
        }
        faults
    }
}

/// Opens the tensors of a directory, under their usual names.
fn open(dir: &Path) -> Result<WeightReader, ModelError> {
    WeightReader::open_dir(dir)?.with_prefix(OTHER_LAYER, &format!("{LAYER}."))
}

/// Returns whether a tensor is no weight of a drafter: a part of its vocabulary, the frequencies that
/// old trainers store, or that of a key which is ignored.
fn is_beside(name: &str, dir: &DrafterDir) -> bool {
    let is_of = |(key, part): &(&str, &str)| name.contains(part) && dir.ignores(key);
    name == MASK
        || name == OFFSETS
        || name.ends_with("rotary_emb.inv_freq")
        || TENSORS_OF.iter().any(is_of)
}

/// Checks the drafting method, and adds the default of the speculators library.
fn complete(path: &Path, mut keys: Map<String, Value>) -> Result<Map<String, Value>, ModelError> {
    if let Some(method) = keys.get(METHOD).filter(|method| **method != "eagle3") {
        let problem = format!("is {method}, expected \"eagle3\"");
        return Err(ModelError::Config { path: path.to_path_buf(), key: METHOD, problem });
    }
    if keys.contains_key(METHOD) || keys.contains_key(LAYER_KEYS) {
        keys.entry("norm_before_residual").or_insert(true.into());
    }
    Ok(keys)
}

impl Eagle3 {
    /// Loads a drafter for a target of shape `target`. `dtype` is the type of computation, which
    /// must be the target's. On an autodiff device the drafter can be trained.
    ///
    /// # Errors
    /// If a file is missing, broken or changed since its export, a tensor is missing, extra or misshapen, or
    /// the drafter does not fit the target.
    pub fn from_dir(
        dir: impl Into<DrafterDir>,
        target: &ModelShape,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<(Eagle3Config, Self), ModelError> {
        let dir = dir.into();
        let config = Eagle3Config::from_dir(&dir, target.num_layers)?;
        config.check_target(&dir, target)?;
        let mut reader = open(&dir)?;
        let dtype = dtype.float_dtype();
        let ModelShape { vocab_size, hidden_size, .. } = config.model.shape;
        let mut source = CheckpointSource { reader: &mut reader, device, dtype };
        let embedding = match config.has_embedding {
            false => None,
            true => {
                let (name, shape) = (format!("{EMBEDDING}.weight"), [vocab_size, hidden_size]);
                let values = source.reader.take_finite(&name, &shape)?;
                let table = LinearSpec::lm_head(EMBEDDING, &config.model.shape);
                let packed = source.packed(|packing| packing.linears("", &[table]))?;
                Some(Packable { tensors: parameter(values, shape, device, dtype), packed })
            }
        };
        let mut drafter = config.build(embedding, &mut source)?;
        drafter.stack.tensors.join();
        reader.ignore(|name| is_beside(name, &dir));
        reader.finish()?;
        check_weights(&dir)?;
        drafter.narrow_head = drafter.narrow_head_of(&config);
        Ok((config, drafter))
    }

    /// Returns the same drafter with its weights as tensors, for comparison.
    #[must_use]
    pub fn to_tensors(&self, config: &Eagle3Config) -> Self {
        let own = self.clone().unpacked();
        Self { narrow_head: own.narrow_head_of(config), ..own }
    }

    /// Combines the drafter's own LM head with the tokens that it may draft. `None` if the drafter
    /// uses the target's LM head.
    fn narrow_head_of(&self, config: &Eagle3Config) -> Option<NarrowHead> {
        let (vocabulary, vocab_size) = (config.draft_vocabulary.as_ref(), self.shape.vocab_size);
        self.lm_head.as_ref().map(|head| NarrowHead::of_own(head, vocabulary, vocab_size))
    }

    /// Writes `model.safetensors` in the configuration's type, then `config.json`, each under a temporary name
    /// first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &Eagle3Config) -> Result<(), ModelError> {
        let offsets = config.draft_vocabulary.as_ref().map(DraftVocabulary::offsets);
        let lists: Vec<(&str, Vec<i64>)> =
            offsets.into_iter().map(|offsets| (OFFSETS, offsets)).collect();
        let path = dir.join("model.safetensors");
        let hash = write_with_ids(&path, &self.named(config), &lists, config.dtype, &[])?;
        write_config(dir, config.to_json(), hash)
    }

    /// Lists the drafter's tensors in the layout of its file.
    pub(super) fn named(&self, config: &Eagle3Config) -> Vec<NamedTensor> {
        let norm = &config.model.spec.norm;
        let mut tensors = named_linears("", [(config.fc(), &*self.fc)]);
        tensors.extend(self.embedding_norm.named(norm, EMBEDDING_NORM));
        tensors.extend(self.stack.named(&config.stack()));
        let head = config.own_head().into_iter().zip(self.lm_head.as_deref());
        tensors.extend(named_linears("", head));
        let table = self
            .embedding
            .as_ref()
            .map(|table| NamedTensor::from_tensor(&format!("{EMBEDDING}.weight"), table.val()));
        tensors.extend(table);
        tensors
    }
}
