//! How tests watch a training: a renderer that stops it, and the files that it leaves.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn_train::Interrupter;

use crate::renderer::{
    EvaluationName, EvaluationProgressLogger, MetricDefinition, MetricState, MetricsRenderer,
    MetricsRendererEvaluation, MetricsRendererTraining, NumericEntry, TrainingProgressLogger,
};
use crate::stint::Ending;

/// What a training that was not stopped left.
#[track_caller]
pub(crate) fn finished<T>(ending: Ending<T>) -> T {
    match ending {
        Ending::Finished(trained) => trained,
        Ending::Stopped { num_steps, .. } => panic!("stopped after step {num_steps}"),
    }
}

/// The one thing that a training that was not stopped left.
#[track_caller]
pub(crate) fn only<T>(ending: Ending<Vec<T>>) -> T {
    let mut all = finished(ending);
    assert_eq!(all.len(), 1);
    all.remove(0)
}

/// Every file under a directory, relative to it.
pub(crate) fn files_under(dir: &Path) -> BTreeSet<PathBuf> {
    let mut files = BTreeSet::new();
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(next) = dirs.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                dirs.push(path);
            } else {
                files.insert(path.strip_prefix(dir).unwrap().to_path_buf());
            }
        }
    }
    files
}

/// Stops the run when `update_split` has been called a number of times, and counts what it is
/// told.
pub(crate) struct Watcher {
    pub(crate) interrupter: Interrupter,
    pub(crate) stop_after: usize,
    pub(crate) num_updates: Arc<AtomicUsize>,
    pub(crate) num_final_scores: Arc<AtomicUsize>,
}

impl MetricsRendererTraining for Watcher {
    fn update_train(&mut self, _state: MetricState) {}

    fn update_valid(&mut self, state: MetricState) {
        // A validation that is interrupted has no scores.
        if let MetricState::Numeric(_, Some(NumericEntry::Final(value))) = state
            && value.is_finite()
        {
            self.num_final_scores.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl MetricsRendererEvaluation for Watcher {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl TrainingProgressLogger for Watcher {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}

    fn update_epoch(&mut self, _epoch: usize) {}

    fn start_split(&mut self, _split: &str, _total_items: usize) {}

    fn update_split(&mut self, _items_processed: usize) {
        if self.num_updates.fetch_add(1, Ordering::SeqCst) + 1 == self.stop_after {
            self.interrupter.stop(Some("enough"));
        }
    }

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _event: String) {}
}

impl EvaluationProgressLogger for Watcher {
    fn start_global_progress(&mut self, _total_tests: usize) {}

    fn start_test(&mut self, _name: &str, _total_items: usize) {}

    fn update_test_progress(&mut self, _items_processed: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRenderer for Watcher {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _definition: MetricDefinition) {}
}
