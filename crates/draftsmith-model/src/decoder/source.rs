//! Where the weights of a decoder come from: the tensors of a checkpoint, or a distribution. What is
//! built asks a [`WeightSource`] for one after the other, as its spec names them.
//!
//! Hugging Face stores linear weights as `[out, in]`; they are transposed here, once.

use std::convert::Infallible;

use burn::module::Param;
use burn::nn::{Initializer, Linear, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor, TensorData};

use crate::error::ModelError;
use crate::spec::LinearSpec;
use crate::weights::{NamedTensor, WeightReader};

/// Gives the weights of linear layers and norms.
pub(crate) trait WeightSource {
    type Error;

    /// A linear layer; `layer` is what its name begins with.
    fn linear(&mut self, layer: &str, spec: &LinearSpec) -> Result<Linear, Self::Error>;

    /// A norm of rows of `width` numbers.
    fn norm(&mut self, name: &str, width: usize, epsilon: f64) -> Result<RmsNorm, Self::Error>;
}

/// The tensors of a checkpoint.
pub(crate) struct Stored<'a> {
    pub(crate) reader: &'a mut WeightReader,
    pub(crate) device: &'a Device,
}

impl WeightSource for Stored<'_> {
    type Error = ModelError;

    fn linear(&mut self, layer: &str, spec: &LinearSpec) -> Result<Linear, ModelError> {
        let name = spec.name_in(layer);
        let shape = [spec.inputs, spec.outputs];
        let weight = self.reader.take(&format!("{name}.weight"), &[spec.outputs, spec.inputs])?;
        let weight = transposed(&weight, spec.outputs, spec.inputs);
        let mut bias = None;
        if spec.has_bias {
            bias = Some(self.reader.take(&format!("{name}.bias"), &[spec.outputs])?);
        }
        Ok(linear(weight, shape, bias, self.device))
    }

    fn norm(&mut self, name: &str, width: usize, epsilon: f64) -> Result<RmsNorm, ModelError> {
        let gamma = self.reader.take(&format!("{name}.weight"), &[width])?;
        let gamma = Param::from_data(TensorData::new(gamma, [width]), self.device);
        Ok(RmsNorm { gamma, epsilon })
    }
}

/// Matrices that `matrix` draws, `[in, out]`, biases of zeros and norms of ones.
pub(crate) struct Drawn<'a, F> {
    pub(crate) device: &'a Device,
    pub(crate) matrix: F,
}

impl<F: FnMut(&LinearSpec) -> Param<Tensor<2>>> WeightSource for Drawn<'_, F> {
    type Error = Infallible;

    fn linear(&mut self, _: &str, spec: &LinearSpec) -> Result<Linear, Infallible> {
        let bias = spec.has_bias.then(|| Initializer::Zeros.init([spec.outputs], self.device));
        Ok(Linear { weight: (self.matrix)(spec), bias })
    }

    fn norm(&mut self, _: &str, width: usize, epsilon: f64) -> Result<RmsNorm, Infallible> {
        Ok(RmsNormConfig::new(width).with_epsilon(epsilon).init(self.device))
    }
}

/// A linear layer's tensors as a checkpoint keeps them.
pub(crate) fn named_linear(name: &str, linear: &Linear) -> impl Iterator<Item = NamedTensor> {
    let weight =
        NamedTensor::from_tensor(&format!("{name}.weight"), linear.weight.val().transpose());
    let bias = linear.bias.as_ref();
    let bias = bias.map(|bias| NamedTensor::from_tensor(&format!("{name}.bias"), bias.val()));
    [weight].into_iter().chain(bias)
}

/// A norm's tensor as a checkpoint keeps it.
pub(crate) fn named_norm(name: &str, norm: &RmsNorm) -> NamedTensor {
    NamedTensor::from_tensor(&format!("{name}.weight"), norm.gamma.val())
}

/// `[rows, columns]` values as `[columns, rows]`.
pub(crate) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut output = vec![0.0; values.len()];
    for (r, row) in values.chunks_exact(columns).enumerate() {
        for (c, value) in row.iter().enumerate() {
            output[c * rows + r] = *value;
        }
    }
    output
}

/// A linear layer of `[in, out]` weights.
pub(crate) fn linear(
    weight: Vec<f32>,
    shape: [usize; 2],
    bias: Option<Vec<f32>>,
    device: &Device,
) -> Linear {
    let bias = bias.map(|bias| Param::from_data(TensorData::new(bias, [shape[1]]), device));
    Linear { weight: parameter(weight, shape, device), bias }
}

pub(crate) fn parameter(values: Vec<f32>, shape: [usize; 2], device: &Device) -> Param<Tensor<2>> {
    Param::from_data(TensorData::new(values, shape), device)
}
