//! From rows and a frozen drafter to trained acceptance heads (SpecDec++, section 3).

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use draftsmith_data::ResponseRow;
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, CausalLm, DrafterModel, Lengths};
use draftsmith_theory::{HeadScores, SeededDraws};

use crate::data::batches::{BatchSettings, Loaders, Prepared};
use crate::data::examples::StepExamples;
use crate::data::split::Split;
use crate::error::TrainError;
use crate::head::batches::HeadSource;
use crate::head::learner::HeadLearner;
use crate::head::recorded::{RecordedRollouts, RolloutsById};
use crate::head::rows::TrainingRow;
use crate::head::settings::HeadTraining;
use crate::head::stored::{StoredHidden, StoredRow};
use crate::run::devices::PerDevice;
use crate::run::first_weights::{Redrawn, redrawn};
use crate::run::trained::Trained;
use crate::run::training_run::{BestOf, Ending, Setup, TrainingRun};
use crate::section::Section;
use crate::states::{FeatureDir, Features, StateFiles};

/// What heads are trained on.
#[derive(Debug, Clone, Copy)]
pub struct HeadData<'a> {
    /// The responses.
    pub rows: &'a [ResponseRow],
    /// What the draft would propose along them: labels from rollouts need it.
    pub rollouts: Option<RecordedRollouts<'a>>,
}

impl<'a> From<&'a [ResponseRow]> for HeadData<'a> {
    fn from(rows: &'a [ResponseRow]) -> Self {
        Self { rows, rollouts: None }
    }
}

impl<'a> From<&'a Vec<ResponseRow>> for HeadData<'a> {
    fn from(rows: &'a Vec<ResponseRow>) -> Self {
        rows.as_slice().into()
    }
}

/// A trained head, and how it came about.
pub type TrainedHead = Trained<AcceptanceHead, AcceptanceHeadConfig, HeadScores>;

/// Trains an acceptance head for `draft` on `rows` with each of `heads`' settings, all of them over
/// one stream of hidden states, on the draft's device and those of `run.more_devices`. Each head
/// is, bit for bit, what it would be if it were trained alone.
///
/// Rows are split by a hash of their conversation's id; each epoch mixes and shuffles them afresh,
/// as a function of `seed`, the epoch and the row's id; validation uses one mixture throughout.
/// The draft is frozen and only read. The same arguments give the same heads, bit for bit, on the
/// same CPU build.
///
/// The state goes under `run.checkpoint_dir`, which this function owns: `checkpoint/` (the
/// state), `metrics.jsonl` (a line a step) and TensorBoard's event files (several heads have their
/// own, in a directory of their [name](HeadTraining::name)). A run that finds a state with its
/// fingerprint resumes from it, and the heads end with the same bits as if training had never
/// stopped, on the same CPU build; a state with another is removed. After a call of
/// `interrupter.stop`, a yes of `should_stop` or the last step that the run allows, training stops
/// between two steps, with its state saved and the best heads so far returned. The state stays after the end too,
/// until [`discard`](crate::discard): the caller has yet to write the heads.
///
/// # Errors
/// If a setting is out of range, a row has no draft columns or broken ones, a side of the split has
/// no labels, a loss or prediction is not finite, or a file cannot be written.
///
/// # Panics
/// If there are no heads, or two differ in more than `num_layers`, `tied` and `rejection_weight`: they
/// would not see the same batches and learning rates.
pub fn train_heads<'a>(
    draft: impl Into<DrafterModel>,
    data: impl Into<HeadData<'a>>,
    heads: &[HeadTraining],
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedHead>>, TrainError> {
    let draft = draft.into();
    let section = section_of(&draft);
    heads.iter().try_for_each(|head| head.validate(section))?;
    let shared = &heads[0];
    assert!(heads.iter().all(|head| head.shares_steps_with(shared)), "heads of other steps");
    let embedding_gain = draft.embedding_gain();
    // Without autodiff, whatever the caller's device: hidden states are constants.
    let frozen = draft.valid().to_dtype(shared.dtype);
    let drafts = PerDevice::frozen(frozen, &run.more_devices)?;
    let place = run.feature_dir();
    let (prepared, stored) = prepare(&drafts, data.into(), shared, seed, Some(&place))?;
    let Prepared { loaders, rows } = prepared;
    let devices = drafts.trained()?;
    let width = draft.hidden_size();

    let learner = |head: &HeadTraining| HeadLearner {
        head: initial_head(&config_of(width, head), seed, devices.first()),
        rejection_weight: head.rejection_weight,
        clipping: head.optimizer.clipping,
        section,
    };
    let optimizer = shared.optimizer;
    let setup = Setup { loaders, devices: devices.clone(), optimizer, label: "acceptance head" };
    let learners = heads.iter().map(|head| (head.name(), learner(head))).collect();
    let trained = run.train(setup, learners, |nth, best| {
        let BestOf { part, place, progress, interrupted, duration } = best;
        // It was trained on larger embeddings than those that it is going to read.
        let head = part.with_embedding_gain(embedding_gain);
        let config = config_of(width, &heads[nth]);
        let mut trained =
            Trained::new((head, config), rows, progress, place, interrupted, duration);
        let in_config = ["num_layers", "tied", "form", "inputs", "sweep"];
        trained.config.training = trained.record(&heads[nth], &in_config, "num_labels", seed);
        trained
    });
    let problems = stored.iter().flat_map(|stored| stored.problems());
    problems.for_each(|problem| (place.tell)(problem));
    trained
}

/// What [`train_heads`] is going to see with one head's settings: every step's batches, with their
/// mixtures and labels, and the rows held out.
///
/// # Errors
/// As there, before training begins.
///
/// # Panics
/// If labels are from rollouts: their rows are no one sequence.
pub fn head_examples(
    draft: &CausalLm,
    rows: &[ResponseRow],
    head: &HeadTraining,
    seed: u64,
) -> Result<Vec<StepExamples>, TrainError> {
    head.validate(Section::Head)?;
    let draft = DrafterModel::from(&draft.valid());
    let (prepared, _) = prepare(&draft.into(), rows.into(), head, seed, None)?;
    Ok(prepared.loaders.examples())
}

/// A head as [`train_heads`] begins with it, on the draft's device.
pub fn first_head(
    draft: &CausalLm,
    head: &HeadTraining,
    seed: u64,
) -> (AcceptanceHeadConfig, AcceptanceHead) {
    let config = config_of(draft.shape().hidden_size, head);
    let first = initial_head(&config, seed, &draft.device());
    (config, first)
}

/// The section of the recipe that a drafter's head has its settings from.
fn section_of(draft: &DrafterModel) -> Section {
    if draft.is_self_draft() { Section::AdapterHead } else { Section::Head }
}

/// The config of a head that reads hidden states of width `hidden_size`.
fn config_of(hidden_size: usize, head: &HeadTraining) -> AcceptanceHeadConfig {
    let config = AcceptanceHeadConfig::new(hidden_size, head.num_layers, head.tied);
    config.with_reads(head.reads())
}

/// Splits the rows, and makes the loaders of both sides. The draft records no autodiff. Only what
/// heads share is read of `shared`. Hidden states are kept in `place`, if they are.
fn prepare(
    drafts: &PerDevice<DrafterModel>,
    data: HeadData<'_>,
    shared: &HeadTraining,
    seed: u64,
    place: Option<&FeatureDir<'_>>,
) -> Result<(Prepared<HeadSource>, Option<Arc<StoredHidden>>), TrainError> {
    let optimizer = &shared.optimizer;
    let context = drafts.first().context();
    let vocab_size = drafts.first().vocab_size();
    let HeadData { rows, rollouts } = data;
    let recorded = rollouts.iter().flat_map(|rollouts| rollouts.rows);
    recorded.into_iter().try_for_each(|rollout| rollout.check_ids(vocab_size))?;
    let rollouts = rollouts.map(RolloutsById::from);
    let usable = |row: &ResponseRow| match (shared.labels.mixed(), &rollouts) {
        (Some(labels), _) => TrainingRow::new(row, context, labels),
        (None, Some(rollouts)) => {
            let recorded = rollouts.mixture(row, context)?;
            Ok(recorded.map(|recorded| TrainingRow::recorded(row, recorded)))
        }
        (None, None) => Err(TrainError::Rollouts { id: row.id.clone(), problem: "there are none" }),
    };
    let split = Split::new(rows, vocab_size, optimizer.validation_fraction, usable)?;
    let counts = split.counts();
    let settings = BatchSettings {
        seed,
        batch_size: optimizer.batch_size,
        gradient_accumulation: optimizer.gradient_accumulation,
    };
    let stored = match (shared.features, place) {
        (Features::Recompute, _) | (_, None) => None,
        (Features::Cache, Some(place)) => {
            let all = split.training.iter().chain(&split.validation);
            let mut all: Vec<StoredRow<'_>> = all
                .map(|row| StoredRow { id: row.id(), mixture: row.mixture(seed, 0, 0.0) })
                .collect();
            all.sort_by(|one, other| one.id.cmp(other.id));
            let files = StateFiles::new(place.clone(), shared.features_format);
            let width = drafts.first().hidden_size();
            Some(Arc::new(StoredHidden::open(files, width, &all)?))
        }
    };
    let source = |rows| HeadSource {
        drafts: drafts.clone(),
        reads: shared.reads(),
        rows,
        seed,
        mixing_ratio: shared.mixing_ratio,
        batch_size: optimizer.batch_size,
        lengths: Lengths::on(&drafts.first().device()),
        stored: stored.clone(),
    };
    let (training, validation) = (source(split.training), source(split.validation));
    let loaders = Loaders::new(training, validation, settings, optimizer.num_epochs);
    if loaders.num_training == 0 || loaders.num_validation == 0 {
        return Err(TrainError::TooFewRows {
            section: section_of(drafts.first()),
            num_rows: rows.len(),
            num_unusable: counts.num_unusable,
            num_training: loaders.num_training,
            num_validation: loaders.num_validation,
            context,
            validation_fraction: optimizer.validation_fraction,
            mixing_ratio: shared.mixing_ratio,
        });
    }
    Ok((Prepared { loaders, rows: counts }, stored))
}

/// A head with PyTorch's default weights for linear layers, uniform in ±1/√in, drawn from the
/// seed. Every layer's `in` is the hidden size, but for what is read beside a hidden state: that
/// begins as small.
fn initial_head(config: &AcceptanceHeadConfig, seed: u64, device: &Device) -> AcceptanceHead {
    let bound = 1.0 / (config.hidden_size as f64).sqrt();
    let mut draws = SeededDraws::new(seed, &["head"]);
    let draw = move || ((2.0 * draws.uniform() - 1.0) * bound) as f32;
    redrawn(config.init(device), Redrawn::All, draw)
}

#[cfg(test)]
mod tests;
