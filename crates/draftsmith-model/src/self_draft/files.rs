//! Directories of self-drafts, read as far as possible, with the faults that keep one from being read.

use std::fmt::Display;

use draftsmith_files::parse_json_value;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::DraftForm;
use super::config::DraftConfig;
use super::faults::{DraftFault, DraftFaultKind};
use super::keys::{DrafterDir, FoundKeys};
use crate::config::{ModelConfig, draft_window};
use crate::draft_vocabulary::{DraftVocabulary, OFFSETS};
use crate::error::{ModelError, Result};
use crate::spec::ModelShape;
use crate::weights::{WeightDtype, WeightReader};

/// The keys of all drafters' records.
#[derive(Deserialize)]
pub(crate) struct RecordKeys {
    /// The type of the weights. transformers 5 calls the key `dtype`, earlier versions
    /// `torch_dtype`.
    dtype: Option<String>,
    torch_dtype: Option<String>,
    target_hash: Option<String>,
    #[serde(default)]
    training: Map<String, Value>,
}

/// A drafter's directory, read as far as possible.
#[derive(Debug)]
pub struct DraftFiles<F> {
    /// The configuration. Where a key is at fault, it has the usual value.
    pub config: DraftConfig<F>,
    /// The keys of `config.json`, with those of the layers beside the others.
    pub keys: Map<String, Value>,
    /// The number of the target's layers.
    pub(crate) num_target_layers: usize,
    /// The faults of the configuration and the draft vocabulary.
    pub(crate) faults: Vec<DraftFault>,
    pub(crate) dir: DrafterDir,
    pub(crate) reader: WeightReader,
}

impl<F: DraftForm> DraftFiles<F> {
    /// Reads the directory of a drafter for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If `config.json` or the weights cannot be read.
    pub fn read(dir: impl Into<DrafterDir>, num_layers: usize) -> Result<Self> {
        let dir = dir.into();
        let FoundKeys { mut keys, refused } = dir.read_keys(&F::KEYS)?;
        keys.retain(|_, value| !value.is_null());
        // A drafter has the special tokens of its target, so their form does not matter.
        let is_id = |value: &Value| value.is_u64() || value.is_array();
        for (key, allows_list) in [("bos_token_id", false), ("eos_token_id", true)] {
            let is_bad = |value: &&Value| !is_id(value) || value.is_array() && !allows_list;
            if keys.get(key).filter(is_bad).is_some() {
                keys.shift_remove(key);
            }
        }
        F::KEYS.dialects.iter().for_each(|dialect| dialect.translate(&mut keys));
        let path = dir.join("config.json");
        let mut model = ModelConfig::from_keys(&path, &keys)?;
        if !F::KEYS.has_families {
            model.spec.window = draft_window(&path, &keys, &model)?;
        }
        let record: RecordKeys = parse_json_value(&path, "", Value::Object(keys.clone()))?;
        let (theirs, ours) = F::KEYS.other_prefix;
        let reader = WeightReader::open_dir(&dir)?.without_prefix(F::KEYS.dropped_prefix);
        let config = DraftConfig {
            dtype: WeightDtype::of_config(record.dtype.or(record.torch_dtype).as_deref()),
            target_hash: record.target_hash,
            training: record.training,
            ..DraftConfig::of(model, Vec::new(), F::default())
        };
        let fault = |error| DraftFault { kind: DraftFaultKind::RefusedKey, error };
        let mut files = Self {
            config,
            keys,
            num_target_layers: num_layers,
            faults: refused.into_iter().map(fault).collect(),
            dir,
            reader: reader.with_prefix(theirs, ours)?,
        };
        F::read(&mut files)?;
        Ok(files)
    }

    /// Parses the keys of the form.
    pub(crate) fn own_keys<T: DeserializeOwned>(&self) -> Result<T> {
        let keys = Value::Object(self.keys.clone());
        Ok(parse_json_value(&self.dir.join("config.json"), "", keys)?)
    }

    /// Builds the error for a key.
    pub(crate) fn error(&self, key: &str, problem: impl Display) -> ModelError {
        ModelError::config(&self.dir.join("config.json"), key, problem)
    }

    pub(crate) fn fault(&mut self, kind: DraftFaultKind, key: &'static str, problem: String) {
        let error = self.error(key, problem);
        self.faults.push(DraftFault { kind, error });
    }

    /// Finds the fault of a drafter that does not have one layer.
    pub(crate) fn need_one_layer(&mut self) {
        let num_layers = self.config.model.shape.num_layers;
        if num_layers != 1 {
            let problem = format!("is {num_layers}, but a drafter has one layer");
            self.fault(DraftFaultKind::SeveralLayers, "num_hidden_layers", problem);
        }
    }

    /// Returns whether the weights have a tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.reader.shape(&format!("{name}.weight")).is_some()
    }

    /// Returns the files if no fault was found.
    ///
    /// # Errors
    /// With the first fault.
    pub(crate) fn without_faults(mut self) -> Result<Self> {
        if self.faults.is_empty() { Ok(self) } else { Err(self.faults.remove(0).error) }
    }

    /// Reads the draft vocabulary of `size` tokens from its offsets, which may be in any order of tokens.
    pub(crate) fn read_offsets(&mut self, size: usize) {
        let vocab_size = self.config.model.shape.vocab_size;
        match DraftVocabulary::take_offsets(&mut self.reader, size, vocab_size) {
            Ok(vocabulary) => self.config.draft_vocabulary = Some(vocabulary),
            Err((are_ids, error)) => {
                let has_offsets = self.reader.shape(OFFSETS).is_some();
                let kind = match (are_ids, has_offsets) {
                    (true, _) => DraftFaultKind::IdsForOffsets,
                    (false, true) => DraftFaultKind::WrongOffsets,
                    (false, false) => DraftFaultKind::NoOffsets,
                };
                self.faults.push(DraftFault { kind, error });
            }
        }
    }

    /// Finds everything for which the drafter is not read beside a target of this shape.
    pub fn faults_beside(self, target: &ModelShape) -> Vec<DraftFault> {
        let Self { config, dir, mut faults, mut reader, .. } = self;
        faults.extend(config.target_faults(&dir.join("config.json"), target));
        reader.ignore(|name| F::is_beside(&config, &dir, name));
        let expected = config.shapes().shapes;
        for (name, shape) in &expected {
            let Err(error) = reader.check_shape(name, shape) else { continue };
            let kind = match reader.shape(name) {
                None => DraftFaultKind::MissingTensor,
                Some(_) => DraftFaultKind::WrongShape,
            };
            faults.push(DraftFault { kind, error });
        }
        reader.ignore(|name| expected.iter().any(|(known, _)| known == name));
        if let Err(error) = reader.finish() {
            faults.push(DraftFault { kind: DraftFaultKind::UnknownTensor, error });
        }
        faults
    }
}

impl<F: DraftForm> DraftConfig<F> {
    /// Reads the configuration of a drafter for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If a file is missing or malformed, a key contradicts the tensors or may change the network, or
    /// the drafter is of a kind that is not computed here.
    pub fn beside(dir: impl Into<DrafterDir>, num_layers: usize) -> Result<Self> {
        Ok(DraftFiles::read(dir, num_layers)?.without_faults()?.config)
    }
}
