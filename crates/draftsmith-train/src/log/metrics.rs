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

/// Where an epoch's scores lie between the loop and the metrics.
#[derive(Debug)]
pub(crate) struct ScoreSlot<S>(Arc<Mutex<Option<S>>>);

impl<S> Default for ScoreSlot<S> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(None)))
    }
}

impl<S> Clone for ScoreSlot<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Copy> ScoreSlot<S> {
    pub(crate) fn set(&self, scores: Option<S>) {
        *self.0.lock().expect("nothing panics while it holds the slot") = scores;
    }

    fn get(&self) -> Option<S> {
        *self.0.lock().expect("nothing panics while it holds the slot")
    }
}

/// One number of the scores: what it is called, and where it is.
pub(crate) struct Score<S> {
    pub(crate) name: &'static str,
    pub(crate) higher_is_better: bool,
    pub(crate) pick: fn(&S) -> f64,
}

/// The mean training loss of a whole epoch, however often it was stopped: burn-train's own mean
/// begins anew with each run.
pub(crate) const TRAINING_LOSS: Score<f64> =
    Score { name: "training loss", higher_is_better: false, pick: |loss| *loss };

/// One number of the scores, as a metric.
#[derive(Debug, Clone)]
pub(crate) struct ScoreMetric<S> {
    name: MetricName,
    higher_is_better: bool,
    pick: fn(&S) -> f64,
    slot: ScoreSlot<S>,
}

impl<S: Copy> ScoreMetric<S> {
    pub(crate) fn new(score: &Score<S>, slot: &ScoreSlot<S>) -> Self {
        Self {
            name: Arc::new(score.name.to_owned()),
            higher_is_better: score.higher_is_better,
            pick: score.pick,
            slot: slot.clone(),
        }
    }

    fn read(&self) -> f64 {
        self.slot.get().map_or(f64::NAN, |scores| (self.pick)(&scores))
    }
}

impl<S: Copy + Send + Sync + 'static> Metric for ScoreMetric<S> {
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

impl<S: Copy + Send + Sync + 'static> Numeric for ScoreMetric<S> {
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
