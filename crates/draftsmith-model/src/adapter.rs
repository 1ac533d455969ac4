//! The self-draft adapter of Kangaroo (Liu et al. 2024, section 3.1): a small layer that predicts
//! the target's final hidden states from those of a shallow layer.
//!
//! The paper's adapter is `y = norm(x + attention(input_layernorm(x)))`, where `x` is the target's
//! hidden state after its first `exit_layer` layers; the target's LM head turns `y` into logits.
//! [`AdapterArchitecture`] lists it and the others of the paper's ablation (Table 2). Each is a
//! decoder layer with parts left out, so that it can start from the weights of one of the target's
//! layers. Stacking several layers is our addition.

mod kangaroo;
#[cfg(test)]
mod tests;

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::stack::LayerStack;
use crate::draft_vocabulary::{DRAFT_VOCABULARY, DraftVocabulary};
use crate::error::{ModelError, Result};
use crate::kv_cache::KvCache;
use crate::precision::copied;
use crate::rows::Rows;
use crate::self_draft::config::DraftConfig;
use crate::self_draft::files::DraftFiles;
use crate::self_draft::keys::{DraftKeys, DrafterDir};
use crate::self_draft::{DraftForm, DraftNetwork, LM_HEAD, Parts};
use crate::spec::{Activation, LayerSpec, LinearSpec, MlpNames, MlpSpec, WindowSpec};
use crate::state_network::{UnrolledInputs, copied_head};
pub use kangaroo::KANGAROO_ROPE_THETA;

/// The architecture of an adapter's layers (Kangaroo, Table 2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdapterArchitecture {
    /// `norm(x + attention(input_layernorm(x)))`, with the target's LM head: the paper's adapter.
    #[default]
    Attention,
    /// The same as `Attention`, with a separate LM head.
    AttentionWithHead,
    /// A whole Llama layer: `Attention` followed by a normed MLP, `h + mlp(norm(h))`.
    DecoderLayer,
    /// The paper's "MLP only": `norm(x + W₂ silu(W₁ input_layernorm(x)))` with two square matrices,
    /// and a separate LM head. Each output depends only on the hidden state at its own position.
    /// The paper counts the parameters but does not print the function. We take the residual and
    /// the activation from Medusa (Cai et al. 2024), which is in the same table.
    MlpOnly,
}

impl AdapterArchitecture {
    /// All architectures, in the order of their number of parameters in the paper.
    pub const ALL: [Self; 4] =
        [Self::Attention, Self::MlpOnly, Self::AttentionWithHead, Self::DecoderLayer];

    /// Returns whether the adapter attends to earlier tokens.
    pub fn has_attention(self) -> bool {
        self != Self::MlpOnly
    }

    /// Returns whether the adapter has a separate LM head.
    pub fn has_head(self) -> bool {
        matches!(self, Self::AttentionWithHead | Self::MlpOnly)
    }
}

impl std::fmt::Display for AdapterArchitecture {
    /// Writes the name that recipes and files use.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.serialize(formatter)
    }
}

/// An adapter's shape and provenance: `config.json` of an adapter directory. Its model has the
/// target's family and sizes, with as many layers as the adapter (1 in the paper); the adapter uses
/// parts of these layers.
pub type AdapterConfig = DraftConfig<AdapterForm>;

/// A self-draft adapter: one or a few layers between a target's shallow layers and its LM head.
pub type Adapter = DraftNetwork<AdapterForm>;

/// The settings that only adapters have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdapterForm {
    /// The architecture of each layer.
    pub architecture: AdapterArchitecture,
}

/// The keys of an adapter's `config.json` that a Llama does not have.
#[derive(Deserialize)]
pub(crate) struct OwnKeys {
    exit_layer: Option<usize>,
    #[serde(default)]
    architecture: AdapterArchitecture,
    /// The number of tokens in the tensor `draft_vocabulary`.
    draft_vocabulary: Option<usize>,
}

impl AdapterConfig {
    /// Configures the paper's adapter for `target` after its first `exit_layer` layers: attention,
    /// in one layer.
    ///
    /// # Errors
    /// If no layer of the target follows `exit_layer`.
    pub fn new(target: &ModelConfig, exit_layer: usize) -> Result<Self> {
        let num_layers = target.shape.num_layers;
        if exit_layer >= num_layers {
            return Err(ModelError::Invalid(format!(
                "exit layer {exit_layer} of a target with {num_layers} layers: expected 0 to {}",
                num_layers.saturating_sub(1)
            )));
        }
        let mut model = target.clone();
        // The adapter has a sliding window only if every layer of the target has one.
        model.spec.window = model.spec.window.filter(|window| !window.layers.contains(&false));
        Ok(Self::of(model, vec![exit_layer], AdapterForm::default()).with_layers(1))
    }

    /// Reads an adapter's `config.json`.
    ///
    /// # Errors
    /// If it is missing, is not a model's configuration, has a key that may change the network, or has
    /// no `exit_layer`.
    pub fn from_dir(dir: impl Into<DrafterDir>) -> Result<Self> {
        Self::beside(dir, 0)
    }

    /// Returns the number of the target's layers that run before the adapter, below the number of all
    /// its layers. With 0 the adapter reads the target's embeddings.
    pub fn exit_layer(&self) -> usize {
        self.target_layers[0]
    }

    /// Sets the number of layers.
    ///
    /// # Panics
    /// If `num_layers` is 0.
    #[must_use]
    pub fn with_layers(mut self, num_layers: usize) -> Self {
        assert!(num_layers > 0, "an adapter has a layer");
        self.model.shape.num_layers = num_layers;
        let window = self.model.spec.window.take();
        let layers = vec![true; num_layers];
        self.model.spec.window = window.map(|window| WindowSpec { layers, ..window });
        self
    }

    /// Specifies the parts of each layer.
    fn layer(&self) -> LayerSpec {
        let spec = &self.model.spec;
        let mlp = match self.architecture {
            AdapterArchitecture::Attention | AdapterArchitecture::AttentionWithHead => None,
            AdapterArchitecture::DecoderLayer => Some(spec.mlp.clone()),
            AdapterArchitecture::MlpOnly => Some(MlpSpec {
                width: self.model.shape.hidden_size,
                bias: false,
                activation: Activation::Silu,
                names: MlpNames {
                    norm: "input_layernorm",
                    gate: None,
                    up: "mlp.fc1",
                    down: "mlp.fc2",
                    post_norm: None,
                },
            }),
        };
        let attention = self.architecture.has_attention().then(|| spec.attention.clone());
        LayerSpec { attention, mlp, ..spec.layer(0) }
    }
}

impl DraftForm for AdapterForm {
    const KIND: &'static str = "adapter";
    const KEYS: DraftKeys = DraftKeys {
        own: "architecture draft_vocabulary exit_layer",
        layers: ("exit_layer", 0),
        reads_last: false,
        table: "",
        table_decides: false,
        has_families: true,
        dropped_prefix: "",
        other_prefix: ("", ""),
        dialects: &[],
    };

    /// Specifies the parts. Names are those of a Llama without the first `model.`, as in Kangaroo.
    fn parts(config: &AdapterConfig) -> Parts {
        let ModelConfig { shape, .. } = &config.model;
        let layer = |number| (config.layer(), format!("layers.{number}"));
        let lm_head = config.architecture.has_head().then(|| LinearSpec::lm_head(LM_HEAD, shape));
        Parts { lm_head, ..Parts::of_layers((0..shape.num_layers).map(layer)) }
    }

    fn read(files: &mut DraftFiles<Self>) -> Result<()> {
        let OwnKeys { exit_layer, architecture, draft_vocabulary } = files.own_keys()?;
        let Some(exit_layer) = exit_layer else {
            let problem = "is missing: give the number of the target's layers that run before the \
                           adapter (in Kangaroo: 2 for 7B, 3 for 13B models)";
            return Err(files.error("exit_layer", problem));
        };
        files.config.target_layers = vec![exit_layer];
        files.config.architecture = architecture;
        let problem = match draft_vocabulary {
            None => return Ok(()),
            Some(0) => "is 0: give the number of tokens, or leave it out".to_owned(),
            Some(_) if architecture.has_head() => format!(
                "needs an adapter with the target's LM head, but `{architecture}` has a separate one"
            ),
            Some(len) => {
                let vocab_size = files.config.model.shape.vocab_size;
                let vocabulary = DraftVocabulary::take(&mut files.reader, len, vocab_size)?;
                files.config.draft_vocabulary = Some(vocabulary);
                return Ok(());
            }
        };
        Err(files.error(DRAFT_VOCABULARY, problem))
    }

    /// Returns the keys. Files of the paper's architecture lack `architecture`, because Kangaroo's class
    /// would silently load only a part of the tensors of any other.
    fn keys(config: &AdapterConfig) -> Vec<(&'static str, Option<Value>)> {
        let architecture = config.architecture;
        let is_papers = architecture == AdapterArchitecture::Attention;
        let num_tokens = config.vocabulary_size().map(Value::from);
        vec![
            ("exit_layer", Some(config.exit_layer().into())),
            ("architecture", (!is_papers).then(|| architecture.to_string().into())),
            (DRAFT_VOCABULARY, num_tokens),
        ]
    }

    /// Computes the only step of each draft.
    fn unrolled(network: &Adapter, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let rows = inputs.begun_rows(0);
        let normed = network.forward(inputs.states.into_iter().next().expect("the exit's states"));
        let [batch, seq, width] = normed.dims();
        vec![normed.reshape([batch * seq, width]).select(0, rows)]
    }

    fn is_beside(config: &AdapterConfig, _dir: &DrafterDir, tensor: &str) -> bool {
        let ignored = config.model.spec.names.ignored;
        // The draft vocabulary was read together with the configuration.
        let is_read = config.draft_vocabulary.is_some() && tensor == DRAFT_VOCABULARY;
        is_read || ignored.iter().any(|end| tensor.ends_with(end))
    }

    fn vocabulary_tensor(vocabulary: &DraftVocabulary) -> (&'static str, Vec<i64>) {
        (DRAFT_VOCABULARY, vocabulary.ids().iter().map(|id| i64::from(*id)).collect())
    }
}

impl Adapter {
    /// Copies the target's weights. The adapter's layers take those of the target's layers from
    /// `first` on, repeating the last layer as needed. The adapter's norm takes the target's final
    /// norm. The MLP of "MLP only" stays unchanged, because no layer of the target has its form.
    ///
    /// # Panics
    /// If the target has another shape.
    pub fn with_layers_of(self, target: &CausalLm, first: usize) -> Self {
        let (device, stack) = (self.stack.device(), self.stack.tensors);
        let last = target.shape().num_layers - 1;
        let layers = stack.layers.into_iter().enumerate().map(|(number, layer)| {
            match target.layer(last.min(first + number).max(first)) {
                Some(theirs) => layer.with_parts_of(theirs, &device),
                None => layer,
            }
        });
        let layers = layers.collect();
        let norm = copied(target.last_norm(), &device);
        Self { stack: LayerStack { layers, norm, ..stack }.into(), ..self }
    }

    /// Copies the target's LM head into the adapter's separate one, if it has one.
    pub fn with_head_of(self, target: &CausalLm) -> Self {
        let device = self.stack.device();
        let lm_head = self.lm_head.map(|_| copied_head(target, None, &device));
        Self { lm_head, ..self }
    }

    /// Computes the LM head's input over whole sequences, without a cache. The adapter is causal,
    /// so padding on the right does not affect earlier positions.
    ///
    /// # Shapes
    /// - features: `[batch, seq, hidden]`, the target's hidden states at the exit layer
    /// - output: `[batch, seq, hidden]`, after the adapter's norm
    pub fn forward(&self, features: Tensor<3>) -> Tensor<3> {
        let all = 0..self.stack.layers.len();
        self.stack.norm.forward(self.stack.forward(all, features, &self.stack.device()))
    }

    /// Computes [`Self::forward`] for new tokens, which follow the cached tokens of their
    /// sequences.
    ///
    /// # Panics
    /// If a slot is full, or its rows come in several runs.
    pub fn forward_cached(&self, features: Rows, cache: &mut KvCache) -> Rows {
        self.stack.form().forward_normed(features, cache)
    }

    /// Adds the keys and values of new tokens to the cache, without computing outputs.
    ///
    /// # Panics
    /// As [`Adapter::forward_cached`].
    pub fn fill_cache(&self, features: Rows, cache: &mut KvCache) {
        self.stack.form().fill_from(0, features, cache);
    }
}
