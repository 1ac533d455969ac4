//! One decoder layer: attention and an MLP, each with a norm before it and a residual around it. An
//! adapter's layers may lack a part.

use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor};

use super::attention::{Attention, Positions};
use super::mlp::Mlp;
use super::source::{RandomSource, WeightSource};
use crate::kv_cache::LayerCache;
use crate::precision::copied;
use crate::spec::{BOTH_PARTS, LayerSpec, LinearSpec, ModelShape, NamedLayer};
use crate::weights::NamedTensor;

/// A decoder layer: `h = x + attention(norm(x))`, then `h + mlp(norm(h))`, or `h + mlp(norm(x))` if
/// the layer is parallel. A missing part adds nothing.
#[derive(Module, Debug)]
pub(crate) struct DecoderLayer {
    pub(crate) attention: Option<Attention>,
    pub(crate) mlp: Option<Mlp>,
    pub(crate) is_parallel: bool,
}

impl DecoderLayer {
    /// Builds a layer with weights from `source`.
    pub(crate) fn build<S: WeightSource>(
        layer: NamedLayer<'_>,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let LayerSpec { attention, mlp, is_parallel, .. } = layer.spec;
        let attention = attention.as_ref().map(|part| Attention::build(part, layer, source));
        let attention = attention.transpose()?;
        let mlp = mlp.as_ref().map(|part| Mlp::build(part, layer, source)).transpose()?;
        Ok(Self { attention, mlp, is_parallel: *is_parallel })
    }

    /// Lists the tensors in a checkpoint's layout.
    pub(crate) fn named(&self, layer: NamedLayer<'_>) -> Vec<NamedTensor> {
        let attention = self.attention.iter().zip(&layer.spec.attention);
        let attention = attention.flat_map(|(own, part)| own.named(part, layer));
        let mlp = self.mlp.iter().zip(&layer.spec.mlp);
        attention.chain(mlp.flat_map(|(own, part)| own.named(part, layer))).collect()
    }

    /// Returns the attention and the MLP.
    ///
    /// # Panics
    /// If the layer lacks a part.
    pub(crate) fn both_parts(&self) -> (&Attention, &Mlp) {
        self.attention.as_ref().zip(self.mlp.as_ref()).expect(BOTH_PARTS)
    }

    /// Adds the parts of `spec` that the layer lacks, with weights of zero, so that they add
    /// nothing to the residual stream.
    pub(crate) fn with_both_parts(
        self,
        spec: &LayerSpec,
        shape: &ModelShape,
        device: &Device,
    ) -> Self {
        let matrix =
            |linear: &LinearSpec| Initializer::Zeros.init([linear.inputs, linear.outputs], device);
        let layer = NamedLayer { spec, shape, name: "" };
        let Ok(zeros) = Self::build(layer, &mut RandomSource { device, matrix });
        let (attention, mlp) = (self.attention.or(zeros.attention), self.mlp.or(zeros.mlp));
        Self { attention, mlp, is_parallel: self.is_parallel }
    }

    /// Replaces parts by trainable copies of `other`'s parts, where both layers have a part of the
    /// same form.
    pub(crate) fn with_parts_of(self, other: Self, device: &Device) -> Self {
        let attention = self.attention.map(|own| match other.attention {
            Some(attention) => own.with_weights_of(attention, device),
            None => own,
        });
        let mlp = self.mlp.map(|own| match other.mlp {
            Some(mlp) if mlp.is_like(&own) => copied(mlp, device),
            _ => own,
        });
        Self { attention, mlp, is_parallel: self.is_parallel }
    }

    /// Initialises the layer with trainable copies of `other`'s weights, where they fit. `other` is
    /// an ordinary layer. The attention of this layer may read further inputs, which come before
    /// those that `other` reads.
    pub(crate) fn begun_from(self, other: Self, device: &Device) -> Self {
        let attention = self.attention.map(|own| match other.attention {
            Some(theirs) => own.begun_from(theirs, device),
            None => own,
        });
        let mlp = self.mlp.map(|own| match other.mlp {
            Some(mlp) if mlp.is_like(&own) && mlp.num_params() == own.num_params() => {
                copied(mlp, device)
            }
            _ => own,
        });
        Self { attention, mlp, is_parallel: self.is_parallel }
    }

    /// Joins products for forwards of few rows, if the layer decodes on a GPU.
    pub(crate) fn join(&mut self) {
        self.attention.iter_mut().for_each(Attention::join);
        self.mlp.iter_mut().for_each(Mlp::join);
    }

    /// Returns whether the products of the layer's parts are joined.
    pub(crate) fn is_joined(&self) -> bool {
        let attention = self.attention.as_ref().is_none_or(Attention::is_joined);
        attention && self.mlp.as_ref().is_none_or(Mlp::is_joined)
    }

    /// Adds the layer's parts to the residual stream. In a parallel layer, the MLP reads the same
    /// rows as the attention.
    ///
    /// # Shapes
    /// - hidden, output: `[batch, seq, hidden]`
    pub(crate) fn forward(
        &self,
        hidden: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let mut output = hidden.clone();
        if let Some(attention) = &self.attention {
            output = attention.added_to(output, (hidden.clone(), false), positions, cache);
        }
        if let Some(mlp) = &self.mlp {
            let read = if self.is_parallel { hidden } else { output.clone() };
            output = mlp.added_to(output, read, positions.kernels());
        }
        output
    }

    /// Computes [`Self::forward`] with attention that reads the rows `read` instead of the residual
    /// stream. The norm has been applied to them already.
    ///
    /// # Shapes
    /// - read: `[batch, seq, hidden · num_read]`
    /// - hidden, output: `[batch, seq, hidden]`
    ///
    /// # Panics
    /// If the layer lacks a part.
    pub(crate) fn forward_reading(
        &self,
        read: Tensor<3>,
        hidden: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let (attention, mlp) = self.both_parts();
        let hidden = attention.added_to(hidden, (read, true), positions, cache);
        mlp.added_to(hidden.clone(), hidden, positions.kernels())
    }

    /// Writes the keys and values of new tokens, and computes nothing else. The norm is applied
    /// first, unless `is_normed` is true.
    pub(crate) fn fill(
        &self,
        hidden: (Tensor<3>, bool),
        positions: &Positions,
        cache: &mut LayerCache,
    ) {
        if let Some(attention) = &self.attention {
            attention.fill(hidden, positions, cache);
        }
    }
}
