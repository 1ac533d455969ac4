//! Directories of block drafters, `config.json` and `model.safetensors`.
//!
//! We write DeepSpec's form, with every key that some runtime needs. Two more forms are read:
//! z-lab's DFlash, with the keys of `dflash_config`, and that of the speculators library, which
//! nests the layers' keys in `transformer_layer_config` and counts layers by their inputs.
//!
//! Copies of the target's embeddings and LM head are ignored, as the drafter was trained on the
//! target's own. A drafter of a part of the vocabulary has an LM head of its own, and the tensor
//! `d2t` contains each draft token's id in the target minus its number in the draft vocabulary.
//!
//! The tensors decide whether a Markov or confidence head exists only if no key does. Gated and
//! recurrent Markov heads, DFlash2, mask embeddings beside the weights, and keys that change the
//! network otherwise, such as sliding windows, are refused by name.

use std::path::{Path, PathBuf};

use burn::tensor::Device;
use draftsmith_files::parse_json_value;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::config::{CONFIDENCE, CONTEXT_NORM, LM_HEAD};
use super::{BlockDrafter, BlockDrafterConfig, ConfidenceHead};
use crate::config::ModelConfig;
use crate::decoder::source::{CheckpointSource, named_linears};
use crate::draft_vocabulary::{DraftVocabulary, MASK, OFFSETS};
use crate::drafter_keys::{DrafterDir, DrafterKeys, FoundKeys};
use crate::error::ModelError;
use crate::spec::ModelShape;
use crate::weights::{
    NamedTensor, WeightDtype, WeightReader, check_weights, write_config, write_with_ids,
};

/// The class of our files, and the layers that they read: each the layer whose output is read,
/// counted from 0, or −1 for the embeddings.
const CLASS: &str = "Qwen3DSparkModel";
const LAYER_IDS: &str = "target_layer_ids";
/// The nested keys of z-lab's form.
const DFLASH: &str = "dflash_config";
/// The keys of the speculators library: the drafting method, and the layers whose input is read.
const METHOD: &str = "speculators_model_type";
const INPUT_IDS: &str = "aux_hidden_state_layer_ids";
const LAYOUT: &str = "sample_from_anchor";
const MARKOV_TYPE: &str = "markov_head_type";
/// The greatest size of a block. Published drafters have at most 16 rows.
const MOST_ROWS: usize = 256;
/// The greatest rank of a Markov head. Published drafters have 256.
const MOST_RANK: usize = 1 << 16;
/// A file that MiMo's drafters have beside the weights.
const MASK_EMBEDDING: &str = "mask_embedding.pt";
/// The keys that are read, the same as in [`BlockKeys`].
pub(crate) const KEYS: DrafterKeys = DrafterKeys {
    own: "architectures aux_hidden_state_layer_ids block_size confidence_head_with_markov draft_vocab_size dtype \
          enable_confidence_head is_causal markov_head_type markov_rank mask_token_id num_target_layers \
          sample_from_anchor shift_label speculators_model_type target_hash target_layer_ids \
          torch_dtype training use_confidence_head",
    table: DFLASH,
    has_families: false,
};

/// The keys of a drafter's `config.json` that a model does not have. Model-Optimizer gives two of them
/// other names.
#[derive(Deserialize)]
pub(crate) struct BlockKeys {
    /// The file, for messages.
    #[serde(skip)]
    path: PathBuf,
    target_layer_ids: Option<Vec<i64>>,
    aux_hidden_state_layer_ids: Option<Vec<i64>>,
    num_target_layers: Option<usize>,
    block_size: Option<usize>,
    mask_token_id: Option<u32>,
    #[serde(alias = "shift_label")]
    sample_from_anchor: Option<bool>,
    #[serde(default)]
    is_causal: bool,
    markov_rank: Option<usize>,
    markov_head_type: Option<String>,
    #[serde(alias = "use_confidence_head")]
    enable_confidence_head: Option<bool>,
    confidence_head_with_markov: Option<bool>,
    draft_vocab_size: Option<usize>,
    #[serde(default)]
    architectures: Vec<String>,
    speculators_model_type: Option<String>,
    /// The type of the weights. transformers 5 calls the key `dtype`, earlier versions
    /// `torch_dtype`.
    dtype: Option<String>,
    torch_dtype: Option<String>,
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

impl BlockKeys {
    fn fail<T>(&self, key: &'static str, problem: impl Into<String>) -> Result<T, ModelError> {
        Err(ModelError::Config { path: self.path.clone(), key, problem: problem.into() })
    }

    /// Refuses drafters that are not computed here.
    fn check_known(&self) -> Result<(), ModelError> {
        let Self { architectures, speculators_model_type, markov_head_type, .. } = self;
        if architectures.iter().chain(speculators_model_type).any(|it| is_class(it, "dflash2")) {
            let key = if speculators_model_type.is_some() { METHOD } else { "architectures" };
            let problem = "names DFlash2, whose convolutions and candidate selector are not computed; hint: use \
                           a DFlash or DSpark drafter";
            return self.fail(key, problem);
        }
        if let Some(other) = markov_head_type.as_ref().filter(|form| *form != "vanilla")
            && self.markov_rank() > 0
        {
            let problem = format!(
                "is `{other}`, and only `vanilla` Markov heads are computed; hint: llama.cpp and vLLM refuse \
                 it too"
            );
            return self.fail(MARKOV_TYPE, problem);
        }
        if self.markov_rank() > MOST_RANK {
            let problem = format!("is {}, expected at most {MOST_RANK}", self.markov_rank());
            return self.fail("markov_rank", problem);
        }
        if self.path.with_file_name(MASK_EMBEDDING).exists() {
            let problem = format!(
                "has an embedding of its own in `{MASK_EMBEDDING}`, and only embeddings of the target are used"
            );
            return self.fail("mask_token_id", problem);
        }
        Ok(())
    }

    fn markov_rank(&self) -> usize {
        self.markov_rank.unwrap_or(0)
    }

    /// Returns whether row i predicts the token after its position. Only z-lab's form of DFlash, and
    /// DSpark in DeepSpec's and SpecForge's forms, have a default on which all agree.
    fn is_anchor_first(&self, is_z_labs: bool) -> Result<bool, ModelError> {
        let is_speculators = self.speculators_model_type.is_some();
        match self.sample_from_anchor {
            Some(is_anchor_first) => Ok(is_anchor_first),
            None if self.markov_rank.is_some() && !is_speculators => Ok(true),
            None if is_z_labs => Ok(false),
            None => self.fail(
                LAYOUT,
                "is missing, and runtimes take it differently; hint: set it to true if the anchor's row predicts \
                 the next token, as in DSpark, or else to false",
            ),
        }
    }

    /// Reads for each state the number of the target's layers before it.
    fn target_layers(&self) -> Result<Vec<usize>, ModelError> {
        let (key, first, ids) = match (&self.target_layer_ids, &self.aux_hidden_state_layer_ids) {
            (Some(ids), _) => (LAYER_IDS, 1, ids),
            (None, Some(ids)) => (INPUT_IDS, 0, ids),
            (None, None) => {
                return self.fail(LAYER_IDS, "is missing, expected a list of the target's layers");
            }
        };
        let layer = |id: &i64| usize::try_from(id.checked_add(first)?).ok();
        match ids.iter().map(layer).collect::<Option<Vec<usize>>>() {
            Some(layers) if !layers.is_empty() && layers.len() <= MOST_ROWS => Ok(layers),
            _ => self.fail(key, format!("is {ids:?}, expected 1 to {MOST_ROWS} layers")),
        }
    }

    /// Reads the number of rows of a block and the mask token.
    fn block(&self, is_anchor_first: bool, vocab_size: usize) -> Result<(usize, u32), ModelError> {
        let least = if is_anchor_first { 1 } else { 2 };
        let block_size = match self.block_size {
            Some(size) if (least..=MOST_ROWS).contains(&size) => size,
            Some(size) => {
                let problem = format!("is {size}, expected {least} to {MOST_ROWS} rows");
                return self.fail("block_size", problem);
            }
            None => return self.fail("block_size", "is missing, expected the rows of a block"),
        };
        match self.mask_token_id {
            Some(id) if (id as usize) < vocab_size => Ok((block_size, id)),
            Some(id) => {
                self.fail("mask_token_id", format!("is {id}, expected an id below {vocab_size}"))
            }
            None => self.fail("mask_token_id", "is missing, expected the id of the mask token"),
        }
    }

    fn confidence(&self, reader: &WeightReader) -> ConfidenceHead {
        let has_tensor = reader.shape(&format!("{CONFIDENCE}.weight")).is_some();
        let is_enabled = self.enable_confidence_head.unwrap_or(has_tensor);
        let reads_token = self.confidence_head_with_markov.unwrap_or(true);
        match (is_enabled, reads_token && self.markov_rank() > 0) {
            (false, _) => ConfidenceHead::Absent,
            (true, false) => ConfidenceHead::OfRow,
            (true, true) => ConfidenceHead::OfRowAndToken,
        }
    }
}

/// Returns whether the name of a class or method contains `part`, in any case.
fn is_class(name: &str, part: &str) -> bool {
    name.to_ascii_lowercase().contains(part)
}

impl BlockDrafterConfig {
    /// Returns whether a `config.json` belongs to a block drafter, of a kind that is read or refused.
    pub fn is_of(config: &Map<String, Value>) -> bool {
        let classes = config.get("architectures").and_then(Value::as_array).into_iter().flatten();
        let mut names = classes.chain(config.get(METHOD)).filter_map(Value::as_str);
        config.contains_key(LAYOUT)
            || config.contains_key(DFLASH)
            || names.any(|name| is_class(name, "dspark") || is_class(name, "dflash"))
    }

    /// Reads the configuration of a drafter.
    ///
    /// # Errors
    /// If a file is missing or malformed, a key contradicts the tensors, or the drafter is of a kind
    /// that is not computed here.
    pub fn from_dir(dir: impl Into<DrafterDir>) -> Result<Self, ModelError> {
        let dir = dir.into();
        Self::read(&dir, &mut open(&dir)?)
    }

    /// Reads the keys of a drafter's `config.json`, with those of nested tables beside the others.
    ///
    /// # Errors
    /// If the file is missing or malformed, or an ignored key is absent.
    pub fn keys(dir: &DrafterDir) -> Result<Map<String, Value>, ModelError> {
        Ok(dir.read_keys(&KEYS)?.keys)
    }

    fn read(dir: &DrafterDir, reader: &mut WeightReader) -> Result<Self, ModelError> {
        let path = &dir.join("config.json");
        let FoundKeys { keys, refused } = dir.read_keys(&KEYS)?;
        let is_z_labs = keys.contains_key(DFLASH);
        let own = parse_json_value(path, "", Value::Object(keys.clone()))?;
        let own = BlockKeys { path: path.clone(), ..own };
        own.check_known()?;
        refused.into_iter().next().map_or(Ok(()), Err)?;
        let model = ModelConfig::from_keys(path, &keys)?;
        if model.spec.window.is_some() {
            return own.fail("model_type", "has windows by default, which are not computed here");
        }
        let vocab_size = model.shape.vocab_size;
        let is_anchor_first = own.is_anchor_first(is_z_labs)?;
        let (block_size, mask_token_id) = own.block(is_anchor_first, vocab_size)?;
        let (target_layers, confidence) = (own.target_layers()?, own.confidence(reader));
        let markov_rank = own.markov_rank();
        let size = own.draft_vocab_size.filter(|size| *size < vocab_size);
        let vocabulary = size.map(|size| DraftVocabulary::take_offsets(reader, size, vocab_size));
        Ok(Self {
            target_layers,
            num_target_layers: own.num_target_layers,
            model,
            draft_vocabulary: vocabulary.transpose().map_err(|(_, error)| error)?,
            block_size,
            mask_token_id,
            is_anchor_first,
            is_causal: own.is_causal,
            markov_rank,
            confidence,
            dtype: WeightDtype::of_config(own.dtype.or(own.torch_dtype).as_deref()),
            target_hash: own.target_hash,
            training: own.training,
        })
    }

    /// Returns the drafter's `config.json`, in DeepSpec's form.
    pub fn to_json(&self) -> Value {
        let mut config = self.model.to_json(self.dtype.config_name());
        let ids = self.target_layers.iter().map(|layer| *layer as i64 - 1);
        let keys = json!({
            "architectures": [CLASS],
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            LAYOUT: self.is_anchor_first,
            "is_causal": self.is_causal,
            "markov_rank": self.markov_rank,
            MARKOV_TYPE: "vanilla",
            "enable_confidence_head": self.confidence != ConfidenceHead::Absent,
            "confidence_head_with_markov": self.confidence == ConfidenceHead::OfRowAndToken,
            LAYER_IDS: ids.collect::<Vec<i64>>(),
            "layer_types": vec!["full_attention"; self.model.shape.num_layers],
            "tie_word_embeddings": false,
        });
        let optional = [
            ("num_target_layers", self.num_target_layers.map(Value::from)),
            ("draft_vocab_size", self.draft_vocabulary.as_ref().map(|all| all.ids().len().into())),
            ("target_hash", self.target_hash.as_deref().map(Value::from)),
            ("training", (!self.training.is_empty()).then(|| self.training.clone().into())),
        ];
        let optional = optional.into_iter().filter_map(|(key, value)| Some((key.into(), value?)));
        if let (Value::Object(config), Value::Object(keys)) = (&mut config, keys) {
            config.extend(keys);
            config.extend(optional);
        }
        config
    }

    /// Returns whether a tensor is none that the drafter computes with: a copy of the target's, a
    /// part of the vocabulary, a head that is switched off, or frequencies that old trainers store.
    fn is_beside(&self, name: &str) -> bool {
        let is_copy = name == "embed_tokens.weight"
            || (name == format!("{LM_HEAD}.weight") && self.draft_vocabulary.is_none());
        let is_off = self.confidence == ConfidenceHead::Absent && name.starts_with(CONFIDENCE);
        let is_old = name.ends_with("rotary_emb.inv_freq");
        is_copy || is_off || is_old || [OFFSETS, MASK].contains(&name)
    }
}

/// Measures the relative distance (root mean square) of a drafter's `embed_tokens` or `lm_head` from that of
/// a target with its directory; `None` if the drafter's file does not have the matrix.
///
/// # Errors
/// If a file cannot be read, or the shapes differ.
pub fn copy_distance(
    dir: &Path,
    matrix: &str,
    (target_dir, target): (&Path, &ModelConfig),
) -> Result<Option<f64>, ModelError> {
    let (mut reader, name) = (open(dir)?, format!("{matrix}.weight"));
    let Some(shape) = reader.shape(&name).map(<[usize]>::to_vec) else { return Ok(None) };
    let names = &target.spec.names;
    let of_target = match matrix == LM_HEAD && !target.spec.tie_word_embeddings {
        true => names.lm_head,
        false => names.embedding,
    };
    let mut ends = WeightReader::open_ends(target_dir, names)?;
    let theirs = ends.take(&format!("{of_target}.weight"), &shape)?;
    let own = reader.take(&name, &shape)?;
    let sum =
        |terms: &mut dyn Iterator<Item = f32>| terms.map(|it| f64::from(it).powi(2)).sum::<f64>();
    let apart = sum(&mut own.iter().zip(&theirs).map(|(own, theirs)| own - theirs));
    Ok(Some((apart / sum(&mut theirs.iter().copied())).sqrt()))
}

/// Opens the tensors of a directory. Some trainers' names begin with `model.`.
fn open(dir: &Path) -> Result<WeightReader, ModelError> {
    Ok(WeightReader::open_dir(dir)?.without_prefix("model."))
}

impl BlockDrafter {
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
    ) -> Result<(BlockDrafterConfig, Self), ModelError> {
        let dir = dir.into();
        let mut reader = open(&dir)?;
        let config = BlockDrafterConfig::read(&dir, &mut reader)?;
        config.check_target(&dir, target)?;
        let dtype = dtype.float_dtype();
        let mut source = CheckpointSource { reader: &mut reader, device, dtype };
        let mut drafter = config.build(&mut source)?;
        drafter.stack.tensors.join();
        reader.ignore(|name| config.is_beside(name));
        reader.finish()?;
        check_weights(&dir)?;
        Ok((config, drafter.with_narrow_heads()))
    }

    /// Returns the same drafter with its weights as tensors, for comparison.
    #[must_use]
    pub fn to_tensors(&self) -> Self {
        self.clone().unpacked().with_narrow_heads()
    }

    /// Writes `model.safetensors` in the configuration's type, then `config.json`, each under a temporary name
    /// first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &BlockDrafterConfig) -> Result<(), ModelError> {
        let offsets = config.draft_vocabulary.as_ref().map(DraftVocabulary::offsets);
        let lists: Vec<(&str, Vec<i64>)> =
            offsets.into_iter().map(|offsets| (OFFSETS, offsets)).collect();
        let path = dir.join("model.safetensors");
        let hash = write_with_ids(&path, &self.named(config), &lists, config.dtype, &[])?;
        write_config(dir, config.to_json(), hash)
    }

    /// Lists the drafter's tensors in the layout of its file.
    pub(super) fn named(&self, config: &BlockDrafterConfig) -> Vec<NamedTensor> {
        let heads = config.own_head().into_iter().zip(&self.lm_head);
        let heads = heads.chain(config.confidence().into_iter().zip(&self.confidence));
        let markov = config.markov().into_iter().flatten().zip(self.markov.iter().flatten());
        let linears = [(config.fc(), &self.fc)].into_iter().chain(heads).chain(markov);
        let mut tensors = named_linears("", linears.map(|(spec, linear)| (spec, &**linear)));
        tensors.extend(self.context_norm.named(&config.model.spec.norm, CONTEXT_NORM));
        tensors.extend(self.stack.named(&config.stack()));
        tensors
    }
}
