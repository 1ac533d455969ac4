//! The float type that a module computes in: f32, or bf16 for a GPU's tensor cores and memory.
//!
//! Trained parameters are always f32. The type is that of a module's matrices in computation. A
//! frozen model's matrices are cast while loading, one tensor at a time, and its cache has the same
//! type. Trained modules keep their parameters in f32 and cast them in each forward
//! ([`CausalLm::to_dtype`] and similar functions on an autodiff device): products run in bf16, the
//! cast is recorded, and gradients come back in f32 (mixed precision with master weights,
//! Micikevicius et al. 2018, section 3.1; bf16 needs no loss scaling). The CPU computes in f32
//! only.
//!
//! Operations that bf16 would make too inaccurate are in f32: norms and their weights, softmaxes,
//! losses, logits, acceptance heads while decoding, and rotary tables until they are used. Products
//! and residual sums are rounded to bf16 one by one, as in transformers and GPU runtimes. A token's
//! logits may differ in the last places between forwards with different numbers of rows, because
//! kernels for several rows sum in another order. `draftsmith_theory`'s `Rounding` bounds the
//! difference.
//!
//! [`CausalLm::to_dtype`]: crate::CausalLm::to_dtype

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, FloatDType, Tensor};

use crate::weights::WeightDtype;

impl WeightDtype {
    /// Returns burn's type for tensors of this type.
    pub fn float_dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
        }
    }
}

/// Casts the module's float parameters to `dtype`, except those of norms, which stay f32. On an
/// autodiff device the casts are recorded, so gradients reach the original's parameters in their
/// type.
pub(crate) fn cast_parameters<M: Module>(module: M, dtype: FloatDType) -> M {
    module.map(&mut CastParameters { dtype, is_in_norm: false })
}

struct CastParameters {
    dtype: FloatDType,
    is_in_norm: bool,
}

/// burn's name for the type [`Norm`](crate::decoder::norm::Norm) when it visits parameters. A norm
/// contains no other modules.
const NORM: &str = "Struct:Norm";

impl ModuleMapper for CastParameters {
    fn enter_module(&mut self, _: &str, container: &str) {
        self.is_in_norm = container == NORM;
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.is_in_norm = false;
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = if self.is_in_norm { FloatDType::F32 } else { self.dtype };
        param.map(|value| value.cast(dtype))
    }
}

/// Returns a trainable copy of the module on `device`, in f32.
pub(crate) fn copied<M: Module>(module: M, device: &Device) -> M {
    module.map(&mut CopyParameters { device })
}

struct CopyParameters<'a> {
    device: &'a Device,
}

impl ModuleMapper for CopyParameters<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        Param::from_data(param.val().cast(FloatDType::F32).into_data(), self.device)
    }
}

#[cfg(test)]
mod tests;
