//! A workspace whose target is served by others: what is read of it, and what it is called.

use std::path::Path;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::hash_bytes;
use draftsmith_model::{CausalLm, WeightDtype, weight_files};

use super::{HELD, Workspace};
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

    /// The same, of whose served target so many first layers are read where adapters stand on them.
    pub(crate) fn with_first_layers(self, num_first_layers: usize) -> Self {
        Self { num_first_layers, ..self }
    }

    /// What adapters stand on, to be computed with in a type: the target, or, where it is served, its
    /// first layers with embedding, final norm and LM head. Its directory needs no others.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub(crate) fn target_of_adapters(&self, dtype: WeightDtype) -> Result<CausalLm> {
        if self.served_as.is_none() {
            return self.target_in(dtype).cloned();
        }
        let mut read = self.first_layers.lock().expect(HELD);
        if let Some((_, model)) = read.iter().find(|(known, _)| *known == dtype) {
            return Ok(model.clone());
        }
        let (dir, num_layers) = (&self.target.dir, self.num_first_layers);
        self.note(|| format!("{num_layers} layers of the target, {dtype:?}"));
        let model = CausalLm::from_first_layers(dir, num_layers, dtype, self.device());
        let model = model.with_context(|| {
            format!(
                "adapters need the target's first {num_layers} layers, embedding, final norm and LM head \
                 in `{}`; hint: copy the weight files that its index names for them there",
                dir.display()
            )
        })?;
        read.push((dtype, model.clone()));
        Ok(model)
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
