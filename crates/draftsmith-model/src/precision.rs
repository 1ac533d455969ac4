//! The float type that a module computes in: f32, or bf16 for a GPU's tensor cores and its memory.
//!
//! The type is that of a module's matrices. A frozen model's are cast as they are read, one tensor
//! at a time, and its cache is of the same type; so it decodes, scores and gives features in it. What
//! is trained keeps its parameters in f32 and casts them anew in each forward
//! ([`CausalLm::to_dtype`] and its like on an autodiff device): the products run in bf16, the cast
//! is recorded, and gradients come back in f32 to an optimiser that adds small steps up in f32
//! (mixed precision with master weights, Micikevicius et al. 2018, section 3.1; bf16 needs no loss
//! scaling).
//!
//! What bf16 would spoil is f32 throughout: norms with their weights, softmaxes, losses, logits from
//! the LM head's product on, what an acceptance head computes while decoding, and the tables of
//! rotary positions, which are cast where they are used. Between them stand products and the sums of
//! layers, which are rounded to bf16 one by one, as transformers and GPU runtimes have it. So a token's
//! logits may differ in their last places from one forward to another that holds other rows beside
//! it: a kernel for several rows sums in another order than one for a single row, and what is then
//! rounded the other way is carried on. `draftsmith_theory`'s `Rounding` says how far apart they may
//! come.
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

/// The module with its float parameters in `dtype`, but for those of norms, which stay f32. On an
/// autodiff device the casts are recorded: gradients of what comes out of the copy reach the
/// parameters of the original, in their own type.
pub(crate) fn cast_parameters<M: Module>(module: M, dtype: FloatDType) -> M {
    module.map(&mut CastParameters { dtype, is_in_norm: false })
}

struct CastParameters {
    dtype: FloatDType,
    is_in_norm: bool,
}

/// What burn calls our norm where it maps its parameters; it has no modules within.
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

#[cfg(test)]
mod tests;
