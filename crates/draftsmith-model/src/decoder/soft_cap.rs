//! The soft cap of Gemma 2, which bounds numbers smoothly.

use burn::tensor::Tensor;

/// `cap · tanh(x / cap)`, or x without a cap.
pub fn soft_capped<const D: usize>(x: Tensor<D>, cap: Option<f32>) -> Tensor<D> {
    match cap {
        Some(cap) => (x / cap).tanh() * cap,
        None => x,
    }
}
