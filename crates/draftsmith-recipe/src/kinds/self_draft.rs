//! What all kinds of self-drafts answer alike: their settings, training, directories and reports.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use draftsmith_data::ResponseRow;
use draftsmith_decode::{DrafterParts, NamedParts};
use draftsmith_files::{hash_file, read_bytes};
use draftsmith_model::{
    CausalLm, DraftConfig, DraftForm, DraftNetwork, DraftVocabulary, DrafterDir, ModelConfig,
    ModelError, VOCABULARY_COVERAGE,
};
use draftsmith_train::{
    Ending, ExportConfig, FeatureFormat, InitialWeights, LessonScores, LessonSettings,
    SelfDraftTraining, StateTraining, TrainError, TrainedExport, TrainingRun, train_self_drafts,
};
use serde_json::{Map, Value, json};

use super::loaded::{DrafterSize, LoadedDrafter, Loading};
use super::origin::Origin;
use super::{DrafterFiles, KindTraining, TrainedText, TrainingWork, trainings_of};
use crate::exports::HeadExport;

/// A form of self-draft in recipes.
pub trait SelfDraftForm: StateTraining {
    /// Reads the configuration of a drafter for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If its files are missing or invalid.
    fn config_in(dir: &DrafterDir, num_layers: usize) -> Result<Self::Config, ModelError>;

    /// Describes a drafter.
    fn about(config: &Self::Config) -> AboutDraft;
}

/// The description of a self-draft.
#[derive(Debug)]
pub struct AboutDraft {
    /// What recordings and reports know of its files.
    pub files: DrafterFiles,
    /// For each hidden state that it reads, the number of the target's layers before it.
    pub target_layers: Vec<usize>,
    /// Where it reads the target's hidden states, such as `behind layer 2`.
    pub place: String,
    /// Its size, in words.
    pub size: String,
    /// The number of parameters in its file.
    pub num_parameters: usize,
    /// Whether an LM head is among them.
    pub has_head: bool,
    /// The number of tokens that it may draft; `None` for all.
    pub num_draft_tokens: Option<usize>,
    /// Its other properties, as keys and values of JSON.
    pub properties: Vec<(&'static str, Value)>,
}

impl AboutDraft {
    /// Describes a drafter with layers, by its configuration, its place and what is known of its files.
    pub fn of<F: DraftForm>(config: &DraftConfig<F>, place: String, files: DrafterFiles) -> Self {
        let num_parameters = config.num_parameters();
        Self {
            files,
            target_layers: config.target_layers.clone(),
            place,
            size: format!("{num_parameters} parameters"),
            num_parameters,
            has_head: config.has_head_tensor(),
            num_draft_tokens: config.vocabulary_size(),
            properties: vec![("layers", json!(config.target_layers))],
        }
    }
}

/// The settings of a self-draft, or its directory.
pub trait SelfDraftOrigin {
    /// Returns the directory, if the recipe names one.
    fn dir(&self) -> Option<&DrafterDir>;

    /// Returns the training, if the recipe has one.
    fn kind_training(&self) -> Option<&dyn KindTraining>;

    /// Checks the settings, which are in the section `key`.
    ///
    /// # Errors
    /// If a setting is out of range.
    fn check(&self, key: &str) -> Result<()>;

    /// Lists the hidden states that the drafter reads, each as the number of the layers before it, for
    /// a target of `num_layers` layers.
    ///
    /// # Errors
    /// If the drafter's files are missing or invalid.
    fn layers(&self, num_layers: usize) -> Result<Vec<usize>>;

    /// Reads the files in `dir`, for a target of `num_layers` layers.
    ///
    /// # Errors
    /// If they are missing or invalid.
    fn files(&self, dir: &DrafterDir, num_layers: usize) -> Result<DrafterFiles>;
}

impl<S: SelfDraftForm> SelfDraftOrigin for Origin<SelfDraftTraining<S>> {
    fn dir(&self) -> Option<&DrafterDir> {
        self.path()
    }

    fn kind_training(&self) -> Option<&dyn KindTraining> {
        self.training().map(|training| training as _)
    }

    fn check(&self, key: &str) -> Result<()> {
        let Some(training) = self.training() else { return Ok(()) };
        training.validate().with_context(|| format!("section `[{key}]`"))
    }

    fn layers(&self, num_layers: usize) -> Result<Vec<usize>> {
        Ok(match self {
            Self::Training(training) => training.layers(num_layers),
            Self::Path(dir) => S::about(&S::config_in(dir, num_layers)?).target_layers,
        })
    }

    fn files(&self, dir: &DrafterDir, num_layers: usize) -> Result<DrafterFiles> {
        Ok(S::about(&S::config_in(dir, num_layers)?).files)
    }
}

impl<S: SelfDraftForm> KindTraining for SelfDraftTraining<S> {
    fn lessons(&self) -> LessonSettings {
        self.common.clone()
    }

    /// Returns `None` for a drafter that reads the states of layers that it runs itself.
    fn served_format(&self) -> Option<FeatureFormat> {
        self.common.served_format().filter(|_| S::READS_TOKENS)
    }

    fn check_layers(&self, num_layers: usize) -> Result<(), TrainError> {
        self.own.check_layers(num_layers)
    }

    fn work(&self, target: &ModelConfig) -> Result<TrainingWork, TrainError> {
        let own = self.common.draft_vocabulary.map(|size| size.min(target.shape.vocab_size));
        let vocabulary = own.map(|size| DraftVocabulary::new((0..size as u32).collect::<Vec<_>>()));
        let config = self.config(target, self.common.dtype, vocabulary.as_ref())?;
        let AboutDraft { target_layers, num_parameters, has_head, .. } = S::about(&config);
        let hidden_size = target.shape.hidden_size;
        Ok(TrainingWork {
            num_parameters,
            num_head_weights: own.unwrap_or(target.shape.vocab_size) * hidden_size,
            has_head,
            num_steps: self.steps().0,
            state_bytes: self.common.features_format.bytes_per_state(hidden_size),
            num_states: target_layers.len(),
        })
    }

    fn settings(&self) -> Value {
        let mut settings = json!(self);
        if let InitialWeights::Drafter(dir) = &self.common.initial {
            // Other weights under the same name are another training.
            settings["initial_hash"] = json!(hash_file(&dir.join("model.safetensors")).ok());
        }
        settings
    }

    fn shown(&self) -> &'static [&'static str] {
        S::Scores::SHOWN
    }

    fn train(
        &self,
        all: &[&dyn KindTraining],
        target: &CausalLm,
        rows: &[ResponseRow],
        seed: u64,
        run: TrainingRun<'_>,
    ) -> Result<Ending<Vec<TrainedExport>>, TrainError> {
        let trainings: Vec<Self> = trainings_of(all).cloned().collect();
        Ok(train_self_drafts(target, rows, &trainings, seed, run)?.into_exports())
    }

    fn describe(&self, dir: &Path, num_layers: usize, scores: &Value) -> Result<TrainedText> {
        let mut config = S::config_in(&dir.into(), num_layers)?;
        let AboutDraft { place, size, num_draft_tokens, num_parameters, properties, .. } =
            S::about(&config);
        let training = config.record().training;
        let scores: S::Scores = serde_json::from_value(scores.clone())?;
        let coverage = training.get(VOCABULARY_COVERAGE).and_then(Value::as_f64);
        let drafted = num_draft_tokens.zip(coverage).map(|(size, coverage)| {
            let share = coverage * 100.0;
            let limited = if S::READS_TOKENS { "" } else { ", to which the scores are limited" };
            format!(", drafting {size} tokens: {share:.1} % of the validation responses'{limited}")
        });
        let advice = low_agreement_text(scores.agreement(), training);
        let lines = format!("{size}{}\n{}", drafted.unwrap_or_default(), scores.text());
        let of_all = [
            ("num_parameters", json!(num_parameters)),
            ("draft_vocabulary", json!(num_draft_tokens)),
            ("vocabulary_coverage", json!(coverage)),
        ];
        let properties = properties.into_iter().chain(of_all);
        let properties = properties.map(|(key, value)| (key.to_owned(), value)).collect();
        Ok(TrainedText { place, lines, properties, advice })
    }
}

/// The agreement with the target below which hardly any candidate is accepted.
const LOW_AGREEMENT: f64 = 0.2;

/// Returns the agreement in the `scores.json` of the drafter in `dir`, if it is too low to serve the drafter.
pub fn low_agreement(dir: &Path) -> Option<f64> {
    let scores: Value = serde_json::from_slice(&read_bytes(dir.join("scores.json")).ok()?).ok()?;
    let agreement = &scores["agreement"];
    let first = agreement.as_f64().or_else(|| agreement[0].as_f64());
    first.filter(|agreement| *agreement < LOW_AGREEMENT)
}

/// Advises on a drafter whose agreement with its target stayed low; `None` for any other. `training`
/// is the `training` object of its `config.json`.
fn low_agreement_text(agreement: f64, training: &Map<String, Value>) -> Option<String> {
    if agreement >= LOW_AGREEMENT {
        return None;
    }
    let rate = training.get("optimizer").and_then(|optimizer| optimizer["learning_rate"].as_f64());
    let rate = rate.map(|rate| format!(" (it was {rate:.1e})")).unwrap_or_default();
    Some(format!(
        "its agreement with the target is {agreement:.3}, too low to serve it; hint: raise `optimizer.learning_rate`{rate} \
         or `data.num_prompts`, or train more epochs"
    ))
}

/// Reads the network of a self-draft.
///
/// # Errors
/// If the drafter has no files yet, they are invalid, or it was trained for another target.
pub fn read_network<F: DraftForm>(
    loading: &Loading<'_>,
) -> Result<(DraftConfig<F>, DraftNetwork<F>)> {
    let (models, dir) = (&loading.workspace.models, loading.export_dir());
    loading.drafter().kind.entry().need(&dir)?;
    let shape = models.target_shape()?;
    let read = DraftNetwork::from_dir(&dir, shape, models.dtype, models.device())?;
    loading.workspace.check_target(("drafter", &dir), read.0.target_hash.as_deref())?;
    Ok(read)
}

impl LoadedDrafter {
    /// Assembles a self-draft, of which one forward reads `num_read` parameters and which has
    /// `num_own` of its own.
    pub fn of_self_draft(
        loading: &Loading<'_>,
        parts: impl DrafterParts + 'static,
        head: Option<HeadExport>,
        [num_read, num_own]: [usize; 2],
    ) -> Self {
        let (id, dir) = (loading.id, Some(loading.export_dir().path));
        let parts = NamedParts { id, parts: Arc::new(parts) };
        let sizes = vec![DrafterSize { id, num_read, num_own }];
        Self { parts, head, dir, rule_dir: None, sizes }
    }
}

/// Names the target's layers whose states a drafter reads, as in `over layers 2, 4, 6`.
pub(super) fn over_layers(layers: &[usize]) -> String {
    let layers: Vec<String> = layers.iter().map(ToString::to_string).collect();
    format!("over layers {}", layers.join(", "))
}
