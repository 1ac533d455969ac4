//! An MLP behind its norm, gated or not.

use burn::module::Module;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Tensor, activation::silu};

use super::source::WeightSource;
use crate::shape::ModelShape;
use crate::spec::{LayerSpec, MlpSpec};

/// `down(silu(gate(x)) ∘ up(x))` of normed x, or `down(silu(up(x)))` without a gate.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    norm: RmsNorm,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// The MLP of the layer `name`, with the weights that `source` has.
    pub(super) fn build<S: WeightSource>(
        spec: &MlpSpec,
        layer: &LayerSpec,
        shape: &ModelShape,
        name: &str,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let (gate, [up, down]) = spec.linears(shape);
        let norm = format!("{name}.{}", spec.names.norm);
        Ok(Self {
            norm: source.norm(&norm, shape.hidden_size, layer.norm_epsilon)?,
            gate: gate.map(|gate| source.linear(name, &gate)).transpose()?,
            up: source.linear(name, &up)?,
            down: source.linear(name, &down)?,
        })
    }

    pub(crate) fn norm(&self) -> &RmsNorm {
        &self.norm
    }

    /// The projections: the gate, if there is one, then up and down.
    pub(crate) fn projections(&self) -> (Option<&Linear>, [&Linear; 2]) {
        (self.gate.as_ref(), [&self.up, &self.down])
    }

    /// The same MLP of other weights, each made of the one here.
    pub(crate) fn map(
        &self,
        norm: impl Fn(&RmsNorm) -> RmsNorm,
        linear: impl Fn(&Linear) -> Linear,
    ) -> Self {
        Self {
            norm: norm(&self.norm),
            gate: self.gate.as_ref().map(&linear),
            up: linear(&self.up),
            down: linear(&self.down),
        }
    }

    /// # Shapes
    /// - x, output: `[batch, seq, hidden]`
    pub(crate) fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        let x = self.norm.forward(x).reshape([batch * seq, hidden]);
        let wide = match &self.gate {
            Some(gate) => silu(gate.forward(x.clone())) * self.up.forward(x),
            None => silu(self.up.forward(x)),
        };
        self.down.forward(wide).reshape([batch, seq, hidden])
    }
}
