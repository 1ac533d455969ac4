//! A frozen model on the CPU, with its weights packed in host memory: from token ids to logits.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::decoder::layer::DecoderLayer;
use crate::decoder::norm::Norm;
use crate::decoder::packing::{unpacked_layer, unpacked_linear, unpacked_norm};
use crate::error::Result;
use crate::frozen::{PackedStack, Stack};
use crate::packed::{self, PackedWeights, Packing};
use crate::rows::HostRows;
use crate::spec::LinearSpec;
use crate::weights::WeightReader;

/// A packed model. Clones share the weights.
#[derive(Module, Debug)]
pub(super) struct PackedModel {
    #[module(skip)]
    weights: Arc<PackedParts>,
}

/// The parts of a packed model.
#[derive(Debug)]
struct PackedParts {
    /// The embedding, packed as a matrix whose outputs are tokens. `None` if it is tied to the LM
    /// head, which then serves as the embedding too.
    embedding: Option<PackedWeights>,
    stack: PackedStack,
    lm_head: PackedWeights,
    /// The factor by which embeddings are multiplied, if any.
    embedding_scale: Option<f32>,
    logit_soft_cap: Option<f32>,
    /// The LM head as a tensor, which is built when training first asks for it. Losses also need
    /// products with the transpose, which packed weights do not support.
    lm_head_tensor: OnceLock<Tensor<2>>,
}

impl PackedModel {
    /// Packs a checkpoint's tensors as they are read.
    ///
    /// # Errors
    /// If a tensor is missing or misshapen, or a file is broken.
    pub(super) fn read(config: &ModelConfig, reader: &mut WeightReader) -> Result<Self> {
        let ModelConfig { shape, spec, .. } = config;
        let mut packing = Packing { reader };
        let table = packing.linears("", &[LinearSpec::lm_head(spec.names.embedding, shape)])?;
        let (embedding, lm_head) = if spec.tie_word_embeddings {
            (None, table)
        } else {
            (Some(table), packing.linears("", &[spec.lm_head(shape)])?)
        };
        let weights = PackedParts {
            embedding,
            stack: PackedStack::read(&config.stack(), &mut packing)?,
            lm_head,
            embedding_scale: spec.embedding_scale,
            logit_soft_cap: spec.logit_soft_cap,
            lm_head_tensor: OnceLock::new(),
        };
        Ok(Self { weights: Arc::new(weights) })
    }

    /// Unpacks the weights into tensors in f32, for writing or computing in another type.
    pub(super) fn to_decoder(&self, config: &ModelConfig, device: &Device) -> Decoder {
        let embedding = self.embedding_table(device);
        let num_layers = self.weights.stack.layers.len();
        let layers = (0..num_layers).map(|number| self.layer(number, config, device)).collect();
        let lm_head = self.lm_head_weight(device);
        Decoder::new(config, embedding, layers, self.norm(config, device), lm_head)
    }

    /// Unpacks the embedding matrix, `[vocab, hidden]`.
    pub(super) fn embedding_table(&self, device: &Device) -> Tensor<2> {
        let table = self.embedding();
        unpacked_linear(table, 0..table.outputs, device).weight.val().transpose()
    }

    /// Unpacks a layer into tensors in f32.
    pub(super) fn layer(
        &self,
        number: usize,
        config: &ModelConfig,
        device: &Device,
    ) -> DecoderLayer {
        let layer = &self.weights.stack.layers[number];
        unpacked_layer(layer, &config.spec.layer(number), &config.shape, device)
    }

    /// Unpacks the final norm.
    pub(super) fn norm(&self, config: &ModelConfig, device: &Device) -> Norm {
        unpacked_norm(&self.weights.stack.norm, &config.spec.norm, device)
    }

    /// Returns the LM head as a tensor, `[hidden, vocab]`, unpacked at the first call.
    pub(super) fn lm_head_weight(&self, device: &Device) -> Tensor<2> {
        let unpack = || {
            let lm_head = &self.weights.lm_head;
            unpacked_linear(lm_head, 0..lm_head.outputs, device).weight.val()
        };
        self.weights.lm_head_tensor.get_or_init(unpack).clone()
    }

    pub(super) fn lm_head(&self) -> &PackedWeights {
        &self.weights.lm_head
    }

    fn embedding(&self) -> &PackedWeights {
        self.weights.embedding.as_ref().unwrap_or(&self.weights.lm_head)
    }

    pub(super) fn embed(&self, ids: &[u32]) -> HostRows {
        let embedding = self.embedding();
        let mut values = embedding.read_outputs(ids.iter());
        if let Some(scale) = self.weights.embedding_scale {
            packed::scale(&mut values, scale);
        }
        HostRows { values, width: embedding.inputs }
    }

    /// Computes the root mean square of the embeddings, with the embedding scale.
    pub(super) fn embedding_size(&self) -> f32 {
        let (embedding, mut row, mut sum) = (self.embedding(), Vec::new(), 0.0);
        for id in 0..embedding.outputs {
            row.clear();
            embedding.read_output(id, &mut row);
            sum += row.iter().map(|x| f64::from(x * x)).sum::<f64>();
        }
        let size = (sum / (embedding.outputs * row.len()) as f64).sqrt() as f32;
        size * self.weights.embedding_scale.unwrap_or(1.0)
    }

    pub(super) fn stack(&self) -> Stack<'_> {
        Stack::Packed(&self.weights.stack)
    }

    pub(super) fn logits(&self, normed: &HostRows) -> HostRows {
        let PackedParts { lm_head, logit_soft_cap, .. } = &*self.weights;
        let values = packed::logits(lm_head, &normed.values, *logit_soft_cap);
        HostRows { values, width: lm_head.outputs }
    }

    /// Runs layers in place over whole sequences of one length, without a cache. For `wanted`, see
    /// [`CausalLm::hidden_states_at`](super::CausalLm::hidden_states_at). `are_last` says whether
    /// the range ends with the model's last layer.
    pub(super) fn run_sequences(
        &self,
        layers: Range<usize>,
        x: &mut [f32],
        wanted: &[Range<usize>],
        are_last: bool,
    ) {
        packed::forward_sequences(&self.weights.stack.layers[layers], x, wanted, are_last);
    }
}
