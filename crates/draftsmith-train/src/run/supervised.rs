//! The adapter between the training loop and burn-train.
//!
//! burn-train provides events, metrics and renderers, including the dashboard; the loop is ours
//! (`epochs.rs`). `SupervisedTraining` is the only way to get the former, and it is built for burn-train's
//! own loop. This module contains everything that exists only because of its types: a learner that is a copy
//! of the first member, with an unused optimizer and learning rate; data loaders that are never read (a
//! request for a batch would not say for which step); a strategy that can be called only once and cannot
//! return our errors; and an empty logger, because burn-train's panics on a full disk (`log/` writes the
//! numbers instead).

use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::tensor::Device;
use burn_train::logger::MetricLogger;
use burn_train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn_train::metric::{LearningRateMetric, LossMetric, MetricDefinition, NumericEntry};
use burn_train::renderer::MetricsRenderer;
use burn_train::{
    Interrupter, Learner, SupervisedLearningStrategy, SupervisedTraining,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingStrategy,
    ValidLoader,
};

use crate::data::BatchSource;
use crate::error::TrainError;
use crate::log::metrics::{ScoreMetric, TRAINING_LOSS};
use crate::run::epochs::{EpochLoop, History};
use crate::run::member::Trainee;

/// Runs the loop with burn-train's events, and returns the renderer and the result. `label` names what is
/// trained, for renderers.
pub(crate) fn launch<L, S>(
    epochs: EpochLoop<L, S>,
    label: &str,
    renderer: Box<dyn MetricsRenderer>,
    interrupter: Interrupter,
) -> (Box<dyn MetricsRenderer>, Result<History<L>, TrainError>)
where
    L: Trainee,
    S: BatchSource<Content = L::Content>,
{
    let first = &epochs.trainer.members[0];
    let learner = Learner::new(first.model.clone(), first.optimizer.clone(), 0.0);
    let scores = epochs.scores.clone();
    let (num_epochs, starting_epoch) = (epochs.loaders.num_epochs, epochs.trainer.progress.epoch);
    let outcome = Arc::new(Mutex::new(None));
    let strategy = Strategy { epochs: Mutex::new(Some(epochs)), outcome: outcome.clone() };
    let supervised = SupervisedTraining::new("", Arc::new(NoLoader), Arc::new(NoLoader))
        .with_metric_logger(NoLogger)
        // The default logger installs a global subscriber and a panic hook.
        .with_application_logger(None)
        .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
        .with_interrupter(interrupter)
        .renderer(renderer)
        .num_epochs(num_epochs)
        // Without a checkpointer this only sets the first epoch that the renderer shows.
        .checkpoint(starting_epoch - 1)
        .label(label)
        .metric_train_numeric(LossMetric::new())
        .metric_train_numeric(LearningRateMetric::new())
        .metric_valid_numeric(LossMetric::new())
        .metric_valid_numeric(ScoreMetric::new(TRAINING_LOSS, false, &scores));
    let supervised = L::SCORES
        .iter()
        .map(|score| ScoreMetric::new(score.name, score.higher_is_better, &scores))
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

/// The result of the loop, once it has ended.
type LoopResult<L> = Arc<Mutex<Option<Result<History<L>, TrainError>>>>;

/// The loop as a burn-train strategy. A strategy is called by reference, and returns neither errors nor
/// members other than the first.
struct Strategy<L: Trainee, S> {
    /// Taken when the loop begins.
    epochs: Mutex<Option<EpochLoop<L, S>>>,
    outcome: LoopResult<L>,
}

impl<L: Trainee, S: BatchSource<Content = L::Content>> SupervisedLearningStrategy<L>
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

/// A data loader that is never read.
struct NoLoader;

impl<B: 'static> DataLoader<B> for NoLoader {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<B> + 'a> {
        unreachable!("the loop has other loaders")
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

/// A logger that writes nothing.
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
