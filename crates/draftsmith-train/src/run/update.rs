//! The optimizer's step: clips gradients and changes weights with AdamW.
//!
//! For the step, all weights are joined to one row of numbers. On a GPU, an operation on each of
//! many small tensors costs a launch, and every distinct shape costs a compilation.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::store::RecordError;
use burn::tensor::{Bytes, Device, Tensor};

use crate::run::clipping::Clipping;
use crate::run::optimizer::OptimizerSettings;

/// The parameter id of the row in the optimizer's record.
const ROW: u64 = 1;
/// The length of the row is a multiple of this number, so that a GPU can read and write vectors.
const WIDTH: usize = 4;

/// The optimizer: gradient clipping, and AdamW with its moments.
pub(crate) struct Updates {
    clipping: Clipping,
    adam_w: ModuleOptimizer,
}

/// The gradients of a model's parameters, joined to one row.
#[derive(Debug)]
pub(crate) struct Gradient {
    ids: Vec<ParamId>,
    row: Tensor<1>,
}

/// All trained numbers of a model, in the order of its parameters.
#[derive(Module, Debug)]
struct WeightRow {
    numbers: Param<Tensor<1>>,
}

impl Gradient {
    /// Joins the gradients of `model` to one row on a device; `None` if there are no gradients.
    pub(crate) fn of<M: Module>(
        model: &M,
        gradients: GradientsParams,
        device: &Device,
    ) -> Option<Self> {
        let mut all = GradientParts { from: gradients, ids: Vec::new(), parts: Vec::new() };
        model.visit(&mut all);
        let row = (!all.ids.is_empty()).then(|| row_of(all.parts).to_device(device))?;
        Some(Self { ids: all.ids, row })
    }

    /// Adds the gradients of another batch.
    pub(crate) fn plus(self, other: Self) -> Self {
        debug_assert_eq!(self.ids, other.ids, "the same parameters are trained in each batch");
        Self { row: self.row + other.row, ..self }
    }
}

/// Joins tensors to a row whose length is a multiple of [`WIDTH`].
fn row_of(mut parts: Vec<Tensor<1>>) -> Tensor<1> {
    let num_numbers: usize = parts.iter().map(|it| it.shape().num_elements()).sum();
    let num_missing = num_numbers.next_multiple_of(WIDTH) - num_numbers;
    if num_missing > 0 {
        parts.push(Tensor::zeros([num_missing], &parts[0].device()));
    }
    Tensor::cat(parts, 0)
}

impl Updates {
    pub(crate) fn new(settings: &OptimizerSettings) -> Self {
        Self { clipping: settings.clipping, adam_w: settings.adam_w() }
    }

    /// Takes an optimizer step. Returns the changed model and the gradient's norm before clipping,
    /// `[1]`. No number leaves the device.
    pub(crate) fn step<M: Module>(
        &mut self,
        rate: f64,
        model: M,
        Gradient { ids, row }: Gradient,
    ) -> (M, Tensor<1>) {
        let mut weights = WeightParts { ids: &ids, parts: Vec::new() };
        model.visit(&mut weights);
        let (gradient, norm) = self.clipping.clip(row);
        let id = ParamId::from(ROW);
        let mut gradients = GradientsParams::new();
        gradients.register(id, gradient);
        let numbers = Tensor::from_inner(row_of(weights.parts));
        let row = WeightRow { numbers: Param::initialized(id, numbers) };
        let numbers = self.adam_w.step(rate, row, gradients).numbers.val().inner();
        (model.map(&mut Spread { numbers, num_taken: 0, ids: &ids }), norm)
    }

    /// Serialises the moments, for a saved state.
    pub(crate) fn to_record(&self) -> Result<Vec<u8>, RecordError> {
        Ok(self.adam_w.into_bytes()?.to_vec())
    }

    /// Restores the moments from a record.
    pub(crate) fn read_record(&mut self, record: Vec<u8>) -> Result<(), RecordError> {
        self.adam_w = self.adam_w.clone().from_bytes(Bytes::from_bytes_vec(record))?;
        Ok(())
    }
}

/// A visitor that collects gradients, and the ids of the parameters that have one.
struct GradientParts {
    from: GradientsParams,
    ids: Vec<ParamId>,
    parts: Vec<Tensor<1>>,
}

impl ModuleVisitor for GradientParts {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.from.remove::<D>(param.id) {
            self.parts.push(gradient.flatten(0, D - 1));
            self.ids.push(param.id);
        }
    }
}

/// A visitor that collects the parameters with these ids.
struct WeightParts<'a> {
    ids: &'a [ParamId],
    parts: Vec<Tensor<1>>,
}

impl ModuleVisitor for WeightParts<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.contains(&param.id) {
            self.parts.push(param.val().inner().flatten(0, D - 1));
        }
    }
}

/// A mapper that replaces each parameter with one of these ids by its part of a row.
struct Spread<'a> {
    numbers: Tensor<1>,
    num_taken: usize,
    ids: &'a [ParamId],
}

impl ModuleMapper for Spread<'_> {
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

    fn step(updates: &mut Updates, layer: &Linear, gradients: GradientsParams) -> Linear {
        let gradient = Gradient::of(layer, gradients, &Device::flex()).expect("gradients");
        updates.step(0.1, layer.clone(), gradient).0
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
            layer = step(&mut updates, &layer, gradients(&first, scale));
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
        assert!(Gradient::of(&layer, GradientsParams::new(), &Device::flex()).is_none());
        let mut only_weight = gradients(&layer, 1.0);
        only_weight.remove::<1>(layer.bias.as_ref().expect("a bias").id);
        let changed = step(&mut updates, &layer, only_weight);
        let (before, after) = (numbers(&layer), numbers(&changed));
        assert!(before[..6].iter().zip(&after).all(|(one, other)| one != other));
        assert_eq!(before[6..], after[6..]);
    }
}
