//! The `config.json` of a head directory, in either of the two schemas.

use std::path::Path;

use burn::nn::LinearConfig;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};

use super::AcceptanceHead;
use super::reads::{HeadForm, HeadInput, HeadReads};
use crate::error::{ModelError, Result, read_json};

/// The value of the key `schema` for heads that the authors' class cannot load.
const OWN_SCHEMA: &str = "draftsmith.head.v2";

/// The shape and provenance of a head: `config.json` of a head directory.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(into = "HeadKeys")]
pub struct AcceptanceHeadConfig {
    /// The width of the draft's hidden states.
    pub hidden_size: usize,
    /// The number of residual blocks, 0 to 64.
    pub num_layers: usize,
    /// Whether all depths share one block.
    pub tied: bool,
    /// The inputs that the head reads.
    pub reads: HeadReads,
    /// The SHA-256 of the draft that the head was trained on, if known.
    pub draft_hash: Option<String>,
    /// The SHA-256 of the target whose acceptance the head predicts, if known.
    pub target_hash: Option<String>,
    /// The record of the training, without the settings above.
    pub training: serde_json::Map<String, serde_json::Value>,
}

/// The keys of the file. In the authors' schema, the key `schema` is absent and there are only the
/// first two keys.
#[derive(Debug, Serialize, Deserialize)]
struct HeadKeys {
    hidden_size: usize,
    num_layers: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    schema: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tied: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    form: Option<HeadForm>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inputs: Option<Vec<HeadInput>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    draft_hash: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hash: Option<String>,
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    training: serde_json::Map<String, serde_json::Value>,
}

impl From<AcceptanceHeadConfig> for HeadKeys {
    fn from(config: AcceptanceHeadConfig) -> Self {
        let own = !config.is_authors();
        Self {
            hidden_size: config.hidden_size,
            num_layers: config.num_layers,
            schema: own.then(|| OWN_SCHEMA.to_owned()),
            tied: own.then_some(config.tied),
            form: own.then(|| config.reads.form()),
            inputs: own.then(|| config.reads.inputs().to_vec()),
            draft_hash: config.draft_hash,
            target_hash: config.target_hash,
            training: config.training,
        }
    }
}

impl HeadKeys {
    /// Checks the keys.
    ///
    /// # Errors
    /// The invalid key with a description of the problem.
    fn check(self) -> Result<AcceptanceHeadConfig, (&'static str, String)> {
        if let Some(schema) = self.schema.as_deref().filter(|schema| *schema != OWN_SCHEMA) {
            return Err(("schema", format!("is `{schema}`, expected `{OWN_SCHEMA}` or no schema")));
        }
        if self.hidden_size == 0 {
            return Err(("hidden_size", "is 0, expected the draft's hidden size".to_owned()));
        }
        if self.num_layers > 64 {
            return Err(("num_layers", format!("is {}, expected 0 to 64", self.num_layers)));
        }
        let (tied, form, inputs) = if self.schema.is_some() {
            let missing = |key| (key, format!("is missing, but `{OWN_SCHEMA}` needs it"));
            let tied = self.tied.ok_or_else(|| missing("tied"))?;
            let form = self.form.ok_or_else(|| missing("form"))?;
            (tied, form, self.inputs.ok_or_else(|| missing("inputs"))?)
        } else {
            let own = [
                ("tied", self.tied.is_some()),
                ("form", self.form.is_some()),
                ("inputs", self.inputs.is_some()),
            ];
            if let Some((key, _)) = own.into_iter().find(|(_, is_there)| *is_there) {
                return Err((key, format!("is set, which needs `schema` = `{OWN_SCHEMA}`")));
            }
            (true, HeadForm::Candidate, Vec::new())
        };
        Ok(AcceptanceHeadConfig {
            hidden_size: self.hidden_size,
            num_layers: self.num_layers,
            tied,
            reads: HeadReads::new(form, &inputs),
            draft_hash: self.draft_hash,
            target_hash: self.target_hash,
            training: self.training,
        })
    }
}

impl AcceptanceHeadConfig {
    /// Configures a head of `num_layers` tied or untied blocks that reads only a hidden state.
    pub fn new(hidden_size: usize, num_layers: usize, tied: bool) -> Self {
        Self {
            hidden_size,
            num_layers,
            tied,
            reads: HeadReads::default(),
            draft_hash: None,
            target_hash: None,
            training: serde_json::Map::new(),
        }
    }

    /// Sets the inputs that the head reads.
    pub fn with_reads(self, reads: HeadReads) -> Self {
        Self { reads, ..self }
    }

    /// Returns whether the authors' class can load the head. If so, the head is stored in the
    /// authors' schema.
    pub fn is_authors(&self) -> bool {
        self.tied && self.reads.is_hidden_only()
    }

    /// Returns the number of stored blocks, which is at most one if they are tied.
    pub fn num_stored_blocks(&self) -> usize {
        if self.tied { self.num_layers.min(1) } else { self.num_layers }
    }

    /// Initialises a head with PyTorch's default for linear layers: uniform in ±1/√in.
    pub fn init(&self, device: &Device) -> AcceptanceHead {
        let hidden = self.hidden_size;
        let num_extra = self.reads.num_extra(hidden);
        let matrix = |from| LinearConfig::new(from, hidden).with_bias(false).init(device);
        AcceptanceHead {
            input: (num_extra > 0).then(|| matrix(num_extra)),
            blocks: (0..self.num_stored_blocks())
                .map(|_| LinearConfig::new(hidden, hidden).init(device))
                .collect(),
            output: LinearConfig::new(hidden, 2).init(device),
            num_layers: self.num_layers,
            reads: self.reads.clone(),
            packed: None,
        }
    }

    /// Reads a head's `config.json`.
    ///
    /// # Errors
    /// If it is missing, not JSON, or of another schema.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let stored: HeadKeys = read_json(&path)?;
        stored.check().map_err(|(key, problem)| ModelError::config(&path, key, problem))
    }
}
