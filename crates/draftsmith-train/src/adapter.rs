//! Self-draft adapters (Kangaroo, §3.1): the settings of their own, and their first weights.
//!
//! The defaults are those of the Kangaroo authors' run. Where ours differ, the key's doc says so.

#[cfg(test)]
mod tests;

use std::path::Path;

use draftsmith_model::{
    Adapter, AdapterArchitecture, AdapterConfig, CausalLm, ModelConfig, StateNetwork,
};
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};
use crate::lessons::settings::LessonSettings;
use crate::ranges::{Range, check_numbers};
use crate::run::optimizer::OptimizerSettings;
use crate::self_draft::scores::AdapterScores;
use crate::self_draft::settings::SelfDraftTraining;
use crate::self_draft::{FirstWeights, Initial, StateTraining, read_initial};

/// The settings of an adapter's training.
pub type AdapterTraining = SelfDraftTraining<AdapterShape>;

/// The settings that only adapters have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdapterShape {
    /// The number of the target's layers that run before the adapter. Default: 2, Kangaroo's for 7B
    /// models (3 for 13B). With 0 the adapter is a small draft that shares only the target's embedding
    /// and LM head. For several exit layers, add a drafter for each; they are trained in one pass.
    pub exit_layer: usize,
    /// The architecture of the adapter: `"decoder-layer"` (our default, which servers load without
    /// loss), `"attention"` (the paper's), or one of the paper's other ablations (Table 2):
    /// `"mlp-only"` or `"attention-with-head"`.
    pub architecture: AdapterArchitecture,
    /// The number of the adapter's layers, 1 to 8. Default: 1, as in the paper.
    pub num_layers: usize,
}

impl Default for AdapterShape {
    fn default() -> Self {
        Self { exit_layer: 2, architecture: AdapterArchitecture::DecoderLayer, num_layers: 1 }
    }
}

impl StateTraining for AdapterShape {
    type Network = Adapter;
    type Config = AdapterConfig;
    type Scores = AdapterScores;

    const LABEL: &'static str = "self-draft adapter";
    const OPTIMIZER: OptimizerSettings = OptimizerSettings::ADAPTER;
    const READS_TOKENS: bool = false;

    fn check(&self, common: &LessonSettings) -> Result<()> {
        let section = Adapter::KIND;
        if let Some(size) = common.draft_vocabulary
            && (size == 0 || self.architecture.has_head())
        {
            let expected = "1 or more, and an architecture without a separate LM head";
            return Err(TrainError::setting(section, "draft_vocabulary", size, expected));
        }
        common.features.check_local(section)?;
        let range = Range::Within(1.0, 8.0, "1 to 8");
        check_numbers(section, &[("num_layers", self.num_layers as f64, range)])
    }

    fn check_layers(&self, num_layers: usize) -> Result<()> {
        let exit_layer = self.exit_layer;
        match exit_layer < num_layers {
            true => Ok(()),
            false => Err(TrainError::Invalid(format!(
                "`adapter.exit_layer` is {exit_layer}, but the target has {num_layers} layers: expected 1 to {}",
                num_layers.saturating_sub(1)
            ))),
        }
    }

    fn layers(&self, _num_layers: usize) -> Vec<usize> {
        vec![self.exit_layer]
    }

    fn config(&self, target: &ModelConfig) -> Result<AdapterConfig> {
        self.check_layers(target.shape.num_layers)?;
        let config = AdapterConfig::new(target, self.exit_layer)?;
        Ok(config.with_layers(self.num_layers).with(|it| it.architecture = self.architecture))
    }

    fn network(&self, config: &AdapterConfig, mut first: FirstWeights<'_>) -> Adapter {
        let drawn = config.init_from(&first.device, || first.draws.uniform());
        let adapter = match first.is_random {
            true => drawn,
            false => drawn.with_layers_of(first.target, config.exit_layer()),
        };
        adapter.with_head_of(first.target)
    }

    fn initial(&self, dir: &Path, target: &CausalLm) -> Result<Initial<Self>> {
        read_initial(self, dir, target)
    }
}
