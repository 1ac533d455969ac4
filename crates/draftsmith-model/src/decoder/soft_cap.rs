//! Soft caps (Gemma 2): numbers that grow no larger than a cap, however large they would be.

use burn::tensor::Tensor;

/// `cap · tanh(x / cap)`, or x where there is no cap.
pub fn soft_capped<const D: usize>(x: Tensor<D>, cap: Option<f32>) -> Tensor<D> {
    match cap {
        Some(cap) => (x / cap).tanh() * cap,
        None => x,
    }
}
