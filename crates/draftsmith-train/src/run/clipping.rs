//! Gradient clipping, equal to torch's `clip_grad_norm_` and `clip_grad_value_`. burn's clipping by norm
//! treats each tensor separately.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// The term that torch adds to the norm before the division.
const NORM_EPSILON: f64 = 1e-6;

/// How the gradients of a step are clipped. In a recipe, `{ norm = 1.0 }` or `{ value = 0.5 }`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clipping {
    /// To this global norm, above 0. The direction does not change.
    Norm(f64),
    /// Each number to ± this limit, above 0. The direction may change.
    Value(f64),
}

impl Clipping {
    /// Clips the gradients of `module`, and returns their global norm before clipping, `[1]`; `None` if
    /// there are no gradients. Nothing leaves the device.
    pub(crate) fn clip<M: Module>(
        self,
        module: &M,
        mut grads: GradientsParams,
    ) -> (GradientsParams, Option<Tensor<1>>) {
        let mut squares = SumOfSquares { grads: &grads, sum: None };
        module.visit(&mut squares);
        let Some(sum) = squares.sum else { return (grads, None) };
        let norm = sum.sqrt();
        match self {
            Self::Norm(limit) => {
                let factor = ((norm.clone() + NORM_EPSILON).recip() * limit).clamp_max(1.0);
                module.visit(&mut Scale { grads: &mut grads, factor });
            }
            Self::Value(limit) => module.visit(&mut Clamp { grads: &mut grads, limit }),
        }
        (grads, Some(norm))
    }
}

struct SumOfSquares<'a> {
    grads: &'a GradientsParams,
    sum: Option<Tensor<1>>,
}

impl ModuleVisitor for SumOfSquares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.get::<D>(param.id) else { return };
        let squares = grad.square().sum();
        self.sum = Some(match self.sum.take() {
            Some(sum) => sum + squares,
            None => squares,
        });
    }
}

/// Multiplies every gradient by `factor`, `[1]`.
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

/// Clips every number to ±`limit`.
struct Clamp<'a> {
    grads: &'a mut GradientsParams,
    limit: f64,
}

impl ModuleVisitor for Clamp<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad.clamp(-self.limit, self.limit));
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;
    use crate::error::to_host;

    fn layer_with_gradients() -> (Linear, GradientsParams) {
        let device = Device::flex();
        let layer = LinearConfig::new(2, 2).init(&device.clone().autodiff());
        let mut grads = GradientsParams::new();
        let weight = Tensor::<2>::from_floats([[0.25, 3.0], [-0.75, 0.1]], &device);
        grads.register(layer.weight.id, weight);
        let bias = Tensor::<1>::from_floats([-4.0, 0.5], &device);
        grads.register(layer.bias.as_ref().unwrap().id, bias);
        (layer, grads)
    }

    /// From torch 2.15:
    /// ```python
    /// def parameters():
    ///     a = torch.nn.Parameter(torch.zeros(2, 2)); b = torch.nn.Parameter(torch.zeros(2))
    ///     a.grad = torch.tensor([[0.25, 3.0], [-0.75, 0.1]]); b.grad = torch.tensor([-4.0, 0.5])
    ///     return [a, b]
    /// p = parameters(); print(torch.nn.utils.clip_grad_norm_(p, 1.0), [q.grad for q in p])
    /// p = parameters(); torch.nn.utils.clip_grad_value_(p, 0.5); print([q.grad for q in p])
    /// ```
    #[track_caller]
    fn check(clipping: Clipping, expected: [f32; 6]) {
        let (layer, grads) = layer_with_gradients();
        let (grads, norm) = clipping.clip(&layer, grads);
        let norm: f32 = norm.unwrap().into_scalar();
        assert!((norm - 5.0877).abs() < 5e-5, "{norm}");
        let weight = to_host(grads.get::<2>(layer.weight.id).unwrap()).unwrap();
        let bias = to_host(grads.get::<1>(layer.bias.as_ref().unwrap().id).unwrap()).unwrap();
        for (found, expected) in weight.into_iter().chain(bias).zip(expected) {
            // f32 rounding of numbers up to 4.
            assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
        }
    }

    #[test]
    fn the_norm_covers_all_gradients() {
        check(
            Clipping::Norm(1.0),
            [0.049137816, 0.5896538, -0.14741345, 0.019655127, -0.78620505, 0.09827563],
        );
        check(
            Clipping::Norm(4.5),
            [0.22112018, 2.6534421, -0.6633606, 0.08844807, -3.5379229, 0.44224036],
        );
    }

    #[test]
    fn values_are_clipped_separately() {
        check(Clipping::Value(0.5), [0.25, 0.5, -0.5, 0.1, -0.5, 0.5]);
    }

    #[test]
    fn small_gradients_do_not_change() {
        for clipping in [Clipping::Norm(6.0), Clipping::Value(4.0)] {
            check(clipping, [0.25, 3.0, -0.75, 0.1, -4.0, 0.5]);
            let (layer, _) = layer_with_gradients();
            let (grads, norm) = clipping.clip(&layer, GradientsParams::new());
            assert!(grads.is_empty() && norm.is_none());
        }
    }

    #[test]
    fn nan_gradients_have_a_nan_norm() {
        for clipping in [Clipping::Norm(1.0), Clipping::Value(0.5)] {
            let (layer, mut grads) = layer_with_gradients();
            let id = layer.bias.as_ref().unwrap().id;
            grads.remove::<1>(id);
            grads.register(id, Tensor::<1>::from_floats([f32::NAN, 0.5], &Device::flex()));
            let (_, norm) = clipping.clip(&layer, grads);
            assert!(norm.unwrap().into_scalar::<f32>().is_nan());
        }
    }
}
