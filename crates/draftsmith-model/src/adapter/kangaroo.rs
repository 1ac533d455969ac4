//! The file format of Kangaroo's authors: `config.json` of a one-layer Llama, and the tensors in
//! `pytorch_model.bin`. Their class loads the tensors that it knows and ignores others.

use std::path::Path;

use burn::tensor::{Device, FloatDType};
use draftsmith_files::write_json;

use super::{Adapter, AdapterArchitecture, AdapterConfig, AdapterForm};
use crate::config::{Architecture, ModelConfig};
use crate::decoder::source::CheckpointSource;
use crate::error::{ModelError, Result};
use crate::self_draft::DraftForm;
use crate::spec::{RopeConfig, RopeScaling};
use crate::weights::{WeightDtype, WeightReader, write_torch};

/// The base of the rotary embedding in the authors' class, which ignores `config.json`.
pub const KANGAROO_ROPE_THETA: f64 = 10_000.0;

/// The prefix of all tensor names if the authors' training ran on several devices.
const MODULE: &str = "module.";

impl AdapterConfig {
    /// Returns whether the class of Kangaroo's authors rotates queries and keys as this adapter does.
    pub fn rotates_as_kangaroo(&self) -> bool {
        self.model.spec.rope == kangaroo_rope()
    }

    /// Checks that the authors' class can compute this adapter, apart from its rotary embedding.
    fn check_kangaroo(&self) -> Result<()> {
        let ModelConfig { architecture, shape, spec } = &self.model;
        let problem = if self.architecture != AdapterArchitecture::Attention {
            format!("it is a `{}`, expected `attention`", self.architecture)
        } else if shape.num_layers != 1 {
            format!("it has {} layers, expected one", shape.num_layers)
        } else if self.draft_vocabulary.is_some() {
            "it has a draft vocabulary".to_owned()
        } else if *architecture != Architecture::Llama
            || spec.attention.qkv_bias
            || spec.attention.output_bias
            || shape.head_dim * shape.num_heads != shape.hidden_size
        {
            "its target is not a Llama without biases whose heads add up to its width".to_owned()
        } else {
            return Ok(());
        };
        Err(ModelError::Invalid(format!("Kangaroo's class cannot compute this adapter: {problem}")))
    }
}

fn kangaroo_rope() -> RopeConfig {
    RopeConfig { theta: KANGAROO_ROPE_THETA, width: None, scaling: RopeScaling::None }
}

impl Adapter {
    /// Writes `pytorch_model.bin` in f32, then `config.json`, for the class of Kangaroo's authors.
    ///
    /// # Errors
    /// If the class cannot compute the adapter, or the directory cannot be written.
    pub fn write_kangaroo(&self, dir: &Path, config: &AdapterConfig) -> Result<()> {
        config.check_kangaroo()?;
        write_torch(&dir.join("pytorch_model.bin"), &self.named(config))?;
        let keys = config.model.to_json(WeightDtype::F32.config_name());
        Ok(write_json(&dir.join("config.json"), &keys)?)
    }

    /// Reads files in Kangaroo's format and writes the adapter in ours, in f32, for a target with
    /// the given exit layer. Returns the configuration. Also returns the rotary base of their
    /// `config.json` if it differs from the base that the authors' class uses.
    ///
    /// # Errors
    /// If a file is missing or broken, a tensor missing, extra or misshapen, or the directory cannot
    /// be written.
    pub fn import_kangaroo(
        from: &Path,
        exit_layer: usize,
        to: &Path,
    ) -> Result<(AdapterConfig, Option<f64>)> {
        let mut model = ModelConfig::from_model_dir(from)?;
        let named_theta = Some(model.spec.rope.theta);
        model.spec.rope = kangaroo_rope();
        // The target has at least one layer after the exit.
        model.shape.num_layers = exit_layer + 1;
        let config = AdapterConfig::new(&model, exit_layer)?;
        config.check_kangaroo()?;
        let mut reader = WeightReader::open_dir(from)?.without_prefix(MODULE);
        let device = &Device::flex();
        let mut source = CheckpointSource { reader: &mut reader, device, dtype: FloatDType::F32 };
        let adapter = config.build(&mut source)?;
        reader.ignore(|name| AdapterForm::is_beside(&config, &from.into(), name));
        reader.finish()?;
        adapter.write_dir(to, &config)?;
        Ok((config, named_theta.filter(|theta| *theta != KANGAROO_ROPE_THETA)))
    }
}
