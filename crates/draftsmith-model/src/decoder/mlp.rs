//! An MLP block with its norms, gated or not.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;

use super::norm::Norm;
use super::source::WeightSource;
use crate::spec::ModelShape;
use crate::spec::{Activation, LayerSpec, MlpSpec};

/// `down(activation(gate(x)) ∘ up(x))` of normed x, or `down(activation(up(x)))` without a gate.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    norm: Norm,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    post_norm: Option<Norm>,
    #[module(skip)]
    activation: Activation,
}

impl Mlp {
    /// Builds the MLP of layer `name` with weights from `source`.
    pub(super) fn build<S: WeightSource>(
        spec: &MlpSpec,
        layer: &LayerSpec,
        shape: &ModelShape,
        name: &str,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let (gate, [up, down]) = spec.linears(shape);
        let mut norm = |part| source.norm(name, part, shape.hidden_size, &layer.norm);
        Ok(Self {
            norm: norm(spec.names.norm)?,
            post_norm: spec.names.post_norm.map(norm).transpose()?,
            gate: gate.map(|gate| source.linear(name, &gate)).transpose()?,
            up: source.linear(name, &up)?,
            down: source.linear(name, &down)?,
            activation: spec.activation,
        })
    }

    /// The norm before the MLP and the norm of its output, if any.
    pub(crate) fn norms(&self) -> (&Norm, Option<&Norm>) {
        (&self.norm, self.post_norm.as_ref())
    }

    /// The gate, if any, then up and down.
    pub(crate) fn projections(&self) -> (Option<&Linear>, [&Linear; 2]) {
        (self.gate.as_ref(), [&self.up, &self.down])
    }

    /// Whether both have the same parts and activation.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let form = |mlp: &Self| (mlp.gate.is_some(), mlp.post_norm.is_some(), mlp.activation);
        form(self) == form(other)
    }

    /// The same MLP with weights derived from these.
    pub(crate) fn map(
        &self,
        norm: impl Fn(&Norm) -> Norm,
        linear: impl Fn(&Linear) -> Linear,
    ) -> Self {
        Self {
            norm: norm(&self.norm),
            post_norm: self.post_norm.as_ref().map(norm),
            gate: self.gate.as_ref().map(&linear),
            up: linear(&self.up),
            down: linear(&self.down),
            activation: self.activation,
        }
    }

    /// # Shapes
    /// - x, output: `[batch, seq, hidden]`
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let x = self.norm.forward(x).reshape([batch * seq, hidden]);
        let wide = match &self.gate {
            Some(gate) => self.activation.apply(gate.forward(x.clone())) * self.up.forward(x),
            None => self.activation.apply(self.up.forward(x)),
        };
        let output = self.down.forward(wide).reshape([batch, seq, hidden]);
        match &self.post_norm {
            Some(norm) => norm.forward(output),
            None => output,
        }
    }
}
