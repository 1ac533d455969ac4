//! A workspace whose target is served by others: what is read of it, and what it is called.

use std::path::Path;

use anyhow::{Result, bail};
use burn::tensor::Device;
use draftsmith_data::hash_bytes;
use draftsmith_model::weight_files;

use super::Workspace;
use crate::console::Console;
use crate::hub::{Wanted, model_dir};
use crate::labels::ServedModels;

impl Workspace {
    /// The same of a target that servers serve under a name: its weights are not read, and need not be
    /// there.
    ///
    /// # Errors
    /// If one is a name of the Hub's and cannot be had.
    pub(crate) fn open_served(
        (target, name): (&Path, &str),
        draft: Option<&Path>,
        chat_template: Option<&str>,
        devices: Vec<Device>,
        console: &Console,
    ) -> Result<Self> {
        let target = model_dir(target, Wanted::AllButWeights, console)?;
        let workspace = Self::of_dirs(&target, draft, chat_template, devices, console)?;
        Ok(workspace.serving(name))
    }

    /// The same, whose target servers serve under a name.
    pub(crate) fn serving(self, name: &str) -> Self {
        Self { served_as: Some(name.to_owned()), ..self }
    }

    /// What is here of a target that is served elsewhere: its draft.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn served_models(&self) -> Result<ServedModels<'_>> {
        let draft = self.draft_in(self.dtype)?;
        let vocab_size = self.target_shape()?.vocab_size;
        Ok(ServedModels { draft, context: self.context()?, vocab_size })
    }

    /// What provenance calls the target: its hash, or, where servers serve it, one of its `config.json`
    /// and of what they call it.
    pub(super) fn target_identity(&self) -> Result<String> {
        match &self.served_as {
            None => Ok(self.target_hash()?.to_owned()),
            Some(name) => {
                let config = self.file_hash(&self.target.dir.join("config.json"))?;
                Ok(hash_bytes(format!("{config} served as {name}").as_bytes()))
            }
        }
    }

    /// Checks that a target that is served has its weights here too.
    ///
    /// # Errors
    /// If it has not.
    pub(super) fn check_weights(&self) -> Result<()> {
        let dir = &self.target.dir;
        let is_there = || weight_files(dir).is_ok_and(|files| dir.join(&files[0]).is_file());
        if self.served_as.is_none() || is_there() {
            return Ok(());
        }
        bail!(
            "`{}` has no weights, which this takes; hint: `build-data`, `train-head`, `record`, \
             `tune` and `replay` do without where the target is served, for the rest put its \
             weights there",
            dir.display()
        )
    }
}
