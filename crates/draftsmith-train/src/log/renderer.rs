//! What a caller needs to show progress: [`Listener`], which hears what matters of a training, and
//! [`ListeningRenderer`], which makes one of burn-train's renderers of it.
//!
//! burn-train's renderer is five traits with a score of methods, some for what we never do. Here
//! one place satisfies them; whoever shows something writes the methods that it needs.
//!
//! During [`train_heads`](crate::train_heads) and [`train_adapters`](crate::train_adapters) a
//! listener is told `start`, then for each half of an epoch `start_half`, `processed` and `number`
//! after each batch, `end_half`, and `end_epoch` after both. The numbers are named `Loss`,
//! `Learning Rate` (training), and in validation `Loss`, `training loss` (of the whole epoch), and
//! `KL`, `unshifted KL`, `BCE`, `AUROC`, `Brier`, `ECE` for heads, `cross-entropy`, `KL`,
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

/// What becomes of a renderer after the last step.
pub type EndRenderer = fn(Box<dyn MetricsRenderer>);

/// The two halves of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The rows that are trained on.
    Training,
    /// Those that are held out.
    Validation,
}

/// What a number is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// The batches so far, or the latest.
    SoFar,
    /// The whole half of the epoch.
    Whole,
}

/// Hears how a training goes, on a thread of its own. What is not written does nothing.
#[expect(unused_variables, reason = "the defaults name what they do nothing with")]
pub trait Listener: Send + Sync {
    /// It begins, in an epoch counted from 1; one that resumes, in a later one.
    fn start(&mut self, epoch: usize) {}

    /// A half of an epoch begins, of so many rows.
    fn start_half(&mut self, half: Half, num_rows: usize) {}

    /// So many rows of the half are done.
    fn processed(&mut self, num_rows: usize) {}

    /// A loss, a rate or a score.
    fn number(&mut self, half: Half, name: &str, number: f64, extent: Extent) {}

    /// The half ends.
    fn end_half(&mut self) {}

    /// The epoch ends.
    fn end_epoch(&mut self, epoch: usize) {}
}

/// Hears nothing.
impl Listener for () {}

/// A listener as burn-train's renderer.
#[derive(Debug, Default)]
pub struct ListeningRenderer<L> {
    listener: L,
    names: HashMap<MetricId, String>,
}

impl<L: Listener> ListeningRenderer<L> {
    /// A renderer that passes all on to `listener`.
    pub fn new(listener: L) -> Self {
        Self { listener, names: HashMap::new() }
    }

    fn number(&mut self, half: Half, state: &MetricState) {
        let MetricState::Numeric(entry, Some(number)) = state else { return };
        let Some(name) = self.names.get(&entry.metric_id) else { return };
        let (number, extent) = match number {
            NumericEntry::Value(number) => (*number, Extent::SoFar),
            NumericEntry::Aggregated { aggregated_value, .. } => (*aggregated_value, Extent::SoFar),
            NumericEntry::Final(number) => (*number, Extent::Whole),
        };
        self.listener.number(half, name, number, extent);
    }
}

impl<L: Listener> MetricsRendererTraining for ListeningRenderer<L> {
    fn update_train(&mut self, state: MetricState) {
        self.number(Half::Training, &state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.number(Half::Validation, &state);
    }

    // burn-train's default prints.
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

// Nothing is tested after training; the renderer's trait asks for these all the same.
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
