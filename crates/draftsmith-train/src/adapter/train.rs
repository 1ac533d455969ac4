//! From rows and a frozen target to trained self-draft adapters (Kangaroo, section 3.1).

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use burn::module::Module;
use draftsmith_data::ResponseRow;
use draftsmith_model::{Adapter, AdapterConfig, CausalLm, DraftVocabulary, Lengths};
use draftsmith_theory::SeededDraws;

use crate::adapter::batches::{AdapterSource, FrozenTarget};
use crate::adapter::learner::AdapterLearner;
use crate::adapter::rows::AdapterRow;
use crate::adapter::scores::AdapterScores;
use crate::adapter::settings::{AdapterTraining, InitialWeights};
use crate::adapter::stored::StoredStates;
use crate::data::batches::{BatchSettings, Loaders, Prepared, StepExamples};
use crate::data::split::SplitRows;
use crate::error::TrainError;
use crate::run::devices::PerDevice;
use crate::run::trained::Trained;
use crate::run::training_run::{Ending, Setup, TrainingRun};
use crate::states::{FeatureDir, Features, StateFiles};

/// A trained adapter, and how it came about.
pub type TrainedAdapter = Trained<Adapter, AdapterConfig, AdapterScores>;

/// Trains an adapter behind each exit layer of `training` on `rows`, all of them over one pass of
/// `target`, on the target's device and those of `run.more_devices`. Each adapter is, bit for
/// bit, what it would be if it were trained alone.
///
/// The adapter A learns to predict softmax(head(A(h_ℓ))) = softmax(head(h)) (Kangaroo, section 3.1; its
/// distance is `training.loss`), where h_ℓ is the target's hidden state after ℓ layers, h its final
/// one after the final norm, and head its LM head, at the positions that predict a token of the
/// response.
/// The target is frozen and only read; rows need no draft columns. Rows are split by a hash of
/// their conversation's id, and shuffled as a function of `seed` and the epoch. The same arguments
/// give the same adapters, bit for bit, on the same CPU build.
///
/// The state goes under `run.checkpoint_dir`, which this function owns: `checkpoint/` (the
/// state), `metrics.jsonl` (a line a step) and TensorBoard's event files (several adapters have
/// their own, in `exit-2/` and the like). A run that finds a state with its fingerprint resumes from it,
/// and the adapters end with the same bits as if training had never stopped, on the same CPU build;
/// a state with another is removed. After a call of `interrupter.stop`, a yes of `should_stop` or the last step that the
/// run allows, training stops between two steps, with its state saved and the best adapters so
/// far returned. The state stays after the end too, until [`discard`](crate::discard): the caller
/// has yet to write the adapters.
///
/// # Errors
/// If a setting is out of range, the target does not have more layers than an exit layer, a row is
/// broken, a side of the split has no response, a loss or prediction is not finite, or a file
/// cannot be written.
pub fn train_adapters(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedAdapter>>, TrainError> {
    training.validate()?;
    let exit_layers = training.exit_layer.to_vec();
    let configs = exit_layers.iter().map(|layer| config_of(target, training, *layer));
    let configs = configs.collect::<Result<Vec<_>, TrainError>>()?;
    // Without autodiff, whatever the caller's device: hidden states are constants.
    let frozen = target.valid().to_dtype(training.dtype);
    let targets = PerDevice::frozen(frozen, &run.more_devices)?;
    let place = run.feature_dir();
    let Sources { prepared, vocabulary, stored } =
        prepare(&targets, rows, training, seed, Some(&place))?;
    let Prepared { loaders, rows } = prepared;
    let (vocabulary, coverage) = vocabulary.unzip();
    let configs: Vec<AdapterConfig> = configs
        .into_iter()
        .map(|config| AdapterConfig { draft_vocabulary: vocabulary.clone(), ..config })
        .collect();
    let devices = PerDevice::trained(targets.first().device(), &run.more_devices)?;
    let optimizer = training.optimizer;
    let setup = Setup { loaders, devices, optimizer, label: "self-draft adapter" };
    let learners = configs.iter().enumerate().map(|(place, config)| {
        let learner = AdapterLearner {
            adapter: initial_adapter(config, target, training.initial, seed),
            place,
            loss: training.loss,
            loss_chunk: training.loss_chunk,
            clipping: training.optimizer.clipping,
        };
        (format!("exit-{}", config.exit_layer), learner)
    });
    let trained = run.train(setup, learners.collect(), |nth, part, outcome| {
        let mut trained = Trained::new((part, configs[nth].clone()), rows, outcome);
        let in_config = ["exit_layer", "architecture"];
        trained.config.training = trained.record(training, &in_config, "num_tokens", seed);
        if let Some(coverage) = coverage {
            trained.config.set_vocabulary_coverage(coverage);
        }
        trained
    });
    let problems = stored.iter().flat_map(|stored| stored.problems());
    problems.for_each(|problem| (place.notify)(problem));
    trained
}

/// What [`train_adapters`] is going to see: every step's batches, and the rows held out.
///
/// # Errors
/// As there, before training begins.
pub fn adapter_examples(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
) -> Result<Vec<StepExamples>, TrainError> {
    training.validate()?;
    Ok(prepare(&target.valid().into(), rows, training, seed, None)?.prepared.loaders.examples())
}

/// An adapter as [`train_adapters`] begins with it, on the target's device.
///
/// # Errors
/// If the target does not have more layers than `exit_layer`.
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

/// A draft vocabulary, and the share of the held-out rows' response tokens that it has.
type CoveredBy = (DraftVocabulary, f64);

/// What a training is made of.
struct Sources {
    prepared: Prepared<AdapterSource>,
    vocabulary: Option<CoveredBy>,
    /// Hidden states on the disk, if they are kept.
    stored: Option<Arc<StoredStates>>,
}

/// Splits the rows, and makes the loaders of both sides; with a draft vocabulary of the training rows,
/// if one is wanted, and hidden states in `place`, if they are kept. The target records no autodiff,
/// whatever the caller's device: hidden states are constants.
fn prepare(
    targets: &PerDevice<CausalLm>,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
    place: Option<&FeatureDir<'_>>,
) -> Result<Sources, TrainError> {
    let target = targets.first();
    let max_len = training.max_len.min(target.shape().context);
    let vocab_size = target.shape().vocab_size;
    let optimizer = &training.optimizer;
    let split = SplitRows::new(rows, vocab_size, optimizer.validation_fraction, |row| {
        Ok(AdapterRow::new(row, max_len))
    })?;
    let counts = split.counts();
    if counts.num_training == 0 || counts.num_validation == 0 {
        return Err(TrainError::TooFewResponses {
            num_rows: rows.len(),
            num_unusable: counts.num_unusable,
            num_training: counts.num_training,
            num_validation: counts.num_validation,
            max_len,
            validation_fraction: optimizer.validation_fraction,
        });
    }

    let settings = BatchSettings {
        seed,
        batch_size: optimizer.batch_size,
        gradient_accumulation: optimizer.gradient_accumulation,
    };
    let lengths = Lengths::on(&targets.first().device());
    let vocabulary = training.draft_vocabulary.map(|size| {
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
    let targets = targets.clone().map(|target| FrozenTarget::new(target, narrowed));
    let stored = match (training.features, place) {
        (Features::Recompute, _) | (_, None) => None,
        (Features::Cache, Some(place)) => {
            let files = StateFiles::new(place.clone(), training.features_format);
            let mut all: Vec<&AdapterRow> =
                split.training.iter().chain(&split.validation).map(AsRef::as_ref).collect();
            // In an order of their own: a row's place does not depend on its side of the split.
            all.sort_by(|one, other| one.id.cmp(&other.id));
            let width = target.shape().hidden_size;
            let exit_layers = training.exit_layer.to_vec();
            let wanted = (&exit_layers[..], training.teacher);
            Some(Arc::new(StoredStates::open(files, wanted, width, &all)?))
        }
    };
    let room = Arc::new(AtomicUsize::new(training.cache_mib.saturating_mul(1 << 20)));
    let source = |rows| AdapterSource {
        targets: targets.clone(),
        exit_layers: training.exit_layer.to_vec(),
        teaching: training.teacher,
        rows,
        batch_size: optimizer.batch_size,
        lengths,
        room: room.clone(),
        stored: stored.clone(),
    };
    let (training_rows, validation_rows) = (source(split.training), source(split.validation));
    let prepared = Prepared {
        loaders: Loaders::new(training_rows, validation_rows, settings, optimizer.num_epochs),
        rows: counts,
    };
    Ok(Sources { prepared, vocabulary, stored })
}

/// An adapter with its first weights, on the target's device with autodiff: Kangaroo's, drawn from
/// the seed, or the target's.
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

#[cfg(test)]
mod tests;
