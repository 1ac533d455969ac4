//! Block drafters (DFlash, DSpark): the settings of their own, and their first weights.
//!
//! Every position of the responses is an anchor, and the rows of all blocks are computed in one
//! forward, in which each block attends to the contexts before its anchor and to its own earlier rows.
//! Row k is step k of a draft.

use std::path::Path;

use draftsmith_files::merged;
use draftsmith_model::{
    BlockDrafter, BlockDrafterConfig, CausalLm, ConfidenceHead, ModelConfig, StateNetwork,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::eagle3::{STEP_WEIGHT, STEPS};
use crate::error::{Result, TrainError};
use crate::lessons::settings::LessonSettings;
use crate::ranges::{Range, check_numbers};
use crate::self_draft::scores::DraftScores;
use crate::self_draft::settings::SelfDraftTraining;
use crate::self_draft::{FirstWeights, Initial, StateTraining, read_initial};

/// The settings of a block drafter's training.
pub type BlockTraining = SelfDraftTraining<BlockShape>;

/// The settings that only block drafters have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BlockShape {
    /// The number of draft layers, 1 to 64. Default: 2.
    pub num_layers: usize,
    /// The number of candidates of a round, 1 to 8. Default: 7, as in DSpark.
    pub block_size: usize,
    /// The weight of each row's loss relative to that of the previous row, above 0 and at most 1.
    /// Default: 0.8.
    pub step_weight: f64,
    /// The rank of the Markov head; 0 for none, as in DFlash. Default: 32 (DSpark's has 256).
    pub markov_rank: usize,
    /// For each hidden state that the drafter reads, the number of the target's layers before it, in
    /// rising order. Default: three, spread from the second layer to the last but two.
    pub layers: Option<Vec<usize>>,
    /// The token in all rows but the anchor's. Text should not contain it. Default: the last token
    /// of the vocabulary.
    pub mask_token_id: Option<u32>,
    /// The number of tokens that each row attends to, itself included, in every layer, 1 or more.
    /// Default: all.
    pub window: Option<usize>,
}

impl Default for BlockShape {
    fn default() -> Self {
        Self {
            num_layers: 2,
            block_size: 7,
            step_weight: 0.8,
            markov_rank: 32,
            layers: None,
            mask_token_id: None,
            window: None,
        }
    }
}

impl StateTraining for BlockShape {
    type Network = BlockDrafter;
    type Config = BlockDrafterConfig;
    type Scores = DraftScores;

    fn steps(&self) -> (usize, f64) {
        (self.block_size, self.step_weight)
    }

    fn check(&self, _common: &LessonSettings) -> Result<()> {
        let (section, layers) = (BlockDrafter::KIND, self.layers.as_ref());
        check_numbers(
            section,
            &[
                ("num_layers", self.num_layers as f64, Range::Within(1.0, 64.0, "1 to 64")),
                ("block_size", self.block_size as f64, STEPS),
                ("step_weight", self.step_weight, STEP_WEIGHT),
                ("window", self.window.unwrap_or(1) as f64, Range::AT_LEAST_ONE),
            ],
        )?;
        let rise =
            |layers: &Vec<usize>| !layers.is_empty() && layers.is_sorted_by(|one, next| one < next);
        layers.filter(|layers| !rise(layers)).map_or(Ok(()), |layers| {
            let value = format!("{layers:?}");
            Err(TrainError::setting(section, "layers", value, "numbers that rise"))
        })
    }

    fn layers(&self, num_layers: usize) -> Vec<usize> {
        let default = || BlockDrafterConfig::default_layers(3, num_layers);
        let mut layers = self.layers.clone().unwrap_or_else(default);
        layers.dedup();
        layers
    }

    fn config(&self, target: &ModelConfig) -> Result<BlockDrafterConfig> {
        let shape = &target.shape;
        let mask = self.mask_token_id.unwrap_or(shape.vocab_size as u32 - 1);
        if mask as usize >= shape.vocab_size {
            let expected = "a token of the target's vocabulary";
            return Err(TrainError::setting("block", "mask_token_id", mask, expected));
        }
        Ok(BlockDrafterConfig::new(target, self.num_layers, mask).with(|it| {
            it.target_layers = self.layers(shape.num_layers);
            it.block_size = self.block_size;
            it.markov_rank = self.markov_rank;
            it.set_window(self.window);
        }))
    }

    fn network(&self, config: &BlockDrafterConfig, mut first: FirstWeights<'_>) -> BlockDrafter {
        let drawn = config.init_for(first.target, &first.device, || first.draws.uniform());
        if first.is_random { drawn } else { drawn.with_weights_of(first.target) }
    }

    /// Reads a causal drafter whose anchor's row predicts, with at least as many rows. A confidence head
    /// is left out, because it belongs to the drafter as it was.
    fn initial(&self, dir: &Path, target: &CausalLm) -> Result<Initial<Self>> {
        let Initial::<Self> { mut config, network, vocabulary } = read_initial(self, dir, target)?;
        let form = &config.own;
        if !form.is_causal || !form.is_anchor_first || form.block_size < self.block_size {
            return Err(TrainError::Invalid(format!(
                "the drafter of `initial`, `{}`, cannot be trained further: blocks are trained causal, with the \
                 anchor's row predicting, and with at most the drafter's {} rows (`block_size`)",
                dir.display(),
                form.block_size
            )));
        }
        config.own.confidence = ConfidenceHead::Absent;
        Ok(Initial {
            config,
            network: network.without_confidence().with_mask_of(target),
            vocabulary,
        })
    }

    /// Returns the settings without the shape, which the drafter's configuration has.
    fn record(training: &BlockTraining) -> Value {
        let (num_steps, step_weight) = (training.block_size, training.step_weight);
        let own = json!({ "num_steps": num_steps, "step_weight": step_weight });
        merged(own, json!(training.common))
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_model::StateNetwork;

    use super::*;
    use crate::run::optimizer::OptimizerSettings;
    use crate::run::{Ending, TrainingRun};
    use crate::self_draft::train_self_drafts;
    use crate::tests::pair::{patterned, random_model};

    fn quick(keys: Value) -> BlockTraining {
        let mut training: BlockTraining = serde_json::from_value(keys).expect("settings");
        training.common.optimizer = OptimizerSettings {
            learning_rate: Some(1e-2),
            num_epochs: 10,
            validation_fraction: 0.2,
            ..OptimizerSettings::EAGLE3
        };
        training
    }

    #[test]
    fn settings_are_keys_of_one_table() {
        let keys =
            json!({ "block_size": 3, "markov_rank": 4, "layers": [1, 2], "step_weight": 0.5 });
        let training: BlockTraining = serde_json::from_value(keys).expect("settings");
        assert_eq!((training.block_size, training.step_weight), (3, 0.5));
        let written = toml::Table::try_from(&training).expect("no key is null");
        assert!(written.get("num_steps").is_none(), "{written}");
        assert_eq!(written["block_size"], 3.into());
        let read: BlockTraining = written.try_into().expect("settings");
        assert_eq!(read, training);
        for (keys, named) in
            [(json!({ "num_steps": 3 }), "block_size"), (json!({ "ranks": 3 }), "ranks")]
        {
            let error =
                serde_json::from_value::<BlockTraining>(keys).expect_err("unknown").to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn a_trained_drafter_predicts_patterns_with_each_row_and_one_pass_equals_two() {
        let rows = patterned(40);
        let target = random_model(5, 16, 64);
        let train = |trainings: &[BlockTraining]| {
            let dir = tempfile::tempdir().expect("a directory");
            let run = TrainingRun::new(dir.path(), "");
            match train_self_drafts(&target, &rows, trainings, 3, run).expect("it trains") {
                Ending::Finished(trained) => trained,
                Ending::Stopped { .. } => panic!("nothing stops it"),
            }
        };
        let response = json!({ "block_size": 3, "markov_rank": 4, "teacher": "response" });
        let wide =
            json!({ "block_size": 2, "markov_rank": 0, "num_layers": 1, "teacher": "response" });
        let trainings = [quick(response), quick(wide)];
        let together = train(&trainings);
        for (training, together) in trainings.iter().zip(&together) {
            let alone = train(std::slice::from_ref(training)).remove(0);
            assert_eq!(alone.scores, together.scores);
            let BlockShape { block_size, markov_rank, .. } = training.own;
            assert_eq!(together.scores.agreement.len(), block_size);
            assert!(together.scores.accepted_length > 0.2, "{:?}", together.scores);
            assert_eq!(together.model.more_head().is_some(), markov_rank > 0);
            assert_eq!(together.config.block_size, block_size);
        }
    }
}
