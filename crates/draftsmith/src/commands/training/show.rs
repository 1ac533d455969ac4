//! Training progress on the console: a bar an epoch, and a line with its losses at its end.

use std::collections::{BTreeMap, HashMap};

use draftsmith_train::renderer::{
    EvaluationName, EvaluationProgressLogger, LearnerSummary, MetricDefinition, MetricId,
    MetricState, MetricsRenderer, MetricsRendererEvaluation, MetricsRendererTraining, NumericEntry,
    TrainingProgressLogger,
};

use crate::console::Console;
use crate::progress::Progress;

/// burn-train's renderer, on stderr.
pub(crate) struct EpochProgress {
    console: Console,
    /// The command, which bars and lines begin with.
    command: &'static str,
    /// The validation scores that an epoch's line tells.
    told: &'static [&'static str],
    num_epochs: usize,
    epoch: usize,
    training: bool,
    bar: Option<Progress>,
    names: HashMap<MetricId, String>,
    /// The scores of the epoch.
    scores: BTreeMap<String, f64>,
    processed: usize,
}

impl EpochProgress {
    pub(crate) fn new(
        console: &Console,
        command: &'static str,
        told: &'static [&'static str],
        num_epochs: usize,
    ) -> Self {
        Self {
            console: console.clone(),
            command,
            told,
            num_epochs,
            epoch: 1,
            training: true,
            bar: None,
            names: HashMap::new(),
            scores: BTreeMap::new(),
            processed: 0,
        }
    }

    fn numeric(&self, state: &MetricState) -> Option<(String, f64)> {
        match state {
            MetricState::Numeric(entry, Some(value)) => {
                let name = self.names.get(&entry.metric_id)?.clone();
                let value = match value {
                    NumericEntry::Value(value) | NumericEntry::Final(value) => *value,
                    NumericEntry::Aggregated { aggregated_value, .. } => *aggregated_value,
                };
                Some((name, value))
            }
            MetricState::Numeric(_, None) | MetricState::Generic(_) => None,
        }
    }

    fn end_of_epoch(&mut self) {
        let score = |name: &&str| self.scores.get(*name).map(|value| format!("{name} {value:.4}"));
        let scores: Vec<String> = self.told.iter().filter_map(score).collect();
        self.console.note(format!(
            "{}: epoch {}/{}, training loss {}; validation {}",
            self.command,
            self.epoch,
            self.num_epochs,
            self.scores.get("training loss").map_or_else(|| "-".to_owned(), |l| format!("{l:.4}")),
            scores.join(", "),
        ));
        self.scores.clear();
    }
}

impl MetricsRendererTraining for EpochProgress {
    fn update_train(&mut self, state: MetricState) {
        if let Some((name, value)) = self.numeric(&state)
            && name == "Loss"
            && let Some(bar) = &self.bar
        {
            bar.message(format!("epoch {}, loss {value:.4}", self.epoch));
        }
    }

    fn update_valid(&mut self, state: MetricState) {
        if let Some((name, value)) = self.numeric(&state) {
            self.scores.insert(name, value);
        }
    }

    fn on_train_end(
        &mut self,
        _summary: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for EpochProgress {
    fn start(
        &mut self,
        _total_epochs: usize,
        starting_epoch: usize,
        _total_items: Option<usize>,
        _label: Option<&str>,
    ) {
        self.epoch = starting_epoch.max(1);
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.epoch = epoch;
        self.end_of_epoch();
        self.epoch = epoch + 1;
    }

    fn start_split(&mut self, split: &str, total_items: usize) {
        self.training = split == "train";
        let name = if self.training { self.command } else { "validate" };
        self.bar = Some(Progress::new(&self.console, name, "rows", total_items as u64));
        self.processed = 0;
    }

    fn update_split(&mut self, items_processed: usize) {
        if let Some(bar) = &self.bar {
            bar.advance(items_processed.saturating_sub(self.processed) as u64);
        }
        self.processed = items_processed;
    }

    fn end_split(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.clear();
        }
    }

    fn end(&mut self) {}

    // Steps and the like: the bar says as much.
    fn log_event_training(&mut self, _event: String) {}
}

// Nothing is tested after training; the trait asks for these all the same.
impl MetricsRendererEvaluation for EpochProgress {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}

    fn on_test_end(
        &mut self,
        _summary: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl EvaluationProgressLogger for EpochProgress {
    fn start_global_progress(&mut self, _total_tests: usize) {}

    fn start_test(&mut self, _name: &str, _total_items: usize) {}

    fn update_test_progress(&mut self, _items_processed: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRenderer for EpochProgress {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name.to_string());
    }
}
