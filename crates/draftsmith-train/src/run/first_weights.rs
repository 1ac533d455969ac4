//! First weights, drawn from a seed: burn's own initialisation draws from one generator for all
//! threads.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, TensorData};

/// The module with new weights, each drawn by `draw`.
pub(crate) fn redrawn<M: Module>(module: M, which: Redrawn, draw: impl FnMut() -> f32) -> M {
    module.map(&mut Redraw { which, draw })
}

/// The parameters that are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redrawn {
    All,
    /// Norms and biases stay as they are.
    Matrices,
}

struct Redraw<F> {
    which: Redrawn,
    draw: F,
}

impl<F: FnMut() -> f32> ModuleMapper for Redraw<F> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.which == Redrawn::Matrices && D != 2 {
            return param;
        }
        param.map(|old| {
            let values: Vec<f32> = (0..old.shape().num_elements()).map(|_| (self.draw)()).collect();
            let new = Tensor::from_data(TensorData::new(values, old.shape()), &old.device());
            new.set_require_grad(old.is_require_grad())
        })
    }
}
