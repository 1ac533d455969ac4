//! The training of self-drafts of any kind: from lessons and learners to trained drafters.

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use draftsmith_data::ResponseRow;
use draftsmith_model::{CausalLm, DraftVocabulary, VOCABULARY_COVERAGE};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::data::TrainingBatch;
use crate::error::TrainError;
use crate::lessons::batches::{LessonBatch, batches_a_step};
use crate::lessons::distillation::{DistillationLoss, StudentStep};
use crate::lessons::{Lessons, Sources, prepare};
use crate::run::devices::PerDevice;
use crate::run::member::Trainee;
use crate::run::trained::{ExportConfig, Trained};
use crate::run::{Ending, Setup, TrainingRun};

/// The source of a drafter's initial weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InitialWeights {
    /// Random weights: linear layers uniform within ±1/√inputs (torch's default), and norms of
    /// ones.
    Random,
    /// The weights of the target: for an adapter, of the layer after the exit (the first that
    /// drafting skips) and of the final norm. Biases are left out, and the MLP of `mlp-only` is
    /// random.
    Target,
}

/// A drafter before its training.
pub(crate) struct Pupil<L, C> {
    /// The name of its directory within the training's directory.
    pub(crate) name: String,
    pub(crate) learner: L,
    pub(crate) config: C,
    /// The settings to record, as an object.
    pub(crate) settings: Value,
}

/// The drafters of a training, with their scores.
pub(crate) type TrainedPupils<L, C> = Vec<Trained<<L as Trainee>::Part, C, <L as Trainee>::Scores>>;

/// The settings that are keys of a drafter's own configuration, so that its record lacks them.
const IN_CONFIG: [&str; 3] = ["exit_layer", "architecture", "layers"];

/// Trains the drafters that `pupils` builds for a draft vocabulary, on the target's device and
/// `run.more_devices`. All share the target's forwards.
pub(crate) fn train_pupils<L, C>(
    target: &CausalLm,
    rows: &[ResponseRow],
    lessons: &Lessons,
    pupils: impl FnOnce(Option<&DraftVocabulary>) -> Vec<Pupil<L, C>>,
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<TrainedPupils<L, C>>, TrainError>
where
    L: Trainee<Content = LessonBatch>,
    C: ExportConfig<L::Part>,
{
    let settings = &lessons.settings;
    // The target has no autodiff on any device, because hidden states are constants.
    let frozen = target.valid().to_dtype(settings.dtype);
    let more = run.more_devices(batches_a_step(&settings.optimizer));
    let targets = PerDevice::frozen(frozen, more)?;
    let place = run.feature_dir();
    let Sources { loaders, vocabulary, stored } =
        prepare(&targets, rows, lessons, seed, Some(&place))?;
    let (vocabulary, coverage) = vocabulary.unzip();
    let devices = PerDevice::trained(targets.first().device(), more)?;
    let optimizer = settings.optimizer.of_width(target.shape().hidden_size);
    let setup = Setup { loaders, devices, optimizer, label: lessons.label };
    let (mut learners, mut exports) = (Vec::new(), Vec::new());
    for Pupil { name, learner, config, mut settings } in pupils(vocabulary.as_ref()) {
        settings["optimizer"] = json!(optimizer);
        learners.push((name, learner));
        exports.push((config, settings));
    }
    let trained = run.train(setup, learners, |nth, part, outcome| {
        let (config, settings) = &exports[nth];
        let mut trained = Trained::new((part, config.clone()), outcome);
        let mut record = trained.record(settings, &IN_CONFIG, "num_tokens", seed);
        if let Some(coverage) = coverage {
            record.insert(VOCABULARY_COVERAGE.to_owned(), coverage.into());
        }
        *trained.config.record().training = record;
        trained
    });
    let Some(stored) = stored else { return trained };
    stored.problems().into_iter().for_each(place.notify);
    trained.map_err(|error| stored.cause_of(error))
}

/// Computes the loss Σₖ wᵏ · (sum of the token losses of step k) / (number of tokens in the first
/// step), and a learner's gradients. `outputs` are the LM head's inputs at the supervised positions
/// in each step, with the learner's own LM head if it has one. w is `step_weight`.
pub(crate) fn loss_and_gradients<L: Module>(
    learner: &L,
    batch: &TrainingBatch<LessonBatch>,
    (outputs, own_head): (Vec<Tensor<2>>, Option<Tensor<2>>),
    step_weight: f64,
    (loss, loss_chunk): (DistillationLoss, usize),
) -> (Tensor<1>, GradientsParams) {
    let TrainingBatch { content, step_share, .. } = batch;
    let steps = outputs.iter().enumerate().map(|(nth, outputs)| StudentStep {
        hidden: outputs.clone().without_autodiff(),
        are: content.are_supervised(nth),
        share: step_weight.powi(nth as i32) / content.tokens.num as f64,
    });
    let found = content.lm_head.loss_and_gradients(
        loss,
        &steps.collect::<Vec<_>>(),
        own_head.clone().map(Tensor::without_autodiff),
        &content.teacher,
        loss_chunk,
    );
    let loss = found.loss.clone();
    (loss, found.backward(learner, outputs, own_head, *step_share))
}
