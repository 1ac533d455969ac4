//! EAGLE-3's drafter (Li et al. 2025, section 3): one layer that reads the target's hidden states
//! after three of its layers. At drafted positions, which the target has not processed, it reads
//! its own output instead.
//!
//! At position q it reads the token after q and the target's states at q:
//! ```text
//! g = fc · [low; mid; high]
//! x = [norm(embedding of token q + 1); norm(g)]
//! a = g + attention(x)
//! o = a + mlp(norm(a))
//! ```
//! The LM head turns `norm(o)` into logits of token q + 2. The next draft step is at position
//! q + 1. It reads the token that was just drafted, and o in place of g. A layer number L stands
//! for the residual stream after the target's first L layers.

mod files;
#[cfg(test)]
mod tests;

use std::path::Path;

use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde_json::{Map, Value};

use crate::adapter::VOCABULARY_COVERAGE;
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::BOTH_PARTS;
use crate::decoder::attention::{DraftPlan, Drafts, UnrolledAttention, delayed};
use crate::decoder::source::{RandomSource, WeightSource};
use crate::decoder::stack::StackSpec;
use crate::draft_vocabulary::{DraftVocabulary, NarrowHead};
use crate::error::ModelError;
use crate::frozen::{Packable, PackableLinear, PackableNorm, PackableStack, PackableTable};
use crate::kv_cache::KvCache;
use crate::precision::cast_parameters;
use crate::rows::{DeviceRows, HostRows, RowData, Rows, Slots};
use crate::spec::{
    AttentionNames, AttentionSpec, LayerSpec, LinearSpec, ModelShape, RopeConfig, RopeScaling,
};
use crate::state_network::{StateNetwork, StepNetwork, UnrolledInputs, begun_from, copied_head};
use crate::weights::WeightDtype;

pub use files::{Eagle3Fault, Eagle3FaultKind, Eagle3Files};
#[cfg(test)]
pub(crate) use files::{KEYS, OwnKeys};

/// The names of the tensors in published drafters.
const LAYER: &str = "midlayer";
const FC: &str = "fc";
const EMBEDDING_NORM: &str = "midlayer.input_layernorm";
const NORM: &str = "norm";
const LM_HEAD: &str = "lm_head";
const EMBEDDING: &str = "embed_tokens";

/// The number of the target's hidden states that a drafter reads.
pub const NUM_TARGET_STATES: usize = 3;

/// A drafter's shape and provenance: `config.json` of its directory.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Config {
    /// For each hidden state that the drafter reads, the number of the target's layers before it.
    /// The order is that of the inputs of `fc`.
    pub target_layers: [usize; NUM_TARGET_STATES],
    /// The number of the target's layers.
    pub num_target_layers: usize,
    /// The width of the target's hidden states.
    pub target_hidden_size: usize,
    /// A Llama that has one layer of the drafter's sizes, and the target's vocabulary.
    pub model: ModelConfig,
    /// The tokens that the drafter may draft; `None` for all.
    pub draft_vocabulary: Option<DraftVocabulary>,
    /// Whether the residual stream begins with g after its norm, instead of g.
    pub norm_before_residual: bool,
    /// Whether the next step reads the normed output, as in EAGLE-3.1, and not the residual stream.
    pub norm_output: bool,
    /// Whether the drafter has token embeddings of its own. If not, it uses the target's.
    pub has_embedding: bool,
    /// Whether the drafter has an LM head of its own. If not, it uses the target's.
    pub has_head: bool,
    /// The type of the weights in the drafter's file.
    pub dtype: WeightDtype,
    /// The SHA-256 of the target that the drafter was trained for, if known.
    pub target_hash: Option<String>,
    /// The record of the training, without the settings above.
    pub training: Map<String, Value>,
}

/// An EAGLE-3 drafter.
#[derive(Module, Debug)]
pub struct Eagle3 {
    /// The projection of the target's hidden states, concatenated, to g.
    fc: PackableLinear,
    embedding_norm: PackableNorm,
    /// The decoder layer and the norm of its output. The layer's attention reads an embedding and
    /// g, concatenated; its attention norm is the norm of g.
    stack: PackableStack,
    /// The LM head, whose outputs are the tokens of the draft vocabulary. `None` to use the
    /// target's.
    lm_head: Option<PackableLinear>,
    /// The token embeddings, `[vocab, hidden]`; `None` to use the target's.
    embedding: Option<PackableTable>,
    #[module(skip)]
    norm_before_residual: bool,
    #[module(skip)]
    norm_output: bool,
    #[module(skip)]
    shape: ModelShape,
    /// The LM head together with the draft vocabulary. It is set if the drafter was loaded for
    /// decoding.
    #[module(skip)]
    narrow_head: Option<NarrowHead>,
}

impl Eagle3Config {
    /// Returns the default of [`Self::target_layers`]: 2, n/2 and n − 3 for a target with n layers.
    pub fn default_layers(num_layers: usize) -> [usize; NUM_TARGET_STATES] {
        [2, num_layers / 2, num_layers.saturating_sub(3)]
    }

    /// Configures a drafter of the target's sizes, with an LM head of its own over all tokens.
    pub fn new(target: &ModelConfig) -> Self {
        let ModelConfig { shape, spec, .. } = target;
        let shape = ModelShape { num_layers: 1, ..shape.clone() };
        let mut model = ModelConfig::llama(shape, spec.mlp.width);
        model.spec.norm.epsilon = spec.norm.epsilon;
        model.spec.rope =
            RopeConfig { theta: spec.rope.theta, width: None, scaling: RopeScaling::None };
        Self {
            target_layers: Self::default_layers(target.shape.num_layers),
            num_target_layers: target.shape.num_layers,
            target_hidden_size: target.shape.hidden_size,
            model,
            draft_vocabulary: None,
            norm_before_residual: false,
            norm_output: false,
            has_embedding: false,
            has_head: true,
            dtype: WeightDtype::F32,
            target_hash: None,
            training: Map::new(),
        }
    }

    /// Specifies the layer, whose queries, keys and values read an embedding and g, concatenated, and
    /// the norm of its output.
    fn stack(&self) -> StackSpec<'_> {
        let spec = &self.model.spec;
        let names = AttentionNames { norm: "hidden_norm", ..AttentionNames::LLAMA };
        let attention = AttentionSpec { num_read: 2, names, ..spec.attention.clone() };
        let layer = LayerSpec { attention: Some(attention), ..spec.layer(0) };
        StackSpec { model: &self.model, layers: vec![(layer, LAYER.to_owned())], norm: NORM }
    }

    fn fc(&self) -> LinearSpec {
        let inputs = NUM_TARGET_STATES * self.target_hidden_size;
        LinearSpec::matrix(FC, inputs, self.model.shape.hidden_size)
    }

    fn own_head(&self) -> Option<LinearSpec> {
        let shape = &self.model.shape;
        let num_tokens = self.num_draft_tokens();
        self.has_head.then(|| LinearSpec::matrix(LM_HEAD, shape.hidden_size, num_tokens))
    }

    /// Counts the tokens that the drafter may draft.
    pub fn num_draft_tokens(&self) -> usize {
        let all = self.model.shape.vocab_size;
        self.draft_vocabulary.as_ref().map_or(all, |vocabulary| vocabulary.ids().len())
    }

    /// Returns the fraction of the held-out responses' tokens that are in the draft vocabulary, as
    /// counted in training; `None` if unknown.
    pub fn vocabulary_coverage(&self) -> Option<f64> {
        self.training.get(VOCABULARY_COVERAGE).and_then(Value::as_f64)
    }

    /// Counts the parameters in the drafter's file.
    pub fn num_parameters(&self) -> usize {
        let ModelConfig { shape, spec, .. } = &self.model;
        let norm = spec.norm.num_parameters(shape.hidden_size);
        let embedding = if self.has_embedding { shape.vocab_size * shape.hidden_size } else { 0 };
        let head = self.own_head().map_or(0, |head| head.num_parameters());
        self.fc().num_parameters() + self.stack().num_parameters() + norm + embedding + head
    }

    /// Checks that the drafter in `dir` fits a target.
    ///
    /// # Errors
    /// If a width or the vocabulary differs, or the target lacks a layer that the drafter reads.
    pub fn check_target(&self, dir: &Path, target: &ModelShape) -> Result<(), ModelError> {
        let faults = self.target_faults(&dir.join("config.json"), target);
        faults.into_iter().next().map_or(Ok(()), |fault| Err(fault.error))
    }

    /// Finds what makes the drafter, whose `config.json` is at `path`, unfit for a target.
    fn target_faults(&self, path: &Path, target: &ModelShape) -> Vec<Eagle3Fault> {
        let own = &self.model.shape;
        let mut faults = Vec::new();
        let mut fault = |kind, key, problem| {
            let error = ModelError::Config { path: path.to_path_buf(), key, problem };
            faults.push(Eagle3Fault { kind, error });
        };
        let other = |found: usize, expected: usize| {
            format!(
                "is {found}, but the target's is {expected}: the drafter was made for another target; hint: \
                 train one for this target"
            )
        };
        let width = self.target_hidden_size;
        if width != target.hidden_size {
            let problem = other(width, target.hidden_size);
            fault(Eagle3FaultKind::OtherWidth, "target_hidden_size", problem);
        }
        if own.vocab_size != target.vocab_size {
            let problem = other(own.vocab_size, target.vocab_size);
            fault(Eagle3FaultKind::OtherVocabulary, "vocab_size", problem);
        }
        if !(self.has_embedding && self.has_head) && own.hidden_size != target.hidden_size {
            let problem = format!(
                "is {}, and the target's is {}: such a drafter needs the tensors `{EMBEDDING}` and `{LM_HEAD}`",
                own.hidden_size, target.hidden_size
            );
            fault(Eagle3FaultKind::MissingTensor, "hidden_size", problem);
        }
        if let Some(layer) = self.target_layers.iter().find(|layer| **layer > target.num_layers) {
            let problem =
                format!("names layer {layer}, but the target has {} layers", target.num_layers);
            fault(Eagle3FaultKind::WrongLayers, files::LAYERS, problem);
        }
        if own.context < target.context {
            let problem = format!(
                "is {}, but the target reads {} tokens: raise it to that",
                own.context, target.context
            );
            fault(Eagle3FaultKind::ShortContext, "max_position_embeddings", problem);
        }
        faults
    }

    /// Initialises random weights: linear layers are uniform within ±1/√inputs (torch's default for
    /// `nn.Linear`), norms are ones, and embeddings have a standard deviation of 0.02. The numbers
    /// in \[0, 1) come from `draw`, in the order of the tensors.
    pub fn init_from(&self, device: &Device, mut draw: impl FnMut() -> f64) -> Eagle3 {
        let mut values = |shape: [usize; 2], bound: f64| {
            let values = (0..shape[0] * shape[1]).map(|_| (bound * (2.0 * draw() - 1.0)) as f32);
            Param::from_data(TensorData::new(values.collect::<Vec<f32>>(), shape), device)
        };
        let ModelShape { vocab_size, hidden_size, .. } = self.model.shape;
        // The standard deviation of a uniform number is its bound divided by √3.
        let bound = 0.02 * 3f64.sqrt();
        let embedding = self.has_embedding.then(|| values([vocab_size, hidden_size], bound).into());
        let matrix = |linear: &LinearSpec| {
            values([linear.inputs, linear.outputs], 1.0 / (linear.inputs as f64).sqrt())
        };
        let Ok(drafter) = self.build(embedding, &mut RandomSource { device, matrix });
        drafter
    }

    /// Initialises random weights as [`Self::init_from`] does, with burn's random numbers.
    pub fn init(&self, device: &Device) -> Eagle3 {
        let shape = [self.model.shape.vocab_size, self.model.shape.hidden_size];
        let normal = Initializer::Normal { mean: 0.0, std: 0.02 };
        let embedding = self.has_embedding.then(|| normal.init(shape, device).into());
        let matrix = |linear: &LinearSpec| {
            let bound = 1.0 / (linear.inputs as f64).sqrt();
            let uniform = Initializer::Uniform { min: -bound, max: bound };
            uniform.init([linear.inputs, linear.outputs], device)
        };
        let Ok(drafter) = self.build(embedding, &mut RandomSource { device, matrix });
        drafter
    }

    /// Builds the drafter with the weights of `source`.
    fn build<S: WeightSource>(
        &self,
        embedding: Option<PackableTable>,
        source: &mut S,
    ) -> Result<Eagle3, S::Error> {
        let head = self.own_head();
        Ok(Eagle3 {
            fc: PackableLinear::build(&self.fc(), source)?,
            embedding_norm: PackableNorm::build(EMBEDDING_NORM, &self.model, source)?,
            stack: PackableStack::build(&self.stack(), source)?,
            lm_head: head.map(|head| PackableLinear::build(&head, source)).transpose()?,
            embedding,
            norm_before_residual: self.norm_before_residual,
            norm_output: self.norm_output,
            shape: self.model.shape.clone(),
            narrow_head: None,
        })
    }
}

impl Eagle3 {
    /// Returns the width of the drafter's hidden states.
    pub fn hidden_size(&self) -> usize {
        self.shape.hidden_size
    }

    /// Drops the packed copies of the weights.
    fn unpacked(self) -> Self {
        Self {
            fc: self.fc.unpacked(),
            embedding_norm: self.embedding_norm.unpacked(),
            stack: self.stack.unpacked(),
            lm_head: self.lm_head.map(Packable::unpacked),
            embedding: self.embedding.map(Packable::unpacked),
            narrow_head: None,
            ..self
        }
    }

    /// Copies the target's weights where the shapes allow. The MLP, the output projection, the
    /// norms, and the halves of the other projections that read g come from the target's last
    /// layer, if it was loaded. `fc` becomes the identity on the deepest of the three states, plus a tenth of its
    /// previous weights. The LM head is the target's, for the tokens that the drafter may draft.
    /// Biases are left out.
    pub fn with_weights_of(self, target: &CausalLm, config: &Eagle3Config) -> Self {
        let device = self.stack.device();
        if target.shape().hidden_size != self.shape.hidden_size {
            return self;
        }
        let vocabulary = config.draft_vocabulary.as_ref();
        let fc = passing_last(&self.fc, &device).into();
        let stack = begun_from(self.stack.tensors, target).into();
        let lm_head = self.lm_head.map(|_| copied_head(target, vocabulary, &device));
        Self { fc, stack, lm_head, ..self }
    }

    /// Converts the drafter to decode in `dtype`.
    pub fn in_dtype(&self, dtype: FloatDType) -> Self {
        let mut own = self.to_dtype(dtype);
        let head = self.narrow_head.as_ref().zip(own.lm_head.as_ref());
        own.narrow_head = head.map(|(head, own)| {
            NarrowHead::of_own(own, Some(&head.vocabulary), self.shape.vocab_size)
        });
        own.stack.tensors.join();
        own
    }
}

/// Returns a projection of several states to one that passes on the last of them, plus a tenth of
/// what `fc` gives.
pub(crate) fn passing_last(fc: &Linear, device: &Device) -> Linear {
    let drawn = fc.weight.val();
    let [inputs, outputs] = drawn.dims();
    let mut weight = values_of(drawn * 0.1);
    for (row, column) in (inputs - outputs..inputs).zip(0..outputs) {
        weight[row * outputs + column] += 1.0;
    }
    let weight = Param::from_data(TensorData::new(weight, [inputs, outputs]), device);
    Linear { weight, bias: None }
}

impl StateNetwork for Eagle3 {
    const KIND: &'static str = "eagle3";

    fn to_dtype(&self, dtype: FloatDType) -> Self {
        cast_parameters(self.clone().unpacked(), dtype)
    }

    fn own_embedding(&self, ids: Tensor<2, Int>) -> Option<Tensor<3>> {
        let [batch, seq] = ids.dims();
        let table = self.embedding.as_ref()?.val();
        let [_, width] = table.dims();
        Some(table.select(0, ids.reshape([batch * seq])).reshape([batch, seq, width]))
    }

    fn own_head(&self) -> Option<Tensor<2>> {
        self.lm_head.as_ref().map(|head| head.weight.val())
    }

    fn unrolled(&self, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        let UnrolledInputs { states, embedded, begun, num_steps, lengths, .. } = inputs;
        let layer = &self.stack.layers[0];
        let (attention, mlp) = layer.attention.as_ref().zip(layer.mlp.as_ref()).expect(BOTH_PARTS);
        let [_, seq, _] = embedded.dims();
        let place = (embedded.dtype().into(), &self.stack.device());
        let plan = DraftPlan { begun, seq, num_steps, rows_ahead: 0, lengths };
        let drafts = Drafts::new(plan, &self.stack.reaches[0], place);
        let known = |x: Tensor<3>| {
            let [batch, seq, width] = x.dims();
            x.reshape([batch * seq, width]).select(0, drafts.known.clone())
        };
        let states = states.into_iter().map(known).collect();
        let features = self.fc.forward(Tensor::cat(states, 1));
        let normed = attention.normed_input(features.clone());
        let embedded = self.embedding_norm.forward(known(embedded));
        let mut attending = UnrolledAttention::new(attention, &drafts, embedded, normed);
        let mut given = features.select(0, drafts.begun.clone());
        let steps = (0..num_steps).map(|_| {
            let normed = attention.normed_input(given.clone());
            let stream = if self.norm_before_residual { normed.clone() } else { given.clone() };
            let stream = stream + attending.step(normed);
            let output = stream.clone() + mlp.forward(stream.unsqueeze()).squeeze_dim::<2>(0);
            let normed = self.stack.norm.forward(output.clone());
            given = delayed(if self.norm_output { normed.clone() } else { output }, 1);
            normed
        });
        steps.collect()
    }
}

impl StepNetwork for Eagle3 {
    fn context(&self) -> usize {
        self.shape.context
    }

    fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        self.stack.form().new_cache(&self.shape, capacity, num_slots)
    }

    fn embed(&self, target: &CausalLm, runs: &[(usize, &[u32])]) -> Rows {
        let Some(table) = &self.embedding else { return target.embed_runs(runs) };
        let ids = runs.iter().flat_map(|(_, ids)| *ids);
        slots_of(runs).rows(table.looked_up(Param::val, ids))
    }

    fn features(&self, states: &[Rows]) -> Rows {
        assert_eq!(states.len(), NUM_TARGET_STATES, "one for each layer");
        self.fc.of_rows(Rows::side_by_side(states))
    }

    fn no_output(&self, target: &CausalLm, slot: usize) -> Rows {
        let rows = target.embed_ids(&[0]).in_slot(slot);
        let width = self.shape.hidden_size;
        match &rows.place {
            RowData::Host(_) => rows.with_place(HostRows { values: vec![0.0; width], width }),
            RowData::Device(found) => {
                let [_, num_padded, _] = found.tensor.dims();
                let like = (&self.stack.device(), found.tensor.dtype());
                let tensor = Box::new(Tensor::<3>::zeros([1, num_padded, width], like));
                rows.with_place(DeviceRows { tensor, num_rows: 1 })
            }
        }
    }

    fn forward_cached(&self, embedded: Rows, features: Rows, cache: &mut KvCache) -> Rows {
        let stack = self.stack.form();
        let embedded = self.embedding_norm.form().of_rows(embedded);
        let normed = stack.first_norm().of_rows(features.clone());
        let read = Rows::side_by_side([&embedded, &normed]);
        let stream = if self.norm_before_residual { normed } else { features };
        let output = stack.forward_reading(read, stream, cache);
        if self.norm_output { stack.norm().of_rows(output) } else { output }
    }

    fn normed(&self, outputs: Rows) -> Rows {
        if self.norm_output { outputs } else { self.stack.form().norm().of_rows(outputs) }
    }

    fn logits(&self, normed: &Rows, target: &CausalLm) -> Rows {
        match &self.narrow_head {
            Some(head) => head.logits(normed),
            None => target.logits(normed),
        }
    }
}

fn values_of(tensor: Tensor<2>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn slots_of(runs: &[(usize, &[u32])]) -> Slots {
    let run = |(slot, ids): &(usize, &[u32])| crate::rows::Run { slot: *slot, num_rows: ids.len() };
    runs.iter().map(run).collect()
}
