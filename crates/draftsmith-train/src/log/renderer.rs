//! Progress display: the trait [`Listener`], and [`RenderingListener`], which shows the progress with a
//! burn-train renderer such as its [`Dashboard`].
//!
//! All uses of burn-train are in this file. Its training loop is not used: it counts batches to
//! find the end of a step, drops the labels of validation batches, keeps no best model in memory,
//! cannot return our errors, and saves only at the ends of epochs.
//!
//! [`train_heads`](crate::train_heads) and [`train_self_drafts`](crate::train_self_drafts) call the
//! methods of a listener in this order: `start`; for each half of an epoch `start_half`,
//! `processed` after every batch, and `end_half`; `end_epoch` after both halves; and at last `end`.
//! The numbers of a training batch, `Loss` and `Learning Rate`, are sent when its step ends. The
//! `Loss` of a validation batch is sent just before the `processed` call for it. A complete
//! validation ends with its scores: `training loss` (the mean of the epoch), and `KL`, `unshifted
//! KL`, `BCE`, `AUROC`, `Brier`, `ECE` for heads or `cross-entropy`, `KL`, `agreement`, `overlap`
//! for adapters.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

pub use burn_train::Interrupter;
use burn_train::metric::state::{FormatOptions, NumericMetricState};
use burn_train::metric::{
    MetricDefinition, MetricEntry, MetricId, NumericAttributes, NumericEntry, SerializedEntry,
};
use burn_train::renderer::MetricState;
pub use burn_train::renderer::MetricsRenderer;
/// burn-train's dashboard, for a terminal.
pub use burn_train::renderer::tui::TuiMetricsRendererWrapper as Dashboard;

/// The loss of a batch.
pub(crate) const LOSS: &str = "Loss";
/// The learning rate of a training batch's step.
pub(crate) const LEARNING_RATE: &str = "Learning Rate";
/// The mean training loss of an epoch, which is shown among the scores. The renderer's own mean is
/// not used, because it covers only the current run.
pub(crate) const TRAINING_LOSS: &str = "training loss";

/// The two halves of an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The training rows.
    Training,
    /// The held-out rows.
    Validation,
}

/// The description of a run for its listener.
#[derive(Debug, Clone)]
pub struct RunStart {
    /// The kind of the trained models.
    pub label: &'static str,
    /// The first epoch, counted from 1.
    pub epoch: usize,
    /// The number of epochs of the whole training.
    pub num_epochs: usize,
    /// The names of the validation scores. The flag is true if a higher score is better.
    pub scores: Vec<(&'static str, bool)>,
}

/// Receives the progress of a training, between its batches. By default every method does nothing.
#[expect(unused_variables, reason = "the defaults ignore their parameters")]
pub trait Listener {
    /// Handles the start or resumption of training.
    fn start(&mut self, start: &RunStart) {}

    /// Handles the start of a half of an epoch, with `num_rows` rows.
    fn start_half(&mut self, half: Half, num_rows: usize) {}

    /// Handles progress: `num_rows` rows of the current half have been processed so far.
    fn processed(&mut self, num_rows: usize) {}

    /// Handles a number with its name: the loss or learning rate of a batch, or a validation score.
    fn number(&mut self, half: Half, name: &'static str, number: f64) {}

    /// Handles the end of the current half of the epoch.
    fn end_half(&mut self) {}

    /// Handles the end of the epoch.
    fn end_epoch(&mut self, epoch: usize) {}

    /// Handles the end of the run, which may have failed.
    fn end(&mut self) {}
}

/// A listener that ignores all progress.
impl Listener for () {}

/// A burn-train renderer as a listener. It makes the calls that burn-train's own loop would make.
///
/// A renderer that panics interrupts the training, and is not called again. The dashboard panics when its
/// user ends the training at once.
pub struct RenderingListener<'a> {
    /// `None` after a panic.
    renderer: Option<&'a mut dyn MetricsRenderer>,
    interrupter: Interrupter,
    half: Half,
    scores: Vec<&'static str>,
    /// The state of each number's display over the batches of the current half, by the number's
    /// name.
    of_batches: BTreeMap<&'static str, NumericMetricState>,
}

impl<'a> RenderingListener<'a> {
    /// Creates a listener that shows everything with `renderer`.
    pub fn new(renderer: &'a mut dyn MetricsRenderer, interrupter: Interrupter) -> Self {
        Self {
            renderer: Some(renderer),
            interrupter,
            half: Half::Training,
            scores: Vec::new(),
            of_batches: BTreeMap::new(),
        }
    }

    fn draw(&mut self, call: impl FnOnce(&mut dyn MetricsRenderer)) {
        let Some(renderer) = &mut self.renderer else { return };
        // After a panic, the renderer's state is not used any more.
        if catch_unwind(AssertUnwindSafe(|| call(&mut **renderer))).is_err() {
            self.renderer = None;
            self.interrupter.stop(None);
        }
    }

    /// Shows a number. `None` shows that the batch has no such number.
    fn show(&mut self, name: &str, text: SerializedEntry, number: Option<NumericEntry>) {
        let state = MetricState::Numeric(MetricEntry::new(id(name), text), number);
        match self.half {
            Half::Training => self.draw(|renderer| renderer.update_train(state)),
            Half::Validation => self.draw(|renderer| renderer.update_valid(state)),
        }
    }
}

impl Listener for RenderingListener<'_> {
    fn start(&mut self, start: &RunStart) {
        let of_batches = [(LOSS, false), (LEARNING_RATE, false)];
        for (name, higher_is_better) in of_batches.iter().chain(&start.scores) {
            let attributes = NumericAttributes { unit: None, higher_is_better: *higher_is_better };
            let metric = MetricDefinition {
                metric_id: id(name),
                name: Arc::new((*name).to_owned()),
                description: None,
                attributes: attributes.into(),
            };
            self.draw(|renderer| renderer.register_metric(metric));
        }
        self.scores = start.scores.iter().map(|(name, _)| *name).collect();
        let RunStart { num_epochs, epoch, label, .. } = *start;
        self.draw(|renderer| renderer.start(num_epochs, epoch, None, Some(label)));
    }

    fn start_half(&mut self, half: Half, num_rows: usize) {
        self.half = half;
        let name = if half == Half::Training { "train" } else { "valid" };
        self.draw(|renderer| renderer.start_split(name, num_rows));
    }

    fn processed(&mut self, num_rows: usize) {
        if self.half == Half::Validation {
            for name in self.scores.clone() {
                self.show(name, SerializedEntry::not_available(None), None);
            }
        }
        self.draw(|renderer| {
            renderer.update_split(num_rows);
            renderer.log_event_training("Iteration".to_owned());
        });
    }

    fn number(&mut self, _half: Half, name: &'static str, number: f64) {
        if self.scores.contains(&name) {
            let entry = NumericEntry::Final(number);
            let text = SerializedEntry::new(format!("epoch {number:.4}"), entry.serialize());
            return self.show(name, text, Some(entry));
        }
        let state = self.of_batches.entry(name).or_default();
        state.update(number, 1);
        let (text, latest) = (state.compute_update(format_of(name)), state.current_value());
        self.show(name, text, Some(latest));
    }

    fn end_half(&mut self) {
        for (name, state) in std::mem::take(&mut self.of_batches) {
            self.show(name, state.compute_final(format_of(name)), Some(state.final_value()));
        }
        self.draw(|renderer| renderer.end_split());
    }

    fn end_epoch(&mut self, epoch: usize) {
        self.draw(|renderer| renderer.update_epoch(epoch));
    }

    fn end(&mut self) {
        self.draw(|renderer| {
            renderer.end();
            // A summary would be printed. Without one there is nothing that can fail.
            let _ = renderer.on_train_end(None);
        });
    }
}

fn id(name: &str) -> MetricId {
    MetricId::new(Arc::new(name.to_owned()))
}

fn format_of(name: &str) -> FormatOptions {
    FormatOptions::new(Arc::new(name.to_owned())).precision(2)
}
