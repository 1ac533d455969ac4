//! An MLP block with its norms, gated or not.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, silu};

use super::block::BlockTensors;
use super::few_rows::Joined;
use super::kernels::{Kernels, Then};
use super::norm::Norm;
use super::source::{WeightSource, named_linears};
use crate::spec::{Activation, MlpNames, MlpSpec, NamedLayer};
use crate::weights::NamedTensor;

/// A gated MLP, `down(activation(gate(x)) ∘ up(x))`, or one without a gate,
/// `down(activation(up(x)))`, where x is the input after the norm.
#[derive(Module, Debug)]
pub(crate) struct Mlp {
    pub(crate) norm: Norm,
    pub(crate) gate: Option<Linear>,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(super) post_norm: Option<Norm>,
    #[module(skip)]
    pub(super) activation: Activation,
    /// The gate and up projections (or only up) joined to one product; `None` if they are separate.
    #[module(skip)]
    pub(super) joined: Option<Joined>,
}

impl Mlp {
    /// Builds the MLP of a layer with weights from `source`.
    pub(super) fn build<S: WeightSource>(
        spec: &MlpSpec,
        layer: NamedLayer<'_>,
        source: &mut S,
    ) -> Result<Self, S::Error> {
        let NamedLayer { shape, name, .. } = layer;
        let (gate, [up, down]) = spec.linears(shape);
        let mut norm = |part| source.norm(layer.norm(part, shape.hidden_size));
        Ok(Self {
            norm: norm(spec.names.norm)?,
            post_norm: spec.names.post_norm.map(norm).transpose()?,
            gate: gate.map(|gate| source.linear(name, &gate)).transpose()?,
            up: source.linear(name, &up)?,
            down: source.linear(name, &down)?,
            activation: spec.activation,
            joined: None,
        })
    }

    /// Lists the tensors in a checkpoint's layout.
    pub(super) fn named(&self, spec: &MlpSpec, layer: NamedLayer<'_>) -> Vec<NamedTensor> {
        let MlpNames { norm, post_norm, .. } = spec.names;
        let named = |(own, part): (&Norm, &'static str)| own.named(layer.norm(part, own.width()));
        let mut tensors = named((&self.norm, norm));
        let (gate_spec, specs) = spec.linears(layer.shape);
        let specs = gate_spec.into_iter().chain(specs);
        let linears = self.gate.iter().chain([&self.up, &self.down]);
        tensors.extend(named_linears(layer.name, specs.zip(linears)));
        tensors.extend(self.post_norm.iter().zip(post_norm).flat_map(named));
        tensors
    }

    /// Returns whether both have the same parts and activation.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let form = |mlp: &Self| (mlp.gate.is_some(), mlp.post_norm.is_some(), mlp.activation);
        form(self) == form(other)
    }

    /// Joins the gate and up projections, if the MLP decodes on a GPU.
    pub(super) fn join(&mut self) {
        if !self.is_joined() && Kernels::on(&self.up.weight.device()).is_some() {
            Joined::new(&mut [&mut self.down]);
            self.joined = match &mut self.gate {
                Some(gate) => Joined::new(&mut [gate, &mut self.up]),
                None => Joined::new(&mut [&mut self.up]),
            };
        }
    }

    pub(super) fn is_joined(&self) -> bool {
        self.joined.as_ref().is_some_and(|joined| joined.is_of(&self.up))
    }

    /// Adds [`Self::forward`] of x to a residual.
    pub(crate) fn added_to(
        &self,
        residual: Tensor<3>,
        x: Tensor<3>,
        kernels: Option<Kernels>,
    ) -> Tensor<3> {
        let Some((kernels, joined)) = kernels.zip(self.joined.as_ref()) else {
            return residual + self.forward(x);
        };
        let then = match &self.gate {
            Some(_) => Then::Gate(self.activation),
            None => Then::Activate(self.activation),
        };
        let post_norm = self.post_norm.as_ref();
        let block = BlockTensors::new(Some(&self.norm), joined, &self.down, post_norm);
        kernels.mlp(residual, x, block, then)
    }

    /// Computes the MLP with its norms, without a residual.
    ///
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

impl Activation {
    /// Applies the activation to every number.
    fn apply(self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Silu => silu(x),
            Self::Gelu => gelu(x),
            Self::GeluTanh => gelu_tanh(x),
        }
    }
}

/// Computes [`Activation::GeluTanh`]. burn's version takes a power of negative numbers, which some
/// devices refuse.
fn gelu_tanh(x: Tensor<2>) -> Tensor<2> {
    let cubed = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cubed * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
    x * (inner.tanh() + 1.0) * 0.5
}
