//! The configuration of a self-draft: what all forms have, and its fit to a target.

use std::ops::{Deref, DerefMut};
use std::path::Path;

use serde_json::{Map, Value};

use super::faults::{DraftFault, DraftFaultKind};
use super::{DraftForm, Parts};
use crate::config::ModelConfig;
use crate::decoder::source::ShapeSource;
use crate::decoder::stack::StackSpec;
use crate::draft_vocabulary::DraftVocabulary;
use crate::error::{ModelError, Result};
use crate::spec::{ModelShape, WindowSpec};
use crate::weights::WeightDtype;

/// The key of the draft vocabulary's coverage in a drafter's training record.
pub const VOCABULARY_COVERAGE: &str = "vocabulary_coverage";

/// A drafter's shape and provenance: `config.json` of its directory. The settings of its form, in
/// `own`, can be used like fields.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftConfig<F> {
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    /// The order is that of the inputs of its projection.
    pub target_layers: Vec<usize>,
    /// The number of the target's layers, if known.
    pub num_target_layers: Option<usize>,
    /// A model with the drafter's layers and the target's vocabulary.
    pub model: ModelConfig,
    /// The tokens that the drafter may draft; `None` for all.
    pub draft_vocabulary: Option<DraftVocabulary>,
    /// The type of the weights in the drafter's file. If the drafter was trained here, it is the
    /// type of the target's file.
    pub dtype: WeightDtype,
    /// The SHA-256 of the target that the drafter was trained for, if known.
    pub target_hash: Option<String>,
    /// The record of the training, without the settings above.
    pub training: Map<String, Value>,
    /// The settings of the form.
    pub own: F,
}

impl<F> Deref for DraftConfig<F> {
    type Target = F;

    fn deref(&self) -> &F {
        &self.own
    }
}

impl<F> DerefMut for DraftConfig<F> {
    fn deref_mut(&mut self) -> &mut F {
        &mut self.own
    }
}

impl<F: DraftForm> DraftConfig<F> {
    pub(crate) fn of(model: ModelConfig, target_layers: Vec<usize>, own: F) -> Self {
        Self {
            target_layers,
            num_target_layers: None,
            model,
            draft_vocabulary: None,
            dtype: WeightDtype::F32,
            target_hash: None,
            training: Map::new(),
            own,
        }
    }

    /// Returns the configuration after a change.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Gives all layers a window of `size` tokens; `None` for no window.
    pub fn set_window(&mut self, size: Option<usize>) {
        let layers = vec![true; self.model.shape.num_layers];
        let window = size.map(|size| WindowSpec { size, layers, sees_ahead: false, rope: None });
        self.model.spec.window = window;
    }

    /// Returns the size of the draft vocabulary; `None` if the drafter may draft all tokens.
    pub fn vocabulary_size(&self) -> Option<usize> {
        self.draft_vocabulary.as_ref().map(|vocabulary| vocabulary.ids().len())
    }

    /// Counts the tokens that the drafter may draft.
    pub fn num_draft_tokens(&self) -> usize {
        self.vocabulary_size().unwrap_or(self.model.shape.vocab_size)
    }

    /// Returns the fraction of the held-out responses' tokens that are in the draft vocabulary, as
    /// counted in training; `None` if unknown.
    pub fn vocabulary_coverage(&self) -> Option<f64> {
        self.training.get(VOCABULARY_COVERAGE).and_then(Value::as_f64)
    }

    /// Counts the parameters in the drafter's file.
    pub fn num_parameters(&self) -> usize {
        self.shapes().num_parameters()
    }

    /// Returns whether an LM head is in the drafter's file; otherwise it uses the target's.
    pub fn has_head_tensor(&self) -> bool {
        F::parts(self).lm_head.is_some()
    }

    /// Lists the tensors of the drafter's file with their shapes, without the draft vocabulary's.
    pub(crate) fn shapes(&self) -> ShapeSource {
        let mut source = ShapeSource::default();
        let Ok(_) = self.build(&mut source);
        source
    }

    /// Specifies the layers and the norm of their output.
    pub(crate) fn stack(&self) -> StackSpec<'_> {
        let Parts { layers, last_norm, .. } = F::parts(self);
        StackSpec { model: &self.model, layers, norm: last_norm }
    }

    /// Checks that the drafter in `dir` fits a target.
    ///
    /// # Errors
    /// If a width or the vocabulary differs, the target lacks a layer that the drafter reads, or its
    /// context is longer.
    pub fn check_target(&self, dir: &Path, target: &ModelShape) -> Result<()> {
        let faults = self.target_faults(&dir.join("config.json"), target);
        faults.into_iter().next().map_or(Ok(()), |fault| Err(fault.error))
    }

    /// Finds what makes the drafter, whose `config.json` is at `path`, unfit for a target.
    pub(crate) fn target_faults(&self, path: &Path, target: &ModelShape) -> Vec<DraftFault> {
        let (own, mut faults) = (&self.model.shape, Vec::new());
        let mut fault = |kind, key, problem| {
            let error = ModelError::config(path, key, problem);
            faults.push(DraftFault { kind, error });
        };
        let (width_key, width) = F::width_read(self);
        for (kind, key, found, expected) in [
            (DraftFaultKind::OtherWidth, width_key, width, target.hidden_size),
            (DraftFaultKind::OtherVocabulary, "vocab_size", own.vocab_size, target.vocab_size),
        ] {
            if found != expected {
                let problem = format!(
                    "is {found}, but the target's is {expected}: the drafter was made for another target; hint: \
                     train one for this target"
                );
                fault(kind, key, problem);
            }
        }
        if let Some((kind, key, problem)) = F::more_faults(self, target) {
            fault(kind, key, problem);
        }
        let (key, first) = F::KEYS.layers;
        let last = target.num_layers - usize::from(!F::KEYS.reads_last);
        if let Some(layer) = self.target_layers.iter().find(|layer| **layer > last) {
            let named = |layer: usize| layer as i64 + first;
            let problem = format!(
                "names layer {}, but the target has {} layers: expected {first} to {}",
                named(*layer),
                target.num_layers,
                named(last)
            );
            fault(DraftFaultKind::WrongLayers, key, problem);
        }
        if own.context < target.context {
            let problem = format!(
                "is {}, but the target reads {} tokens: raise it to that",
                own.context, target.context
            );
            fault(DraftFaultKind::ShortContext, "max_position_embeddings", problem);
        }
        faults
    }

    /// Returns the drafter's `config.json`.
    pub fn to_json(&self) -> Value {
        let mut config = self.model.to_json(self.dtype.config_name());
        let record = [
            ("target_hash", self.target_hash.as_deref().map(Value::from)),
            ("training", (!self.training.is_empty()).then(|| self.training.clone().into())),
        ];
        for (key, value) in F::keys(self).into_iter().chain(record) {
            if let Some(value) = value {
                config[key] = value;
            }
        }
        config
    }
}
