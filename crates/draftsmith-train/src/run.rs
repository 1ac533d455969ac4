//! The settings and the result of one run of a training. A run resumes where an earlier run
//! stopped.

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
    /// An identifier of everything that the training depends on: settings, seed, models and rows. A
    /// saved state with another fingerprint is removed.
    pub fingerprint: &'a str,
    /// The maximum number of optimizer steps in this run; `None` for no limit.
    pub max_steps: Option<usize>,
    /// The minimum time between two saved states within an epoch. Default: 60 s. If saving takes
    /// more than a fiftieth of this time, states are saved less often.
    pub save_interval: Duration,
    /// Devices that are used in addition to the frozen model's device. Default: none. Each gets a
    /// copy of the frozen model and some batches of every step; a step with fewer batches than
    /// devices leaves some idle. Gradients are added in the order of the batches. The result thus
    /// equals that of a single device, bit for bit if all devices compute alike, and a training may
    /// resume on other devices.
    pub more_devices: Vec<Device>,
    /// The place for hidden states, if the settings ask for storing them. Default:
    /// `checkpoint_dir`.
    pub features: Option<FeatureDir<'a>>,
    /// The listener that shows the progress. Default: nothing is shown.
    pub listener: Box<dyn Listener + 'a>,
    /// A callback that is called after each batch. Once it returns true, the run stops. Default:
    /// never.
    pub should_stop: Box<dyn Fn() -> bool + 'a>,
    /// A callback that receives the size of the training before it begins.
    pub begins: Box<dyn Fn(TrainingSize) + 'a>,
}

/// The size of a training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingSize {
    /// The number of planned optimizer steps.
    pub num_steps: usize,
    /// The number of trained weights.
    pub num_weights: usize,
    /// The maximum size of the saved state on disk, in bytes.
    pub num_bytes: u64,
}

impl<'a> TrainingRun<'a> {
    /// Sets up a run that goes to the end of the training and shows nothing.
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

    /// Returns the additional devices that a step of at most `num_batches` batches can use.
    pub(crate) fn more_devices(&self, num_batches: usize) -> &[Device] {
        &self.more_devices[..self.more_devices.len().min(num_batches - 1)]
    }

    /// Returns the place for stored hidden states: `features`, or else the checkpoint directory.
    pub(crate) fn feature_dir(&self) -> FeatureDir<'a> {
        self.features.clone().unwrap_or_else(|| FeatureDir {
            dir: self.checkpoint_dir,
            name: "frozen".to_owned(),
            models: self.fingerprint.to_owned(),
            notify: &|_| (),
            source: None,
        })
    }
}

/// The data, devices and settings of a run, without the models to train.
pub(crate) struct Setup<S> {
    pub(crate) loaders: Loaders<S>,
    /// The devices of the trained models, with autodiff.
    pub(crate) devices: PerDevice<Device>,
    pub(crate) optimizer: OptimizerSettings,
    /// The kind of the trained models, for listeners.
    pub(crate) label: &'static str,
}

/// The result of a run.
#[derive(Debug)]
pub enum Ending<T> {
    /// Training reached its end.
    Finished(T),
    /// Training was stopped before its end. The state is saved.
    Stopped {
        /// The best result so far; `None` before the end of the first epoch.
        best: Option<T>,
        /// The number of optimizer steps since training began.
        num_steps: usize,
        /// The number of optimizer steps of the whole training.
        num_planned_steps: usize,
    },
}

impl<T> Ending<Vec<T>> {
    /// Builds the result of a run. `interrupted` is true if the run stopped before the end of the
    /// training. `trained` converts the best weights of each member (one of the models trained side
    /// by side), given its index.
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
    /// Converts the trained modules to [`TrainedExport`]s, which do not depend on the module's
    /// type.
    pub fn into_exports(self) -> Ending<Vec<TrainedExport>> {
        self.map(|all| all.into_iter().map(Into::into).collect())
    }
}

impl<T> Ending<T> {
    /// Converts the result with `then`.
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
