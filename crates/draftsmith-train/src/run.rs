//! One run of a training, which resumes where an earlier run stopped: its settings and result.

pub(crate) mod checkpoint;
pub(crate) mod clipping;
pub(crate) mod devices;
pub(crate) mod epochs;
pub(crate) mod member;
pub(crate) mod optimizer;
pub(crate) mod progress;
pub(crate) mod trained;
pub(crate) mod trainer;
pub(crate) mod update;

use std::path::Path;
use std::time::Duration;

use burn::tensor::Device;

use self::devices::PerDevice;
use self::member::{Trainee, TrainingMember};
use self::optimizer::OptimizerSettings;
use self::progress::RunProgress;
use self::trained::{Outcome, TrainedExport};
use self::trainer::Trainer;
use crate::data::{Loaders, RowCounts};
use crate::log::renderer::Listener;
use crate::states::FeatureDir;

/// The default of [`TrainingRun::save_interval`].
const SAVE_INTERVAL: Duration = Duration::from_secs(60);

/// The settings of one run: where its state is saved, how long it may take, which devices it uses, and how
/// its progress is shown.
pub struct TrainingRun<'a> {
    /// The directory for the training's state and metrics.
    pub checkpoint_dir: &'a Path,
    /// Identifies everything that the training depends on: settings, seed, models and rows. A state with
    /// another fingerprint is removed.
    pub fingerprint: &'a str,
    /// The most optimizer steps of this run; `None` for no limit.
    pub max_steps: Option<usize>,
    /// The least time between two saved states within an epoch. Default: 60 s. States are saved less often
    /// if saving takes more than a fiftieth of this.
    pub save_interval: Duration,
    /// Devices that share the work with the frozen model's device. Default: none. Each gets a copy of the
    /// frozen model and some batches of every step; a step with fewer batches than devices leaves some
    /// idle. Sums are taken in the order of the batches, so the result equals that of a single device, bit
    /// for bit where all compute alike, and a training may resume on other devices.
    pub more_devices: Vec<Device>,
    /// Where hidden states are stored if the settings ask for it. Default: beside the state.
    pub features: Option<FeatureDir<'a>>,
    /// Shows the progress. Default: nothing is shown.
    pub listener: Box<dyn Listener + 'a>,
    /// Called after each batch; once it returns true, the run stops. Default: never.
    pub should_stop: Box<dyn Fn() -> bool + 'a>,
    /// Called with the size of the training before it begins.
    pub begins: Box<dyn Fn(TrainingSize) + 'a>,
}

/// The size of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingSize {
    /// Planned optimizer steps.
    pub num_steps: usize,
    /// Trained weights.
    pub num_weights: usize,
    /// The most bytes that its state takes on the disk.
    pub num_bytes: u64,
}

impl<'a> TrainingRun<'a> {
    /// Sets up a run to the end of the training that shows nothing.
    pub fn new(checkpoint_dir: &'a Path, fingerprint: &'a str) -> Self {
        Self {
            checkpoint_dir,
            fingerprint,
            max_steps: None,
            save_interval: SAVE_INTERVAL,
            more_devices: Vec::new(),
            features: None,
            listener: Box::new(()),
            should_stop: Box::new(|| false),
            begins: Box::new(|_| ()),
        }
    }

    /// Returns the devices besides the first that a step of at most `num_batches` batches can use.
    pub(crate) fn more_devices(&self, num_batches: usize) -> &[Device] {
        &self.more_devices[..self.more_devices.len().min(num_batches - 1)]
    }

    /// Returns where hidden states are stored: in the checkpoint directory, unless the run has a place for them.
    pub(crate) fn feature_dir(&self) -> FeatureDir<'a> {
        self.features.clone().unwrap_or_else(|| FeatureDir {
            dir: self.checkpoint_dir,
            name: "frozen".to_owned(),
            models: self.fingerprint.to_owned(),
            notify: &|_| (),
        })
    }
}

/// What a run needs besides the models to train.
pub(crate) struct Setup<S> {
    pub(crate) loaders: Loaders<S>,
    /// With autodiff.
    pub(crate) devices: PerDevice<Device>,
    pub(crate) optimizer: OptimizerSettings,
    /// What is trained, for listeners.
    pub(crate) label: &'static str,
}

/// The result of a run.
#[derive(Debug)]
pub enum Ending<T> {
    /// Training reached its end.
    Finished(T),
    /// Training was stopped before its end. Its state is saved.
    Stopped {
        /// The best result so far; `None` before the end of the first epoch.
        best: Option<T>,
        /// Optimizer steps since training began.
        num_steps: usize,
        /// Optimizer steps of the whole training.
        num_planned_steps: usize,
    },
}

impl<T> Ending<Vec<T>> {
    /// Returns the result of a run, which was `interrupted` if it stopped before the end: `trained` converts each
    /// member's best weights, given the member's index.
    fn of_members<L: Trainee>(
        trainer: Trainer<L>,
        interrupted: bool,
        num_planned_steps: usize,
        rows: RowCounts,
        mut trained: impl FnMut(usize, L::Part, Outcome<L::Scores>) -> T,
    ) -> Self {
        let RunProgress { num_steps, duration, .. } = trainer.progress;
        let members = trainer.members.into_iter().enumerate();
        let best = members.map(|(nth, TrainingMember { progress, best, .. })| {
            let (part, best) = best.zip(progress.best)?;
            let interrupted = interrupted && !progress.is_out_of_patience(trainer.patience);
            Some(trained(nth, part, Outcome { progress, best, interrupted, rows, duration }))
        });
        let best: Option<Vec<T>> = best.collect();
        if interrupted {
            return Self::Stopped { best, num_steps, num_planned_steps };
        }
        Self::Finished(best.expect("a finished training has validated an epoch"))
    }
}

impl<T: Into<TrainedExport>> Ending<Vec<T>> {
    /// Converts what was trained to exports of any type.
    pub fn into_exports(self) -> Ending<Vec<TrainedExport>> {
        self.map(|all| all.into_iter().map(Into::into).collect())
    }
}

impl<T> Ending<T> {
    /// Converts the result.
    pub fn map<U>(self, then: impl FnOnce(T) -> U) -> Ending<U> {
        match self {
            Self::Finished(best) => Ending::Finished(then(best)),
            Self::Stopped { best, num_steps, num_planned_steps } => {
                Ending::Stopped { best: best.map(then), num_steps, num_planned_steps }
            }
        }
    }

    /// Returns the best result, finished or not; `None` if the run stopped before it had one.
    pub fn best(self) -> Option<T> {
        match self {
            Self::Finished(best) => Some(best),
            Self::Stopped { best, .. } => best,
        }
    }
}
