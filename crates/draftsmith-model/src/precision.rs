//! The float type that a module computes in: f32, or bf16 for a GPU's tensor cores.
//!
//! The type is that of a module's parameters. A frozen model is cast once. What is trained keeps
//! its parameters in f32 and casts them anew in each forward ([`CausalLm::to_dtype`] and its like
//! on an autodiff device): the products run in bf16, the cast is recorded, and gradients come back
//! in f32 to an optimiser that adds small steps up in f32 (mixed precision with master weights,
//! Micikevicius et al. 2018, section 3.1; bf16 needs no loss scaling).
//!
//! Sums that bf16 would spoil stay in f32 throughout: norms, softmaxes, losses, and the tables of
//! rotary positions, which are cast where they are used.
//!
//! [`CausalLm::to_dtype`]: crate::CausalLm::to_dtype

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{FloatDType, Tensor};

use crate::weights::WeightDtype;

impl WeightDtype {
    /// The type of tensors.
    pub fn float_dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
        }
    }
}

/// The module with its float parameters in `dtype`. On an autodiff device the casts are recorded:
/// gradients of what comes out of the copy reach the parameters of the original, in their own type.
pub(crate) fn cast_parameters<M: Module>(module: M, dtype: FloatDType) -> M {
    module.map(&mut CastParameters(dtype))
}

struct CastParameters(FloatDType);

impl ModuleMapper for CastParameters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0))
    }
}

#[cfg(test)]
mod tests;
