//! From rows and a frozen target to trained self-draft adapters (Kangaroo, section 3.1).

use std::f64::consts::TAU;
use std::time::Duration;

use burn::module::Module;
use draftsmith_data::ResponseRow;
use draftsmith_model::{Adapter, AdapterConfig, CausalLm};
use draftsmith_theory::SeededDraws;
use serde_json::{Map, Value, json};

use crate::adapter::batches::{AdapterRow, AdapterSource, FrozenTarget};
use crate::adapter::learner::AdapterLearner;
use crate::adapter::scores::AdapterScores;
use crate::adapter::settings::{AdapterTraining, InitialWeights};
use crate::data::batches::{BatchSettings, Loaders, Prepared};
use crate::data::lessons::Lesson;
use crate::error::TrainError;
use crate::head::rows::Split;
use crate::run::devices::PerDevice;
use crate::run::epochs::EpochScores;
use crate::run::fit::{Fit, Redrawn, record, redrawn};
use crate::run::stint::{BestOf, Ending, Stint};

/// A trained adapter and how it came about.
#[derive(Debug)]
pub struct TrainedAdapter {
    /// The weights after the epoch whose mean loss on the validation rows is the lowest.
    pub adapter: Adapter,
    /// The adapter's shape and exit layer. `training` records the settings, the seed, the rows and
    /// every epoch's scores; `target_hash` is left to the caller, who knows the files.
    pub config: AdapterConfig,
    /// The adapter's scores on the validation rows.
    pub scores: AdapterScores,
    /// The epoch it is from, counted from 1.
    pub best_epoch: usize,
    /// Every epoch that was validated, in order.
    pub epochs: Vec<EpochScores<AdapterScores>>,
    /// Whether it was stopped before the end of its last epoch.
    pub interrupted: bool,
    /// Rows that were trained on.
    pub num_training_rows: usize,
    /// Rows that were held out.
    pub num_validation_rows: usize,
    /// Rows of neither: without a response, or beginning past the longest sequence.
    pub num_unusable_rows: usize,
    /// Supervised tokens that were trained on, over all epochs.
    pub num_tokens: usize,
    /// Optimiser steps taken.
    pub num_steps: usize,
    /// Time in all, validation and earlier calls included, and the adapters that were trained
    /// beside it.
    pub duration: Duration,
}

impl TrainedAdapter {
    /// Supervised tokens a second, validation's time included.
    pub fn tokens_per_second(&self) -> f64 {
        self.num_tokens as f64 / self.duration.as_secs_f64()
    }
}

/// Trains an adapter behind each exit layer of `training` on `rows`, all of them over one pass of
/// `target`, on the target's device and those of `stint.more_devices`. Each adapter is, bit for
/// bit, what it would be if it were trained alone.
///
/// The adapter A learns to say softmax(head(A(h_ℓ))) = softmax(head(h)) (Kangaroo, section 3.1; its
/// distance is `training.loss`), where h_ℓ is the target's hidden state after ℓ layers, h its final
/// one after the final norm, and head its LM head, at the positions that predict a token of the
/// response.
/// The target is frozen and only read; rows need no draft columns. Rows are split by a hash of
/// their conversation's id, and shuffled as a function of `seed` and the epoch. The same arguments
/// give the same adapters, bit for bit, on the same CPU build.
///
/// The state goes under `stint.checkpoint_dir`, which this function owns: `checkpoint/` (the
/// state), `metrics.jsonl` (a line a step) and TensorBoard's event files (several adapters have
/// their own, in `exit-2/` and the like), `train/` and `valid/` (burn-train's metrics, of the first
/// adapter that is still trained). A call that finds a state with its fingerprint goes on from it,
/// and the adapters end with the same bits as if training had never stopped, on the same CPU build;
/// a state with another is removed. After a call of `interrupter.stop` or the last step that the
/// stint allows, training stops between two steps, with its state saved and the best adapters so
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
    stint: Stint<'_>,
) -> Result<Ending<Vec<TrainedAdapter>>, TrainError> {
    training.validate()?;
    let exit_layers = training.exit_layer.to_vec();
    let configs = exit_layers.iter().map(|layer| config_of(target, training, *layer));
    let configs = configs.collect::<Result<Vec<_>, TrainError>>()?;
    // Without autodiff, whatever the caller's device: hidden states are constants.
    let frozen = target.valid().to_dtype(training.dtype);
    let targets = PerDevice::frozen(frozen, &stint.more_devices)?;
    let Prepared { loaders, num_training_rows, num_validation_rows, num_unusable_rows } =
        prepare(&targets, rows, training, seed)?;
    let fit = Fit {
        loaders,
        devices: targets.trained()?,
        optimizer: training.optimizer,
        label: "self-draft adapter",
        stint,
    };
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
    fit.run(learners.collect(), |nth, best| {
        let BestOf { part, place, standing, interrupted, duration } = best;
        let mut trained = TrainedAdapter {
            adapter: part,
            config: configs[nth].clone(),
            scores: standing.epochs[place].validation,
            best_epoch: standing.epochs[place].epoch,
            epochs: standing.epochs,
            interrupted,
            num_training_rows,
            num_validation_rows,
            num_unusable_rows,
            num_tokens: standing.num_supervised,
            num_steps: standing.num_steps,
            duration,
        };
        trained.config.training = record_of(&trained, training, seed);
        trained
    })
}

/// What [`train_adapters`] is going to see: every step's batches, and the rows held out.
///
/// # Errors
/// As there, before training begins.
pub fn adapter_lessons(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
) -> Result<Vec<Lesson>, TrainError> {
    training.validate()?;
    Ok(prepare(&target.valid().into(), rows, training, seed)?.loaders.lessons())
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
    let config = AdapterConfig::new(target.config(), exit_layer)?;
    Ok(AdapterConfig { architecture: training.architecture, ..config })
}

/// Splits the rows, and makes the loaders of both sides. The target records no autodiff, whatever
/// the caller's device: hidden states are constants.
fn prepare(
    targets: &PerDevice<CausalLm>,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
) -> Result<Prepared<AdapterSource>, TrainError> {
    let target = targets.first();
    let max_len = training.max_len.min(target.config().max_position_embeddings);
    let vocab_size = target.config().vocab_size;
    let optimizer = &training.optimizer;
    let split = Split::new(rows, optimizer.validation_fraction, |row| {
        AdapterRow::new(row, max_len, vocab_size)
    })?;
    let (num_training_rows, num_validation_rows) = (split.training.len(), split.validation.len());
    if num_training_rows == 0 || num_validation_rows == 0 {
        return Err(TrainError::TooFewResponses {
            num_rows: rows.len(),
            num_unusable: split.num_unusable,
            num_training: num_training_rows,
            num_validation: num_validation_rows,
            max_len,
            validation_fraction: optimizer.validation_fraction,
        });
    }

    let settings = BatchSettings {
        seed,
        batch_size: optimizer.batch_size,
        gradient_accumulation: optimizer.gradient_accumulation,
    };
    let targets = targets.clone().map(FrozenTarget::from);
    let source = |rows| AdapterSource {
        targets: targets.clone(),
        exit_layers: training.exit_layer.to_vec(),
        rows,
    };
    let (training_rows, validation_rows) = (source(split.training), source(split.validation));
    Ok(Prepared {
        loaders: Loaders::new(training_rows, validation_rows, settings, optimizer.num_epochs),
        num_training_rows,
        num_validation_rows,
        num_unusable_rows: split.num_unusable,
    })
}

/// An adapter with its first weights, on the target's device with autodiff: Kangaroo's, drawn from
/// the seed, or the target's.
fn initial_adapter(
    config: &AdapterConfig,
    target: &CausalLm,
    initial: InitialWeights,
    seed: u64,
) -> Adapter {
    let adapter = config.init(&target.device().autodiff());
    if initial == InitialWeights::Target {
        return adapter.with_layer_of(target, config.exit_layer).with_head_of(target);
    }
    let mut draws = SeededDraws::new(seed, &["adapter"]);
    // Box and Muller's, of which one number of two is enough. 1 − u is above 0.
    let draw = move || {
        let radius = (-2.0 * (1.0 - draws.uniform()).ln()).sqrt();
        (0.02 * radius * (TAU * draws.uniform()).cos()) as f32
    };
    redrawn(adapter, Redrawn::Matrices, draw).with_head_of(target)
}

/// What `config.json` keeps of the training.
fn record_of(
    trained: &TrainedAdapter,
    training: &AdapterTraining,
    seed: u64,
) -> Map<String, Value> {
    let outcome = [
        ("seed", json!(seed)),
        ("num_training_rows", json!(trained.num_training_rows)),
        ("num_validation_rows", json!(trained.num_validation_rows)),
        ("num_tokens", json!(trained.num_tokens)),
        ("num_steps", json!(trained.num_steps)),
        ("interrupted", json!(trained.interrupted)),
        ("best_epoch", json!(trained.best_epoch)),
        ("validation", json!(trained.scores)),
        ("epochs", json!(trained.epochs)),
    ];
    record(training, &["exit_layer", "architecture"], outcome)
}

#[cfg(test)]
mod tests;
