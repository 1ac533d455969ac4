//! Elementwise steps of a few rows, done in place in host memory.
//!
//! A decoded token is one row, a verification a few. On the CPU each tensor operation on so little
//! costs more in overhead than in arithmetic, and a norm is seven of them, a rotation six. Here
//! each is one pass over the values. Many rows, other devices and training go through tensors.

use burn::nn::RmsNorm;
use burn::tensor::{Device, Tensor, TensorData, activation::silu};

/// The most rows that are multiplied by panels.
pub(crate) const MOST_ROWS: usize = 16;

/// The most values that are worked on here: beyond, a tensor's operations spread over threads.
const MOST_VALUES: usize = 1 << 16;

/// Whether so many values on a device are worked on in host memory.
pub(crate) fn are_few(num_values: usize, device: &Device) -> bool {
    num_values <= MOST_VALUES && *device == Device::flex()
}

/// The values of a tensor in host memory, row by row; without a copy where nobody else holds them.
pub(crate) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("tensors on the CPU are f32")
}

/// A tensor of values in host memory.
pub(crate) fn tensor<const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// `x / sqrt(mean(x²) + ε) ∘ γ` over the last dimension.
///
/// # Shapes
/// - x: `[batch, seq, width]`
/// - output: the same
pub(crate) fn rms_norm(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    let shape = x.dims();
    let [batch, seq, width] = shape;
    let device = x.device();
    if !are_few(batch * seq * width, &device) {
        return norm.forward(x);
    }
    let gamma = values(norm.gamma.val());
    let mut x = values(x);
    for row in x.chunks_exact_mut(width) {
        let squares: f32 = row.iter().map(|v| v * v).sum();
        let scale = 1.0 / (squares / width as f32 + norm.epsilon as f32).sqrt();
        for (value, gamma) in row.iter_mut().zip(&gamma) {
            *value = *value * scale * gamma;
        }
    }
    tensor(x, shape, &device)
}

/// `silu(gate) ∘ up`.
///
/// # Shapes
/// - gate, up: `[rows, width]`
/// - output: the same
pub(crate) fn gated(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    let shape = gate.dims();
    let device = gate.device();
    if !are_few(shape[0] * shape[1], &device) {
        return silu(gate) * up;
    }
    let mut gate = values(gate);
    for (gate, up) in gate.iter_mut().zip(values(up)) {
        *gate = *gate / (1.0 + (-*gate).exp()) * up;
    }
    tensor(gate, shape, &device)
}

/// `x + silu(y)`.
///
/// # Shapes
/// - x, y: `[rows, width]`
/// - output: the same
pub(crate) fn residual_silu(x: Tensor<2>, y: Tensor<2>) -> Tensor<2> {
    let shape = x.dims();
    let device = x.device();
    if !are_few(shape[0] * shape[1], &device) {
        return x + silu(y);
    }
    let mut x = values(x);
    for (x, y) in x.iter_mut().zip(values(y)) {
        *x += y / (1.0 + (-y).exp());
    }
    tensor(x, shape, &device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::nn::RmsNormConfig;
    use burn::tensor::Distribution;

    fn assert_close(found: Vec<f32>, expected: Vec<f32>) {
        for (a, b) in found.iter().zip(&expected) {
            // One rounding more or less in f32.
            assert!((a - b).abs() <= 1e-5 * (1.0 + b.abs()), "{a} for {b}");
        }
        assert_eq!(found.len(), expected.len());
    }

    #[test]
    fn few_values_are_what_tensors_give() {
        let device = Device::flex();
        let mut norm = RmsNormConfig::new(24).with_epsilon(1e-5).init(&device);
        let random = |shape| Tensor::<3>::random(shape, Distribution::Normal(0.0, 2.0), &device);
        norm.gamma = norm.gamma.map(|_| random([1, 1, 24]).reshape([24]));
        for rows in [1, 5, 16] {
            let x = random([1, rows, 24]);
            assert_close(values(rms_norm(&norm, x.clone())), values(norm.forward(x)));
            let [gate, up] = [(); 2].map(|()| random([1, rows, 24]).reshape([rows, 24]));
            let added = residual_silu(gate.clone(), up.clone());
            assert_close(values(added), values(gate.clone() + silu(up.clone())));
            assert_close(values(gated(gate.clone(), up.clone())), values(silu(gate) * up));
        }
    }
}
