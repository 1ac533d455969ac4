//! Medusa's heads: the settings of their own, and their first weights.
//!
//! Head k is step k of a draft. It reads the target's last state k positions before, so that all
//! heads of a lesson predict the same token.

use std::path::Path;

use draftsmith_model::{
    CausalLm, DraftVocabulary, Medusa, MedusaConfig, ModelConfig, ModelError, StateNetwork,
    WeightDtype,
};
use serde::{Deserialize, Serialize};
use serde_json::Map;

use crate::eagle3::{STEP_WEIGHT, STEPS};
use crate::error::{Result, TrainError};
use crate::lessons::settings::LessonSettings;
use crate::ranges::{Range, check_numbers};
use crate::run::optimizer::OptimizerSettings;
use crate::run::trained::{ExportConfig, ExportRecord};
use crate::self_draft::scores::DraftScores;
use crate::self_draft::settings::SelfDraftTraining;
use crate::self_draft::{FirstWeights, Initial, StateTraining};

/// The settings of the training of Medusa's heads.
pub type MedusaTraining = SelfDraftTraining<MedusaShape>;

/// The settings that only Medusa's heads have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MedusaShape {
    /// The number of heads, 1 to 8. Default: 5, as in the authors' v1.3 files.
    pub num_heads: usize,
    /// The weight of each head's loss relative to that of the previous head, above 0 and at most 1.
    /// Default: 0.8, as in the paper. The authors trained their v1.3 files with 1.
    pub step_weight: f64,
    /// Whether each head has an LM head of its own, as in the paper, or uses the target's, as in
    /// version 2. Default: true.
    pub lm_heads: bool,
}

impl Default for MedusaShape {
    fn default() -> Self {
        Self { num_heads: 5, step_weight: 0.8, lm_heads: true }
    }
}

impl StateTraining for MedusaShape {
    type Network = Medusa;
    type Config = MedusaConfig;
    type Scores = DraftScores;

    /// The authors' learning rate, schedule and weight decay. The rest is as for acceptance heads.
    const OPTIMIZER: OptimizerSettings = OptimizerSettings {
        learning_rate: Some(1e-3),
        warmup_ratio: 0.1,
        ..OptimizerSettings::HEAD
    };

    fn steps(&self) -> (usize, f64) {
        (self.num_heads, self.step_weight)
    }

    fn check(&self, common: &LessonSettings) -> Result<()> {
        let none = Range::Within(0.0, 0.0, "no such key, because Medusa's heads draft all tokens");
        check_numbers(
            Medusa::KIND,
            &[
                ("draft_vocabulary", common.draft_vocabulary.unwrap_or(0) as f64, none),
                ("num_heads", self.num_heads as f64, STEPS),
                ("step_weight", self.step_weight, STEP_WEIGHT),
            ],
        )
    }

    fn layers(&self, num_layers: usize) -> Vec<usize> {
        vec![num_layers]
    }

    fn config(&self, target: &ModelConfig) -> Result<MedusaConfig> {
        let config = MedusaConfig::new(&target.shape, self.num_heads);
        let vocab_size = config.vocab_size.filter(|_| self.lm_heads);
        Ok(MedusaConfig { vocab_size, ..config })
    }

    fn network(&self, config: &MedusaConfig, mut first: FirstWeights<'_>) -> Medusa {
        let drawn = config.init_from(&first.device, || first.draws.uniform());
        let network = if first.is_random { drawn } else { drawn.with_heads_of(first.target) };
        network.with_norm_of(first.target)
    }

    /// Reads as many heads as the settings have. Their files decide whether they have LM heads.
    fn initial(&self, dir: &Path, target: &CausalLm) -> Result<Initial<Self>> {
        let device = target.device().autodiff();
        let (config, network) = Medusa::from_dir(dir, target.shape(), WeightDtype::F32, &device)?;
        if config.num_heads != self.num_heads {
            let expected = "the number of heads of `initial`";
            return Err(TrainError::setting(Medusa::KIND, "num_heads", self.num_heads, expected));
        }
        let (dtype, training) = (target.stored_dtype(), Map::new());
        let config = MedusaConfig { dtype, target_hash: None, training, ..config };
        Ok(Initial { config, network: network.with_norm_of(target), vocabulary: None })
    }
}

impl ExportConfig<Medusa> for MedusaConfig {
    fn record(&mut self) -> ExportRecord<'_> {
        ExportRecord { training: &mut self.training, target_hash: &mut self.target_hash }
    }

    fn stored_as(self, dtype: WeightDtype, _vocabulary: Option<&DraftVocabulary>) -> Self {
        Self { dtype, ..self }
    }

    fn write(&self, model: &Medusa, dir: &Path) -> Result<(), ModelError> {
        model.write_dir(dir, self)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::lessons::settings::InitialWeights;
    use crate::run::{Ending, TrainingRun};
    use crate::self_draft::train_self_drafts;
    use crate::tests::pair::{patterned, random_model};

    fn training_of(keys: Value) -> MedusaTraining {
        serde_json::from_value(keys).expect("settings")
    }

    #[test]
    fn settings_are_keys_of_one_table_and_errors_name_the_key() {
        let training = training_of(json!({ "num_heads": 3, "lm_heads": false }));
        assert_eq!((training.num_heads, training.step_weight, training.lm_heads), (3, 0.8, false));
        assert_eq!(training.common.optimizer.learning_rate, Some(1e-3));
        training.validate().expect("it is valid");
        for (keys, named) in [
            (json!({ "num_heads": 9 }), "num_heads"),
            (json!({ "num_heads": 0 }), "num_heads"),
            (json!({ "step_weight": 0 }), "step_weight"),
            (json!({ "draft_vocabulary": 9 }), "draft_vocabulary"),
        ] {
            let error = training_of(keys).validate().expect_err("out of range").to_string();
            assert!(error.starts_with(&format!("`medusa.{named}` is ")), "{error}");
        }
    }

    fn train(
        target: &CausalLm,
        trainings: &[MedusaTraining],
    ) -> Vec<crate::self_draft::TrainedState<MedusaShape>> {
        let dir = tempfile::tempdir().expect("a directory");
        let run = TrainingRun::new(dir.path(), "");
        match train_self_drafts(target, &patterned(40), trainings, 3, run).expect("it trains") {
            Ending::Finished(trained) => trained,
            Ending::Stopped { .. } => panic!("nothing stops it"),
        }
    }

    #[test]
    fn trained_heads_predict_patterns_one_pass_equals_two_and_heads_are_trained_further() {
        let target = random_model(5, 16, 64);
        let optimizer = json!({ "learning_rate": 1e-2, "num_epochs": 10,
            "gradient_accumulation": 1, "validation_fraction": 0.2 });
        let paper = json!({ "num_heads": 3, "teacher": "response", "optimizer": optimizer });
        let shared = json!({ "num_heads": 2, "teacher": "response", "lm_heads": false,
            "step_weight": 1, "optimizer": optimizer });
        let trainings = [paper, shared].map(training_of);
        let together = train(&target, &trainings);
        for (training, together) in trainings.iter().zip(&together) {
            let alone = train(&target, std::slice::from_ref(training)).remove(0);
            assert_eq!(alone.scores, together.scores);
            assert_eq!(together.scores.agreement.len(), training.num_heads);
            // The random target's LM head can tell the patterns apart only in part.
            let least = if training.lm_heads { 0.2 } else { 0.1 };
            assert!(together.scores.accepted_length > least, "{:?}", together.scores);
            let first = &together.epochs[0].validation;
            assert!(together.scores.cross_entropy < 0.95 * first.cross_entropy, "{first:?}");
            assert_eq!(together.config.vocab_size.is_some(), training.lm_heads);
        }
        let dir = tempfile::tempdir().expect("a directory");
        together[0].config.write(&together[0].model, dir.path()).expect("written");
        let [of_paper, of_shared] = trainings.map(|training| {
            training.with(|it| it.common.initial = InitialWeights::Drafter(dir.path().to_owned()))
        });
        let further = train(&target, &[of_paper]).remove(0);
        let (before, after) = (&together[0].epochs, &further.epochs);
        assert!(after[0].validation.cross_entropy < before[0].validation.cross_entropy);
        let other = of_shared.own.initial(dir.path(), &target).expect_err("another number");
        assert!(other.to_string().contains("`medusa.num_heads` is 2"), "{other}");
    }
}
