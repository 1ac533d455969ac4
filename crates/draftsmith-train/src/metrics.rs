//! Validation scores as burn-train's metrics, so that its logs and any renderer have them.
//!
//! burn's own AUROC takes hard labels only, and five metrics that each gather every prediction
//! would gather them five times. Here the loop scores an epoch once and leaves the scores in a
//! slot; each metric reads one number of it at the end of the split.

use std::sync::{Arc, Mutex};

use burn::tensor::TensorReadError;
use burn_train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use draftsmith_theory::HeadScores;

/// Where an epoch's scores lie between the loop and the metrics.
#[derive(Debug, Clone, Default)]
pub(crate) struct ScoreSlot(Arc<Mutex<Option<HeadScores>>>);

impl ScoreSlot {
    pub(crate) fn set(&self, scores: Option<HeadScores>) {
        *self.0.lock().expect("nothing panics while it holds the slot") = scores;
    }

    fn get(&self) -> Option<HeadScores> {
        *self.0.lock().expect("nothing panics while it holds the slot")
    }
}

/// One number of the scores.
#[derive(Debug, Clone)]
pub(crate) struct ScoreMetric {
    name: MetricName,
    higher_is_better: bool,
    pick: fn(&HeadScores) -> f64,
    slot: ScoreSlot,
}

impl ScoreMetric {
    /// KL, BCE, AUROC, Brier and ECE.
    pub(crate) fn all(slot: &ScoreSlot) -> [Self; 5] {
        let metric = |name: &str, higher_is_better, pick| Self {
            name: Arc::new(name.to_owned()),
            higher_is_better,
            pick,
            slot: slot.clone(),
        };
        [
            metric("KL", false, |scores| scores.kl),
            metric("BCE", false, |scores| scores.bce),
            metric("AUROC", true, |scores| scores.auroc.unwrap_or(f64::NAN)),
            metric("Brier", false, |scores| scores.brier),
            metric("ECE", false, |scores| scores.ece),
        ]
    }

    fn read(&self) -> f64 {
        self.slot.get().map_or(f64::NAN, |scores| (self.pick)(&scores))
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
