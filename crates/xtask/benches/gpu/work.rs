//! The timed work: the shipped trainers on made-up rows, with a listener that they notify of every batch.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use draftsmith_data::{DraftColumns, FinishReason, ResponseRow};
use draftsmith_model::{CausalLm, WeightDtype};
use draftsmith_theory::SeededDraws;
use draftsmith_train::renderer::Listener;
use draftsmith_train::{
    AdapterTraining, Eagle3Training, Ending, HeadTraining, OptimizerSettings, TrainingRun,
    is_held_out, train_heads, train_self_drafts,
};
use serde::Deserialize;

/// The share of rows that is held out, enough for one row.
const VALIDATION_FRACTION: f64 = 0.1;
/// The number of steps after the timed ones, so that the thread of the frozen model is equally busy until the
/// end.
const SPARE_STEPS: usize = 4;
const SEED: u64 = 7;

/// A training.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Work {
    Adapter { exit_layer: usize, loss_chunk: usize },
    Head { num_layers: usize, accumulation: usize },
    Eagle3 { num_steps: usize, loss_chunk: usize },
}

/// The size of a training.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    /// Rows of a batch.
    pub(crate) rows: usize,
    /// Tokens of a row that the frozen model reads.
    pub(crate) seq: usize,
    /// Supervised tokens of a row.
    pub(crate) supervised: usize,
    pub(crate) warm_up: usize,
    pub(crate) steps: usize,
    pub(crate) dtype: WeightDtype,
    pub(crate) learning_rate: f64,
}

/// The results of a training.
#[derive(Debug)]
pub(crate) struct Timed {
    /// The time of each step after the warm-up, from the end of the previous one.
    pub(crate) step_seconds: Vec<f64>,
    /// All steps, including the warm-up.
    pub(crate) steps: Vec<Step>,
    pub(crate) reserved_bytes: Option<u64>,
}

/// The fields of a line of `metrics.jsonl` that are used here.
#[derive(Debug, Deserialize)]
pub(crate) struct Step {
    pub(crate) loss: f64,
    pub(crate) gradient_norm: f64,
}

impl Timing {
    fn optimizer(&self, defaults: OptimizerSettings, accumulation: usize) -> OptimizerSettings {
        OptimizerSettings {
            learning_rate: Some(self.learning_rate),
            num_epochs: 1,
            batch_size: self.rows,
            gradient_accumulation: accumulation,
            validation_fraction: VALIDATION_FRACTION,
            ..defaults
        }
    }
}

impl Work {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Adapter { .. } => "adapter",
            Self::Head { .. } => "head",
            Self::Eagle3 { .. } => "eagle3",
        }
    }

    /// Trains for the warm-up and the timed steps.
    ///
    /// # Errors
    /// If training fails.
    pub(crate) fn time(&self, frozen: &CausalLm, timing: &Timing) -> Result<Timed> {
        let batches_per_step = match self {
            Self::Adapter { .. } | Self::Eagle3 { .. } => 1,
            Self::Head { accumulation, .. } => *accumulation,
        };
        let num_steps = timing.warm_up + timing.steps;
        let num_rows = (num_steps + SPARE_STEPS) * batches_per_step * timing.rows;
        let rows = self.rows(num_rows, frozen.shape().vocab_size, timing);
        let dir = tempfile::tempdir()?;
        let clock = Clock::new(frozen.device());
        let run = TrainingRun {
            max_steps: Some(num_steps),
            listener: Box::new(clock.clone()),
            ..TrainingRun::new(dir.path(), "")
        };
        self.train(frozen, &rows, timing, run)?;
        let steps = read_steps(&dir.path().join("metrics.jsonl"))?;
        let (batch_ends, reserved_bytes) = clock.read();
        let ends: Vec<Instant> =
            batch_ends.into_iter().skip(batches_per_step - 1).step_by(batches_per_step).collect();
        if ends.len() != num_steps || steps.len() != num_steps {
            bail!(
                "{} steps were observed and {} logged out of {num_steps}",
                ends.len(),
                steps.len()
            );
        }
        // The first step's time begins at the end of a warm-up step.
        let ends = &ends[timing.warm_up.saturating_sub(1)..];
        let step_seconds = ends.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        Ok(Timed { step_seconds, steps, reserved_bytes })
    }

    fn train(
        &self,
        frozen: &CausalLm,
        rows: &[ResponseRow],
        timing: &Timing,
        run: TrainingRun<'_>,
    ) -> Result<()> {
        let stopped = match *self {
            Self::Adapter { exit_layer, loss_chunk } => {
                let training = AdapterTraining::default().with(|it| {
                    it.exit_layer = exit_layer;
                    it.common.loss_chunk = loss_chunk;
                    it.common.max_len = timing.seq + 1;
                    it.common.dtype = timing.dtype;
                    it.common.optimizer = timing.optimizer(OptimizerSettings::ADAPTER, 1);
                });
                let ending = train_self_drafts(frozen, rows, &[training], SEED, run)?;
                matches!(ending, Ending::Stopped { .. })
            }
            Self::Eagle3 { num_steps, loss_chunk } => {
                let training = Eagle3Training::default().with(|it| {
                    it.num_steps = num_steps;
                    it.common.loss_chunk = loss_chunk;
                    it.common.max_len = timing.seq + 1;
                    it.common.dtype = timing.dtype;
                    it.common.optimizer = timing.optimizer(OptimizerSettings::EAGLE3, 1);
                });
                let ending = train_self_drafts(frozen, rows, &[training], SEED, run)?;
                matches!(ending, Ending::Stopped { .. })
            }
            Self::Head { num_layers, accumulation } => {
                let training = HeadTraining {
                    num_layers,
                    // Every response token has a label, so that all steps have the same number.
                    mixing_ratio: 0.0,
                    dtype: timing.dtype,
                    optimizer: timing.optimizer(OptimizerSettings::HEAD, accumulation),
                    ..HeadTraining::default()
                };
                let ending = train_heads(frozen, rows, &[training], SEED, run)?;
                matches!(ending, Ending::Stopped { .. })
            }
        };
        if !stopped {
            bail!("the rows ran out before the last step");
        }
        Ok(())
    }

    /// Rows of random tokens to train on, and one that is held out.
    fn rows(&self, num_rows: usize, vocab_size: usize, timing: &Timing) -> Vec<ResponseRow> {
        // An adapter does not read a row's last token, because nothing is known after it.
        let unread = match self {
            Self::Adapter { .. } | Self::Eagle3 { .. } => 1,
            Self::Head { .. } => 0,
        };
        let mut draws = SeededDraws::new(SEED, &["gpu"]);
        let mut ids = |len: usize| -> Vec<u32> {
            (0..len).map(|_| (draws.uniform() * vocab_size as f64) as u32).collect()
        };
        let mut rows = Vec::with_capacity(num_rows + 1);
        let mut is_one_held_out = false;
        let mut nth = 0;
        while rows.len() < num_rows + usize::from(is_one_held_out) || !is_one_held_out {
            let len = timing.supervised;
            let mut row = ResponseRow {
                id: format!("random#{nth}"),
                source: "random".to_owned(),
                prompt_ids: Vec::new(),
                response_ids: Vec::new(),
                response_target_log_prob: vec![-1.0; len],
                target_outside_mass: None,
                draft: None,
                finish_reason: FinishReason::Length,
            };
            nth += 1;
            let held_out = is_held_out(&row, VALIDATION_FRACTION);
            let is_wanted = if held_out {
                !is_one_held_out
            } else {
                rows.len() < num_rows + usize::from(is_one_held_out)
            };
            if !is_wanted {
                continue;
            }
            is_one_held_out |= held_out;
            row.prompt_ids = ids(timing.seq + unread - len);
            row.response_ids = ids(len);
            row.draft = Some(DraftColumns {
                response_draft_log_prob: vec![-1.0; len],
                draft_ids: ids(len),
                draft_log_prob: vec![-1.0; len],
                target_log_prob: (0..len).map(|i| -1.0 - (i % 7) as f32 / 4.0).collect(),
                overlap: vec![0.5; len],
                draft_entropy: vec![1.0; len],
                draft_target_cross_entropy: None,
                draft_top_ids: vec![0; len],
                target_top_ids: vec![0; len],
                draft_top_log_prob: vec![-1.0; len],
            });
            rows.push(row);
        }
        rows
    }
}

/// The steps that a training logged.
fn read_steps(path: &Path) -> Result<Vec<Step>> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read `{}`", path.display()))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

/// Records the time of each training batch and the device memory of the allocator.
#[derive(Clone)]
struct Clock {
    device: Device,
    begun: Instant,
    noted: Arc<Mutex<(Vec<Instant>, Option<u64>)>>,
}

impl Clock {
    fn new(device: Device) -> Self {
        Self { device, begun: Instant::now(), noted: Arc::default() }
    }

    fn read(&self) -> (Vec<Instant>, Option<u64>) {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Listener for Clock {
    /// Notes the time of a batch, and prints it: compiling kernels takes the first ones long. The last batch of a step waits for the device, and so for all before it.
    fn processed(&mut self, _num_rows: usize) {
        let now = Instant::now();
        let reserved = self.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let last = noted.0.last().copied().unwrap_or(self.begun);
        noted.0.push(now);
        eprintln!("batch {}: {:.1} ms", noted.0.len(), 1e3 * (now - last).as_secs_f64());
        noted.1 = noted.1.max(reserved);
    }
}
