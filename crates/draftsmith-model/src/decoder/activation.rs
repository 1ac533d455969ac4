//! Functions of single numbers, on tensors: the activations of MLPs, and soft caps.

use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, silu};

use crate::spec::Activation;

impl Activation {
    /// Applies the activation to every number.
    pub(super) fn apply(self, x: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Silu => silu(x),
            Self::Gelu => gelu(x),
            Self::GeluTanh => gelu_tanh(x),
        }
    }
}

/// [`Activation::GeluTanh`]. burn's version takes a power of negative numbers, which some devices
/// refuse.
fn gelu_tanh(x: Tensor<2>) -> Tensor<2> {
    let cubed = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cubed * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
    x * (inner.tanh() + 1.0) * 0.5
}

/// The soft cap of Gemma 2, which bounds numbers smoothly: `cap · tanh(x / cap)`, or x without a cap.
pub fn soft_capped<const D: usize>(x: Tensor<D>, cap: Option<f32>) -> Tensor<D> {
    match cap {
        Some(cap) => (x / cap).tanh() * cap,
        None => x,
    }
}
