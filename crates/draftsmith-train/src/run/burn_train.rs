//! Our loop as a training of burn-train: what exists only because burn-train's types ask for it.
//!
//! burn-train gives the loop its events, metrics and renderers, the dashboard among them. They are
//! to be had through `SupervisedTraining` alone, which is made for a loop of its own and so wants
//! what ours has itself: a learner (a copy of the first member; its optimizer is not used), two data
//! loaders (burn-train's are asked for batches without saying which), a strategy that can be
//! called twice and returns no error of ours, and a logger: its own writes files that panic on a full
//! disk, and `log/` writes what they would hold.

use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::tensor::Device;
use burn_train::logger::MetricLogger;
use burn_train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn_train::metric::{
    Adaptor, LearningRateMetric, LossInput, LossMetric, MetricDefinition, NumericEntry,
};
use burn_train::renderer::MetricsRenderer;
use burn_train::{
    InferenceStep, Interrupter, Learner, SupervisedLearningStrategy, SupervisedTraining,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingStrategy,
    ValidLoader,
};

use crate::data::batches::BatchSource;
use crate::error::TrainError;
use crate::log::metrics::{ScoreMetric, TRAINING_LOSS};
use crate::run::epochs::{EpochLoop, History};
use crate::run::trainee::Trainee;

/// Runs the loop with burn-train's events. `label` is what is trained, for renderers. Gives the
/// renderer back.
pub(crate) fn launch<L, S>(
    epochs: EpochLoop<L, S>,
    label: &str,
    renderer: Box<dyn MetricsRenderer>,
    interrupter: Interrupter,
) -> (Box<dyn MetricsRenderer>, Result<History<L>, TrainError>)
where
    L: Trainee,
    S: BatchSource<Batch = L::Batch>,
    <L as TrainStep>::Output: Adaptor<LossInput> + Adaptor<()>,
    <L as InferenceStep>::Output: Adaptor<LossInput> + Adaptor<()>,
{
    let first = &epochs.trainer.members[0];
    let schedule = epochs.trainer.schedule.clone();
    let learner = Learner::new(first.model.clone(), first.optimizer.clone(), schedule);
    let (slot, loss_slot) = (epochs.slot.clone(), epochs.loss_slot.clone());
    let (num_epochs, starting_epoch) = (epochs.loaders.num_epochs, epochs.trainer.progress.epoch);
    let outcome = Arc::new(Mutex::new(None));
    let strategy = Strategy { epochs: Mutex::new(Some(epochs)), outcome: outcome.clone() };
    let supervised = SupervisedTraining::new("", Arc::new(NoLoader), Arc::new(NoLoader))
        .with_metric_logger(NoLogger)
        // The default one installs a global subscriber and a panic hook.
        .with_application_logger(None)
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
        .with_interrupter(interrupter)
        .renderer(renderer)
        .num_epochs(num_epochs)
        // Only tells the renderer where it begins: there is no checkpointer of burn-train's.
        .checkpoint(starting_epoch - 1)
        .label(label)
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
    let outcome =
        outcome.expect("the loop leaves an outcome").and_then(|history| match result.error {
            Some(error) => Err(TrainError::Learner(error)),
            None => Ok(history),
        });
    (result.renderer, outcome)
}

/// How a run ended, once it has.
type Outcome<L> = Arc<Mutex<Option<Result<History<L>, TrainError>>>>;

/// The loop as burn-train's strategy, which is called by reference and returns neither an error nor
/// what was trained beside the first member.
struct Strategy<L: Trainee, S> {
    /// Taken once, when the loop begins.
    epochs: Mutex<Option<EpochLoop<L, S>>>,
    outcome: Outcome<L>,
}

impl<L: Trainee, S: BatchSource<Batch = L::Batch>> SupervisedLearningStrategy<L>
    for Strategy<L, S>
{
    fn fit(
        &self,
        components: TrainingComponents<L>,
        _learner: Learner<L>,
        _training: TrainLoader<L>,
        _validation: ValidLoader<L>,
        _starting_epoch: usize,
    ) -> (L, SupervisedTrainingEventProcessor<L>) {
        let epochs = self.epochs.lock().expect("nothing panics while it holds the loop").take();
        let epochs = epochs.expect("a loop runs once");
        let (outcome, events, model) =
            epochs.run(components.event_processor, components.interrupter);
        *self.outcome.lock().expect("nothing panics while it holds the outcome") = Some(outcome);
        (model, events)
    }
}

/// In place of a loader that nobody asks for anything.
struct NoLoader;

impl<B: 'static> DataLoader<B> for NoLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<B> + 'a> {
        unreachable!("the loop has loaders of its own")
    }

    fn num_items(&self) -> usize {
        0
    }

    fn to_device(&self, _device: &Device) -> Arc<dyn DataLoader<B>> {
        Arc::new(Self)
    }

    fn slice(&self, _start: usize, _end: usize) -> Arc<dyn DataLoader<B>> {
        Arc::new(Self)
    }
}

/// In place of a logger that writes files of its own.
struct NoLogger;

impl MetricLogger for NoLogger {
    fn log(&mut self, _update: MetricsUpdate, _epoch: usize, _split: &Split) {}

    fn read_numeric(
        &mut self,
        _name: &str,
        _epoch: usize,
        _split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        Ok(Vec::new())
    }

    fn log_metric_definition(&mut self, _definition: MetricDefinition) {}

    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}
