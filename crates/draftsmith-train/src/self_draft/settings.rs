//! The settings of a self-draft's training: `[drafters.NAME]` in a recipe. Those of its form come
//! first, and those that all self-drafts have second, in one table.

use std::ops::{Deref, DerefMut};

use draftsmith_files::parse_toml;
use draftsmith_model::{CausalLm, DraftVocabulary, ModelConfig, StateNetwork, WeightDtype};
use draftsmith_theory::SeededDraws;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use super::{FirstWeights, StateTraining};
use crate::error::{Result, TrainError};
use crate::lessons::settings::{InitialWeights, LessonSettings};
use crate::ranges::{Range, check_numbers};
use crate::run::trained::ExportConfig;

/// The settings of a self-draft's [training](crate::train_self_drafts). Every key is optional. The
/// settings of the form can be used like fields.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SelfDraftTraining<S> {
    /// The settings that only this form has.
    #[serde(flatten)]
    pub own: S,
    /// The settings that all self-drafts have.
    #[serde(flatten)]
    pub common: LessonSettings,
}

impl<S: StateTraining> Default for SelfDraftTraining<S> {
    fn default() -> Self {
        let common = LessonSettings { optimizer: S::OPTIMIZER, ..LessonSettings::default() };
        Self { own: S::default(), common }
    }
}

impl<S> Deref for SelfDraftTraining<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.own
    }
}

impl<S> DerefMut for SelfDraftTraining<S> {
    fn deref_mut(&mut self) -> &mut S {
        &mut self.own
    }
}

impl<'de, S: StateTraining> Deserialize<'de> for SelfDraftTraining<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut keys = toml::Table::deserialize(deserializer)?;
        let [names, common] = [json!(S::default()), json!(LessonSettings::default())];
        let is_in = |names: &Value, key: &str| names.get(key).is_some();
        if let Some(key) = keys.keys().find(|key| !is_in(&names, key) && !is_in(&common, key)) {
            let known = [&names, &common].into_iter().flat_map(Value::as_object);
            let known = known.flat_map(|keys| keys.keys()).map(|key| format!("`{key}`"));
            let known = known.collect::<Vec<_>>().join(", ");
            return Err(D::Error::custom(format!(
                "unknown field `{key}`, expected one of {known}"
            )));
        }
        // Missing keys of the optimizer come from the form's defaults.
        let mut optimizer = toml::Table::try_from(S::OPTIMIZER).map_err(D::Error::custom)?;
        match keys.remove("optimizer") {
            Some(toml::Value::Table(given)) => optimizer.extend(given),
            Some(other) => drop(keys.insert("optimizer".to_owned(), other)),
            None => {}
        }
        keys.entry("optimizer").or_insert(optimizer.into());
        let (own, common): (toml::Table, toml::Table) =
            keys.into_iter().partition(|(key, _)| is_in(&names, key));
        let own = parse_toml(own).map_err(D::Error::custom)?;
        Ok(Self { own, common: parse_toml(common).map_err(D::Error::custom)? })
    }
}

impl<S: StateTraining> SelfDraftTraining<S> {
    /// Returns the settings after a change.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Checks every setting's range, except those of layers, which depend on the target.
    ///
    /// # Errors
    /// If a key is out of range. The error names the first one.
    pub fn validate(&self) -> Result<()> {
        let (section, common) = (S::Network::KIND, &self.common);
        self.own.check(common)?;
        if common.draft_vocabulary == Some(0) {
            return Err(TrainError::setting(section, "draft_vocabulary", 0, "1 or more"));
        }
        common.optimizer.check(section)?;
        check_numbers(
            section,
            &[
                ("max_len", common.max_len as f64, Range::AT_LEAST_TWO),
                ("loss_chunk", common.loss_chunk as f64, Range::AT_LEAST_ONE),
            ],
        )
    }

    /// Describes the network to train for a target that has its layers, with weights that are stored in
    /// `dtype`, and the tokens that it may draft if these are not all.
    ///
    /// # Errors
    /// If the settings do not suit the target.
    pub fn config(
        &self,
        target: &ModelConfig,
        dtype: WeightDtype,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<S::Config> {
        Ok(self.own.config(target)?.stored_as(dtype, vocabulary))
    }

    /// Builds the network before training, on the target's device with autodiff.
    pub(crate) fn network(&self, config: &S::Config, target: &CausalLm, seed: u64) -> S::Network {
        let is_random = self.common.initial == InitialWeights::Random;
        let draws = SeededDraws::new(seed, &[S::Network::KIND]);
        let device = target.device().autodiff();
        self.own.network(config, FirstWeights { is_random, target, device, draws })
    }
}

#[cfg(test)]
mod tests {
    use draftsmith_model::AdapterArchitecture;

    use crate::adapter::AdapterTraining;
    use crate::lessons::distillation::DistillationLoss;
    use crate::lessons::settings::InitialWeights;
    use crate::run::optimizer::OptimizerSettings;

    #[test]
    fn an_empty_section_is_the_default_and_an_error_names_a_misspelt_key() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        assert_eq!(read("").unwrap(), AdapterTraining::default());
        let message = read("loss_chunks = 1").unwrap_err().to_string();
        assert!(message.contains("loss_chunks"), "{message}");
    }

    #[test]
    fn errors_name_the_key_and_missing_keys_of_the_optimizer_are_the_forms() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        assert_eq!(read("exit_layer = 3").unwrap().exit_layer, 3);
        for wrong in ["exit_layer = \"2\"", "exit_layer = -1", "exit_layer = [1, 2]"] {
            let message = read(wrong).unwrap_err().to_string();
            assert!(message.contains("`exit_layer` is "), "{message}");
            assert!(message.contains("expected a whole number, 0 or more"), "{message}");
        }
        let wrong = read("optimizer = { num_epochs = 1.5 }").unwrap_err().to_string();
        assert!(wrong.contains("`optimizer.num_epochs` is 1.5"), "{wrong}");
        let unknown = read("optimizer = { rate = 1.5 }").unwrap_err().to_string();
        assert!(unknown.contains("rate"), "{unknown}");
        let optimizer = read("optimizer = { num_epochs = 9 }").unwrap().common.optimizer;
        assert_eq!(optimizer, OptimizerSettings { num_epochs: 9, ..OptimizerSettings::ADAPTER });
    }

    #[test]
    fn every_architecture_and_initialisation_has_a_name() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        for architecture in AdapterArchitecture::ALL {
            let training = read(&format!("architecture = \"{architecture}\"")).unwrap();
            assert_eq!(training.architecture, architecture);
            assert_eq!(read(&toml::to_string(&training).unwrap()).unwrap(), training);
        }
        assert_eq!(read("initial = \"target\"").unwrap(), AdapterTraining::default());
        assert_eq!(read("initial = \"random\"").unwrap().common.initial, InitialWeights::Random);
        let further = read("initial = \"checkpoints/other\"").unwrap();
        let dir = InitialWeights::Drafter("checkpoints/other".into());
        assert_eq!(further.common.initial, dir);
        assert_eq!(read(&toml::to_string(&further).unwrap()).unwrap(), further);
        let message = read("architecture = \"ffn\"").unwrap_err().to_string();
        assert!(message.contains("`mlp-only`"), "{message}");
    }

    #[test]
    fn every_loss_has_a_name() {
        let read = |text: &str| toml::from_str::<AdapterTraining>(text);
        for (name, loss) in [
            ("cross-entropy", DistillationLoss::CrossEntropy),
            ("total-variation", DistillationLoss::TotalVariation),
            ("dspark", DistillationLoss::Dspark),
        ] {
            let training = read(&format!("loss = \"{name}\"")).unwrap();
            assert_eq!(training.common.loss, loss);
            assert!(toml::to_string(&training).unwrap().contains(name));
        }
        let message = read("loss = \"kl\"").unwrap_err().to_string();
        assert!(message.contains("`total-variation`"), "{message}");
    }

    #[test]
    fn defaults_are_in_range_and_errors_name_the_key() {
        AdapterTraining::default().validate().unwrap();
        let check = |key: &str, bad: AdapterTraining| {
            let message = bad.validate().unwrap_err().to_string();
            assert!(message.starts_with(&format!("`adapter.{key}` is ")), "{message}");
        };
        let default = AdapterTraining::default;
        for num_layers in [0, 9] {
            check("num_layers", default().with(|it| it.num_layers = num_layers));
        }
        check("max_len", default().with(|it| it.common.max_len = 1));
        check("draft_vocabulary", default().with(|it| it.common.draft_vocabulary = Some(0)));
        let architecture = AdapterArchitecture::AttentionWithHead;
        let narrow = default().with(|it| {
            it.common.draft_vocabulary = Some(9);
            it.architecture = architecture;
        });
        check("draft_vocabulary", narrow);
        check("loss_chunk", default().with(|it| it.common.loss_chunk = 0));
        let optimizer = OptimizerSettings { batch_size: 0, ..OptimizerSettings::ADAPTER };
        check("optimizer.batch_size", default().with(|it| it.common.optimizer = optimizer));
    }
}
