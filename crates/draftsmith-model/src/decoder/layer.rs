//! One decoder layer: attention and an MLP, each behind its norm and around a residual. A model's
//! layers have both, an adapter's may leave one out.

use burn::module::Module;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::Tensor;

use super::attention::{Attention, Positions};
use super::mlp::Mlp;
use super::source::{WeightSource, named_linear, named_norm};
use crate::kv_cache::LayerCache;
use crate::shape::ModelShape;
use crate::spec::LayerSpec;
use crate::weights::NamedTensor;

/// `h = x + attention(norm(x))`, then `h + mlp(norm(h))`; a part that is left out adds nothing.
#[derive(Module, Debug)]
pub(crate) struct DecoderLayer {
    attention: Option<Attention>,
    mlp: Option<Mlp>,
}

impl DecoderLayer {
    /// The layer that checkpoints call `name`, with the weights that `source` has of it.
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
        Ok(Self { attention, mlp })
    }

    /// The tensors as a checkpoint keeps them under `name`.
    pub(crate) fn named(
        &self,
        spec: &LayerSpec,
        shape: &ModelShape,
        name: &str,
    ) -> Vec<NamedTensor> {
        let mut tensors = Vec::new();
        if let (Some(part), Some(spec)) = (&self.attention, &spec.attention) {
            tensors.push(named_norm(&format!("{name}.{}", spec.names.norm), part.norm()));
            for (linear, spec) in part.projections().into_iter().zip(spec.linears(shape)) {
                tensors.extend(named_linear(&spec.name_in(name), linear));
            }
        }
        if let (Some(part), Some(spec)) = (&self.mlp, &spec.mlp) {
            tensors.push(named_norm(&format!("{name}.{}", spec.names.norm), part.norm()));
            let (gate, up_and_down) = part.projections();
            let (gate_spec, specs) = spec.linears(shape);
            let linears = gate.into_iter().chain(up_and_down);
            for (linear, spec) in linears.zip(gate_spec.into_iter().chain(specs)) {
                tensors.extend(named_linear(&spec.name_in(name), linear));
            }
        }
        tensors
    }

    /// Attention, unless it is left out.
    pub(crate) fn attention(&self) -> Option<&Attention> {
        self.attention.as_ref()
    }

    /// The MLP, unless it is left out.
    pub(crate) fn mlp(&self) -> Option<&Mlp> {
        self.mlp.as_ref()
    }

    /// The layer whose parts are those of `other` as far as both have them in one form, each norm
    /// and linear layer made of the other's.
    pub(crate) fn with_parts_of(
        self,
        other: &Self,
        norm: impl Fn(&RmsNorm) -> RmsNorm,
        linear: impl Fn(&Linear) -> Linear,
    ) -> Self {
        let attention = self.attention.map(|own| match &other.attention {
            Some(attention) => attention.map(&norm, &linear),
            None => own,
        });
        let is_gated = |mlp: &Mlp| mlp.projections().0.is_some();
        let mlp = self.mlp.map(|own| match &other.mlp {
            Some(mlp) if is_gated(mlp) == is_gated(&own) => mlp.map(&norm, &linear),
            _ => own,
        });
        Self { attention, mlp }
    }

    /// # Shapes
    /// - hidden, output: `[batch, seq, hidden]`
    pub(crate) fn forward(
        &self,
        mut hidden: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        if let Some(attention) = &self.attention {
            hidden = hidden.clone() + attention.forward(hidden, positions, cache);
        }
        if let Some(mlp) = &self.mlp {
            hidden = hidden.clone() + mlp.forward(hidden);
        }
        hidden
    }

    /// Writes the keys and values of new tokens, of which nothing else is computed.
    pub(crate) fn fill(&self, hidden: Tensor<3>, positions: &Positions, cache: &mut LayerCache) {
        if let Some(attention) = &self.attention {
            attention.fill(hidden, positions, cache);
        }
    }
}
