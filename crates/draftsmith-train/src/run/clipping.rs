//! Gradient clipping, equal to torch's `clip_grad_norm_` and `clip_grad_value_`. burn's clipping by norm
//! treats each tensor separately.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// The term that torch adds to the norm before the division.
const NORM_EPSILON: f64 = 1e-6;

/// The kind and limit of gradient clipping. In a recipe, `{ norm = 1.0 }` or `{ value = 0.5 }`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clipping {
    /// The maximum global norm, above 0. Clipping to it does not change the gradient's direction.
    Norm(f64),
    /// The maximum absolute value of each number, above 0. Clipping to it may change the gradient's
    /// direction.
    Value(f64),
}

impl Clipping {
    /// Clips all gradients, joined to one row, and returns them with their norm before clipping,
    /// `[1]`. No number leaves the device.
    pub(crate) fn clip(self, gradients: Tensor<1>) -> (Tensor<1>, Tensor<1>) {
        let norm = gradients.clone().square().sum().sqrt();
        let clipped = match self {
            Self::Norm(limit) => {
                let factor = ((norm.clone() + NORM_EPSILON).recip() * limit).clamp_max(1.0);
                gradients * factor
            }
            Self::Value(limit) => gradients.clamp(-limit, limit),
        };
        (clipped, norm)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;
    use crate::error::to_host;

    fn row(numbers: [f32; 6]) -> Tensor<1> {
        Tensor::from_floats(numbers, &Device::flex())
    }

    const GRADIENTS: [f32; 6] = [0.25, 3.0, -0.75, 0.1, -4.0, 0.5];

    /// Compares with torch 2.15:
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
        let (clipped, norm) = clipping.clip(row(GRADIENTS));
        let norm: f32 = norm.into_scalar();
        assert!((norm - 5.0877).abs() < 5e-5, "{norm}");
        for (found, expected) in to_host(clipped).unwrap().into_iter().zip(expected) {
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
            check(clipping, GRADIENTS);
        }
    }

    #[test]
    fn nan_gradients_have_a_nan_norm() {
        for clipping in [Clipping::Norm(1.0), Clipping::Value(0.5)] {
            let (_, norm) = clipping.clip(row([0.25, 3.0, -0.75, 0.1, f32::NAN, 0.5]));
            assert!(norm.into_scalar::<f32>().is_nan());
        }
    }
}
