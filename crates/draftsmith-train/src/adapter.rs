//! Self-draft adapters: from rows and a frozen target to trained adapters (Kangaroo, §3.1).
//!
//! The learner (`learner`) compares the adapter's predictions from the hidden states after the exit
//! layer with those of the whole target.

pub(crate) mod learner;
pub(crate) mod settings;
#[cfg(test)]
mod tests;

use burn::module::Module;
use draftsmith_data::ResponseRow;
use draftsmith_model::{Adapter, AdapterConfig, CausalLm, DraftVocabulary};
use draftsmith_theory::SeededDraws;
use serde_json::json;

use self::learner::{AdapterLearner, AdapterScores};
use self::settings::AdapterTraining;
use crate::data::StepExamples;
use crate::error::TrainError;
use crate::lessons::{Lessons, prepare};
use crate::run::trained::Trained;
use crate::run::{Ending, TrainingRun};
use crate::self_draft::{InitialWeights, Pupil, train_pupils};

/// A trained adapter.
pub type TrainedAdapter = Trained<Adapter, AdapterConfig, AdapterScores>;

/// Trains an adapter for each exit layer of `training`. All adapters share the target's forwards, on the
/// target's device and `run.more_devices`. Each ends with the same bits as if it were trained alone.
///
/// The adapter A learns that softmax(head(A(h_ℓ))) = softmax(head(h)) (Kangaroo, §3.1), with
/// `training.loss` as the distance. Here h_ℓ is the target's hidden state after ℓ layers, h is its
/// hidden state after the final norm, and head is its LM head. The loss covers the positions that
/// predict a token of the response. The target is frozen; rows need no draft columns. Rows are
/// split by a hash of their conversation's id, and shuffled as a function of `seed` and the epoch.
/// The same arguments give the same adapters, bit for bit, on the same CPU build.
///
/// The run owns `run.checkpoint_dir`: the state in `checkpoint/`, and `metrics.jsonl` with one line
/// per step. If there are several adapters, their logs are in directories named `exit-2/` and so
/// on. A run resumes from a state with its fingerprint, with the same result as without an
/// interruption, and removes any other state. When `run` is stopped, it saves its state after the
/// current step and returns the best adapters so far. The state remains at the end until
/// [`discard`](crate::discard), because the caller has yet to save the adapters.
///
/// # Errors
/// If a setting is out of range, an exit layer is not below the target's number of layers, a row is invalid,
/// either side of the split has no response, a loss or prediction is not finite, or a file cannot be
/// written.
pub fn train_adapters(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
    run: TrainingRun<'_>,
) -> Result<Ending<Vec<TrainedAdapter>>, TrainError> {
    training.validate()?;
    let exit_layers = training.exit_layer.to_vec();
    let configs = exit_layers.iter().map(|layer| config_of(target, training, *layer));
    let configs = configs.collect::<Result<Vec<_>, TrainError>>()?;
    let pupils = |vocabulary: Option<&DraftVocabulary>| {
        let pupil = |(exit, config)| {
            let config = AdapterConfig { draft_vocabulary: vocabulary.cloned(), ..config };
            let learner = AdapterLearner {
                adapter: initial_adapter(&config, target, training.initial, seed),
                exit,
                loss: training.loss,
                loss_chunk: training.loss_chunk,
            };
            let name = format!("exit-{}", config.exit_layer);
            Pupil { name, learner, config, settings: json!(training) }
        };
        configs.into_iter().enumerate().map(pupil).collect()
    };
    train_pupils(target, rows, &lessons_of(training), pupils, seed, run)
}

/// Returns the examples that [`train_adapters`] uses in every training step and in validation.
///
/// # Errors
/// As [`train_adapters`] before training begins.
pub fn adapter_examples(
    target: &CausalLm,
    rows: &[ResponseRow],
    training: &AdapterTraining,
    seed: u64,
) -> Result<Vec<StepExamples>, TrainError> {
    training.validate()?;
    Ok(prepare(&target.valid().into(), rows, &lessons_of(training), seed, None)?.loaders.examples())
}

/// Returns the initial adapter of [`train_adapters`], on the target's device.
///
/// # Errors
/// If `exit_layer` is not below the target's number of layers.
pub fn first_adapter(
    target: &CausalLm,
    training: &AdapterTraining,
    exit_layer: usize,
    seed: u64,
) -> Result<(AdapterConfig, Adapter), TrainError> {
    let config = config_of(target, training, exit_layer)?;
    let first = initial_adapter(&config, target, training.initial, seed).valid();
    Ok((config, first))
}

fn lessons_of(training: &AdapterTraining) -> Lessons {
    Lessons {
        section: "adapter",
        label: "self-draft adapter",
        layers: training.exit_layer.to_vec(),
        reads_tokens: false,
        caps_own_heads: true,
        settings: training.lessons(),
    }
}

fn config_of(
    target: &CausalLm,
    training: &AdapterTraining,
    exit_layer: usize,
) -> Result<AdapterConfig, TrainError> {
    let num_layers = target.shape().num_layers;
    let config = AdapterConfig::new(target.config(), exit_layer)
        .map_err(|_| TrainError::ExitLayer { exit_layer, num_layers })?;
    let (architecture, dtype) = (training.architecture, target.stored_dtype());
    let config = AdapterConfig { architecture, dtype, ..config };
    Ok(config.with_layers(training.num_layers))
}

/// Initialises an adapter on the target's device, with autodiff. Its weights are drawn from the
/// seed or copied from the target.
fn initial_adapter(
    config: &AdapterConfig,
    target: &CausalLm,
    initial: InitialWeights,
    seed: u64,
) -> Adapter {
    let mut draws = SeededDraws::new(seed, &["adapter"]);
    let drawn = config.init_from(&target.device().autodiff(), || draws.uniform());
    let adapter = match initial {
        InitialWeights::Random => drawn,
        InitialWeights::Target => drawn.with_layers_of(target, config.exit_layer),
    };
    adapter.with_head_of(target)
}
