//! EAGLE-3 drafters (Li et al. 2025): from rows and a frozen target to trained drafters.
//!
//! Batches have the form of adapter batches. They contain the target's hidden states after three
//! layers and its token embeddings. The drafter is unrolled over them for as many steps as it will
//! draft; each step has the same inputs as in decoding.

pub(crate) mod learner;
pub(crate) mod scores;
pub(crate) mod settings;
#[cfg(test)]
mod tests;

use draftsmith_data::ResponseRow;
use draftsmith_model::{CausalLm, DraftVocabulary, Eagle3, Eagle3Config, StateNetwork};
use draftsmith_theory::SeededDraws;
use serde_json::json;

use self::learner::StateLearner;
use self::scores::DraftScores;
use self::settings::Eagle3Training;
use crate::error::TrainError;
use crate::lessons::Lessons;
use crate::run::trained::{ExportConfig, Trained};
use crate::run::{Ending, TrainingRun};
use crate::self_draft::{InitialWeights, Pupil, train_pupils};

/// A network that drafts from the target's hidden states, trained with settings of the type `T`, and
/// its scores.
pub type TrainedState<T> =
    Trained<<T as StateTraining>::Network, <T as StateTraining>::Config, DraftScores>;

/// The settings of the training of a network that drafts from the target's hidden states.
pub trait StateTraining {
    /// The network.
    type Network: StateNetwork;
    /// The network's `config.json`.
    type Config: ExportConfig<Self::Network>;

    /// Returns the settings that all such trainings have. Their keys `layers` and `initial` are not
    /// read.
    fn common(&self) -> &Eagle3Training;

    /// Describes the network to train for a target, without a draft vocabulary.
    ///
    /// # Errors
    /// If the settings do not suit the target.
    fn config(&self, target: &CausalLm) -> Result<Self::Config, TrainError>;

    /// Lists the hidden states that the network reads, each as the number of the target's layers
    /// before it.
    fn layers(config: &Self::Config) -> Vec<usize>;

    /// Builds the network before training, on the target's device with autodiff, and sets the draft
    /// vocabulary of its configuration.
    fn network(
        &self,
        config: &mut Self::Config,
        vocabulary: Option<&DraftVocabulary>,
        target: &CausalLm,
        seed: u64,
    ) -> Self::Network;
}

/// Trains a drafter for each of `trainings`, on the target's device and `run.more_devices`. All
/// drafters share the target's forwards. Each ends with the same bits as if it were trained alone.
///
/// Step k of the unrolled drafter predicts the k-th token of a draft from every position of the
/// responses, given the response's tokens before it. The step's loss compares
/// softmax(head(norm(o))), where o is the drafter's output, with the target's distribution over the
/// draft vocabulary. Its weight is `step_weight` to the power of k (Li et al. 2025, section 3.2).
/// Training keeps the epoch with the largest accepted length on held-out responses.
///
/// Rows are split and shuffled, files are written, and runs are resumed and stopped as in
/// [`train_adapters`](crate::train_adapters).
///
/// # Errors
/// If a setting is out of range, the target lacks a layer, a row is invalid, either side of the split has no
/// response, a loss or prediction is not finite, or a file cannot be written.
///
/// # Panics
/// If `trainings` is empty, or two do not [share a pass](Eagle3Training::shares_pass_with).
pub fn train_state_drafters<T: StateTraining>(
    target: &CausalLm,
    rows: &[ResponseRow],
    trainings: &[T],
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedState<T>>>, TrainError> {
    let configs = trainings.iter().map(|training| training.config(target));
    let configs = configs.collect::<Result<Vec<_>, TrainError>>()?;
    let first = trainings.first().expect("there is a training").common();
    let share_pass = trainings.iter().all(|one| one.common().shares_pass_with(first));
    assert!(share_pass, "they share a pass");
    trainings.iter().try_for_each(|one| one.common().validate())?;
    let mut layers: Vec<usize> = configs.iter().flat_map(T::layers).collect();
    layers.sort_unstable();
    layers.dedup();
    let (section, settings) = (T::Network::KIND, first.lessons());
    let (reads_tokens, caps_own_heads) = (true, false);
    let lessons =
        Lessons { section, label: section, layers, reads_tokens, caps_own_heads, settings };
    let pupils = |vocabulary: Option<&DraftVocabulary>| {
        let pupil = |(nth, (one, mut config)): (usize, (&T, T::Config))| {
            let drafter = one.network(&mut config, vocabulary, target, seed);
            let place_of = |layer: usize| lessons.layers.binary_search(&layer).ok();
            let states = T::layers(&config).into_iter().filter_map(place_of).collect();
            let (name, training) = (format!("drafter-{}", nth + 1), one.common().clone());
            let settings = json!(training);
            Pupil { name, learner: StateLearner { drafter, states, training }, config, settings }
        };
        trainings.iter().zip(configs).enumerate().map(pupil).collect()
    };
    train_pupils(target, rows, &lessons, pupils, seed, run)
}

impl StateTraining for Eagle3Training {
    type Network = Eagle3;
    type Config = Eagle3Config;

    fn common(&self) -> &Self {
        self
    }

    fn config(&self, target: &CausalLm) -> Result<Eagle3Config, TrainError> {
        self.check_layers(target.shape().num_layers)?;
        let config = Eagle3Config::new(target.config());
        let target_layers = self.layers.unwrap_or(config.target_layers);
        Ok(Eagle3Config { target_layers, dtype: target.stored_dtype(), ..config })
    }

    fn layers(config: &Eagle3Config) -> Vec<usize> {
        config.target_layers.to_vec()
    }

    fn network(
        &self,
        config: &mut Eagle3Config,
        vocabulary: Option<&DraftVocabulary>,
        target: &CausalLm,
        seed: u64,
    ) -> Eagle3 {
        config.draft_vocabulary = vocabulary.cloned();
        let mut draws = SeededDraws::new(seed, &["eagle3"]);
        let drawn = config.init_from(&target.device().autodiff(), || draws.uniform());
        match self.initial {
            InitialWeights::Random => drawn,
            InitialWeights::Target => drawn.with_weights_of(target, config),
        }
    }
}
