//! The formats in which other programs load acceptance heads and drafters.

pub mod draft_model;
pub mod dspark;
pub mod eagle;
pub mod eagle3;
pub mod foreign;
pub mod transformers;
pub mod vllm;

use std::path::Path;

use anyhow::Result;
use draftsmith_model::{DraftConfig, DraftForm, DraftNetwork, DrafterDir};

use crate::out_dir::OutDir;
use crate::workspace::Workspace;

/// A format that `export --for` can write.
#[derive(Debug)]
pub struct ExportForm {
    /// The format's name on the command line.
    pub name: &'static str,
    /// Whether an acceptance head stops drafting, so that the user may set its threshold.
    pub stops_by_head: bool,
    /// A function that writes an export in this format.
    pub write: fn(&Exporting<'_>) -> Result<Written>,
}

impl ExportForm {
    /// Creates a format without a stop rule.
    pub const fn new(name: &'static str, write: fn(&Exporting<'_>) -> Result<Written>) -> Self {
        Self { name, stops_by_head: false, write }
    }

    /// Creates a format in which an acceptance head stops drafting.
    pub const fn stopping(
        name: &'static str,
        write: fn(&Exporting<'_>) -> Result<Written>,
    ) -> Self {
        Self { name, stops_by_head: true, write }
    }
}

/// The arguments for writing an export in another format.
pub struct Exporting<'a> {
    /// The directory of the export to convert.
    pub source: &'a DrafterDir,
    /// The output directory.
    pub out: &'a Path,
    /// The stop threshold of the acceptance head; the tuned threshold if `None`.
    pub stop_threshold: Option<f64>,
    /// A function that opens the models that the export was trained for.
    pub open: &'a dyn Fn() -> Result<Workspace>,
}

impl Exporting<'_> {
    /// Reads the self-draft, which checks that it is complete. Drops the record of its training.
    fn self_draft<F: DraftForm>(&self) -> Result<(DraftConfig<F>, DraftNetwork<F>)> {
        let workspace = (self.open)()?;
        let models = &workspace.models;
        let (shape, dtype) = (models.target_shape()?, models.dtype);
        let (mut config, drafter) =
            DraftNetwork::from_dir(self.source, shape, dtype, models.device())?;
        (config.target_hash, config.training) = (None, serde_json::Map::new());
        Ok((config, drafter))
    }

    /// Writes a self-draft.
    fn write<F: DraftForm>(
        &self,
        drafter: &DraftNetwork<F>,
        config: &DraftConfig<F>,
    ) -> Result<()> {
        let dir = OutDir::begin_again(self.out)?;
        drafter.write_dir(dir.path(), config)?;
        dir.finish()
    }
}

/// A description of the output, for messages.
#[derive(Debug)]
pub struct Written {
    /// What was written, in words.
    pub what: String,
    /// Properties of the source that the target runtime cannot use, one sentence each.
    pub ignored: Vec<String>,
    /// Commands that load the output.
    pub commands: Vec<String>,
}
