//! From rows and a frozen draft to a trained acceptance head (SpecDec++, section 3).

use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor, TensorData};
use burn_train::checkpoint::KeepLastNCheckpoints;
use burn_train::metric::{LearningRateMetric, LossMetric};
use burn_train::renderer::MetricsRenderer;
use burn_train::{Interrupter, Learner, SupervisedTraining, TrainingStrategy};
use draftsmith_data::ResponseRow;
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, CausalLm};
use draftsmith_theory::{HeadScores, SeededDraws};
use serde_json::{Map, Value, json};

use crate::batches::{BatchSettings, HeadLoader};
use crate::epochs::{EpochLoop, EpochScores, History};
use crate::error::TrainError;
use crate::head_training::HeadTraining;
use crate::learner::HeadLearner;
use crate::metrics::{ScoreMetric, ScoreSlot};
use crate::rows::{TrainingRow, is_held_out};
use crate::schedule::CosineWithWarmUp;

/// A trained head and how it came about.
#[derive(Debug)]
pub struct TrainedHead {
    /// The weights after the epoch whose validation KL is the lowest.
    pub head: AcceptanceHead,
    /// The head's shape. `training` records the settings, the seed, the rows and every epoch's
    /// scores; `draft_hash` and `target_hash` are left to the caller, who knows the files.
    pub config: AcceptanceHeadConfig,
    /// The head's scores on the validation rows.
    pub scores: HeadScores,
    /// The epoch it is from, counted from 1.
    pub best_epoch: usize,
    /// Every epoch that was validated, in order.
    pub epochs: Vec<EpochScores>,
    /// Whether the interrupter stopped it before the end of its last epoch.
    pub interrupted: bool,
    /// Rows that were trained on.
    pub num_training_rows: usize,
    /// Rows that were held out.
    pub num_validation_rows: usize,
    /// Rows of neither: empty, or beginning past the draft's context.
    pub num_unusable_rows: usize,
    /// Labelled tokens that were trained on, over all epochs.
    pub num_labels: usize,
    /// Optimiser steps taken.
    pub num_steps: usize,
    /// Time in all, validation included.
    pub duration: Duration,
}

impl TrainedHead {
    /// Labelled tokens a second, validation's time included.
    pub fn labels_per_second(&self) -> f64 {
        self.num_labels as f64 / self.duration.as_secs_f64()
    }
}

/// Trains an acceptance head for `draft` on `rows`, on the draft's device.
///
/// Rows are split by a hash of their conversation's id; each epoch mixes and shuffles them afresh,
/// as a function of `seed`, the epoch and the row's id; validation uses one mixture throughout.
/// The draft is frozen and only read. The same arguments give the same head, bit for bit, on the
/// same CPU build.
///
/// burn-train's files go under `checkpoint_dir`, which this function owns: `checkpoint/` (weights,
/// optimiser and schedule after the last epoch), `train/` and `valid/` (metrics); what an earlier
/// run left of them is removed. `renderer` is told of progress. After a call of
/// `interrupter.stop`, training ends at the next batch and the best head so far is returned; in the
/// first epoch, the present weights are validated and returned.
///
/// # Errors
/// If a setting is out of range, a row has no draft columns or broken ones, a side of the split has
/// no labels, a loss or prediction is not finite, or a file cannot be written.
pub fn train_head(
    draft: &CausalLm,
    rows: &[ResponseRow],
    training: &HeadTraining,
    seed: u64,
    checkpoint_dir: &Path,
    renderer: Box<dyn MetricsRenderer>,
    interrupter: Interrupter,
) -> Result<TrainedHead, TrainError> {
    let start = Instant::now();
    training.validate()?;
    let split = Split::new(rows, draft.config().max_position_embeddings, training)?;
    let (num_training_rows, num_validation_rows) = (split.training.len(), split.validation.len());

    // Without autodiff, whatever the caller's device: hidden states are constants.
    let draft = draft.valid();
    let device = draft.device();
    let settings = BatchSettings::new(training, seed);
    let epoch = Arc::new(AtomicU64::new(1));
    let training_loader =
        HeadLoader::training(draft.clone(), split.training, settings, epoch.clone());
    let validation_loader = HeadLoader::validation(draft.clone(), split.validation, settings);

    let sizes: Vec<(usize, usize)> =
        (1..=training.num_epochs).map(|epoch| training_loader.size(epoch as u64)).collect();
    let num_training = sizes.iter().map(|(rows, _)| *rows).min().unwrap_or(0);
    let (num_validation, _) = validation_loader.size(0);
    if num_training == 0 || num_validation == 0 {
        return Err(TrainError::TooFewRows {
            num_rows: rows.len(),
            num_unusable: split.num_unusable,
            num_training,
            num_validation,
            context: draft.config().max_position_embeddings,
            validation_share: training.validation_share,
            mixing_ratio: training.mixing_ratio,
        });
    }
    let num_steps = sizes.iter().map(|(_, steps)| *steps).sum();

    let hidden_size = draft.config().hidden_size;
    let config = AcceptanceHeadConfig::new(hidden_size, training.num_layers, training.tied);
    let learner = Learner::new(
        HeadLearner {
            head: initial_head(&config, seed, &device.clone().autodiff()),
            rejection_weight: training.rejection_weight,
            max_grad_norm: training.max_grad_norm,
        },
        AdamWConfig::new()
            .with_beta_1(training.beta_1 as f32)
            .with_beta_2(training.beta_2 as f32)
            .with_epsilon(training.epsilon as f32)
            .with_weight_decay(training.weight_decay as f32)
            .with_cautious_weight_decay(false)
            .with_amsgrad(false)
            .init(),
        CosineWithWarmUp::new(training.learning_rate, training.warm_up_share, num_steps),
    );

    prepare_dir(checkpoint_dir)?;
    let slot = ScoreSlot::default();
    let outcome = Arc::new(Mutex::new(None));
    let strategy = EpochLoop { device, epoch, slot: slot.clone(), outcome: outcome.clone() };
    let supervised = SupervisedTraining::new(
        checkpoint_dir,
        Arc::new(training_loader),
        Arc::new(validation_loader),
    )
    // The default one installs a global subscriber and a panic hook.
    .with_application_logger(None)
    .with_default_checkpointers()
    .with_checkpointing_strategy(KeepLastNCheckpoints::new(1))
    .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
    .with_interrupter(interrupter)
    .renderer(renderer)
    .num_epochs(training.num_epochs)
    .label("acceptance head")
    .metric_train_numeric(LossMetric::new())
    .metric_train_numeric(LearningRateMetric::new())
    .metric_valid_numeric(LossMetric::new());
    let supervised = ScoreMetric::all(&slot)
        .into_iter()
        .fold(supervised, |supervised, metric| supervised.metric_valid_numeric(metric));
    let result = supervised.launch(learner);

    let outcome = outcome.lock().expect("nothing panics while it holds the outcome").take();
    let History { best, epochs, num_labels, num_steps, interrupted } =
        outcome.expect("the loop leaves an outcome")?;
    if let Some(error) = result.error {
        return Err(TrainError::Learner(error));
    }
    let (head, best) = best.expect("the first epoch is validated, whole or not");
    let (scores, best_epoch) = (epochs[best].validation, epochs[best].epoch);
    let mut trained = TrainedHead {
        head,
        config,
        scores,
        best_epoch,
        epochs,
        interrupted,
        num_training_rows,
        num_validation_rows,
        num_unusable_rows: split.num_unusable,
        num_labels,
        num_steps,
        duration: start.elapsed(),
    };
    trained.config.training = record(&trained, training, seed);
    Ok(trained)
}

/// The rows of each side.
struct Split {
    training: Vec<Arc<TrainingRow>>,
    validation: Vec<Arc<TrainingRow>>,
    num_unusable: usize,
}

impl Split {
    fn new(
        rows: &[ResponseRow],
        context: usize,
        training: &HeadTraining,
    ) -> Result<Self, TrainError> {
        let mut split = Self { training: Vec::new(), validation: Vec::new(), num_unusable: 0 };
        for row in rows {
            match TrainingRow::new(row, context)?.map(Arc::new) {
                None => split.num_unusable += 1,
                Some(usable) if is_held_out(row, training.validation_share) => {
                    split.validation.push(usable);
                }
                Some(usable) => split.training.push(usable),
            }
        }
        Ok(split)
    }
}

/// A head with PyTorch's default weights for linear layers, uniform in ±1/√in, drawn from the
/// seed: burn draws from one generator for all threads. Every layer's `in` is the hidden size.
fn initial_head(config: &AcceptanceHeadConfig, seed: u64, device: &Device) -> AcceptanceHead {
    let bound = 1.0 / (config.hidden_size as f64).sqrt();
    let draws = SeededDraws::new(seed, &["head"]);
    config.init(device).map(&mut Redraw { draws, bound })
}

struct Redraw {
    draws: SeededDraws,
    bound: f64,
}

impl ModuleMapper for Redraw {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let values: Vec<f32> = (0..old.shape().num_elements())
                .map(|_| ((2.0 * self.draws.uniform() - 1.0) * self.bound) as f32)
                .collect();
            let new = Tensor::from_data(TensorData::new(values, old.shape()), &old.device());
            new.set_require_grad(old.is_require_grad())
        })
    }
}

/// Makes the directory and clears what burn-train leaves in one: it reads old epochs' metrics as
/// if they were this run's.
fn prepare_dir(dir: &Path) -> Result<(), TrainError> {
    for name in ["checkpoint", "train", "valid"] {
        let path = dir.join(name);
        match std::fs::remove_dir_all(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(TrainError::CheckpointDir { action: "clear", path, source });
            }
            _ => {}
        }
    }
    // burn-train ignores that it cannot make a directory and panics at the first file in it.
    for path in [dir.to_path_buf(), dir.join("checkpoint"), dir.join("train"), dir.join("valid")] {
        std::fs::create_dir_all(&path).map_err(|source| TrainError::CheckpointDir {
            action: "create",
            path,
            source,
        })?;
    }
    Ok(())
}

/// What `config.json` keeps of the training. No times: the same training gives the same file.
fn record(trained: &TrainedHead, training: &HeadTraining, seed: u64) -> Map<String, Value> {
    let settings = match json!(training) {
        Value::Object(settings) => settings,
        other => unreachable!("a struct serialises to an object: {other}"),
    };
    // The config has these two itself.
    let in_config = ["num_layers", "tied"];
    let settings = settings.into_iter().filter(|(key, _)| !in_config.contains(&key.as_str()));
    let outcome = [
        ("seed", json!(seed)),
        ("num_training_rows", json!(trained.num_training_rows)),
        ("num_validation_rows", json!(trained.num_validation_rows)),
        ("num_labels", json!(trained.num_labels)),
        ("num_steps", json!(trained.num_steps)),
        ("interrupted", json!(trained.interrupted)),
        ("best_epoch", json!(trained.best_epoch)),
        ("validation", json!(trained.scores)),
        ("epochs", json!(trained.epochs)),
    ];
    settings.chain(outcome.map(|(key, value)| (key.to_owned(), value))).collect()
}

#[cfg(test)]
mod tests;
