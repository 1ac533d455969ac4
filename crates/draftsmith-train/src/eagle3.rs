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

use burn::module::Module;
use draftsmith_data::ResponseRow;
use draftsmith_model::{
    CausalLm, DraftVocabulary, Eagle3, Eagle3Config, StateNetwork, VOCABULARY_COVERAGE,
};
use draftsmith_theory::SeededDraws;

use self::learner::StateLearner;
use self::scores::DraftScores;
use self::settings::Eagle3Training;
use crate::adapter::settings::InitialWeights;
use crate::error::TrainError;
use crate::lessons::batches::batches_a_step;
use crate::lessons::{Sources, prepare};
use crate::run::devices::PerDevice;
use crate::run::trained::{ExportConfig, Trained};
use crate::run::{Ending, Setup, TrainingRun};

/// A trained drafter.
pub type TrainedEagle3 = Trained<Eagle3, Eagle3Config, DraftScores>;

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
pub fn train_eagle3(
    target: &CausalLm,
    rows: &[ResponseRow],
    trainings: &[Eagle3Training],
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedEagle3>>, TrainError> {
    let configs = trainings.iter().map(|training| config_of(target, training));
    let configs = configs.collect::<Result<Vec<_>, TrainError>>()?;
    let members = trainings.iter().zip(&configs).map(|(training, config)| StateMember {
        training,
        layers: config.target_layers.to_vec(),
        initial: Box::new(move |vocabulary| {
            let config = Eagle3Config { draft_vocabulary: vocabulary.cloned(), ..config.clone() };
            let drafter = initial_drafter(&config, target, training.initial, seed);
            (drafter, config)
        }),
    });
    train_state_drafters(target, rows, &members.collect::<Vec<_>>(), seed, run)
}

/// A function that builds a network and its configuration on the target's device, with autodiff.
/// The argument is the draft vocabulary, if there is one.
pub type InitialNetwork<'a, N, C> = Box<dyn Fn(Option<&DraftVocabulary>) -> (N, C) + 'a>;

/// A trained network that drafts from the target's hidden states, with its scores.
pub type TrainedState<N, C> = Trained<N, C, DraftScores>;

/// A network to train, with its settings.
pub struct StateMember<'a, N, C> {
    /// The settings. The fields below replace their keys `layers` and `initial`.
    pub training: &'a Eagle3Training,
    /// For each hidden state that the network reads, the number of the target's layers before it.
    pub layers: Vec<usize>,
    /// The function that builds the network before training.
    pub initial: InitialNetwork<'a, N, C>,
}

/// Trains networks that draft from the target's hidden states. [`train_eagle3`] calls this
/// function. All networks share the target's forwards.
///
/// # Errors
/// As [`train_eagle3`].
///
/// # Panics
/// If `members` is empty, or two do not [share a pass](Eagle3Training::shares_pass_with).
pub fn train_state_drafters<N: StateNetwork, C: ExportConfig<N> + Clone>(
    target: &CausalLm,
    rows: &[ResponseRow],
    members: &[StateMember<'_, N, C>],
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedState<N, C>>>, TrainError> {
    let first = members.first().expect("there is a training").training;
    assert!(members.iter().all(|one| one.training.shares_pass_with(first)), "they share a pass");
    members.iter().try_for_each(|one| one.training.validate())?;
    let layers = members.iter().flat_map(|one| one.layers.iter().copied());
    let lessons = first.lessons(N::KIND, layers.collect());
    let frozen = target.valid().to_dtype(first.dtype);
    let more = run.more_devices(batches_a_step(&first.optimizer));
    let targets = PerDevice::frozen(frozen, more)?;
    let place = run.feature_dir();
    let Sources { loaders, vocabulary, stored } =
        prepare(&targets, rows, &lessons, seed, Some(&place))?;
    let (vocabulary, coverage) = vocabulary.unzip();
    let devices = PerDevice::trained(targets.first().device(), more)?;
    let optimizer = first.optimizer.of_width(target.shape().hidden_size);
    let setup = Setup { loaders, devices, optimizer, label: N::KIND };
    let place_of = |layer: &usize| lessons.layers.binary_search(layer).ok();
    let (mut learners, mut configs) = (Vec::new(), Vec::new());
    for (nth, one) in members.iter().enumerate() {
        let (drafter, config) = (one.initial)(vocabulary.as_ref());
        let learner = StateLearner {
            drafter,
            states: one.layers.iter().filter_map(place_of).collect(),
            num_steps: one.training.num_steps,
            step_weight: one.training.step_weight,
            loss: one.training.loss,
            loss_chunk: one.training.loss_chunk,
        };
        learners.push((format!("drafter-{}", nth + 1), learner));
        configs.push(config);
    }
    let trained = run.train(setup, learners, |nth, part, outcome| {
        let mut trained = Trained::new((part, configs[nth].clone()), outcome);
        let training = Eagle3Training { optimizer, ..members[nth].training.clone() };
        let mut record = trained.record(&training, &["layers"], "num_tokens", seed);
        if let Some(coverage) = coverage {
            record.insert(VOCABULARY_COVERAGE.to_owned(), coverage.into());
        }
        *trained.config.training() = record;
        trained
    });
    let Some(stored) = stored else { return trained };
    stored.problems().into_iter().for_each(place.notify);
    trained.map_err(|error| stored.cause_of(error))
}

fn config_of(target: &CausalLm, training: &Eagle3Training) -> Result<Eagle3Config, TrainError> {
    let config = Eagle3Config::new(target.config());
    let num_layers = target.shape().num_layers;
    let target_layers = training.layers.unwrap_or(config.target_layers);
    training.check_layers(num_layers)?;
    Ok(Eagle3Config { target_layers, dtype: target.stored_dtype(), ..config })
}

/// Initialises a drafter on the target's device, with autodiff. Its weights are drawn from the seed
/// or copied from the target.
fn initial_drafter(
    config: &Eagle3Config,
    target: &CausalLm,
    initial: InitialWeights,
    seed: u64,
) -> Eagle3 {
    let mut draws = SeededDraws::new(seed, &["eagle3"]);
    let drawn = config.init_from(&target.device().autodiff(), || draws.uniform());
    match initial {
        InitialWeights::Random => drawn,
        InitialWeights::Target => drawn.with_weights_of(target, config),
    }
}
