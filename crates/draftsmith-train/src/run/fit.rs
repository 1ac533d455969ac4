//! What every training is put together from: first weights, burn-train's supervised training around
//! our loop, its directory, and the record in `config.json`.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_train::metric::{Adaptor, LearningRateMetric, LossInput, LossMetric};
use burn_train::{InferenceStep, Learner, SupervisedTraining, TrainStep, TrainingStrategy};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::data::batches::{BatchSource, Loaders};
use crate::error::TrainError;
use crate::log::metrics::{ScoreMetric, ScoreSlot, TRAINING_LOSS};
use crate::log::step_log::StepLog;
use crate::run::checkpoint;
use crate::run::devices::PerDevice;
use crate::run::epochs::{EpochLoop, History, Saving, Trainee};
use crate::run::optimizer::OptimizerSettings;
use crate::run::stint::{BestOf, Ending, Stint};
use crate::run::trainer::Trainer;

/// One run of the loop: what it needs besides what it trains.
pub(crate) struct Fit<'a, S> {
    pub(crate) loaders: Loaders<S>,
    /// With autodiff.
    pub(crate) devices: PerDevice<Device>,
    pub(crate) optimizer: OptimizerSettings,
    /// What is trained, for logs.
    pub(crate) label: &'static str,
    pub(crate) stint: Stint<'a>,
}

impl<S: BatchSource> Fit<'_, S> {
    /// Trains `models` side by side, from the state that was saved if there is one, and makes with
    /// `trained` what the caller wants of each, given its place among them. Several have names,
    /// which are directories; a single one's is not used.
    pub(crate) fn run<L, T>(
        self,
        models: Vec<(String, L)>,
        trained: impl FnMut(usize, BestOf<L>) -> T,
    ) -> Result<Ending<Vec<T>>, TrainError>
    where
        L: Trainee<Batch = S::Batch>,
        <L as TrainStep>::Output: Adaptor<LossInput> + Adaptor<()>,
        <L as InferenceStep>::Output: Adaptor<LossInput> + Adaptor<()>,
    {
        let num_steps = self.loaders.num_steps;
        let models = match <[_; 1]>::try_from(models) {
            Ok([(_, model)]) => vec![(String::new(), model)],
            Err(models) => models,
        };
        let trainer = Trainer::new(models, self.devices.clone(), &self.optimizer, num_steps);
        Ok(Ending::of_members(self.history(trainer)?, num_steps, trained))
    }

    fn history<L>(self, trainer: Trainer<L>) -> Result<History<L>, TrainError>
    where
        L: Trainee<Batch = S::Batch>,
        <L as TrainStep>::Output: Adaptor<LossInput> + Adaptor<()>,
        <L as InferenceStep>::Output: Adaptor<LossInput> + Adaptor<()>,
    {
        let Stint {
            checkpoint_dir,
            fingerprint,
            max_steps,
            save_interval,
            renderer,
            interrupter,
            more_devices: _,
        } = self.stint;
        let trainer = match checkpoint::load(checkpoint_dir, fingerprint)? {
            Some((state, dir)) => trainer.resumed(state, &dir)?,
            None => {
                clear_dir(checkpoint_dir)?;
                trainer
            }
        };
        make_dir(checkpoint_dir)?;
        let logs = trainer.members.iter().map(|member| {
            let dir = checkpoint_dir.join(&member.name);
            create_dir(&dir)?;
            StepLog::open(&dir, member.standing.num_steps, member.standing.epochs.len())
        });
        let logs = logs.collect::<Result<Vec<_>, _>>()?;
        let first = &trainer.members[0];
        let (model, optimizer) = (first.model.clone(), first.optimizer.clone());
        let learner = Learner::new(model, optimizer, trainer.schedule.clone());
        let (slot, loss_slot) = (ScoreSlot::default(), ScoreSlot::default());
        let starting_epoch = trainer.standing.epoch;
        let outcome = Arc::new(Mutex::new(None));
        let strategy = EpochLoop {
            begun: Mutex::new(Some((trainer, logs))),
            start: self.loaders.start,
            slot: slot.clone(),
            loss_slot: loss_slot.clone(),
            saving: Saving {
                dir: checkpoint_dir.to_path_buf(),
                fingerprint: fingerprint.to_owned(),
                interval: save_interval,
            },
            max_steps,
            outcome: outcome.clone(),
        };
        let supervised = SupervisedTraining::new(
            checkpoint_dir,
            Arc::new(self.loaders.training),
            Arc::new(self.loaders.validation),
        )
        // The default one installs a global subscriber and a panic hook.
        .with_application_logger(None)
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
        .with_interrupter(interrupter)
        .renderer(renderer)
        .num_epochs(self.loaders.num_epochs)
        // Only tells the renderer where it begins: there is no checkpointer of burn-train's.
        .checkpoint(starting_epoch - 1)
        .label(self.label)
        .metric_train_numeric(LossMetric::new())
        .metric_train_numeric(LearningRateMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .metric_valid_numeric(ScoreMetric::new(&TRAINING_LOSS, &loss_slot));
        let supervised = L::SCORES
            .iter()
            .map(|score| ScoreMetric::new(score, &slot))
            .fold(supervised, |supervised, metric| supervised.metric_valid_numeric(metric));
        let result = supervised.launch(learner);
        let outcome = outcome.lock().expect("nothing panics while it holds the outcome").take();
        let history = outcome.expect("the loop leaves an outcome")?;
        match result.error {
            Some(error) => Err(TrainError::Learner(error)),
            None => Ok(history),
        }
    }
}

/// Clears what an earlier training left: burn-train reads old epochs' metrics as if they were this
/// one's.
fn clear_dir(dir: &Path) -> Result<(), TrainError> {
    for name in ["checkpoint", "train", "valid"] {
        let path = dir.join(name);
        match std::fs::remove_dir_all(&path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(TrainError::CheckpointDir { action: "clear", path, source });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Makes the directory: burn-train ignores that it cannot, and panics at the first file in it.
fn make_dir(dir: &Path) -> Result<(), TrainError> {
    for path in [dir.to_path_buf(), dir.join("checkpoint"), dir.join("train"), dir.join("valid")] {
        create_dir(&path)?;
    }
    Ok(())
}

fn create_dir(path: &Path) -> Result<(), TrainError> {
    std::fs::create_dir_all(path).map_err(|source| TrainError::CheckpointDir {
        action: "create",
        path: path.to_path_buf(),
        source,
    })
}

/// The module with new weights, each drawn by `draw`: burn's own initialisation draws from one
/// generator for all threads.
pub(crate) fn redrawn<M: Module>(module: M, which: Redrawn, draw: impl FnMut() -> f32) -> M {
    module.map(&mut Redraw { which, draw })
}

/// The parameters that are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redrawn {
    All,
    /// Norms and biases stay as they are.
    Matrices,
}

struct Redraw<F> {
    which: Redrawn,
    draw: F,
}

impl<F: FnMut() -> f32> ModuleMapper for Redraw<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.which == Redrawn::Matrices && D != 2 {
            return param;
        }
        param.map(|old| {
            let values: Vec<f32> = (0..old.shape().num_elements()).map(|_| (self.draw)()).collect();
            let new = Tensor::from_data(TensorData::new(values, old.shape()), &old.device());
            new.set_require_grad(old.is_require_grad())
        })
    }
}

/// What `config.json` keeps of a training: the settings but for those that the config has itself,
/// and the outcome. No times: the same training gives the same file.
pub(crate) fn record<const N: usize>(
    settings: &impl Serialize,
    in_config: &[&str],
    outcome: [(&str, Value); N],
) -> Map<String, Value> {
    let settings = match json!(settings) {
        Value::Object(settings) => settings,
        other => unreachable!("a struct serialises to an object: {other}"),
    };
    let settings = settings.into_iter().filter(|(key, _)| !in_config.contains(&key.as_str()));
    settings.chain(outcome.map(|(key, value)| (key.to_owned(), value))).collect()
}
