//! A workspace whose target runs on servers: what it reads of the target, and how provenance identifies it.

use anyhow::{Context, Result, bail};
use draftsmith_data::hash_bytes;
use draftsmith_model::{CausalLm, WeightDtype, weight_files};

use super::Workspace;
use crate::pair::LabelModels;

impl Workspace {
    /// The model that adapters run on, computing in `dtype`: the target, or the first layers of a served
    /// target with embedding, final norm and LM head.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn target_of_adapters(&self, dtype: WeightDtype) -> Result<&CausalLm> {
        if self.served_as.is_none() {
            return self.target_in(dtype);
        }
        let num_layers = self.num_first_layers;
        self.first_layers.weights(dtype, |dir| {
            self.watch.reads(&format!("{num_layers} layers of the target, {dtype:?}"));
            let model = CausalLm::load(dir, dtype, Some(num_layers), self.device());
            model.with_context(|| {
                format!(
                    "adapters need the target's first {num_layers} layers, embedding, final norm and \
                     LM head in `{}`; hint: copy the weight files that its index names for them there",
                    dir.display()
                )
            })
        })
    }

    /// A served target's shape and its draft.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn served_models(&self) -> Result<LabelModels<'_>> {
        let draft = self.draft_in(self.dtype)?;
        let vocab_size = self.target_shape()?.vocab_size;
        Ok(LabelModels { target: None, draft, context: self.context()?, vocab_size })
    }

    /// The target's identity in provenance: its hash, or for a served target a hash of its `config.json`
    /// and its name on the servers.
    pub(super) fn target_identity(&self) -> Result<String> {
        let Some(name) = &self.served_as else { return Ok(self.target_hash()?.to_owned()) };
        let config = self.file_hash(&self.target.dir.join("config.json"))?;
        Ok(hash_bytes(format!("{config} served as {name}").as_bytes()))
    }

    /// Checks that a served target's weights are available locally.
    ///
    /// # Errors
    /// If they are not.
    pub(super) fn check_weights(&self) -> Result<()> {
        let dir = &self.target.dir;
        let exist = || weight_files(dir).is_ok_and(|files| dir.join(&files[0]).is_file());
        if self.served_as.is_none() || exist() {
            return Ok(());
        }
        bail!(
            "`{}` has no weights, which this command needs; hint: with a served target only \
             `build-data`, `train-head`, `record`, `tune` and `replay` work without; copy the weights \
             there for the others",
            dir.display()
        )
    }
}
