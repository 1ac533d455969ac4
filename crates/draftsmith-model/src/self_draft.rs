//! Self-drafts: drafters made of a target's own hidden states. Kangaroo's adapters, EAGLE-3 and block
//! drafters are one network with different parts, one configuration and one format of directories.
//!
//! A [`DraftForm`] says which parts a kind has, which keys and tensors its files have, and how it
//! learns. Everything else is here: building, reading, writing, counting, and the first weights.

pub(crate) mod config;
pub(crate) mod faults;
pub(crate) mod files;
pub(crate) mod keys;

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde_json::{Map, Value};

use self::config::DraftConfig;
use self::faults::DraftFaultKind;
use self::files::DraftFiles;
use self::keys::{DraftKeys, DrafterDir};
use crate::causal_lm::CausalLm;
use crate::config::ModelConfig;
use crate::decoder::source::{CheckpointSource, RandomSource, WeightSource, named_linears};
use crate::decoder::stack::LayerStack;
use crate::draft_vocabulary::{DraftVocabulary, NarrowHead};
use crate::error::Result;
use crate::frozen::{
    Packable, PackableLinear, PackableNorm, PackableStack, PackableTable, PackedStack,
};
use crate::kv_cache::KvCache;
use crate::precision::{cast_parameters, copied};
use crate::rows::{DeviceRows, HostRows, RowData, Rows};
use crate::spec::{LayerSpec, LinearSpec, ModelShape, NamedNorm, SessionFaults};
use crate::state_network::{CachedNetwork, StateNetwork, UnrolledInputs, begun_from, copied_head};
use crate::weights::{NamedTensor, WeightDtype, check_weights, write_config, write_with_ids};

/// The names of tensors that all forms share.
pub(crate) const FC: &str = "fc";
pub(crate) const NORM: &str = "norm";
pub(crate) const LM_HEAD: &str = "lm_head";
pub(crate) const EMBEDDING: &str = "embed_tokens";

/// A form of self-draft: its own settings, and what distinguishes its network and files.
pub trait DraftForm: Clone + Debug + Default + PartialEq + Send + Sync + 'static {
    /// The name of the kind, for messages.
    const KIND: &'static str;
    /// What its `config.json` and its tensors are called.
    const KEYS: DraftKeys;

    /// Specifies the parts of the network.
    fn parts(config: &DraftConfig<Self>) -> Parts;

    /// Reads the keys of its own.
    ///
    /// # Errors
    /// If a key is invalid in a way that leaves nothing to examine.
    fn read(files: &mut DraftFiles<Self>) -> Result<()>;

    /// Returns the keys of its own in `config.json`, in their order. Keys without a value are left out.
    fn keys(config: &DraftConfig<Self>) -> Vec<(&'static str, Option<Value>)>;

    /// Computes the LM head's inputs in the steps of drafts: see [`StateNetwork::unrolled`].
    fn unrolled(network: &DraftNetwork<Self>, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>>;

    /// Counts the tokens that a cache holds beyond the longest sequence.
    fn num_ahead(_config: &DraftConfig<Self>) -> usize {
        0
    }

    /// Returns the width of the hidden states that the drafter reads, with the key that gives it.
    fn width_read(config: &DraftConfig<Self>) -> (&'static str, usize) {
        ("hidden_size", config.model.shape.hidden_size)
    }

    /// Finds what else makes the drafter unfit for a target, as a kind, a key and a problem.
    fn more_faults(
        _config: &DraftConfig<Self>,
        _target: &ModelShape,
    ) -> Option<(DraftFaultKind, &'static str, String)> {
        None
    }

    /// Returns whether the drafter does not compute with a tensor of its file.
    fn is_beside(config: &DraftConfig<Self>, dir: &DrafterDir, tensor: &str) -> bool;

    /// Lists a draft vocabulary as the tensor of its file.
    fn vocabulary_tensor(vocabulary: &DraftVocabulary) -> (&'static str, Vec<i64>) {
        (crate::draft_vocabulary::OFFSETS, vocabulary.offsets())
    }
}

/// The specifications of a network's parts.
#[derive(Debug)]
pub struct Parts {
    /// The embeddings, as the matrix whose outputs are tokens.
    pub(crate) embedding: Option<LinearSpec>,
    /// The projection of the target's states.
    pub(crate) fc: Option<LinearSpec>,
    /// The names and widths of the norms of the target's states before their projection.
    pub(crate) state_norms: Vec<(&'static str, usize)>,
    /// The name of the norm of embeddings or projected states.
    pub(crate) input_norm: Option<&'static str>,
    /// Each layer with the prefix of its tensors.
    pub(crate) layers: Vec<(LayerSpec, String)>,
    /// The name of the norm of the last layer's output; empty without one.
    pub(crate) last_norm: &'static str,
    pub(crate) lm_head: Option<LinearSpec>,
    /// Whether the LM head gets its random numbers before the layers.
    pub(crate) is_head_first: bool,
    pub(crate) markov: Option<[LinearSpec; 2]>,
    pub(crate) confidence: Option<LinearSpec>,
}

impl Parts {
    /// Specifies a network of layers only.
    pub(crate) fn of_layers(layers: impl Iterator<Item = (LayerSpec, String)>) -> Self {
        Self {
            embedding: None,
            fc: None,
            state_norms: Vec::new(),
            input_norm: None,
            layers: layers.collect(),
            last_norm: NORM,
            lm_head: None,
            is_head_first: false,
            markov: None,
            confidence: None,
        }
    }
}

/// The network of a self-draft. A form has some of the parts.
#[derive(Module, Debug)]
pub struct DraftNetwork<F: DraftForm> {
    /// The projection of the target's hidden states, concatenated.
    pub(crate) fc: Option<PackableLinear>,
    /// The norms of the target's states before their projection: none, one of all states, or one of
    /// each.
    pub(crate) state_norms: Vec<PackableNorm>,
    /// The norm of embeddings (EAGLE-3) or of projected states (block drafters).
    pub(crate) input_norm: Option<PackableNorm>,
    /// The layers and the norm of their output.
    pub(crate) stack: PackableStack,
    /// The LM head, whose outputs are the tokens of the draft vocabulary. `None` to use the
    /// target's.
    pub(crate) lm_head: Option<PackableLinear>,
    /// The token embeddings, `[vocab, hidden]`; `None` to use the target's.
    pub(crate) embedding: Option<PackableTable>,
    /// The Markov head: the vector of each token, `[rank, vocab]`, and the projection of vectors to
    /// logits of the draft vocabulary.
    pub(crate) markov: Option<[PackableLinear; 2]>,
    pub(crate) confidence: Option<PackableLinear>,
    /// The LM head of a drafter that reads projected states, with its draft vocabulary. Set if the
    /// drafter was loaded for decoding.
    #[module(skip)]
    pub(crate) narrow_head: Option<NarrowHead>,
    /// The Markov head's projection to logits. Set if the drafter was loaded for decoding.
    #[module(skip)]
    pub(crate) narrow_markov: Option<NarrowHead>,
    /// The embedding of a block's mask token, for training.
    #[module(skip)]
    pub(crate) mask: Option<Vec<f32>>,
    #[module(skip)]
    pub(crate) config: Arc<DraftConfig<F>>,
}

impl<F: DraftForm> DraftConfig<F> {
    /// Initialises random weights with burn's random numbers: linear layers are uniform within
    /// ±1/√inputs (torch's default for `nn.Linear`), norms are ones, and embeddings have a standard
    /// deviation of 0.02.
    pub fn init(&self, device: &Device) -> DraftNetwork<F> {
        self.init_by(device, |linear| {
            let bound = bound_of(linear);
            let uniform = Initializer::Uniform { min: -bound, max: bound };
            uniform.init([linear.inputs, linear.outputs], device)
        })
    }

    /// Initialises random weights as [`Self::init`] does, with numbers in [0, 1) from `draw`, in the
    /// order of the tensors.
    pub fn init_from(&self, device: &Device, mut draw: impl FnMut() -> f64) -> DraftNetwork<F> {
        self.init_by(device, |linear| {
            let shape = [linear.inputs, linear.outputs];
            uniform_matrix(shape, bound_of(linear), &mut draw, device)
        })
    }

    fn init_by(
        &self,
        device: &Device,
        matrix: impl FnMut(&LinearSpec) -> Param<Tensor<2>>,
    ) -> DraftNetwork<F> {
        let Ok(network) = self.build(&mut RandomSource { device, matrix });
        network
    }

    /// Builds the network with the weights of `source`.
    pub(crate) fn build<S: WeightSource>(
        &self,
        source: &mut S,
    ) -> Result<DraftNetwork<F>, S::Error> {
        let linear = |spec: Option<LinearSpec>, source: &mut S| {
            let built = spec.map(|spec| {
                Packable::build(source, |it| it.linear("", &spec), |it| it.linears("", &[spec]))
            });
            built.transpose()
        };
        let parts = F::parts(self);
        let [early, late] = match parts.is_head_first {
            true => [parts.lm_head, None],
            false => [None, parts.lm_head],
        };
        let embedding = parts.embedding.map(|spec| {
            Packable::build(source, |it| it.table(&spec), |it| it.linears("", &[spec]))
        });
        let embedding = embedding.transpose()?;
        let fc = linear(parts.fc, source)?;
        let norm = |(name, width): (&'static str, usize), source: &mut S| {
            let outside = NamedNorm::outside(name, &self.model.shape, &self.model.spec.norm);
            let norm = outside.of_width(width);
            Packable::build(source, |it| it.norm(norm), |it| it.norm(norm))
        };
        let state_norms = parts.state_norms.into_iter().map(|it| norm(it, source));
        let state_norms = state_norms.collect::<Result<_, _>>()?;
        let width = self.model.shape.hidden_size;
        let input_norm = parts.input_norm.map(|name| norm((name, width), source)).transpose()?;
        let lm_head = linear(early, source)?;
        let markov = match parts.markov {
            Some(both) => {
                let [vectors, out] = both.map(Some).map(|spec| linear(spec, source));
                vectors?.zip(out?).map(<[_; 2]>::from)
            }
            None => None,
        };
        let confidence = linear(parts.confidence, source)?;
        let spec = &self.stack();
        let layers = |it: &mut S| LayerStack::build(spec, it);
        let stack = Packable::build(source, layers, |it| PackedStack::read(spec, it))?;
        let lm_head = linear(late, source)?.or(lm_head);
        let config = Arc::new(self.clone());
        let (narrow_head, narrow_markov, mask) = (None, None, None);
        Ok(DraftNetwork {
            fc,
            state_norms,
            input_norm,
            stack,
            lm_head,
            embedding,
            markov,
            confidence,
            narrow_head,
            narrow_markov,
            mask,
            config,
        })
    }
}

/// Returns the bound of a matrix's uniform random weights. The standard deviation of a uniform number
/// is its bound divided by √3.
fn bound_of(linear: &LinearSpec) -> f64 {
    if linear.name == EMBEDDING { 0.02 * 3f64.sqrt() } else { 1.0 / (linear.inputs as f64).sqrt() }
}

/// Draws a matrix of numbers that are uniform within ±`bound`, from numbers in [0, 1) that `draw`
/// gives.
pub fn uniform_matrix(
    shape: [usize; 2],
    bound: f64,
    mut draw: impl FnMut() -> f64,
    device: &Device,
) -> Param<Tensor<2>> {
    let mut value = || (bound * (2.0 * draw() - 1.0)) as f32;
    let values: Vec<f32> = (0..shape[0] * shape[1]).map(|_| value()).collect();
    Param::from_data(TensorData::new(values, shape), device)
}

/// Returns a part that every drafter of a form has.
pub(crate) fn part<T>(part: &Option<T>) -> &T {
    part.as_ref().expect("drafters of this form have the part")
}

impl<F: DraftForm> DraftNetwork<F> {
    /// Loads a drafter for a target of shape `target`. `dtype` is the type of computation, which
    /// must be the target's. On an autodiff device the drafter can be trained.
    ///
    /// # Errors
    /// If a file is missing, broken or changed since its export, a tensor is missing, extra or
    /// misshapen, or the drafter does not fit the target.
    pub fn from_dir(
        dir: impl Into<DrafterDir>,
        target: &ModelShape,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<(DraftConfig<F>, Self)> {
        let files = DraftFiles::<F>::read(dir, target.num_layers)?;
        let DraftFiles { config, dir, mut reader, .. } = files.without_faults()?;
        config.check_target(&dir, target)?;
        let dtype = dtype.float_dtype();
        let mut source = CheckpointSource { reader: &mut reader, device, dtype };
        let mut network = config.build(&mut source)?;
        network.stack.tensors.join();
        reader.ignore(|name| F::is_beside(&config, &dir, name));
        reader.finish()?;
        check_weights(&dir)?;
        Ok((config, network.with_narrow_heads()))
    }

    /// Reads a drafter of any target of shape `target`'s, to train it further on the device of `target`
    /// with autodiff. The record of its training is left out.
    ///
    /// # Errors
    /// As for [`Self::from_dir`].
    pub fn to_train(dir: &Path, target: &CausalLm) -> Result<(DraftConfig<F>, Self)> {
        let device = target.device().autodiff();
        let (config, network) = Self::from_dir(dir, target.shape(), WeightDtype::F32, &device)?;
        let (dtype, target_hash, training) = (target.stored_dtype(), None, Map::new());
        Ok((DraftConfig { dtype, target_hash, training, ..config }, network.unpacked()))
    }

    /// Adds tokens to the draft vocabulary. Their rows of the LM head are the target's, or zeros if the
    /// drafter has another width.
    ///
    /// # Panics
    /// If `vocabulary` does not begin with the drafter's own.
    #[must_use]
    pub fn widened(self, vocabulary: &DraftVocabulary, target: &CausalLm) -> Self {
        let num_before = self.config.num_draft_tokens();
        let own = self.config.draft_vocabulary.as_ref().map(DraftVocabulary::ids);
        assert_eq!(own, vocabulary.ids().get(..num_before), "the drafter's own tokens come first");
        let added = &vocabulary.ids()[num_before..];
        if added.is_empty() {
            return self;
        }
        let device = self.stack.device();
        let joined = |linear: PackableLinear, columns: Tensor<2>| -> PackableLinear {
            let weight = Tensor::cat(vec![linear.weight.val(), columns], 1);
            let weight = Param::from_data(weight.into_data(), &device);
            Linear { weight, bias: None }.into()
        };
        let zeros = |linear: &PackableLinear| {
            let [inputs, _] = linear.weight.dims();
            Tensor::zeros([inputs, added.len()], &device)
        };
        let is_as_wide = self.hidden_size() == target.shape().hidden_size;
        let lm_head = self.lm_head.map(|head| {
            let added = DraftVocabulary::new(added);
            let columns = match is_as_wide {
                true => copied_head(target, Some(&added), &device).weight.val(),
                false => zeros(&head),
            };
            joined(head, columns)
        });
        let markov = self.markov.map(|[vectors, out]| {
            let columns = zeros(&out);
            [vectors, joined(out, columns)]
        });
        let draft_vocabulary = Some(vocabulary.clone());
        let config = Arc::new(DraftConfig { draft_vocabulary, ..(*self.config).clone() });
        Self { lm_head, markov, config, ..self }
    }

    /// Combines the drafter's own matrices that give logits with the tokens that it may draft. The
    /// LM head of an adapter has the target's soft cap instead.
    fn with_narrow_heads(mut self) -> Self {
        let (vocabulary, vocab_size) = (self.config.draft_vocabulary.as_ref(), self.vocab_size());
        let of = |head| NarrowHead::of_own(head, vocabulary, vocab_size);
        let narrow_head = self.lm_head.as_ref().filter(|_| self.fc.is_some()).map(of);
        let narrow_markov = self.markov.as_ref().map(|[_, out]| of(out));
        (self.narrow_head, self.narrow_markov) = (narrow_head, narrow_markov);
        self
    }

    /// Drops the packed copies of the weights.
    pub(crate) fn unpacked(self) -> Self {
        Self {
            fc: self.fc.map(Packable::unpacked),
            state_norms: self.state_norms.into_iter().map(Packable::unpacked).collect(),
            input_norm: self.input_norm.map(Packable::unpacked),
            stack: self.stack.unpacked(),
            lm_head: self.lm_head.map(Packable::unpacked),
            embedding: self.embedding.map(Packable::unpacked),
            markov: self.markov.map(|both| both.map(Packable::unpacked)),
            confidence: self.confidence.map(Packable::unpacked),
            narrow_head: None,
            narrow_markov: None,
            ..self
        }
    }

    /// Returns the same drafter with its weights as tensors, for comparison.
    #[must_use]
    pub fn to_tensors(&self) -> Self {
        self.clone().unpacked().with_narrow_heads()
    }

    /// Converts the drafter to decode in `dtype`.
    pub fn in_dtype(&self, dtype: FloatDType) -> Self {
        let mut own = self.to_dtype(dtype);
        own.stack.tensors.join();
        own.with_narrow_heads()
    }

    /// Copies the target's weights where the shapes allow. The layers take those of the target's
    /// last layers, if these were loaded, and the norm the target's. `fc` passes on the deepest state,
    /// plus a tenth of its previous output. The LM head is the target's, for the tokens that the
    /// drafter may draft. Embeddings of its own are the target's, with the family's scale. Biases are
    /// left out.
    #[must_use]
    pub fn with_weights_of(self, target: &CausalLm) -> Self {
        let device = self.stack.device();
        if target.shape().hidden_size != self.hidden_size() {
            return self;
        }
        let vocabulary = self.config.draft_vocabulary.as_ref();
        let lm_head = self.lm_head.map(|_| copied_head(target, vocabulary, &device));
        let embedding = self.embedding.map(|_| {
            let ids = Tensor::arange(0..target.shape().vocab_size as i64, &target.device());
            let table = target.embed(ids.unsqueeze()).squeeze_dim(0);
            copied(Param::from_tensor(table), &device).into()
        });
        let fc = self.fc.map(|fc| passing_last(&fc, &device).into());
        let stack = begun_from(self.stack.tensors, target).into();
        Self { embedding, fc, stack, lm_head, ..self }
    }

    /// Returns the drafter with sessions that have these faults.
    #[must_use]
    pub fn with_faults(mut self, faults: SessionFaults) -> Self {
        Arc::make_mut(&mut self.config).model.spec.faults = faults;
        self
    }

    /// Returns the width of the drafter's hidden states.
    pub fn hidden_size(&self) -> usize {
        self.config.model.shape.hidden_size
    }

    /// Returns the number of logits, which is the target's vocabulary size.
    pub fn vocab_size(&self) -> usize {
        self.config.model.shape.vocab_size
    }

    /// Returns the tokens that the drafter may draft; `None` for all.
    pub fn draft_vocabulary(&self) -> Option<&DraftVocabulary> {
        self.config.draft_vocabulary.as_ref()
    }

    /// Returns the number of parameters.
    pub fn num_parameters(&self) -> usize {
        self.num_params()
    }

    /// Writes `model.safetensors` in the configuration's type, then `config.json`, each under a
    /// temporary name first.
    ///
    /// # Errors
    /// If the directory cannot be written.
    pub fn write_dir(&self, dir: &Path, config: &DraftConfig<F>) -> Result<()> {
        let vocabulary = config.draft_vocabulary.as_ref().map(F::vocabulary_tensor);
        let (path, ids) = (dir.join("model.safetensors"), Vec::from_iter(vocabulary));
        let hash = write_with_ids(&path, &self.named(config), &ids, config.dtype, &[])?;
        write_config(dir, config.to_json(), hash)
    }

    /// Lists the drafter's tensors in the layout of its file.
    pub(crate) fn named(&self, config: &DraftConfig<F>) -> Vec<NamedTensor> {
        let Parts { fc, lm_head, markov, confidence, state_norms, input_norm, .. } =
            F::parts(config);
        let own = [(fc, &self.fc), (lm_head, &self.lm_head), (confidence, &self.confidence)];
        let own = own.into_iter().flat_map(|(spec, linear)| spec.zip(linear.as_deref()));
        let markov = markov.into_iter().flatten().zip(self.markov.iter().flatten());
        let markov = markov.map(|(spec, linear)| (spec, &**linear));
        let mut tensors = named_linears("", own.chain(markov));
        let ModelConfig { shape, spec, .. } = &config.model;
        let input_norm = input_norm.map(|name| (name, shape.hidden_size));
        let norms = self.state_norms.iter().zip(state_norms);
        let norms = norms.chain(self.input_norm.iter().zip(input_norm));
        tensors.extend(norms.flat_map(|(norm, (name, width))| {
            norm.named(NamedNorm::outside(name, shape, &spec.norm).of_width(width))
        }));
        tensors.extend(self.stack.named(&config.stack()));
        let table = self.embedding.iter();
        let name = format!("{EMBEDDING}.weight");
        tensors.extend(table.map(|table| NamedTensor::from_tensor(&name, table.val())));
        tensors
    }
}

impl<F: DraftForm> StateNetwork for DraftNetwork<F> {
    const KIND: &'static str = F::KIND;

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

    /// Returns the Markov head's projection, whose inputs are the vectors of the tokens before the
    /// candidates.
    fn more_head(&self) -> Option<Tensor<2>> {
        self.markov.as_ref().map(|[_, out]| out.weight.val())
    }

    fn unrolled(&self, inputs: UnrolledInputs<'_>) -> Vec<Tensor<2>> {
        F::unrolled(self, inputs)
    }
}

impl<F: DraftForm> CachedNetwork for DraftNetwork<F> {
    fn context(&self) -> usize {
        self.config.model.shape.context
    }

    fn new_cache(&self, capacity: usize, num_slots: usize) -> KvCache {
        let capacity = capacity + F::num_ahead(&self.config);
        let cache = self.stack.form().new_cache(&self.config.model.shape, capacity, num_slots);
        cache.with_bits(self.faults().cache_bits)
    }

    fn no_output(&self, target: &CausalLm, slot: usize) -> Rows {
        let rows = target.embed_ids(&[0]).in_slot(slot);
        let width = self.hidden_size();
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

    fn faults(&self) -> SessionFaults {
        self.config.model.spec.faults
    }

    fn logits(&self, normed: &Rows, target: &CausalLm) -> Rows {
        match (&self.narrow_head, &self.lm_head) {
            (Some(head), _) => head.logits(normed),
            (None, Some(head)) => head.logits(normed, self.config.model.spec.logit_soft_cap),
            (None, None) => target.logits(normed),
        }
    }
}

/// Returns a projection of several states to one that passes on the last of them, plus a tenth of
/// what `fc` gives.
pub(crate) fn passing_last(fc: &Linear, device: &Device) -> Linear {
    let drawn = fc.weight.val();
    let [inputs, outputs] = drawn.dims();
    let mut weight: Vec<f32> = (drawn * 0.1).into_data().iter::<f32>().collect();
    for (row, column) in (inputs - outputs..inputs).zip(0..outputs) {
        weight[row * outputs + column] += 1.0;
    }
    let weight = Param::from_data(TensorData::new(weight, [inputs, outputs]), device);
    Linear { weight, bias: fc.bias.clone() }
}
