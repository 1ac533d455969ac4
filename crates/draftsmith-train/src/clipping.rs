//! Gradients cut to a global norm, as torch's `clip_grad_norm_` does. burn's own clipping looks at
//! one tensor at a time.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// torch adds this to the norm before it divides.
const NORM_EPSILON: f64 = 1e-6;

/// Multiplies every gradient of `module` by min(1, `max_norm` / norm), the norm being that of all
/// of them together. Nothing leaves the device.
pub(crate) fn clip_to_global_norm<M: Module>(
    module: &M,
    mut grads: GradientsParams,
    max_norm: f64,
) -> (GradientsParams, Option<Tensor<1>>) {
    let mut squares = SumOfSquares { grads: &grads, sum: None };
    module.visit(&mut squares);
    let Some(sum) = squares.sum else { return (grads, None) };
    let norm = sum.sqrt();
    let factor = ((norm.clone() + NORM_EPSILON).recip() * max_norm).clamp_max(1.0);
    module.visit(&mut Scale { grads: &mut grads, factor });
    (grads, Some(norm))
}

struct SumOfSquares<'a> {
    grads: &'a GradientsParams,
    sum: Option<Tensor<1>>,
}

impl ModuleVisitor for SumOfSquares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.get::<D>(param.id) else { return };
        let own = grad.square().sum();
        self.sum = Some(match self.sum.take() {
            Some(sum) => sum + own,
            None => own,
        });
    }
}

struct Scale<'a> {
    grads: &'a mut GradientsParams,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad * self.factor.clone().reshape([1; D]));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    /// A layer whose weight's gradients have norm 3 (0, 3 and 0s) and whose bias's have norm 4.
    fn layer_with_gradients() -> (Linear, GradientsParams) {
        let device = Device::flex();
        let layer = LinearConfig::new(2, 2).init(&device.clone().autodiff());
        let mut grads = GradientsParams::new();
        let weight = Tensor::<2>::from_floats([[0.0, 3.0], [0.0, 0.0]], &device);
        grads.register(layer.weight.id, weight);
        let bias = Tensor::<1>::from_floats([-4.0, 0.0], &device);
        grads.register(layer.bias.as_ref().unwrap().id, bias);
        (layer, grads)
    }

    fn clipped(max_norm: f64) -> [f32; 2] {
        let (layer, grads) = layer_with_gradients();
        let (grads, norm) = clip_to_global_norm(&layer, grads, max_norm);
        assert_eq!(norm.unwrap().into_scalar::<f32>(), 5.0);
        let weight = grads.get::<2>(layer.weight.id).unwrap().sum().into_scalar();
        let bias = grads.get::<1>(layer.bias.as_ref().unwrap().id).unwrap().sum().into_scalar();
        [weight, bias]
    }

    #[test]
    fn the_norm_is_that_of_all_gradients_together() {
        // √(3² + 4²) = 5. Each tensor alone would be cut to 1 and −1.
        let [weight, bias] = clipped(1.0);
        // f32 rounding, and the 1e-6 in the divisor.
        assert!((weight - 0.6).abs() < 1e-6 && (bias + 0.8).abs() < 1e-6, "{weight} {bias}");
        let [weight, bias] = clipped(4.5);
        assert!((weight - 2.7).abs() < 1e-5 && (bias + 3.6).abs() < 1e-5, "{weight} {bias}");
    }

    #[test]
    fn small_gradients_are_left_alone() {
        assert_eq!(clipped(5.1), [3.0, -4.0]);
        let (layer, _) = layer_with_gradients();
        let (grads, norm) = clip_to_global_norm(&layer, GradientsParams::new(), 1.0);
        assert!(grads.is_empty() && norm.is_none());
    }
}
