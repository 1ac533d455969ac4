//! Validation scores as burn-train metrics, so that any of its renderers can show them.
//!
//! burn's own AUROC takes only hard labels, and separate metrics would each collect all predictions
//! again. Instead the training loop computes all scores of an epoch at once and stores them in a
//! [`ScoreSlot`]; each metric reads one of them at the end of the validation.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use burn::tensor::TensorReadError;
use burn_train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

/// The scores of the latest validation, by name.
pub(crate) type ScoreSlot = Arc<Mutex<HashMap<&'static str, f64>>>;

/// One score of a validation.
pub(crate) struct Score<S> {
    pub(crate) name: &'static str,
    pub(crate) higher_is_better: bool,
    pub(crate) pick: fn(&S) -> f64,
}

/// The name of the mean training loss of an epoch. burn-train's own mean covers only the current run.
pub(crate) const TRAINING_LOSS: &str = "training loss";

/// A score as a metric.
#[derive(Debug, Clone)]
pub(crate) struct ScoreMetric {
    name: MetricName,
    higher_is_better: bool,
    scores: ScoreSlot,
}

impl ScoreMetric {
    pub(crate) fn new(name: &'static str, higher_is_better: bool, scores: &ScoreSlot) -> Self {
        Self { name: Arc::new(name.to_owned()), higher_is_better, scores: scores.clone() }
    }

    /// The score; NaN after an interrupted validation.
    fn read(&self) -> f64 {
        let scores = self.scores.lock().expect("nothing panics while it holds the scores");
        scores.get(self.name.as_str()).copied().unwrap_or(f64::NAN)
    }
}

impl Metric for ScoreMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes { unit: None, higher_is_better: self.higher_is_better }.into()
    }

    fn update(
        &mut self,
        _item: &(),
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, TensorReadError> {
        Ok(SerializedEntry::not_available(None))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        let value = self.read();
        let formatted = format!("epoch {value:.4}");
        Ok(SerializedEntry::new(formatted, NumericEntry::Final(value).serialize()))
    }

    fn clear(&mut self) {}
}

impl Numeric for ScoreMetric {
    fn value(&self) -> Option<NumericEntry> {
        None
    }

    fn running_value(&self) -> Option<NumericEntry> {
        None
    }

    fn final_value(&self) -> NumericEntry {
        NumericEntry::Final(self.read())
    }
}
