//! Self-draft adapters: from rows and a frozen target to trained adapters (Kangaroo, §3.1).
//!
//! A batch contains the frozen target's hidden states after the exit layers and after the last
//! layer (`batches`). The learner (`learner`) compares the adapter's predictions with the target's
//! (`distillation`). The target is never part of the learner, so checkpoints contain only adapters.

pub(crate) mod batches;
pub(crate) mod distillation;
pub(crate) mod learner;
pub(crate) mod rows;
pub(crate) mod settings;
pub(crate) mod stored;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use burn::module::Module;
use draftsmith_data::ResponseRow;
use draftsmith_model::{Adapter, AdapterConfig, CausalLm, DraftVocabulary, Lengths};
use draftsmith_theory::SeededDraws;

use self::batches::{AdapterSource, FrozenTarget, batches_a_step};
use self::learner::{AdapterLearner, AdapterScores};
use self::rows::AdapterRow;
use self::settings::{AdapterTraining, InitialWeights, Teaching};
use self::stored::StoredStates;
use crate::data::split::SplitRows;
use crate::data::{Loaders, StepExamples};
use crate::error::{Section, TrainError};
use crate::run::devices::PerDevice;
use crate::run::optimizer::OptimizerSettings;
use crate::run::trained::Trained;
use crate::run::{Ending, Setup, TrainingRun};
use crate::states::{FeatureDir, FeatureFormat, Features, StateFiles};

/// A trained adapter.
pub type TrainedAdapter = Trained<Adapter, AdapterConfig, AdapterScores>;

/// Trains an adapter for each exit layer of `training`. All adapters share the target's forwards, on the
/// target's device and `run.more_devices`. Each ends with the same bits as if it were trained alone.
///
/// The adapter A learns that softmax(head(A(h_ℓ))) = softmax(head(h)) (Kangaroo, §3.1), with
/// `training.loss` as the distance. Here h_ℓ is the target's hidden state after ℓ layers, h is its
/// hidden state after the final norm, and head is its LM head. The loss covers the positions that
/// predict a token of the response. The target is frozen; rows need no draft columns. Rows are
/// split by a hash of their conversation's id, and shuffled as a function of `seed` and the epoch.
/// The same arguments give the same adapters, bit for bit, on the same CPU build.
///
/// The run owns `run.checkpoint_dir`: the state in `checkpoint/`, and `metrics.jsonl` with one line
/// per step. If there are several adapters, their logs are in directories named `exit-2/` and so
/// on. A run resumes from a state with its fingerprint, with the same result as without an
/// interruption, and removes any other state. When `run` is stopped, it saves its state after the
/// current step and returns the best adapters so far. The state remains at the end until
/// [`discard`](crate::discard), because the caller has yet to save the adapters.
///
/// # Errors
/// If a setting is out of range, an exit layer is not below the target's number of layers, a row is invalid,
/// either side of the split has no response, a loss or prediction is not finite, or a file cannot be
/// written.
pub fn train_adapters(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedAdapter>>, TrainError> {
    training.validate()?;
    let optimizer = training.optimizer.of_width(target.shape().hidden_size);
    let training = &AdapterTraining { optimizer, ..training.clone() };
    let exit_layers = training.exit_layer.to_vec();
    let configs = exit_layers.iter().map(|layer| config_of(target, training, *layer));
    let configs = configs.collect::<Result<Vec<_>, TrainError>>()?;
    // The target has no autodiff on any device, because hidden states are constants.
    let frozen = target.valid().to_dtype(training.dtype);
    let more = run.more_devices(batches_a_step(&training.optimizer));
    let targets = PerDevice::frozen(frozen, more)?;
    let place = run.feature_dir();
    let Sources { loaders, vocabulary, stored } =
        prepare(&targets, rows, &training.lessons(), seed, Some(&place))?;
    let (vocabulary, coverage) = vocabulary.unzip();
    let configs: Vec<AdapterConfig> = configs
        .into_iter()
        .map(|config| AdapterConfig { draft_vocabulary: vocabulary.clone(), ..config })
        .collect();
    let devices = PerDevice::trained(targets.first().device(), more)?;
    let setup = Setup { loaders, devices, optimizer, label: "self-draft adapter" };
    let learners = configs.iter().enumerate().map(|(exit, config)| {
        let learner = AdapterLearner {
            adapter: initial_adapter(config, target, training.initial, seed),
            exit,
            loss: training.loss,
            loss_chunk: training.loss_chunk,
        };
        (format!("exit-{}", config.exit_layer), learner)
    });
    let trained = run.train(setup, learners.collect(), |nth, part, outcome| {
        let mut trained = Trained::new((part, configs[nth].clone()), outcome);
        let in_config = ["exit_layer", "architecture"];
        trained.config.training = trained.record(training, &in_config, "num_tokens", seed);
        if let Some(coverage) = coverage {
            trained.config.set_vocabulary_coverage(coverage);
        }
        trained
    });
    stored.iter().flat_map(|stored| stored.problems()).for_each(place.notify);
    trained
}

/// Returns the examples that [`train_adapters`] uses in every training step and in validation.
///
/// # Errors
/// As [`train_adapters`] before training begins.
pub fn adapter_examples(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
) -> Result<Vec<StepExamples>, TrainError> {
    training.validate()?;
    Ok(prepare(&target.valid().into(), rows, &training.lessons(), seed, None)?.loaders.examples())
}

/// Returns the initial adapter of [`train_adapters`], on the target's device.
///
/// # Errors
/// If `exit_layer` is not below the target's number of layers.
pub fn first_adapter(
    target: &CausalLm,
    training: &AdapterTraining,
    exit_layer: usize,
    seed: u64,
) -> Result<(AdapterConfig, Adapter), TrainError> {
    let config = config_of(target, training, exit_layer)?;
    let first = initial_adapter(&config, target, training.initial, seed).valid();
    Ok((config, first))
}

fn config_of(
    target: &CausalLm,
    training: &AdapterTraining,
    exit_layer: usize,
) -> Result<AdapterConfig, TrainError> {
    let num_layers = target.shape().num_layers;
    let config = AdapterConfig::new(target.config(), exit_layer)
        .map_err(|_| TrainError::ExitLayer { exit_layer, num_layers })?;
    let (architecture, dtype) = (training.architecture, target.stored_dtype());
    let config = AdapterConfig { architecture, dtype, ..config };
    Ok(config.with_layers(training.num_layers))
}

/// The inputs that the training of a self-draft reads from the target and the rows, and the
/// settings for reading them.
pub(crate) struct Lessons<'a> {
    pub(crate) section: Section,
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    pub(crate) layers: Vec<usize>,
    /// Whether the drafter reads token embeddings, each with the hidden state of the position
    /// before.
    pub(crate) reads_tokens: bool,
    /// Whether the target's logit soft cap also applies to a drafter's own LM head.
    pub(crate) caps_own_heads: bool,
    pub(crate) draft_vocabulary: Option<usize>,
    pub(crate) teacher: Teaching,
    pub(crate) max_len: usize,
    pub(crate) cache_mib: usize,
    pub(crate) features: Features,
    pub(crate) features_format: FeatureFormat,
    pub(crate) optimizer: &'a OptimizerSettings,
}

/// The loaders of a training, with the draft vocabulary and the stored hidden states.
pub(crate) struct Sources {
    pub(crate) loaders: Loaders<AdapterSource>,
    /// The draft vocabulary, and the fraction of the validation rows' response tokens in it. `None`
    /// if all tokens may be drafted.
    pub(crate) vocabulary: Option<(DraftVocabulary, f64)>,
    /// The hidden states on the disk; `None` if they are not stored.
    pub(crate) stored: Option<Arc<StoredStates>>,
}

/// Opens the files of hidden states for all rows, if the settings ask for them. States that servers
/// give are requested here.
///
/// # Errors
/// If a file cannot be opened, or the servers fail.
fn open_states(
    lessons: &Lessons<'_>,
    mut rows: Vec<&AdapterRow>,
    width: usize,
    place: Option<&FeatureDir<'_>>,
) -> Result<Option<Arc<StoredStates>>, TrainError> {
    let has_source = place.is_some_and(|place| place.source.is_some());
    if lessons.features == Features::Server && !has_source {
        return Err(TrainError::States(format!(
            "`{}.features` is `server`, and no server gives hidden states",
            lessons.section
        )));
    }
    let (Features::Cache | Features::Server, Some(place)) = (lessons.features, place) else {
        return Ok(None);
    };
    let files = StateFiles::new(place.clone(), lessons.features_format);
    // Rows are sorted, so that the file does not depend on the split.
    rows.sort_by(|one, other| one.id.cmp(&other.id));
    let wanted = (&lessons.layers[..], lessons.teacher);
    Ok(Some(Arc::new(StoredStates::open(files, wanted, width, &rows)?)))
}

/// Splits the rows and makes the loaders of both sides. If the settings ask for it, chooses a draft
/// vocabulary from the training rows, and stores hidden states in `place`. `targets` have no
/// autodiff.
pub(crate) fn prepare(
    targets: &PerDevice<CausalLm>,
    rows: &[ResponseRow],
    lessons: &Lessons<'_>,
    seed: u64,
    place: Option<&FeatureDir<'_>>,
) -> Result<Sources, TrainError> {
    let target = targets.first();
    let max_len = lessons.max_len.min(target.shape().context);
    let vocab_size = target.shape().vocab_size;
    let optimizer = lessons.optimizer;
    let first = usize::from(lessons.reads_tokens);
    let split = SplitRows::new(rows, vocab_size, optimizer.validation_fraction, |row| {
        Ok(AdapterRow::new(row, first, max_len))
    })?;
    let counts = split.counts();
    if counts.num_training == 0 || counts.num_validation == 0 {
        return Err(TrainError::TooFewRows {
            section: lessons.section,
            num_rows: rows.len(),
            num_unusable: counts.num_unusable,
            num_training: counts.num_training,
            num_validation: counts.num_validation,
            max_len,
            validation_fraction: optimizer.validation_fraction,
            mixing_ratio: None,
        });
    }

    let lengths = Lengths::on(&targets.first().device());
    let vocabulary = lessons.draft_vocabulary.map(|size| {
        let counts = |rows: &[Arc<AdapterRow>]| {
            let mut counts = vec![0_u64; vocab_size];
            for id in rows.iter().flat_map(|row| row.predicted()) {
                counts[*id as usize] += 1;
            }
            counts
        };
        let always = &target.shape().eos_token_ids;
        let vocabulary = DraftVocabulary::most_frequent(&counts(&split.training), size, always);
        let coverage = vocabulary.coverage(&counts(&split.validation));
        (vocabulary, coverage)
    });
    let narrowed = vocabulary.as_ref().map(|(vocabulary, _)| vocabulary);
    let targets = targets.clone().map(|target| {
        let frozen = FrozenTarget::new(target, narrowed);
        if lessons.caps_own_heads { frozen } else { frozen.with_uncapped_students() }
    });
    let width = target.shape().hidden_size;
    let all = split.training.iter().chain(&split.validation).map(AsRef::as_ref);
    let stored = open_states(lessons, all.collect(), width, place)?;
    let room = Arc::new(AtomicUsize::new(lessons.cache_mib.saturating_mul(1 << 20)));
    let source = |rows| AdapterSource {
        targets: targets.clone(),
        exit_layers: lessons.layers.clone(),
        reads_tokens: lessons.reads_tokens,
        teaching: lessons.teacher,
        rows,
        batch_size: optimizer.batch_size,
        lengths,
        room: room.clone(),
        stored: stored.clone(),
    };
    let (training_rows, validation_rows) = (source(split.training), source(split.validation));
    let (settings, num_epochs) = (optimizer.batches(seed), optimizer.num_epochs);
    let loaders = Loaders::new(training_rows, validation_rows, settings, num_epochs, counts);
    Ok(Sources { loaders, vocabulary, stored })
}

/// Initialises an adapter on the target's device, with autodiff. Its weights are drawn from the
/// seed or copied from the target.
fn initial_adapter(
    config: &AdapterConfig,
    target: &CausalLm,
    initial: InitialWeights,
    seed: u64,
) -> Adapter {
    let mut draws = SeededDraws::new(seed, &["adapter"]);
    let drawn = config.init_from(&target.device().autodiff(), || draws.uniform());
    let adapter = match initial {
        InitialWeights::Random => drawn,
        InitialWeights::Target => drawn.with_layers_of(target, config.exit_layer),
    };
    adapter.with_head_of(target)
}
