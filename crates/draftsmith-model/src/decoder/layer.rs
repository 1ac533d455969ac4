//! One decoder layer: attention and an MLP, each with a norm before it and a residual around it. An
//! adapter's layers may lack a part.

use burn::module::Module;
use burn::nn::{Initializer, Linear};
use burn::tensor::{Device, Tensor};

use super::attention::{Attention, Positions};
use super::mlp::Mlp;
use super::norm::Norm;
use super::source::{Drawn, WeightSource, named_linears};
use crate::kv_cache::LayerCache;
use crate::spec::ModelShape;
use crate::spec::{AttentionSpec, LayerSpec, LinearSpec};
use crate::weights::NamedTensor;

/// `h = x + attention(norm(x))`, then `h + mlp(norm(h))`, or `h + mlp(norm(x))` if the layer is
/// parallel. A missing part adds nothing.
#[derive(Module, Debug)]
pub(crate) struct DecoderLayer {
    attention: Option<Attention>,
    mlp: Option<Mlp>,
    is_parallel: bool,
}

impl DecoderLayer {
    /// Builds the layer that checkpoints call `name` with weights from `source`.
    pub(crate) fn build<S: WeightSource>(
        spec: &LayerSpec,
        shape: &ModelShape,
        name: &str,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let attention = spec.attention.as_ref();
        let attention =
            attention.map(|part| Attention::build(part, spec, shape, name, source)).transpose()?;
        let mlp = spec.mlp.as_ref();
        let mlp = mlp.map(|part| Mlp::build(part, spec, shape, name, source)).transpose()?;
        Ok(Self { attention, mlp, is_parallel: spec.is_parallel })
    }

    /// The tensors in a checkpoint's layout, under `name`.
    pub(crate) fn named(
        &self,
        spec: &LayerSpec,
        shape: &ModelShape,
        name: &str,
    ) -> Vec<NamedTensor> {
        let mut tensors = Vec::new();
        let norm = |norm: &Norm, part: &str| norm.named(&spec.norm, &format!("{name}.{part}"));
        if let (Some(part), Some(AttentionSpec { names, .. })) = (&self.attention, &spec.attention)
        {
            let linears = spec.attention.iter().flat_map(|spec| spec.linears(shape));
            let (before, of_heads, behind) = part.norms();
            tensors.extend(norm(before, names.norm));
            tensors.extend(named_linears(name, linears.zip(part.projections())));
            for (own, name) in of_heads.into_iter().flatten().zip(names.head_norms.iter().flatten())
            {
                tensors.extend(norm(own, name));
            }
            for (own, name) in behind.into_iter().zip(names.post_norm) {
                tensors.extend(norm(own, name));
            }
        }
        if let (Some(part), Some(spec)) = (&self.mlp, &spec.mlp) {
            let (before, behind) = part.norms();
            let (gate, up_and_down) = part.projections();
            let (gate_spec, specs) = spec.linears(shape);
            let specs = gate_spec.into_iter().chain(specs);
            tensors.extend(norm(before, spec.names.norm));
            tensors.extend(named_linears(name, specs.zip(gate.into_iter().chain(up_and_down))));
            for (own, name) in behind.into_iter().zip(spec.names.post_norm) {
                tensors.extend(norm(own, name));
            }
        }
        tensors
    }

    /// The attention, unless missing.
    pub(crate) fn attention(&self) -> Option<&Attention> {
        self.attention.as_ref()
    }

    /// The MLP, unless missing.
    #[cfg(test)]
    pub(crate) fn mlp(&self) -> Option<&Mlp> {
        self.mlp.as_ref()
    }

    /// Whether the MLP reads the same input as attention.
    #[cfg(test)]
    pub(crate) fn is_parallel(&self) -> bool {
        self.is_parallel
    }

    /// The layer with both parts of `spec`. A missing part gets weights of zero, so it adds
    /// nothing.
    pub(crate) fn with_both_parts(
        self,
        spec: &LayerSpec,
        shape: &ModelShape,
        device: &Device,
    ) -> Self {
        let matrix =
            |linear: &LinearSpec| Initializer::Zeros.init([linear.inputs, linear.outputs], device);
        let Ok(zeros) = Self::build(spec, shape, "", &mut Drawn { device, matrix });
        let (attention, mlp) = (self.attention.or(zeros.attention), self.mlp.or(zeros.mlp));
        Self { attention, mlp, is_parallel: self.is_parallel }
    }

    /// The layer with the weights of `other`, for each part that both have in the same form. `norm`
    /// and `linear` copy the weights.
    pub(crate) fn with_parts_of(
        self,
        other: &Self,
        norm: impl Fn(&Norm) -> Norm,
        linear: impl Fn(&Linear) -> Linear,
    ) -> Self {
        let attention = self.attention.map(|own| match &other.attention {
            Some(attention) => own.with_weights_of(attention, &norm, &linear),
            None => own,
        });
        let mlp = self.mlp.map(|own| match &other.mlp {
            Some(mlp) if mlp.is_like(&own) => mlp.map(&norm, &linear),
            _ => own,
        });
        Self { attention, mlp, is_parallel: self.is_parallel }
    }

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
            output = output + attention.forward(hidden.clone(), positions, cache);
        }
        if let Some(mlp) = &self.mlp {
            let read = if self.is_parallel { hidden } else { output.clone() };
            output = output + mlp.forward(read);
        }
        output
    }

    /// Writes the keys and values of new tokens, and computes nothing else.
    pub(crate) fn fill(&self, hidden: Tensor<3>, positions: &Positions, cache: &mut LayerCache) {
        if let Some(attention) = &self.attention {
            attention.fill(hidden, positions, cache);
        }
    }
}
