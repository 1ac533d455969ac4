//! A workspace's target, which may run on servers, and draft models, each read and hashed once.

use std::path::Path;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_model::{
    CausalLm, ModelConfig, ModelShape, WeightDtype, hash_first_layers, hash_model_dir, is_gguf,
    weight_files,
};
use draftsmith_theory::DrafterId;

use super::model_dir::{HashModel, ModelDir, get_or_read, hash_with};
use crate::device::DeviceChoice;
use crate::pair::LabelModels;
use crate::watch::Watch;

/// The target, the draft models, and the devices that they compute on.
#[derive(Default)]
pub struct Models {
    /// The devices among which training splits its batches. All other work runs on the first one.
    pub devices: Vec<Device>,
    /// The dtype that models compute in. A training may use another one.
    pub dtype: WeightDtype,
    pub(super) target: ModelDir,
    /// The draft models. The data contains candidates and labels of the first one.
    pub(super) drafts: Vec<(DrafterId, ModelDir)>,
    /// The target's name on servers, if servers run it. Its weights are then not read.
    pub served_as: Option<String>,
    /// The directory of a served target's first layers, which its adapters need.
    pub(super) first_layers: ModelDir,
    /// The layers in `first_layers`.
    pub layers_needed: LayersNeeded,
    pub(super) watch: Box<dyn Watch>,
}

/// The layers of a target that a drafter needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayersNeeded {
    /// The first ones, by their number.
    First(usize),
    /// All.
    All,
}

impl Default for LayersNeeded {
    fn default() -> Self {
        Self::First(0)
    }
}

impl Models {
    /// Returns the first device, the only one that is used outside of training.
    pub fn device(&self) -> &Device {
        &self.devices[0]
    }

    /// Returns the devices other than the first, among which training splits a batch. On the CPU,
    /// returns the CPU once for each further thread.
    pub fn more_devices(&self) -> Vec<Device> {
        match DeviceChoice::is_cpu(self.device()) {
            true => vec![self.device().clone(); rayon::current_num_threads() - 1],
            false => self.devices[1..].to_vec(),
        }
    }

    /// Returns the target for computing in `dtype`. Reads it at the first call.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn target_in(&self, dtype: WeightDtype) -> Result<&CausalLm> {
        self.check_weights()?;
        let model = self.model(&self.target, dtype);
        if self.served_as.is_none() {
            return model;
        }
        model.context(
            "this command needs all of the target's layers here; hint: `server certify` tests the output of the server \
             instead, and its counters show what it accepts",
        )
    }

    /// Returns the first draft model in `dtype`, read at the first call; `None` without a draft
    /// model.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn draft_in(&self, dtype: WeightDtype) -> Result<Option<&CausalLm>> {
        self.draft().map(|draft| self.model(draft, dtype)).transpose()
    }

    /// Returns the first draft model; `None` if there is none.
    pub(super) fn draft(&self) -> Option<&ModelDir> {
        self.drafts.first().map(|(_, draft)| draft)
    }

    pub(super) fn draft_dir_of(&self, id: DrafterId) -> Result<&ModelDir> {
        let found = self.drafts.iter().find(|(own, _)| *own == id).map(|(_, draft)| draft);
        found.with_context(|| format!("the draft model `{id}` was not opened"))
    }

    /// Returns a draft model for computing in `dtype`. Reads it at the first call.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn draft_model_in(&self, id: DrafterId, dtype: WeightDtype) -> Result<&CausalLm> {
        self.model(self.draft_dir_of(id)?, dtype)
    }

    /// Returns the `config.json` of a draft model. Reads it at the first call.
    ///
    /// # Errors
    /// If the file is missing or broken.
    pub fn draft_model_config(&self, id: DrafterId) -> Result<&ModelConfig> {
        self.draft_dir_of(id)?.config()
    }

    /// Returns the hash of a draft model. Computes it at the first call.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn draft_model_hash(&self, id: DrafterId) -> Result<&str> {
        self.model_hash(self.draft_dir_of(id)?, hash_model_dir)
    }

    fn model<'w>(&self, model: &'w ModelDir, dtype: WeightDtype) -> Result<&'w CausalLm> {
        model.weights(dtype, |dir| {
            self.watch.reads(&format!("weights of the {}, {dtype:?}", model.role));
            if model.is_unread() {
                let notes = CausalLm::notes(dir, model.config()?)?;
                notes.into_iter().for_each(|note| self.watch.note(note));
            }
            Ok(CausalLm::load(dir, dtype, None, self.device())?)
        })
    }

    /// Returns the target's `config.json`. Reads it at the first call.
    ///
    /// # Errors
    /// If the file is missing or broken.
    pub fn target_config(&self) -> Result<&ModelConfig> {
        self.target.config()
    }

    /// Returns the target's shape, from its `config.json`.
    ///
    /// # Errors
    /// If the file is missing or broken.
    pub fn target_shape(&self) -> Result<&ModelShape> {
        Ok(&self.target.config()?.shape)
    }

    /// Names how the models compute, for provenance: the dtype, and whether a device widens the weights of a
    /// GGUF file, which a CPU multiplies in integers.
    pub fn arithmetic(&self) -> String {
        let mut dirs = self.drafts.iter().map(|(_, draft)| draft).chain([&self.target]);
        let is_gguf = dirs.any(|model| is_gguf(&model.dir));
        named_arithmetic(self.dtype, is_gguf, DeviceChoice::is_cpu(self.device()))
    }

    /// Returns the longest sequence that both target and draft model can read, in tokens.
    ///
    /// # Errors
    /// If a `config.json` is missing or broken.
    pub fn context(&self) -> Result<usize> {
        self.smaller(|shape| shape.context)
    }

    /// Returns the number of token ids that target and draft model have in common.
    ///
    /// # Errors
    /// If a `config.json` is missing or broken.
    pub fn vocab_size(&self) -> Result<usize> {
        self.smaller(|shape| shape.vocab_size)
    }

    fn smaller(&self, size: fn(&ModelShape) -> usize) -> Result<usize> {
        let target = size(self.target_shape()?);
        let draft = self.draft().map(ModelDir::config).transpose()?;
        Ok(draft.map_or(target, |draft| target.min(size(&draft.shape))))
    }

    /// Returns the target's directory.
    pub fn target_dir(&self) -> &Path {
        &self.target.dir
    }

    /// Returns the first draft model's name and directory; `None` without a draft model.
    pub fn draft_dir(&self) -> Option<(DrafterId, &Path)> {
        self.drafts.first().map(|(id, draft)| (*id, draft.dir.as_path()))
    }

    /// Returns the target's hash for provenance. If it runs on servers, only local files are
    /// hashed.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn target_hash(&self) -> Result<&str> {
        match self.served_as {
            None => self.model_hash(&self.target, hash_model_dir),
            Some(_) => self.model_hash(&self.first_layers, hash_first_layers),
        }
    }

    /// Returns the first draft model's hash; `None` without a draft model.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub fn draft_hash(&self) -> Result<Option<&str>> {
        self.draft().map(|draft| self.model_hash(draft, hash_model_dir)).transpose()
    }

    fn model_hash<'w>(&self, model: &'w ModelDir, hash: HashModel) -> Result<&'w str> {
        let hash = get_or_read(&model.hash, || {
            self.watch.reads(&format!("hash of the {}", model.role));
            hash_with(&model.dir, &*self.watch, hash)
        });
        hash.map(String::as_str)
    }

    /// Returns the model that adapters run on, for computing in `dtype`: the target. If servers run
    /// the target, it is the local first layers with embedding, final norm and LM head.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn target_of_adapters(&self, dtype: WeightDtype) -> Result<&CausalLm> {
        if self.served_as.is_none() {
            return self.target_in(dtype);
        }
        let num_layers = match (self.layers_needed, self.target_shape()?.num_layers) {
            (LayersNeeded::First(num), all) => num.min(all),
            (LayersNeeded::All, all) => all,
        };
        self.first_layers.weights(dtype, |dir| {
            self.watch.reads(&format!("{num_layers} layers of the target, {dtype:?}"));
            let model = match num_layers {
                0 => CausalLm::load_ends(dir, dtype, self.device()),
                _ => CausalLm::load(dir, dtype, Some(num_layers), self.device()),
            };
            model.with_context(|| {
                format!(
                    "drafters need the target's first {num_layers} layers, embedding, final norm and \
                     LM head in `{}`; hint: copy the weight files that its index names for them there",
                    dir.display()
                )
            })
        })
    }

    /// Returns the models that label responses of a target on servers: the draft model, and the
    /// target's vocabulary size instead of its weights.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn served_models(&self) -> Result<LabelModels<'_>> {
        let draft = self.draft_in(self.dtype)?;
        let vocab_size = self.target_shape()?.vocab_size;
        Ok(LabelModels { target: None, draft, context: self.context()?, vocab_size })
    }

    /// Checks that the target's weights are available locally, even if servers run it.
    ///
    /// # Errors
    /// If the weights are missing.
    fn check_weights(&self) -> Result<()> {
        let dir = &self.target.dir;
        let is_there = |files: Vec<String>| is_gguf(dir) || dir.join(&files[0]).is_file();
        let exist = || weight_files(dir).is_ok_and(is_there);
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

/// Names how models compute: see [`Models::arithmetic`].
fn named_arithmetic(dtype: WeightDtype, is_gguf: bool, is_cpu: bool) -> String {
    let widened = if is_gguf && !is_cpu { " with widened weights" } else { "" };
    format!("{}{widened}", dtype.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_gguf_file_computes_otherwise_on_a_gpu() {
        let name = |is_gguf, is_cpu| named_arithmetic(WeightDtype::F32, is_gguf, is_cpu);
        assert_eq!(name(true, false), "f32 with widened weights");
        assert!(
            [name(true, true), name(false, false), name(false, true)].iter().all(|it| it == "f32")
        );
    }
}
