//! Reads trained acceptance heads and adapters from the directories that training exports.
//!
//! Each export is checked against the models in use. An error message names every difference.

pub mod config_keys;
pub mod entry;
pub mod forms;
pub(crate) mod inspected;
pub mod servers;
pub mod tuned;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use draftsmith_model::{
    AcceptanceHead, AcceptanceHeadConfig, Adapter, AdapterConfig, DrafterDir, ModelConfig,
    check_trained_with,
};
use draftsmith_theory::{DrafterId, ModelSummary};
use serde_json::{Map, Value};

pub use self::entry::{ExportEntry, HEAD};
pub use self::inspected::model as inspect_model;
use crate::workspace::Workspace;

/// An adapter and its directory.
pub struct AdapterExport {
    /// The weights.
    pub adapter: Adapter,
    /// The adapter's settings.
    pub config: AdapterConfig,
    /// The directory that the adapter was read from.
    pub dir: PathBuf,
}

impl AdapterExport {
    /// Reads the adapter in a directory, and checks that it was trained for the target.
    ///
    /// # Errors
    /// If the adapter is invalid, or was trained for another target.
    pub fn read(dir: &DrafterDir, workspace: &Workspace) -> Result<Self> {
        let (config, adapter) =
            workspace.artifacts.adapter_in(&workspace.models, dir, workspace.models.dtype)?;
        workspace.check_target(("adapter", dir), config.target_hash.as_deref())?;
        check_text("adapter", dir, &config.training, workspace)?;
        Ok(Self { adapter, config, dir: dir.path.clone() })
    }

    /// Reads the adapter's acceptance head, and checks that it was trained for this adapter and
    /// target.
    ///
    /// # Errors
    /// If the head is invalid, or was trained for another adapter or target.
    pub fn head(&self, dir: &Path, workspace: &Workspace) -> Result<HeadExport> {
        let hash = || workspace.artifacts.adapter_hash(&self.dir, &self.config);
        read_self_drafts_head(dir, self.config.model.shape.hidden_size, hash, workspace)
    }
}

/// Returns the directory of an acceptance head inside the directory of its drafter.
pub fn head_within(dir: &Path) -> PathBuf {
    dir.join("head")
}

/// Returns the directory of the acceptance head of the adapter in `dir`; `None` without a head.
pub fn found_adapter_head(dir: &Path) -> Option<PathBuf> {
    Some(head_within(dir)).filter(|dir| dir.join("config.json").is_file())
}

/// Reads the acceptance head of a self-draft that has this hidden size and weight hash.
///
/// # Errors
/// If the head is invalid, or was trained for another self-draft or target.
pub fn read_self_drafts_head(
    dir: &Path,
    hidden_size: usize,
    hash: impl FnOnce() -> Result<String>,
    workspace: &Workspace,
) -> Result<HeadExport> {
    let head = HeadExport::read(dir, hidden_size, workspace)?;
    let AcceptanceHeadConfig { draft_hash, target_hash, .. } = &head.config;
    check_trained_with(("head", dir), "adapter", draft_hash.as_deref(), hash)?;
    workspace.check_target(("head", dir), target_hash.as_deref())?;
    check_text("head", dir, &head.config.training, workspace)?;
    Ok(head)
}

/// An acceptance head and its directory.
pub struct HeadExport {
    /// The weights.
    pub head: AcceptanceHead,
    /// The head's settings.
    pub config: AcceptanceHeadConfig,
    /// The directory that the head was read from.
    pub dir: PathBuf,
}

impl HeadExport {
    /// Reads the acceptance head in a directory, for a drafter with this hidden size.
    ///
    /// # Errors
    /// If the head is missing or invalid, or was trained for another hidden size.
    pub fn read(dir: &Path, hidden_size: usize, workspace: &Workspace) -> Result<Self> {
        let (config, head) = workspace.artifacts.head(&workspace.models, dir, hidden_size)?;
        Ok(Self { head, config, dir: dir.to_path_buf() })
    }
}

/// Reads a draft model's acceptance head from a directory. Checks that the head was trained for
/// this draft model and for a reviewer with this hash, or for the target if `reviewer` is `None`. A
/// reviewer is the model that verifies the draft's candidates.
///
/// # Errors
/// If the head is missing or invalid, or was trained for another draft model or reviewer.
pub fn read_model_head(
    dir: &Path,
    draft: DrafterId,
    reviewer: Option<&str>,
    workspace: &Workspace,
) -> Result<HeadExport> {
    let hidden_size = workspace.models.draft_model_config(draft)?.shape.hidden_size;
    let head = HeadExport::read(dir, hidden_size, workspace)?;
    let AcceptanceHeadConfig { draft_hash, target_hash, training, .. } = &head.config;
    let now = || workspace.models.draft_model_hash(draft).map(str::to_owned);
    check_trained_with(("head", dir), "draft", draft_hash.as_deref(), now)?;
    let now = || reviewer.map_or_else(|| workspace.models.target_hash(), Ok).map(str::to_owned);
    check_trained_with(("head", dir), "target", target_hash.as_deref(), now)?;
    check_text("head", dir, training, workspace)?;
    Ok(head)
}

/// The key of an export's training settings that describes the training data.
pub const TRAINED_ON: &str = "data";

/// Checks that an export was trained with the current tokenizer, chat template, end tokens and stop
/// strings, as far as the export records them.
fn check_text(
    what: &str,
    dir: &Path,
    training: &Map<String, Value>,
    workspace: &Workspace,
) -> Result<()> {
    let recorded = training.get(TRAINED_ON).filter(|_| !workspace.takes_others);
    let Some(Value::Object(then)) = recorded else { return Ok(()) };
    let Value::Object(now) = serde_json::to_value(workspace.text.identity(&workspace.models)?)?
    else {
        return Ok(());
    };
    for (key, now) in now {
        let differs = |then: &&Value| **then != now && !workspace.text.ends.leave_open(&key);
        let Some(then) = then.get(&key).filter(differs) else { continue };
        bail!(
            "the {what} in `{}` was trained with `{key}` = {then}, which is {now} now; hint: train it \
             again, or take the change back",
            dir.display()
        );
    }
    Ok(())
}

/// Describes an acceptance head in a few words: its form, blocks and inputs.
pub fn describe_head(config: &AcceptanceHeadConfig) -> String {
    let kind = if config.tied { "tied" } else { "untied" };
    let form = if config.reads.looks_ahead() { " that looks ahead" } else { "" };
    let inputs = config.reads.inputs().iter();
    let more: String = inputs.map(|input| format!(", + {}", input.name())).collect();
    format!(
        "acceptance head{form}, {} {kind} blocks of width {}{more}",
        config.num_layers, config.hidden_size
    )
}

/// Describes an adapter in a few words: its exit layer, size and draft vocabulary.
pub fn describe_adapter(config: &AdapterConfig) -> String {
    let mut text = format!(
        "self-draft adapter behind layer {}, {} x {}, {:.2} M parameters",
        config.exit_layer(),
        config.model.shape.num_layers,
        config.architecture,
        config.num_parameters() as f64 / 1e6,
    );
    if let Some(vocabulary) = &config.draft_vocabulary {
        text += &format!(", draws {} tokens", vocabulary.ids().len());
        if let Some(coverage) = config.vocabulary_coverage() {
            text += &format!(" ({:.1} % of those in held-out responses)", coverage * 100.0);
        }
    }
    text
}

/// Summarises a model for a report: its architecture, sizes and hash.
pub fn summary_of(role: &str, dir: &Path, config: &ModelConfig, hash: &str) -> ModelSummary {
    let shape = &config.shape;
    ModelSummary {
        role: role.to_owned(),
        name: dir.display().to_string(),
        description: format!(
            "{} architecture, {} layers, hidden {}, {} heads ({} key/value), vocabulary {}, \
             {:.1} M parameters",
            config.architecture.name(),
            shape.num_layers,
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.vocab_size,
            config.num_parameters() as f64 / 1e6
        ),
        hash: hash.to_owned(),
    }
}
