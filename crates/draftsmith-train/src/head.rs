//! Acceptance heads: from rows and a frozen drafter to trained heads (SpecDec++, §3).
//!
//! A response becomes a mixture of the target's and the draft's tokens (`rows`), or a record of the
//! candidates that decoding rounds would draft along it (`recorded`). The frozen drafter computes
//! features for the candidates (`features`), the loader collects them in batches (`batches`), and
//! the learner (`learner`) computes the loss. The drafter is never part of the learner, so
//! checkpoints contain only heads.

pub(crate) mod batches;
pub(crate) mod features;
pub(crate) mod learner;
pub(crate) mod predicted;
pub(crate) mod recorded;
pub(crate) mod rollout_rows;
pub(crate) mod rows;
pub(crate) mod settings;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use draftsmith_data::ResponseRow;
use draftsmith_model::{AcceptanceHead, AcceptanceHeadConfig, CausalLm, DrafterModel, Lengths};
use draftsmith_theory::{HeadScores, SeededDraws};

use self::batches::HeadSource;
use self::features::{StoredRounds, values_of};
use self::learner::HeadLearner;
use self::recorded::{RecordedRollouts, RolloutsById};
use self::rows::{Mixture, TrainingRow};
use self::settings::HeadTraining;
use crate::data::split::SplitRows;
use crate::data::{Loaders, StepExamples};
use crate::error::{Result, TrainError};
use crate::run::devices::PerDevice;
use crate::run::trained::Trained;
use crate::run::{Ending, Setup, TrainingRun};
use crate::states::{
    FeatureDir, Features, RowStatesPlan, StateFiles, StatesRow, check_stored, problems,
};

/// The training data of heads.
#[derive(Debug, Clone, Copy)]
pub struct HeadData<'a> {
    /// The responses.
    pub rows: &'a [ResponseRow],
    /// The draft's rollouts along the responses, if labels come from rollouts.
    pub rollouts: Option<RecordedRollouts<'a>>,
}

impl<'a, R: AsRef<[ResponseRow]> + ?Sized> From<&'a R> for HeadData<'a> {
    fn from(rows: &'a R) -> Self {
        Self { rows: rows.as_ref(), rollouts: None }
    }
}

/// A trained head.
pub type TrainedHead = Trained<AcceptanceHead, AcceptanceHeadConfig, HeadScores>;

/// Trains an acceptance head for `draft` with each of the settings `heads`. All heads share one stream of
/// hidden states, on the draft's device and `run.more_devices`. Each ends with the same bits as if it were
/// trained alone.
///
/// Rows are split by a hash of their conversation's id. Each epoch mixes and shuffles the rows
/// again, as a function of `seed`, the epoch and the row's id. Validation always uses the same
/// mixture. The draft is frozen. The same arguments give the same heads, bit for bit, on the same
/// CPU build.
///
/// The run owns `run.checkpoint_dir`: the state in `checkpoint/`, and `metrics.jsonl` with one line
/// per step. If there are several heads, each has its log in a directory of its
/// [name](HeadTraining::name). A run resumes from a state with its fingerprint, with the same
/// result as without an interruption, and removes any other state. When `run` is stopped, it saves
/// its state after the current step and returns the best heads so far. The state remains at the end
/// until [`discard`](crate::discard), because the caller has yet to save the heads.
///
/// # Errors
/// If a setting is out of range, a row has missing or invalid draft columns, either side of the split has
/// no labels, a loss or prediction is not finite, or a file cannot be written.
///
/// # Panics
/// If `heads` is empty, or its settings differ in more than `num_layers`, `tied` and
/// `rejection_weight`. Such heads could not share batches and learning rates.
pub fn train_heads<'a>(
    draft: impl Into<DrafterModel>,
    data: impl Into<HeadData<'a>>,
    heads: &[HeadTraining],
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedHead>>> {
    let draft = draft.into();
    heads.iter().try_for_each(|head| head.validate())?;
    let width = draft.hidden_size();
    let resolved = |head: &HeadTraining| HeadTraining {
        optimizer: head.optimizer.of_width(width),
        ..head.clone()
    };
    let heads: Vec<HeadTraining> = heads.iter().map(resolved).collect();
    let shared = &heads[0];
    assert!(heads.iter().all(|head| head.shares_steps_with(shared)), "heads must share batches");
    let embedding_gain = draft.embedding_gain();
    // The drafter has no autodiff on any device, because hidden states are constants.
    let frozen = draft.valid().to_dtype(shared.dtype);
    let more = run.more_devices(shared.optimizer.gradient_accumulation);
    let drafts = PerDevice::frozen(frozen, more)?;
    let place = run.feature_dir();
    let (loaders, stored) = prepare(&drafts, data.into(), shared, seed, Some(&place))?;
    let devices = PerDevice::trained(drafts.first().device(), more)?;

    let learner = |head: &HeadTraining| HeadLearner {
        head: initial_head(&config_of(width, head), seed, devices.first()),
        rejection_weight: head.rejection_weight,
    };
    let optimizer = shared.optimizer;
    let setup = Setup { loaders, devices: devices.clone(), optimizer, label: "acceptance head" };
    let learners = heads.iter().map(|head| (head.name(), learner(head))).collect();
    let trained = run.train(setup, learners, |nth, part, outcome| {
        // The head was trained on scaled embeddings; the exported head reads unscaled ones.
        let head = part.with_embedding_gain(embedding_gain);
        let config = config_of(width, &heads[nth]);
        let mut trained = Trained::new((head, config), outcome);
        let in_config = ["num_layers", "tied", "form", "inputs", "sweep"];
        trained.config.training = trained.record(&heads[nth], &in_config, "num_labels", seed);
        trained
    });
    stored.iter().flat_map(|stored| problems(&[&stored.file])).for_each(place.notify);
    trained
}

/// Returns the examples that [`train_heads`] uses for one head: the mixtures and labels of every training step and of
/// validation.
///
/// # Errors
/// As [`train_heads`] before training begins.
///
/// # Panics
/// If labels come from rollouts. Such rows have branches, so they are not single sequences.
pub fn head_examples(
    draft: &CausalLm,
    rows: &[ResponseRow],
    head: &HeadTraining,
    seed: u64,
) -> Result<Vec<StepExamples>> {
    head.validate()?;
    let draft = DrafterModel::from(&draft.valid());
    let (loaders, _) = prepare(&draft.into(), rows.into(), head, seed, None)?;
    Ok(loaders.examples())
}

/// Returns the initial head of [`train_heads`], on the draft's device.
pub fn first_head(
    draft: &CausalLm,
    head: &HeadTraining,
    seed: u64,
) -> (AcceptanceHeadConfig, AcceptanceHead) {
    let config = config_of(draft.shape().hidden_size, head);
    let first = initial_head(&config, seed, &draft.device());
    (config, first)
}

/// Configures a head that reads hidden states of width `hidden_size`.
fn config_of(hidden_size: usize, head: &HeadTraining) -> AcceptanceHeadConfig {
    let config = AcceptanceHeadConfig::new(hidden_size, head.num_layers, head.tied);
    config.with_reads(head.reads())
}

/// Splits the rows and makes the loaders of both sides. `drafts` have no autodiff. Only those
/// settings of `shared` are read that all heads of the training have in common. If the settings ask
/// for it, or a source gives the target's, hidden states are stored in `place`.
fn prepare(
    drafts: &PerDevice<DrafterModel>,
    data: HeadData<'_>,
    shared: &HeadTraining,
    seed: u64,
    place: Option<&FeatureDir<'_>>,
) -> Result<(Loaders<HeadSource>, Option<Arc<StoredRounds>>)> {
    let optimizer = &shared.optimizer;
    let context = drafts.first().context();
    let HeadData { rows, rollouts } = data;
    let rollouts = rollouts.map(RolloutsById::from);
    let usable = |row: &ResponseRow| match (shared.labels.mixed(), &rollouts) {
        (Some(labels), _) => TrainingRow::new(row, context, labels),
        (None, Some(rollouts)) => {
            let recorded = rollouts.mixture(row, context)?;
            Ok(recorded.map(|recorded| TrainingRow::recorded(row, recorded)))
        }
        (None, None) => Err(TrainError::rollouts(&row.id, "there are none")),
    };
    // The target may have more tokens than the draft, which reads them as another token.
    let split = SplitRows::new(rows, optimizer.validation_fraction, usable)?;
    let counts = split.counts();
    let is_stored =
        |place: &&FeatureDir<'_>| shared.features == Features::Cache || place.source.is_some();
    let stored = match place.filter(is_stored) {
        Some(place) => {
            let files = StateFiles::new(place.clone(), shared.features_format);
            let rows = split.training.iter().chain(&split.validation).map(AsRef::as_ref);
            Some(Arc::new(open_states(files, drafts.first(), rows.collect(), seed)?))
        }
        None => None,
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
    let (settings, num_epochs) = (optimizer.batches(seed), optimizer.num_epochs);
    let loaders = Loaders::new(training, validation, settings, num_epochs, counts);
    if loaders.num_training == 0 || loaders.num_validation == 0 {
        let settings = format!(
            "`head.optimizer.validation_fraction` = {} and `head.mixing_ratio` = {}",
            optimizer.validation_fraction, shared.mixing_ratio
        );
        let nums = [loaders.num_training, loaders.num_validation, counts.num_unusable, rows.len()];
        return Err(TrainError::too_few_rows(nums, context, &settings));
    }
    Ok((loaders, stored))
}

/// Opens the file for the draft's hidden states at all tokens of recorded rows and of their
/// branches. Recorded rows are the same in every epoch and run. If a source gives the target's
/// hidden states, computes and stores all missing ones.
fn open_states(
    mut files: StateFiles<'_>,
    draft: &DrafterModel,
    mut rows: Vec<&TrainingRow>,
    seed: u64,
) -> Result<StoredRounds> {
    rows.sort_by(|one, other| one.id.cmp(&other.id));
    let plans = rows.iter().map(|row| {
        let mixture = row.mixture(seed, 0, 0.0);
        let num_states = mixture.num_tokens();
        let Mixture { input_ids: mut ids, branches, .. } = mixture;
        for branch in branches {
            ids.extend([u32::MAX, branch.start as u32]);
            ids.extend(branch.token_ids);
        }
        RowStatesPlan { id: &row.id, num_states, ids }
    });
    files.add("", draft.hidden_size(), plans);
    let source = files.source();
    let stored = StoredRounds { file: files.open()?.remove(0), is_given: source.is_some() };
    if let Some(source) = source {
        let missing = rows.iter().filter(|row| stored.file.read(&row.id).is_none());
        let missing: Vec<(&str, Mixture)> =
            missing.map(|row| (&*row.id, row.mixture(seed, 0, 0.0))).collect();
        let asked =
            missing.iter().map(|(id, mixture)| StatesRow::of_layers(id, mixture.read_ids()));
        let asked: Vec<StatesRow<'_>> = asked.collect();
        source.states(draft.target_layers(), &asked, &mut |nth, states| {
            let (id, mixture) = &missing[nth];
            stored.file.store(id, values_of(draft, mixture, Some(states.layers)));
            check_stored(id, &[&stored.file])
        })?;
    }
    Ok(stored)
}

/// Initialises a head with PyTorch's default weights for linear layers: uniform in ±1/√in and drawn
/// from the seed (burn has one generator for all threads). `in` is the hidden size for every layer,
/// even for a layer that also reads further inputs.
fn initial_head(config: &AcceptanceHeadConfig, seed: u64, device: &Device) -> AcceptanceHead {
    let bound = 1.0 / (config.hidden_size as f64).sqrt();
    let mut draws = SeededDraws::new(seed, &["head"]);
    let draw = || ((2.0 * draws.uniform() - 1.0) * bound) as f32;
    config.init(device).map(&mut Redraw(draw))
}

/// A mapper that replaces every weight by the next number of a function.
pub(crate) struct Redraw<F>(pub(crate) F);

impl<F: FnMut() -> f32> ModuleMapper for Redraw<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|old| {
            let values: Vec<f32> = (0..old.shape().num_elements()).map(|_| (self.0)()).collect();
            let new = Tensor::from_data(TensorData::new(values, old.shape()), &old.device());
            new.set_require_grad(old.is_require_grad())
        })
    }
}
