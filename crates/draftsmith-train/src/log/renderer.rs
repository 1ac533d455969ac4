//! Progress display: the trait [`Listener`], and [`ListeningRenderer`], which turns a listener into a
//! burn-train renderer.
//!
//! burn-train's renderer consists of five traits with some twenty methods, several for features that
//! training here does not use. A listener implements only the methods that it needs.
//!
//! During [`train_heads`](crate::train_heads) and [`train_adapters`](crate::train_adapters) a listener
//! receives `start`, then for each half of an epoch `start_half`, `processed` and `number` after every
//! batch, and `end_half`, and after both halves `end_epoch`. The numbers are named `Loss` and
//! `Learning Rate` in training. In validation they are `Loss`, `training loss` (the mean of the epoch),
//! and `KL`, `unshifted KL`, `BCE`, `AUROC`, `Brier`, `ECE` for heads or `cross-entropy`, `KL`,
//! `agreement`, `overlap` for adapters.

use std::collections::HashMap;
use std::error::Error;

use burn_train::LearnerSummary;
use burn_train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn_train::metric::{MetricDefinition, MetricId, NumericEntry};
pub use burn_train::renderer::MetricsRenderer;
/// burn-train's dashboard, for a terminal.
pub use burn_train::renderer::tui::TuiMetricsRendererWrapper as Dashboard;
use burn_train::renderer::{
    EvaluationName, MetricState, MetricsRendererEvaluation, MetricsRendererTraining,
};

/// Disposes of a renderer after the last step.
pub type EndRenderer = fn(Box<dyn MetricsRenderer>);

/// The two halves of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The training rows.
    Training,
    /// The held-out rows.
    Validation,
}

/// Receives the progress of a training, on a separate thread. By default every method does nothing.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait Listener: Send + Sync {
    /// Training begins or resumes in an epoch, counted from 1.
    fn start(&mut self, epoch: usize) {}

    /// A half of an epoch with `num_rows` rows begins.
    fn start_half(&mut self, half: Half, num_rows: usize) {}

    /// `num_rows` rows of the half are done.
    fn processed(&mut self, num_rows: usize) {}

    /// A loss, learning rate or score: the latest, the mean so far, or the final one.
    fn number(&mut self, half: Half, name: &str, number: f64) {}

    /// The half of the epoch ends.
    fn end_half(&mut self) {}

    /// The epoch ends.
    fn end_epoch(&mut self, epoch: usize) {}
}

/// Ignores everything.
impl Listener for () {}

/// A listener as a burn-train renderer.
#[derive(Debug, Default)]
pub struct ListeningRenderer<L> {
    listener: L,
    names: HashMap<MetricId, String>,
}

impl<L: Listener> ListeningRenderer<L> {
    /// A renderer that passes everything on to `listener`.
    pub fn new(listener: L) -> Self {
        Self { listener, names: HashMap::new() }
    }

    fn number(&mut self, half: Half, state: &MetricState) {
        let MetricState::Numeric(entry, Some(number)) = state else { return };
        let Some(name) = self.names.get(&entry.metric_id) else { return };
        let number = match number {
            NumericEntry::Value(number) | NumericEntry::Final(number) => *number,
            NumericEntry::Aggregated { aggregated_value, .. } => *aggregated_value,
        };
        self.listener.number(half, name, number);
    }
}

impl<L: Listener> MetricsRendererTraining for ListeningRenderer<L> {
    fn update_train(&mut self, state: MetricState) {
        self.number(Half::Training, &state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.number(Half::Validation, &state);
    }

    // burn-train's default implementation prints.
    fn on_train_end(&mut self, _summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl<L: Listener> TrainingProgressLogger for ListeningRenderer<L> {
    fn start(
        &mut self,
        _total_epochs: usize,
        starting_epoch: usize,
        _total_items: Option<usize>,
        _label: Option<&str>,
    ) {
        self.listener.start(starting_epoch);
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.listener.end_epoch(epoch);
    }

    fn start_split(&mut self, split: &str, total_items: usize) {
        let half = if split == "train" { Half::Training } else { Half::Validation };
        self.listener.start_half(half, total_items);
    }

    fn update_split(&mut self, items_processed: usize) {
        self.listener.processed(items_processed);
    }

    fn end_split(&mut self) {
        self.listener.end_half();
    }

    fn end(&mut self) {}

    fn log_event_training(&mut self, _event: String) {}
}

impl<L: Listener> MetricsRenderer for ListeningRenderer<L> {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }
}

// Required by the trait. Training here has no test phase.
impl<L: Listener> MetricsRendererEvaluation for ListeningRenderer<L> {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn on_test_end(&mut self, _summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

impl<L: Listener> EvaluationProgressLogger for ListeningRenderer<L> {
    fn start_global_progress(&mut self, _total_tests: usize) {}

    fn start_test(&mut self, _name: &str, _total_items: usize) {}

    fn update_test_progress(&mut self, _items_processed: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}
