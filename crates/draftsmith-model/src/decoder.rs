//! A decoder's weights as tensors on any device: for training, and for frozen models that are not
//! packed.
//!
//! Decoders are built, read and written according to their spec. Weights are contiguous `[in, out]`
//! matrices, and inputs are flattened to two dimensions before each product; other layouts are
//! several times slower on the CPU.

pub(crate) mod attention;
pub(crate) mod block;
pub(crate) mod few_rows;
#[cfg(feature = "kernels")]
pub(crate) mod kernels;
#[cfg(not(feature = "kernels"))]
#[path = "decoder/no_kernels.rs"]
pub(crate) mod kernels;
pub(crate) mod layer;
pub(crate) mod mlp;
pub(crate) mod norm;
pub(crate) mod packing;
pub(crate) mod rope;
pub(crate) mod source;
pub(crate) mod stack;

use burn::module::{Module, Param};
use burn::nn::{Initializer, Linear};
use burn::tensor::{Device, FloatDType, Int, Tensor, module::embedding};

use crate::config::ModelConfig;
use crate::error::Result;
use crate::precision::cast_parameters;
use crate::rope::Reach;
use crate::spec::LinearSpec;
use crate::weights::{NamedTensor, WeightDtype, WeightReader};
use few_rows::Joined;
use kernels::Kernels;
use layer::DecoderLayer;
use norm::Norm;
use source::{
    CheckpointSource, RandomSource, WeightSource, linear, named_linears, parameter, transposed,
};
use stack::{LayerStack, StackSpec};

/// The embedding, the layers, the final norm and the LM head.
#[derive(Module, Debug)]
pub(crate) struct Decoder {
    /// The token embeddings, `[vocab, hidden]`.
    embedding: Param<Tensor<2>>,
    pub(crate) stack: LayerStack,
    /// The LM head. `None` while a tied model is trained, because the embedding serves as both.
    /// Frozen models have a contiguous copy, tied or not.
    lm_head: Option<Linear>,
    #[module(skip)]
    embedding_scale: Option<f32>,
}

impl Decoder {
    /// Builds a frozen decoder from its parts. If the LM head is tied, `lm_head` is a contiguous
    /// copy of the embedding.
    pub(crate) fn new(
        config: &ModelConfig,
        embedding: Tensor<2>,
        layers: Vec<DecoderLayer>,
        norm: Norm,
        lm_head: Tensor<2>,
    ) -> Self {
        let reaches = Reach::all_of(&config.spec, &config.shape);
        Self {
            embedding: Param::from_tensor(embedding),
            stack: LayerStack { layers, norm, reaches },
            lm_head: Some(Linear { weight: Param::from_tensor(lm_head), bias: None }),
            embedding_scale: config.spec.embedding_scale,
        }
    }

    /// Initialises random weights. They are normal with standard deviation 0.02, as in
    /// transformers. Projections into the residual stream are scaled by 1/√(2·layers), as in GPT-2.
    pub(crate) fn init(config: &ModelConfig, device: &Device) -> Self {
        let ModelConfig { shape, spec, .. } = config;
        let normal = |std: f64| Initializer::Normal { mean: 0.0, std };
        let residual_std = 0.02 / (2.0 * shape.num_layers as f64).sqrt();
        let matrix = |linear: &LinearSpec| {
            let std = if linear.is_residual { residual_std } else { 0.02 };
            normal(std).init([linear.inputs, linear.outputs], device)
        };
        let mut source = RandomSource { device, matrix };
        let embedding = normal(0.02).init([shape.vocab_size, shape.hidden_size], device);
        let lm_head = (!spec.tie_word_embeddings).then(|| {
            let Ok(head) = source.linear("", &spec.lm_head(shape));
            head
        });
        let Ok(decoder) = Self::build(config, embedding, lm_head, &mut source);
        decoder
    }

    /// Builds a decoder whose layers and norm get their weights from `source`.
    fn build<S: WeightSource>(
        config: &ModelConfig,
        embedding: Param<Tensor<2>>,
        lm_head: Option<Linear>,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let stack = LayerStack::build(&config.stack(), source)?;
        Ok(Self { embedding, stack, lm_head, embedding_scale: config.spec.embedding_scale })
    }

    /// Reads a checkpoint tensor by tensor. Each tensor reaches the device in `dtype`, so a bf16
    /// model never exists in f32 as a whole, neither there nor in host memory.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(crate) fn read(
        config: &ModelConfig,
        reader: &mut WeightReader,
        dtype: WeightDtype,
        device: &Device,
    ) -> Result<Self> {
        let ModelConfig { shape, spec, .. } = config;
        let (vocab, hidden) = (shape.vocab_size, shape.hidden_size);
        let dtype = dtype.float_dtype();
        let mut source = CheckpointSource { reader, device, dtype };
        let table = format!("{}.weight", spec.names.embedding);
        let table = source.reader.take(&table, &[vocab, hidden])?;
        // A tied model on an autodiff device will be trained, so its embedding serves as both. A
        // GPU reads the embedding as it is stored.
        let copies_head = spec.tie_word_embeddings && *device == Device::flex();
        let tied = copies_head.then(|| {
            linear(transposed(&table, vocab, hidden), [hidden, vocab], None, device, dtype)
        });
        let embedding = parameter(table, [vocab, hidden], device, dtype);
        let lm_head = match spec.tie_word_embeddings {
            true => tied,
            false => Some(source.linear("", &spec.lm_head(shape))?),
        };
        Ok(Self::build(config, embedding, lm_head, &mut source)?.joined())
    }

    /// Prepares the decoder for forwards of [few rows](few_rows), if it decodes on a GPU.
    fn joined(mut self) -> Self {
        self.stack.join();
        if let Some(head) = self
            .lm_head
            .as_mut()
            .filter(|_| Kernels::on(&self.stack.norm.gamma().device()).is_some())
        {
            Joined::new(&mut [head]);
        }
        self
    }

    /// Lists the tensors in a checkpoint's layout.
    pub(crate) fn named(&self, config: &ModelConfig) -> Vec<NamedTensor> {
        let ModelConfig { shape, spec, .. } = config;
        let embedding = format!("{}.weight", spec.names.embedding);
        let mut tensors = vec![NamedTensor::from_tensor(&embedding, self.embedding.val())];
        tensors.extend(self.stack.named(&config.stack()));
        if let Some(head) = self.lm_head.as_ref().filter(|_| !spec.tie_word_embeddings) {
            tensors.extend(named_linears("", [(spec.lm_head(shape), head)]));
        }
        tensors
    }

    pub(crate) fn device(&self) -> Device {
        self.embedding.val().device()
    }

    /// Returns the type in which the decoder computes.
    pub(crate) fn dtype(&self) -> FloatDType {
        self.embedding.val().dtype().into()
    }

    /// Converts the decoder to compute in `dtype`.
    pub(crate) fn in_dtype(self, dtype: WeightDtype) -> Self {
        let dtype = dtype.float_dtype();
        let decoder = if self.dtype() == dtype { self } else { cast_parameters(self, dtype) };
        decoder.joined()
    }

    /// Returns the embedding matrix, `[vocab, hidden]`.
    pub(crate) fn embedding(&self) -> Tensor<2> {
        self.embedding.val()
    }

    /// Computes the root mean square of the embeddings, with the embedding scale.
    pub(crate) fn embedding_size(&self) -> f32 {
        let table = self.embedding.val().cast(FloatDType::F32);
        let size = table.square().mean().sqrt().into_scalar::<f32>();
        size * self.embedding_scale.unwrap_or(1.0)
    }

    /// Returns the LM head's weights, `[hidden, vocab]`. If the LM head is tied, they are the
    /// transposed embedding matrix.
    pub(crate) fn lm_head_weight(&self) -> Tensor<2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => self.embedding.val().transpose(),
        }
    }

    /// Looks up token embeddings: `[batch, seq]` to `[batch, seq, hidden]`.
    pub(crate) fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let embedded = embedding(self.embedding.val(), ids);
        match self.embedding_scale {
            Some(scale) => embedded * scale,
            None => embedded,
        }
    }
}

impl ModelConfig {
    /// Specifies the model's layers and their norm.
    pub(crate) fn stack(&self) -> StackSpec<'_> {
        let spec = &self.spec;
        let layer = |number| (spec.layer(number), spec.names.layer(number));
        let layers = (0..self.shape.num_layers).map(layer).collect();
        StackSpec { model: self, layers, norm: spec.names.norm }
    }
}

/// Applies an LM head to hidden states after the final norm, and a soft cap if given. Logits are
/// always f32, so the soft cap and later steps cause no further rounding to bf16.
///
/// # Shapes
/// - hidden: `[batch, seq, hidden]`
/// - head: `[hidden, vocab]`
/// - output: `[batch, seq, vocab]`
pub(crate) fn logits(hidden: Tensor<3>, head: Tensor<2>, cap: Option<f32>) -> Tensor<3> {
    let ([batch, seq, width], [_, vocab_size]) = (hidden.dims(), head.dims());
    let logits = few_rows::logits(hidden.reshape([batch * seq, width]), head);
    soft_capped(logits, cap).reshape([batch, seq, vocab_size])
}

/// Applies the soft cap of Gemma 2, which bounds numbers smoothly: `cap · tanh(x / cap)`, or x
/// without a cap.
pub fn soft_capped<const D: usize>(x: Tensor<D>, cap: Option<f32>) -> Tensor<D> {
    match cap {
        Some(cap) => (x / cap).tanh() * cap,
        None => x,
    }
}
