//! Block drafters (DFlash, DSpark): from rows and a frozen target to trained drafters.
//!
//! The training is that of [`train_state_drafters`](crate::train_state_drafters): every position of the
//! responses is an anchor, and the rows of all blocks are computed in one forward, in which each block attends to
//! the contexts before its anchor and to its own earlier rows. Row k is step k of a draft.

use draftsmith_model::{BlockDrafter, BlockDrafterConfig, CausalLm, DraftVocabulary};
use draftsmith_theory::SeededDraws;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::eagle3::StateTraining;
use crate::eagle3::settings::Eagle3Training;
use crate::error::TrainError;
use crate::self_draft::InitialWeights;

/// The settings of a block drafter's [training](crate::train_state_drafters). Every key is optional.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>", into = "Map<String, Value>")]
pub struct BlockTraining {
    /// The drafter's shape.
    pub shape: BlockShape,
    /// The keys that EAGLE-3 has too. Its `num_steps` is the block size, and it has no `layers`.
    pub common: Eagle3Training,
}

/// The keys of a block drafter's shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockShape {
    /// The number of draft layers, 1 to 64. Default: 2.
    pub num_layers: usize,
    /// The number of candidates of a round, 1 to 8. Default: 7, as in DSpark.
    pub block_size: usize,
    /// The rank of the Markov head; 0 for none, as in DFlash. Default: 32 (DSpark's has 256).
    pub markov_rank: usize,
    /// For each hidden state that the drafter reads, the number of the target's layers before it, in
    /// rising order. Default: three, spread from the second layer to the last but two.
    pub layers: Option<Vec<usize>>,
    /// The token in all rows but the anchor's. Text should not contain it. Default: the last token
    /// of the vocabulary.
    pub mask_token_id: Option<u32>,
}

impl Default for BlockShape {
    fn default() -> Self {
        Self { num_layers: 2, block_size: 7, markov_rank: 32, layers: None, mask_token_id: None }
    }
}

impl TryFrom<Map<String, Value>> for BlockTraining {
    type Error = String;

    fn try_from(mut keys: Map<String, Value>) -> Result<Self, String> {
        if keys.contains_key("num_steps") {
            return Err("unknown key `num_steps`: a block drafter has `block_size`".to_owned());
        }
        let names = json!(BlockShape::default()).as_object().cloned().unwrap_or_default();
        let own = names.keys().filter_map(|name| Some((name.clone(), keys.remove(name)?)));
        let own: Map<String, Value> = own.collect();
        let problem = |error: serde_json::Error| error.to_string();
        let shape: BlockShape = serde_json::from_value(own.into()).map_err(problem)?;
        keys.insert("num_steps".to_owned(), shape.block_size.into());
        let common = serde_json::from_value(keys.into()).map_err(problem)?;
        Ok(Self { shape, common })
    }
}

impl From<BlockTraining> for Map<String, Value> {
    fn from(BlockTraining { shape, common }: BlockTraining) -> Self {
        let mut keys = given_keys(&common);
        keys.remove("num_steps");
        keys.extend(given_keys(&shape));
        keys
    }
}

/// Returns settings as keys, without those that have no value.
fn given_keys(settings: &impl Serialize) -> Map<String, Value> {
    let keys = json!(settings).as_object().cloned().unwrap_or_default();
    let given = keys.into_iter().filter(|(_, value)| !value.is_null());
    let tables = given.map(|(name, value)| match value.is_object() {
        true => (name, given_keys(&value).into()),
        false => (name, value),
    });
    tables.collect()
}

impl BlockTraining {
    /// Checks every setting's range. It does not check that the target has the layers.
    ///
    /// # Errors
    /// [`TrainError::Setting`] with the first key that is out of range.
    pub fn validate(&self) -> Result<(), TrainError> {
        let BlockShape { num_layers, block_size, layers, .. } = &self.shape;
        let invalid =
            |key, value, expected| Err(TrainError::setting("block", key, value, expected));
        if !(1..=64).contains(num_layers) {
            return invalid("num_layers", num_layers.to_string(), "1 to 64");
        }
        if !(1..=crate::MAX_STEPS).contains(block_size) {
            return invalid("block_size", block_size.to_string(), "1 to 8");
        }
        let rise =
            |layers: &Vec<usize>| !layers.is_empty() && layers.is_sorted_by(|one, next| one < next);
        if let Some(layers) = layers.as_ref().filter(|layers| !rise(layers)) {
            return invalid("layers", format!("{layers:?}"), "numbers that rise");
        }
        self.common.validate()
    }

    /// Checks that a target of `num_layers` layers has the layers that the drafter reads.
    ///
    /// # Errors
    /// [`TrainError::Setting`] if the target lacks one of them.
    pub fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        match &self.shape.layers {
            Some(layers) if layers.iter().any(|layer| !(1..=num_layers).contains(layer)) => {
                let expected = "numbers from 1 to the target's number of layers";
                Err(TrainError::setting("block", "layers", format!("{layers:?}"), expected))
            }
            _ => Ok(()),
        }
    }

    /// Returns the layers of a target of `num_layers` whose hidden states the drafter reads, each as
    /// the number of layers before the state.
    pub fn layers_of(&self, num_layers: usize) -> Vec<usize> {
        let default = || BlockDrafterConfig::default_layers(3, num_layers);
        let mut layers = self.shape.layers.clone().unwrap_or_else(default);
        layers.dedup();
        layers
    }
}

impl StateTraining for BlockTraining {
    type Network = BlockDrafter;
    type Config = BlockDrafterConfig;

    fn common(&self) -> &Eagle3Training {
        &self.common
    }

    fn config(&self, target: &CausalLm) -> Result<BlockDrafterConfig, TrainError> {
        self.validate()?;
        let BlockShape { num_layers, block_size, markov_rank, mask_token_id, .. } = &self.shape;
        let shape = target.shape();
        self.check_layers(shape.num_layers)?;
        let mask = mask_token_id.unwrap_or(shape.vocab_size as u32 - 1);
        if mask as usize >= shape.vocab_size {
            let expected = "a token of the target's vocabulary";
            return Err(TrainError::setting("block", "mask_token_id", mask, expected));
        }
        Ok(BlockDrafterConfig {
            target_layers: self.layers_of(shape.num_layers),
            block_size: *block_size,
            markov_rank: *markov_rank,
            dtype: target.stored_dtype(),
            ..BlockDrafterConfig::new(target.config(), *num_layers, mask)
        })
    }

    fn layers(config: &BlockDrafterConfig) -> Vec<usize> {
        config.target_layers.clone()
    }

    fn network(
        &self,
        config: &mut BlockDrafterConfig,
        vocabulary: Option<&DraftVocabulary>,
        target: &CausalLm,
        seed: u64,
    ) -> BlockDrafter {
        config.draft_vocabulary = vocabulary.cloned();
        let mut draws = SeededDraws::new(seed, &["block"]);
        let device = target.device().autodiff();
        let drawn = config.init_from(target, &device, || draws.uniform());
        match self.common.initial {
            InitialWeights::Random => drawn,
            InitialWeights::Target => drawn.with_weights_of(target),
        }
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_model::StateNetwork;

    use super::*;
    use crate::eagle3::train_state_drafters;
    use crate::run::optimizer::OptimizerSettings;
    use crate::run::{Ending, TrainingRun};
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
        assert_eq!((training.common.num_steps, training.common.step_weight), (3, 0.5));
        let written = serde_json::to_value(&training).expect("JSON");
        assert!(written.get("num_steps").is_none() && written["block_size"] == 3, "{written}");
        assert!(toml::Table::try_from(&training).is_ok(), "no key is null");
        let read: BlockTraining = serde_json::from_value(written).expect("settings");
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
            match train_state_drafters(&target, &rows, trainings, 3, run).expect("it trains") {
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
            let BlockShape { block_size, markov_rank, .. } = training.shape;
            assert_eq!(together.scores.agreement.as_slice().len(), block_size);
            assert!(together.scores.accepted_length > 0.2, "{:?}", together.scores);
            assert_eq!(together.model.more_head().is_some(), markov_rank > 0);
            assert_eq!(together.config.block_size, block_size);
        }
    }
}
