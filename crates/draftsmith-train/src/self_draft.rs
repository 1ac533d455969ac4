//! The training of self-drafts of any kind: from rows and a frozen target to trained drafters.
//!
//! A form of self-draft gives the settings of its own, its first weights, and the steps that it
//! unrolls ([`StateTraining`]). Everything else is the same for all: the settings and scores, the
//! lessons, and the learner.

pub(crate) mod learner;
pub(crate) mod scores;
pub(crate) mod settings;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;

use burn::module::Module;
use burn::tensor::Device;
use draftsmith_data::ResponseRow;
use draftsmith_model::{
    CausalLm, DraftConfig, DraftForm, DraftNetwork, DraftVocabulary, ModelConfig, StateNetwork,
    VOCABULARY_COVERAGE,
};
use draftsmith_theory::SeededDraws;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use self::learner::StateLearner;
use self::scores::LessonScores;
use self::settings::SelfDraftTraining;
use crate::data::StepExamples;
use crate::error::{Result, TrainError};
use crate::lessons::batches::batches_a_step;
use crate::lessons::settings::{InitialWeights, LessonSettings};
use crate::lessons::{Lessons, Sources, prepare};
use crate::run::devices::PerDevice;
use crate::run::optimizer::OptimizerSettings;
use crate::run::trained::{ExportConfig, Trained};
use crate::run::{Ending, Setup, TrainingRun};

/// The settings that only one form of self-draft has, and what its training needs.
pub trait StateTraining:
    Clone + Debug + Default + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// The network.
    type Network: StateNetwork;
    /// The network's `config.json`.
    type Config: ExportConfig<Self::Network>;
    /// The scores on held-out responses.
    type Scores: LessonScores + Debug + Clone + Send + Sync + Serialize + DeserializeOwned;

    /// The name of the drafters, for listeners.
    const LABEL: &'static str = Self::Network::KIND;
    /// The defaults of the optimizer.
    const OPTIMIZER: OptimizerSettings = OptimizerSettings::EAGLE3;
    /// Whether the drafter reads token embeddings, each with the hidden state of the position before.
    /// The LM head of a drafter that does not read them has the target's soft cap.
    const READS_TOKENS: bool = true;

    /// Returns the number of unrolled steps, and the weight of each step's loss relative to that of
    /// the previous step.
    fn steps(&self) -> (usize, f64) {
        (1, 1.0)
    }

    /// Checks the range of every setting, beside those that all self-drafts have.
    ///
    /// # Errors
    /// If a key is out of range. The error names the first one.
    fn check(&self, common: &LessonSettings) -> Result<()>;

    /// Checks that a target of `num_layers` layers has the layers that the drafter reads.
    ///
    /// # Errors
    /// If the target lacks one of them.
    fn check_layers(&self, num_layers: usize) -> Result<()> {
        let layers = self.layers(num_layers);
        match layers.iter().all(|layer| (1..=num_layers).contains(layer)) {
            true => Ok(()),
            false => {
                let expected = "numbers from 1 to the target's number of layers";
                let (section, value) = (Self::Network::KIND, format!("{layers:?}"));
                Err(TrainError::setting(section, "layers", value, expected))
            }
        }
    }

    /// Lists the hidden states that the drafter reads, each as the number of the layers before it, for
    /// a target of `num_layers` layers.
    fn layers(&self, num_layers: usize) -> Vec<usize>;

    /// Describes the network to train for a target that has its layers.
    ///
    /// # Errors
    /// If the settings do not suit the target.
    fn config(&self, target: &ModelConfig) -> Result<Self::Config>;

    /// Builds the network before training.
    fn network(&self, config: &Self::Config, first: FirstWeights<'_>) -> Self::Network;

    /// Reads the drafter in `dir` to train it further.
    ///
    /// # Errors
    /// If it cannot be read, or not be trained with these settings.
    fn initial(&self, dir: &Path, target: &CausalLm) -> Result<Initial<Self>> {
        let (_, expected) = (target, "`target` or `random`");
        Err(TrainError::setting(Self::Network::KIND, "initial", dir.display(), expected))
    }

    /// Returns the settings to record, as an object.
    fn record(training: &SelfDraftTraining<Self>) -> Value {
        json!(training)
    }
}

/// The source of a network's first weights.
#[derive(Debug)]
pub struct FirstWeights<'a> {
    /// Whether the network has no weights of the target.
    pub is_random: bool,
    /// The target.
    pub target: &'a CausalLm,
    /// The target's device with autodiff.
    pub device: Device,
    /// The random numbers of the weights that are not the target's.
    pub draws: SeededDraws,
}

/// A drafter to train further: its configuration, its network, and the tokens that it may draft if these
/// are not all.
#[derive(Debug)]
pub struct Initial<S: StateTraining> {
    /// The configuration.
    pub config: S::Config,
    /// The network, on a device with autodiff.
    pub network: S::Network,
    /// The draft vocabulary.
    pub vocabulary: Option<DraftVocabulary>,
}

/// Reads the drafter in `dir` to train it further with the settings `own`.
pub(crate) fn read_initial<F, S>(own: &S, dir: &Path, target: &CausalLm) -> Result<Initial<S>>
where
    F: DraftForm,
    S: StateTraining<Network = DraftNetwork<F>, Config = DraftConfig<F>>,
{
    if !dir.join("config.json").is_file() {
        let expected = "`target`, `random` or the directory of a drafter";
        return Err(TrainError::setting(F::KIND, "initial", dir.display(), expected));
    }
    let (config, network) = DraftNetwork::<F>::to_train(dir, target)?;
    let layers = own.layers(target.shape().num_layers);
    if config.target_layers != layers {
        let found = &config.target_layers;
        return Err(TrainError::Invalid(format!(
            "the drafter of `initial`, `{}`, reads the target's states after layers {found:?}, and the recipe \
             says {layers:?}; hint: write `layers = {found:?}`",
            dir.display()
        )));
    }
    Ok(Initial { vocabulary: config.draft_vocabulary.clone(), config, network })
}

/// A trained self-draft, with settings of the form `S`.
pub type TrainedState<S> = Trained<
    <S as StateTraining>::Network,
    <S as StateTraining>::Config,
    <S as StateTraining>::Scores,
>;

/// The settings that are keys of a drafter's own configuration, so that its record lacks them.
const IN_CONFIG: [&str; 3] = ["exit_layer", "architecture", "layers"];

/// Trains a drafter for each of `trainings`, on the target's device and `run.more_devices`. All
/// drafters share the target's forwards. Each ends with the same bits as if it were trained alone.
///
/// Step k of the unrolled drafter predicts the k-th token of a draft from every position of the
/// responses, given the response's tokens before it. The step's loss compares
/// softmax(head(norm(o))), where o is the drafter's output, with the target's distribution over the
/// draft vocabulary. Its weight is `step_weight` to the power of k (Li et al. 2025, section 3.2).
/// Training keeps the epoch with the largest accepted length on held-out responses.
///
/// An adapter A has one step, and learns that softmax(head(A(h_ℓ))) = softmax(head(h)) (Kangaroo,
/// §3.1). Here h_ℓ is the target's hidden state after ℓ layers, h is its hidden state after the final
/// norm, and head is its LM head. Training keeps the epoch with the smallest loss.
///
/// The loss covers the positions that predict a token of the response. The target is frozen; rows
/// need no draft columns. Rows are split by a hash of their conversation's id, and shuffled as a
/// function of `seed` and the epoch. The same arguments give the same drafters, bit for bit, on the
/// same CPU build.
///
/// The run owns `run.checkpoint_dir`: the state in `checkpoint/`, and `metrics.jsonl` with one line
/// per step. If there are several drafters, their logs are in directories named `drafter-1/` and so
/// on. A run resumes from a state with its fingerprint, with the same result as without an
/// interruption, and removes any other state. When `run` is stopped, it saves its state after the
/// current step and returns the best drafters so far. The state remains at the end until
/// [`discard`](crate::discard), because the caller has yet to save the drafters.
///
/// # Errors
/// If a setting is out of range, the target lacks a layer, a row is invalid, either side of the split
/// has no response, a loss or prediction is not finite, or a file cannot be written.
///
/// # Panics
/// If `trainings` is empty, or two differ in the [settings of a pass](LessonSettings::of_pass).
pub fn train_self_drafts<S: StateTraining>(
    target: &CausalLm,
    rows: &[ResponseRow],
    trainings: &[SelfDraftTraining<S>],
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedState<S>>>> {
    let initials = trainings.iter().map(|one| match &one.common.initial {
        InitialWeights::Drafter(dir) => one.initial(dir, target).map(Some),
        InitialWeights::Random | InitialWeights::Target => Ok(None),
    });
    let initials = initials.collect::<Result<Vec<Option<Initial<S>>>>>()?;
    let lessons = lessons_of(target, trainings)?.beginning_with(&initials)?;
    let settings = &lessons.settings;
    // The target has no autodiff on any device, because hidden states are constants.
    let frozen = target.valid().to_dtype(settings.dtype);
    let more = run.more_devices(batches_a_step(&settings.optimizer));
    let targets = PerDevice::frozen(frozen, more)?;
    let place = run.feature_dir();
    let Sources { loaders, vocabulary, stored } =
        prepare(&targets, rows, &lessons, seed, Some(&place))?;
    let (vocabulary, coverage) = vocabulary.unzip();
    let devices = PerDevice::trained(targets.first().device(), more)?;
    let optimizer = settings.optimizer.of_width(target.shape().hidden_size);
    let (mut learners, mut exports) = (Vec::new(), Vec::new());
    for ((nth, one), initial) in trainings.iter().enumerate().zip(initials) {
        let (config, drafter) = match (initial, &vocabulary) {
            (Some(initial), Some(vocabulary)) => {
                let Initial { mut config, network, .. } = initial;
                let network = config.widened(network, vocabulary, target);
                (config, network)
            }
            (Some(initial), None) => (initial.config, initial.network),
            (None, vocabulary) => {
                let dtype = target.stored_dtype();
                let config = one.config(target.config(), dtype, vocabulary.as_ref())?;
                let network = one.network(&config, target, seed);
                (config, network)
            }
        };
        let place_of = |layer: usize| lessons.layers.binary_search(&layer).ok();
        let states = one.layers(target.shape().num_layers).into_iter().filter_map(place_of);
        let learner = StateLearner { drafter, states: states.collect(), training: one.clone() };
        learners.push((format!("drafter-{}", nth + 1), learner));
        let mut settings = S::record(one);
        settings["optimizer"] = json!(optimizer);
        exports.push((config, settings));
    }
    let setup = Setup { loaders, devices, optimizer, label: lessons.label };
    let trained = run.train(setup, learners, |nth, part, outcome| {
        let (config, settings) = &exports[nth];
        let mut trained = Trained::new((part, config.clone()), outcome);
        let mut record = trained.record(settings, &IN_CONFIG, "num_tokens", seed);
        if let Some(coverage) = coverage {
            record.insert(VOCABULARY_COVERAGE.to_owned(), coverage.into());
        }
        *trained.config.record().training = record;
        trained
    });
    let Some(stored) = stored else { return trained };
    stored.problems().into_iter().for_each(place.notify);
    trained.map_err(|error| stored.cause_of(error))
}

impl Lessons {
    /// Takes the draft vocabulary of initial drafters, which must all have the same.
    fn beginning_with<S: StateTraining>(self, initials: &[Option<Initial<S>>]) -> Result<Self> {
        let invalid = |problem: String| {
            Err(TrainError::Invalid(format!("`{}.initial`: {problem}", self.section)))
        };
        let own = |one: &Option<Initial<S>>| one.as_ref().map(|one| one.vocabulary.clone());
        let Some(first) = initials.iter().find_map(own) else { return Ok(self) };
        if initials.iter().any(|one| own(one).as_ref() != Some(&first)) {
            return invalid(
                "drafters of one pass begin with different draft vocabularies; hint: train them one by one, \
                 with `train-drafter RECIPE DRAFTER`"
                    .to_owned(),
            );
        }
        match (&first, self.settings.draft_vocabulary) {
            (None, Some(_)) => invalid(
                "the drafter drafts all tokens, and `draft_vocabulary` cannot narrow it; hint: leave the key out"
                    .to_owned(),
            ),
            (Some(own), Some(size)) if size < own.ids().len() => invalid(format!(
                "the drafter drafts {} tokens, and `draft_vocabulary` is {size}; hint: leave the key out",
                own.ids().len()
            )),
            _ => Ok(Self { initial_vocabulary: first, ..self }),
        }
    }
}

/// Checks trainings that share a pass, and plans their lessons.
fn lessons_of<S: StateTraining>(
    target: &CausalLm,
    trainings: &[SelfDraftTraining<S>],
) -> Result<Lessons> {
    let first = trainings.first().expect("there is a training");
    let pass = first.common.of_pass();
    assert!(trainings.iter().all(|one| one.common.of_pass() == pass), "they share a pass");
    let num_layers = target.shape().num_layers;
    for one in trainings {
        one.validate()?;
        one.check_layers(num_layers)?;
        one.config(target.config(), target.stored_dtype(), None)?;
    }
    let layers: BTreeSet<usize> = trainings.iter().flat_map(|one| one.layers(num_layers)).collect();
    Ok(Lessons {
        section: S::Network::KIND,
        label: S::LABEL,
        layers: layers.into_iter().collect(),
        reads_tokens: S::READS_TOKENS,
        initial_vocabulary: None,
        settings: first.common.clone(),
    })
}

/// Returns the examples that [`train_self_drafts`] uses in every training step and in validation.
///
/// # Errors
/// As [`train_self_drafts`] before training begins.
pub fn self_draft_examples<S: StateTraining>(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &SelfDraftTraining<S>,
    seed: u64,
) -> Result<Vec<StepExamples>> {
    let lessons = lessons_of(target, std::slice::from_ref(training))?;
    Ok(prepare(&target.valid().into(), rows, &lessons, seed, None)?.loaders.examples())
}

/// Returns the network of [`train_self_drafts`] before training, on the target's device.
///
/// # Errors
/// If the target lacks a layer.
pub fn first_self_draft<S: StateTraining>(
    target: &CausalLm,
    training: &SelfDraftTraining<S>,
    seed: u64,
) -> Result<(S::Config, S::Network)> {
    training.check_layers(target.shape().num_layers)?;
    let config = training.config(target.config(), target.stored_dtype(), None)?;
    let first = training.network(&config, target, seed).valid();
    Ok((config, first))
}
