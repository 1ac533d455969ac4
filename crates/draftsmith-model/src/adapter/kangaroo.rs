//! Adapters as Kangaroo's authors keep them: a Llama's `config.json` of one layer, and the tensors in
//! `pytorch_model.bin`, which their class loads with whatever it knows.

use std::path::Path;

use super::{Adapter, AdapterArchitecture, AdapterConfig};
use crate::config::{Architecture, ModelConfig};
use crate::error::ModelError;
use crate::spec::{RopeConfig, RopeScaling};
use crate::weights::{WeightDtype, WeightReader, write_json, write_torch};

/// The base that their class rotates with, whatever `config.json` says.
pub const KANGAROO_ROPE_THETA: f64 = 10_000.0;

/// What their training loop puts before every name where it ran on several devices.
const MODULE: &str = "module.";

impl AdapterConfig {
    /// Whether their class rotates as this adapter does.
    pub fn rotates_as_kangaroo(&self) -> bool {
        self.model.spec.rope == kangaroo_rope()
    }

    /// Why their class would not compute this adapter, if it would not, but for its rotation.
    fn unlike_kangaroo(&self) -> Option<String> {
        let ModelConfig { architecture, shape, spec } = &self.model;
        if self.architecture != AdapterArchitecture::Attention {
            return Some(format!(
                "it is a `{}`, and their class computes `attention` alone",
                self.architecture
            ));
        }
        if shape.num_layers != 1 {
            return Some(format!("it has {} layers, and theirs has one", shape.num_layers));
        }
        if self.draft_vocabulary.is_some() {
            return Some("it has a draft vocabulary, of which theirs knows nothing".to_owned());
        }
        if *architecture != Architecture::Llama
            || spec.attention.qkv_bias
            || spec.attention.output_bias
            || shape.head_dim * shape.num_heads != shape.hidden_size
        {
            return Some(
                "its target is no Llama without biases whose heads together are as wide as it is"
                    .to_owned(),
            );
        }
        None
    }
}

fn kangaroo_rope() -> RopeConfig {
    RopeConfig { theta: KANGAROO_ROPE_THETA, width: None, scaling: RopeScaling::None }
}

impl Adapter {
    /// Writes `pytorch_model.bin`, in f32, then `config.json`, as Kangaroo's class loads them.
    ///
    /// # Errors
    /// If their class computes no such adapter, or the directory cannot be written.
    pub fn write_kangaroo(&self, dir: &Path, config: &AdapterConfig) -> Result<(), ModelError> {
        if let Some(problem) = config.unlike_kangaroo() {
            return Err(ModelError::NotKangaroo { problem });
        }
        write_torch(&dir.join("pytorch_model.bin"), &self.named(config))?;
        write_json(&dir.join("config.json"), &config.model.to_json(WeightDtype::F32.config_name()))
    }

    /// Reads what [`Adapter::write_kangaroo`] writes, or their training, for the target's layer that
    /// it is to stand behind, and writes it as ours, in f32. Returns the configuration, and the base
    /// of the rotation that their `config.json` names and their class passes over, if it does.
    ///
    /// # Errors
    /// If a file is missing or broken, a tensor missing, extra or misshapen, or the directory cannot
    /// be written.
    pub fn import_kangaroo(
        from: &Path,
        exit_layer: usize,
        to: &Path,
    ) -> Result<(AdapterConfig, Option<f64>), ModelError> {
        let mut model = ModelConfig::from_model_dir(from)?;
        let named_theta = Some(model.spec.rope.theta);
        model.spec.rope = kangaroo_rope();
        // It is behind a layer of a target that has more.
        model.shape.num_layers = exit_layer + 1;
        let config = AdapterConfig::new(&model, exit_layer)?;
        if let Some(problem) = config.unlike_kangaroo() {
            return Err(ModelError::NotKangaroo { problem });
        }
        let adapter = config.take(WeightReader::open_dir(from)?.without_prefix(MODULE))?;
        adapter.write_dir(to, &config)?;
        Ok((config, named_theta.filter(|theta| *theta != KANGAROO_ROPE_THETA)))
    }
}
