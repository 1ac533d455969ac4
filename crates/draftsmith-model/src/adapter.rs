//! The self-draft adapter of Kangaroo (Liu et al. 2024, section 3.1): a small layer that predicts
//! the target's final hidden states from those of a shallow layer.
//!
//! The paper's adapter is `y = norm(x + attention(input_layernorm(x)))`, where `x` is the target's
//! hidden state after its first `exit_layer` layers; the target's LM head turns `y` into logits.
//! [`AdapterArchitecture`] lists it and the others of the paper's ablation (Table 2). Each is a
//! decoder layer with parts left out, so that it can start from the weights of one of the target's
//! layers. Stacking several layers is our addition.

mod files;
mod kangaroo;
#[cfg(test)]
mod tests;

use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::source::{RandomSource, WeightSource};
use crate::decoder::stack::{LayerStack, StackSpec};
use crate::draft_vocabulary::DraftVocabulary;
use crate::error::ModelError;
use crate::frozen::{Packable, PackableLinear, PackableStack};
use crate::kv_cache::KvCache;
use crate::precision::{cast_parameters, copied};
use crate::rows::Rows;
use crate::spec::ModelShape;
use crate::spec::{Activation, LayerSpec, LinearSpec, MlpNames, MlpSpec, WindowSpec};
use crate::state_network::copied_head;
use crate::weights::WeightDtype;
#[cfg(test)]
pub(crate) use files::{KEYS, OwnKeys};
pub use kangaroo::KANGAROO_ROPE_THETA;

/// The prefix of the names of an adapter's layers. As in Kangaroo, names are those of a Llama
/// without the first `model.`.
const LAYERS: &str = "layers";
const NORM: &str = "norm";
const LM_HEAD: &str = "lm_head";

/// The key of the draft vocabulary's coverage in an adapter's training record.
pub const VOCABULARY_COVERAGE: &str = "vocabulary_coverage";

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

/// An adapter's shape and provenance: `config.json` of an adapter directory.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// The number of the target's layers that run before the adapter, below the number of all its
    /// layers. With 0 the adapter reads the target's embeddings.
    pub exit_layer: usize,
    /// The architecture of each layer.
    pub architecture: AdapterArchitecture,
    /// A model of the target's family and sizes with as many layers as the adapter (1 in the
    /// paper). The adapter uses parts of these layers.
    pub model: ModelConfig,
    /// The tokens that the adapter may draft; `None` for all.
    pub draft_vocabulary: Option<DraftVocabulary>,
    /// The type of the weights in the adapter's file. If the adapter was trained here, it is the
    /// type of the target's file.
    pub dtype: WeightDtype,
    /// The SHA-256 of the target that the adapter was trained for, if known.
    pub target_hash: Option<String>,
    /// The record of the training, without the settings above.
    pub training: Map<String, Value>,
}

/// A self-draft adapter: one or a few layers between a target's shallow layers and its LM head.
#[derive(Module, Debug)]
pub struct Adapter {
    pub(crate) stack: PackableStack,
    /// The separate LM head, `[hidden, vocab]`; `None` if the adapter uses the target's.
    lm_head: Option<PackableLinear>,
    #[module(skip)]
    logit_soft_cap: Option<f32>,
    #[module(skip)]
    shape: ModelShape,
    #[module(skip)]
    draft_vocabulary: Option<DraftVocabulary>,
}

impl AdapterConfig {
    /// Configures the paper's adapter for `target` after its first `exit_layer` layers: attention,
    /// in one layer.
    ///
    /// # Errors
    /// If no layer of the target follows `exit_layer`.
    pub fn new(target: &ModelConfig, exit_layer: usize) -> Result<Self, ModelError> {
        let num_layers = target.shape.num_layers;
        if exit_layer >= num_layers {
            return Err(ModelError::ExitLayer { exit_layer, num_layers });
        }
        let mut model = target.clone();
        // The adapter has a sliding window only if every layer of the target has one.
        model.spec.window = model.spec.window.filter(|window| !window.layers.contains(&false));
        let architecture = AdapterArchitecture::Attention;
        let config = Self {
            exit_layer,
            architecture,
            model,
            draft_vocabulary: None,
            dtype: WeightDtype::F32,
            target_hash: None,
            training: Map::new(),
        };
        Ok(config.with_layers(1))
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

    /// Returns the fraction of the held-out responses' tokens that are in the draft vocabulary, as
    /// counted in training; `None` if unknown.
    pub fn vocabulary_coverage(&self) -> Option<f64> {
        self.training.get(VOCABULARY_COVERAGE).and_then(Value::as_f64)
    }

    /// Adds the vocabulary coverage to the training record.
    pub fn set_vocabulary_coverage(&mut self, coverage: f64) {
        self.training.insert(VOCABULARY_COVERAGE.to_owned(), coverage.into());
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

    /// Specifies the layers and their norm.
    fn stack(&self) -> StackSpec<'_> {
        let layer = |number| (self.layer(), format!("{LAYERS}.{number}"));
        let layers = (0..self.model.shape.num_layers).map(layer).collect();
        StackSpec { model: &self.model, layers, norm: NORM }
    }

    /// Specifies the separate LM head, if the architecture has one.
    fn own_head(&self) -> Option<LinearSpec> {
        self.architecture.has_head().then(|| LinearSpec::lm_head(LM_HEAD, &self.model.shape))
    }

    /// Initialises an adapter as Kangaroo does: linear layers are uniform within ±1/√inputs,
    /// torch's default for `nn.Linear`, and norms are ones.
    pub fn init(&self, device: &Device) -> Adapter {
        self.init_by(device, |linear| {
            let bound = 1.0 / (linear.inputs as f64).sqrt();
            let uniform = Initializer::Uniform { min: -bound, max: bound };
            uniform.init([linear.inputs, linear.outputs], device)
        })
    }

    /// Initialises an adapter as [`AdapterConfig::init`] does, with numbers in [0, 1) from `draw`,
    /// in the order of the tensors.
    pub fn init_from(&self, device: &Device, mut draw: impl FnMut() -> f64) -> Adapter {
        self.init_by(device, |linear| {
            let bound = 1.0 / (linear.inputs as f64).sqrt();
            let shape = [linear.inputs, linear.outputs];
            let mut value = || (bound * (2.0 * draw() - 1.0)) as f32;
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| value()).collect();
            Param::from_data(TensorData::new(values, shape), device)
        })
    }

    fn init_by(
        &self,
        device: &Device,
        matrix: impl FnMut(&LinearSpec) -> Param<Tensor<2>>,
    ) -> Adapter {
        let Ok(adapter) = self.build(&mut RandomSource { device, matrix });
        adapter
    }

    /// Builds the adapter with the weights of `source`.
    fn build<S: WeightSource>(&self, source: &mut S) -> Result<Adapter, S::Error> {
        let stack = PackableStack::build(&self.stack(), source)?;
        let head = self.own_head();
        Ok(Adapter {
            stack,
            lm_head: head.map(|head| PackableLinear::build(&head, source)).transpose()?,
            logit_soft_cap: self.model.spec.logit_soft_cap,
            shape: self.model.shape.clone(),
            draft_vocabulary: self.draft_vocabulary.clone(),
        })
    }

    /// Counts the parameters. H is the hidden size, q and kv are the widths of all query heads and
    /// of all key/value heads, I is the intermediate size, and V the vocabulary size. A layer's
    /// attention has 2H(q + kv) + H parameters, its MLP 3HI + H, the MLP of "MLP only" 2H² + H, an
    /// LM head HV, and the last norm H.
    pub fn num_parameters(&self) -> usize {
        let head = self.own_head().map_or(0, |head| head.num_parameters());
        self.stack().num_parameters() + head
    }

    /// Checks that the adapter fits a target.
    ///
    /// # Errors
    /// If a width differs, or no layer of the target follows the exit layer.
    pub fn check_target(&self, dir: &Path, target: &ModelShape) -> Result<(), ModelError> {
        let shape = &self.model.shape;
        let fail =
            |key, problem| Err(ModelError::Config { path: dir.join("config.json"), key, problem });
        for (key, found, expected) in [
            ("hidden_size", shape.hidden_size, target.hidden_size),
            ("vocab_size", shape.vocab_size, target.vocab_size),
        ] {
            if found != expected {
                let problem = format!(
                    "is {found}, but the target's is {expected}: the adapter was made for another \
                     target; train one for this target"
                );
                return fail(key, problem);
            }
        }
        let (context, needed) = (shape.context, target.context);
        if context < needed {
            let problem = format!(
                "is {context}, but the target reads {needed} tokens: the adapter rotates with the \
                 target's table, so raise it to that"
            );
            return fail("max_position_embeddings", problem);
        }
        let (exit_layer, num_layers) = (self.exit_layer, target.num_layers);
        if exit_layer >= num_layers {
            let problem = format!(
                "is {exit_layer}, but the target has {num_layers} layers: expected 0 to {}",
                num_layers - 1
            );
            return fail("exit_layer", problem);
        }
        Ok(())
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

    /// Returns the tokens that the adapter may draft; `None` for all.
    pub fn draft_vocabulary(&self) -> Option<&DraftVocabulary> {
        self.draft_vocabulary.as_ref()
    }

    /// Creates a cache for `num_slots` sequences of up to `capacity` tokens each.
    pub fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        self.stack.form().new_cache(&self.shape, capacity, num_slots)
    }

    /// Returns a copy that computes in `dtype`, for one training forward over whole sequences. On
    /// an autodiff device, gradients reach this adapter's parameters in their own type.
    pub fn to_dtype(&self, dtype: FloatDType) -> Self {
        let own = self.clone();
        let (stack, lm_head) = (own.stack.unpacked(), own.lm_head.map(Packable::unpacked));
        cast_parameters(Self { stack, lm_head, ..own }, dtype)
    }

    /// Returns the number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.num_params()
    }

    /// Returns the number of logits, which is the target's vocabulary size.
    pub fn vocab_size(&self) -> usize {
        self.shape.vocab_size
    }

    /// Returns the weights of the separate LM head; `None` if the adapter uses the target's.
    ///
    /// # Shapes
    /// - output: `[hidden, vocab]`
    pub fn own_head(&self) -> Option<Tensor<2>> {
        self.lm_head.as_ref().map(|head| head.weight.val())
    }

    /// Computes logits of rows after the final norm, with the adapter's separate LM head or else
    /// the target's.
    pub fn logits(&self, normed: &Rows, target: &CausalLm) -> Rows {
        match &self.lm_head {
            Some(head) => head.logits(normed, self.logit_soft_cap),
            None => target.logits(normed),
        }
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
