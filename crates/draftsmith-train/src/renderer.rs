//! What a caller needs to show progress: burn-train's renderer traits and the types in their
//! methods, and a renderer that shows nothing.
//!
//! A renderer implements [`MetricsRenderer`] and its four parents. During
//! [`train_head`](crate::train_head) and [`train_adapter`](crate::train_adapter) it is told `start`,
//! then for each epoch `start_split` ("train", then "valid"), `update_split` (rows so far) and
//! `update_train` or `update_valid` after each batch, `end_split`, `update_epoch`; and `end`. The
//! metrics are named `Loss`, `Learning Rate` (training), and in validation `Loss`, `training loss` (of
//! the whole epoch), and `KL`, `BCE`, `AUROC`, `Brier`, `ECE` for heads, `cross-entropy`, `KL`,
//! `agreement`, `overlap` for adapters (all but the `Loss` come once, at the end of the split, as
//! [`NumericEntry::Final`]). A run that goes on begins in the epoch that `start` names.

pub use burn_train::LearnerSummary;
pub use burn_train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
pub use burn_train::metric::{
    MetricAttributes, MetricDefinition, MetricEntry, MetricId, NumericAttributes, NumericEntry,
    SerializedEntry,
};
pub use burn_train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};

/// A renderer that shows nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct SilentRenderer;

impl MetricsRendererTraining for SilentRenderer {
    fn update_train(&mut self, _state: MetricState) {}

    fn update_valid(&mut self, _state: MetricState) {}

    fn on_train_end(
        &mut self,
        _summary: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl MetricsRendererEvaluation for SilentRenderer {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn on_test_end(
        &mut self,
        _summary: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for SilentRenderer {
    fn start(
        &mut self,
        _total_epochs: usize,
        _starting_epoch: usize,
        _total_items: Option<usize>,
        _label: Option<&str>,
    ) {
    }

    fn update_epoch(&mut self, _epoch: usize) {}

    fn start_split(&mut self, _split: &str, _total_items: usize) {}

    fn update_split(&mut self, _items_processed: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _event: String) {}
}

impl EvaluationProgressLogger for SilentRenderer {
    fn start_global_progress(&mut self, _total_tests: usize) {}

    fn start_test(&mut self, _name: &str, _total_items: usize) {}

    fn update_test_progress(&mut self, _items_processed: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRenderer for SilentRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _definition: MetricDefinition) {}
}
