//! The optimizer's step: clips gradients and changes weights with AdamW.
//!
//! All weights take the step as one row of numbers. On a GPU, operations on many small tensors cost a launch each, and
//! every shape that burn tells apart costs a compilation.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::store::RecordError;
use burn::tensor::{Bytes, Tensor};

use crate::run::clipping::Clipping;
use crate::run::optimizer::OptimizerSettings;

/// The identity of the row in the optimizer's record.
const ROW: u64 = 1;

/// Clipping, AdamW and its moments.
pub(crate) struct Updates {
    clipping: Clipping,
    adam_w: ModuleOptimizer,
}

/// All trained numbers of a model, in the order of its parameters.
#[derive(Module, Debug)]
struct Row {
    numbers: Param<Tensor<1>>,
}

impl Updates {
    pub(crate) fn new(settings: &OptimizerSettings) -> Self {
        Self { clipping: settings.clipping, adam_w: settings.adam_w() }
    }

    /// Takes a step with gradients of the same parameters each time. Returns the changed model and the gradients'
    /// global norm before clipping, `[1]`; `None` without gradients. Nothing leaves the device.
    pub(crate) fn step<M: Module>(
        &mut self,
        rate: f64,
        model: M,
        gradients: GradientsParams,
    ) -> (M, Option<Tensor<1>>) {
        let mut gathered = Gathered { from: gradients, gradients: Vec::new(), weights: Vec::new() };
        model.visit(&mut gathered);
        if gathered.gradients.is_empty() {
            return (model, None);
        }
        let ids = gathered.weights.iter().map(|(id, _)| *id).collect();
        let weights = gathered.weights.into_iter().map(|(_, weight)| weight).collect();
        let (gradient, norm) = self.clipping.clip(Tensor::cat(gathered.gradients, 0));
        let id = ParamId::from(ROW);
        let numbers = Tensor::from_inner(Tensor::cat(weights, 0));
        let mut gradients = GradientsParams::new();
        gradients.register(id, gradient);
        let row = Row { numbers: Param::initialized(id, numbers) };
        let numbers = self.adam_w.step(rate, row, gradients).numbers.val().inner();
        (model.map(&mut Spread { numbers, num_taken: 0, ids }), Some(norm))
    }

    /// The moments, for a saved state.
    pub(crate) fn to_record(&self) -> Result<Vec<u8>, RecordError> {
        Ok(self.adam_w.into_bytes()?.to_vec())
    }

    /// Continues with the moments of a record.
    pub(crate) fn read_record(&mut self, record: Vec<u8>) -> Result<(), RecordError> {
        self.adam_w = self.adam_w.clone().from_bytes(Bytes::from_bytes_vec(record))?;
        Ok(())
    }
}

/// Takes the parameters with gradients as rows.
struct Gathered {
    from: GradientsParams,
    gradients: Vec<Tensor<1>>,
    weights: Vec<(ParamId, Tensor<1>)>,
}

impl ModuleVisitor for Gathered {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.from.remove::<D>(param.id) {
            self.gradients.push(gradient.flatten(0, D - 1));
            self.weights.push((param.id, param.val().inner().flatten(0, D - 1)));
        }
    }
}

/// Gives the parameters with these identities their part of a row.
struct Spread {
    numbers: Tensor<1>,
    num_taken: usize,
    ids: Vec<ParamId>,
}

impl ModuleMapper for Spread {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.ids.contains(&param.id) {
            return param;
        }
        param.map(|old| {
            let shape = old.shape();
            let end = self.num_taken + shape.num_elements();
            let new = self.numbers.clone().slice(self.num_taken..end).reshape(shape);
            self.num_taken = end;
            Tensor::from_inner(new).require_grad()
        })
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;
    use crate::error::to_host;

    fn gradients(layer: &Linear, scale: f32) -> GradientsParams {
        let device = Device::flex();
        let mut all = GradientsParams::new();
        let weight = Tensor::<2>::from_floats([[0.25, 3.0], [-0.75, 0.1], [1.0, -2.0]], &device);
        all.register(layer.weight.id, weight * scale);
        let bias = Tensor::<1>::from_floats([-4.0, 0.5], &device);
        all.register(layer.bias.as_ref().expect("a bias").id, bias * scale);
        all
    }

    fn numbers(layer: &Linear) -> Vec<f32> {
        let weight = to_host(layer.weight.val().inner()).expect("host");
        let bias = to_host(layer.bias.as_ref().expect("a bias").val().inner()).expect("host");
        [weight, bias].concat()
    }

    #[test]
    fn a_row_gives_the_bits_of_separate_tensors_and_continues_from_a_record() {
        let settings = OptimizerSettings {
            weight_decay: 0.1,
            clipping: Clipping::Norm(1e9),
            ..OptimizerSettings::HEAD
        };
        let first: Linear = LinearConfig::new(3, 2).init(&Device::flex().autodiff());
        let (mut separate, mut adam_w) = (first.clone(), settings.adam_w());
        let (mut layer, mut updates) = (first.clone(), Updates::new(&settings));
        for scale in [1.0, -0.5, 2.0] {
            let (changed, norm) = updates.step(0.1, layer, gradients(&first, scale));
            layer = changed;
            assert!(norm.is_some());
            separate = adam_w.step(0.1, separate, gradients(&first, scale));
            assert_eq!(numbers(&layer), numbers(&separate));
            assert!(layer.weight.val().is_require_grad());
            // Each step goes on from the saved moments of the one before.
            let record = updates.to_record().expect("a record");
            updates = Updates::new(&settings);
            updates.read_record(record).expect("reads back");
        }
        assert_ne!(numbers(&layer), numbers(&first));
    }

    #[test]
    fn only_parameters_with_gradients_change() {
        let layer: Linear = LinearConfig::new(3, 2).init(&Device::flex().autodiff());
        let mut updates = Updates::new(&OptimizerSettings::HEAD);
        let (same, norm) = updates.step(0.1, layer.clone(), GradientsParams::new());
        assert!(norm.is_none());
        assert_eq!(numbers(&same), numbers(&layer));
        let mut only_weight = gradients(&layer, 1.0);
        only_weight.remove::<1>(layer.bias.as_ref().expect("a bias").id);
        let (changed, _) = updates.step(0.1, layer.clone(), only_weight);
        let (before, after) = (numbers(&layer), numbers(&changed));
        assert!(before[..6].iter().zip(&after).all(|(one, other)| one != other));
        assert_eq!(before[6..], after[6..]);
    }
}
