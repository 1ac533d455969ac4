//! Sources of a decoder's weights: a checkpoint or a distribution. The code that builds a decoder
//! asks a [`WeightSource`] for one tensor after another, by the names in the spec.
//!
//! Hugging Face stores linear weights as `[out, in]`; they are transposed here, once.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;

use burn::module::Param;
use burn::nn::{Initializer, Linear};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

use super::norm::Norm;
use crate::error::{ModelError, Result};
use crate::packed::{self, Packing};
use crate::spec::{LinearSpec, NamedNorm, NormForm};
use crate::weights::{NamedTensor, WeightReader};

/// A source of linear layers and norms.
pub(crate) trait WeightSource {
    type Error;

    /// Returns a linear layer. `layer` is the prefix of its name.
    fn linear(&mut self, layer: &str, spec: &LinearSpec) -> Result<Linear, Self::Error>;

    /// Returns a norm.
    fn norm(&mut self, norm: NamedNorm<'_>) -> Result<Norm, Self::Error>;

    /// Returns the rows of a table, `[outputs, inputs]` of `spec`.
    fn table(&mut self, spec: &LinearSpec) -> Result<Param<Tensor<2>>, Self::Error>;

    /// Reads a packed copy of weights. `None` if the source is no checkpoint, or its weights are
    /// not for decoding on the CPU.
    fn packed<P>(
        &mut self,
        read: impl FnOnce(&mut Packing<'_>) -> Result<P>,
    ) -> Result<Option<Arc<P>>, Self::Error> {
        let _ = read;
        Ok(None)
    }
}

/// A checkpoint. Each tensor goes to `device` in `dtype` as soon as it is read.
pub(crate) struct CheckpointSource<'a> {
    pub(crate) reader: &'a mut WeightReader,
    pub(crate) device: &'a Device,
    pub(crate) dtype: FloatDType,
}

impl WeightSource for CheckpointSource<'_> {
    type Error = ModelError;

    fn linear(&mut self, layer: &str, spec: &LinearSpec) -> Result<Linear> {
        let name = spec.name_in(layer);
        let mut part = |name: String, shape: &[usize]| {
            // The shape is checked before memory is allocated, because it comes from a
            // `config.json`.
            self.reader.check_shape(&name, shape)?;
            let row_len: usize = shape[1..].iter().product();
            let mut values = Vec::with_capacity(spec.outputs * row_len);
            let strips = spec.rows.strips(spec.outputs);
            let keep = |_, rows: &[f32]| values.extend_from_slice(rows);
            self.reader.take_rows(&name, shape, strips, keep).map(|()| values)
        };
        let weight = part(format!("{name}.weight"), &[spec.rows.num_all, spec.inputs])?;
        let mut bias = None;
        if spec.has_bias {
            bias = Some(part(format!("{name}.bias"), &[spec.rows.num_all])?);
        }
        let shape = [spec.inputs, spec.outputs];
        if self.device.is_autodiff() || *self.device == Device::flex() {
            let weight = transposed(&weight, spec.outputs, spec.inputs);
            return Ok(linear(weight, shape, bias, self.device, self.dtype));
        }
        // The weights keep the file's layout. A GPU reads its columns in products of few rows,
        // without a transpose.
        let stored = parameter(weight, [spec.outputs, spec.inputs], self.device, self.dtype);
        let bias = bias.map(|bias| parameter(bias, [spec.outputs], self.device, self.dtype));
        Ok(Linear { weight: Param::from_tensor(stored.val().transpose()), bias })
    }

    fn norm(&mut self, norm: NamedNorm<'_>) -> Result<Norm> {
        let (weight, bias) = self.reader.take_norm(norm)?;
        Ok(Norm::new(norm.spec, weight, bias, self.device))
    }

    fn table(&mut self, spec: &LinearSpec) -> Result<Param<Tensor<2>>> {
        let shape = [spec.outputs, spec.inputs];
        let values = self.reader.take_finite(&format!("{}.weight", spec.name), &shape)?;
        Ok(parameter(values, shape, self.device, self.dtype))
    }

    fn packed<P>(
        &mut self,
        read: impl FnOnce(&mut Packing<'_>) -> Result<P>,
    ) -> Result<Option<Arc<P>>> {
        let packs = self.dtype == FloatDType::F32 && packed::runs_on(self.device);
        packs.then(|| read(&mut Packing { reader: self.reader }).map(Arc::new)).transpose()
    }
}

/// A source that draws each matrix, `[in, out]`, with `matrix`. Biases are zeros and norms are
/// ones.
pub(crate) struct RandomSource<'a, F> {
    pub(crate) device: &'a Device,
    pub(crate) matrix: F,
}

impl<F: FnMut(&LinearSpec) -> Param<Tensor<2>>> WeightSource for RandomSource<'_, F> {
    type Error = Infallible;

    fn linear(&mut self, _: &str, spec: &LinearSpec) -> Result<Linear, Infallible> {
        let bias = spec.has_bias.then(|| Initializer::Zeros.init([spec.outputs], self.device));
        Ok(Linear { weight: (self.matrix)(spec), bias })
    }

    fn norm(&mut self, norm: NamedNorm<'_>) -> Result<Norm, Infallible> {
        Ok(Norm::ones(norm, self.device))
    }

    fn table(&mut self, spec: &LinearSpec) -> Result<Param<Tensor<2>>, Infallible> {
        Ok((self.matrix)(&LinearSpec::matrix(spec.name, spec.outputs, spec.inputs)))
    }
}

/// Collects the names and shapes of a checkpoint's tensors. Its layers have no values.
#[derive(Default)]
pub(crate) struct ShapeSource {
    pub(crate) shapes: Vec<(String, Vec<usize>)>,
    /// The names of the linear layers' weights, which layers may share.
    weights: HashSet<String>,
}

impl ShapeSource {
    /// Counts the parameters.
    pub(crate) fn num_parameters(&self) -> usize {
        self.shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }
}

impl WeightSource for ShapeSource {
    type Error = Infallible;

    fn linear(&mut self, layer: &str, spec: &LinearSpec) -> Result<Linear, Infallible> {
        let (name, num_rows) = (spec.name_in(layer), spec.rows.num_all);
        let weight = format!("{name}.weight");
        if self.weights.insert(weight.clone()) {
            self.shapes.push((weight, vec![num_rows, spec.inputs]));
            self.shapes.extend(spec.has_bias.then(|| (format!("{name}.bias"), vec![num_rows])));
        }
        let weight = Initializer::Zeros.init([0, 0], &Device::flex());
        Ok(Linear { weight, bias: None })
    }

    fn norm(&mut self, norm: NamedNorm<'_>) -> Result<Norm, Infallible> {
        let NamedNorm { width, spec, .. } = norm;
        let parts =
            if spec.form == NormForm::Layer { &["weight", "bias"][..] } else { &["weight"] };
        let parts = if norm.is_absent() { &[][..] } else { parts };
        let name = norm.name();
        self.shapes.extend(parts.iter().map(|part| (format!("{name}.{part}"), vec![width])));
        // A malformed configuration may have any width.
        Ok(Norm::ones(norm.of_width(1), &Device::flex()))
    }

    fn table(&mut self, spec: &LinearSpec) -> Result<Param<Tensor<2>>, Infallible> {
        Ok(self.linear("", spec)?.weight)
    }
}

/// Lists the tensors of linear layers in a checkpoint's layout. `layer` is the prefix of their
/// names. Layers that share a tensor are written into one.
pub(crate) fn named_linears<'a>(
    layer: &str,
    linears: impl IntoIterator<Item = (LinearSpec, &'a Linear)>,
) -> Vec<NamedTensor> {
    let mut tensors: Vec<NamedTensor> = Vec::new();
    let mut add = |name: String, spec: &LinearSpec, values: Vec<f32>| {
        let row_len = values.len() / spec.outputs;
        let found = tensors.iter().position(|tensor| tensor.name == name);
        let place = found.unwrap_or_else(|| {
            let shape = match name.ends_with(".bias") {
                true => vec![spec.rows.num_all],
                false => vec![spec.rows.num_all, spec.inputs],
            };
            let values = vec![0.0; spec.rows.num_all * row_len];
            tensors.push(NamedTensor { name, shape, values });
            tensors.len() - 1
        });
        let mut rest = values.as_slice();
        for rows in spec.rows.strips(spec.outputs) {
            let (strip, others) = rest.split_at(rows.len() * row_len);
            tensors[place].values[rows.start * row_len..rows.end * row_len].copy_from_slice(strip);
            rest = others;
        }
    };
    for (spec, linear) in linears {
        let name = spec.name_in(layer);
        let weight = NamedTensor::from_tensor("", linear.weight.val().transpose());
        add(format!("{name}.weight"), &spec, weight.values);
        if let Some(bias) = &linear.bias {
            add(format!("{name}.bias"), &spec, NamedTensor::from_tensor("", bias.val()).values);
        }
    }
    tensors
}

/// Transposes `[rows, columns]`.
pub(crate) fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut output = vec![0.0; values.len()];
    for (r, row) in values.chunks_exact(columns).enumerate() {
        for (c, value) in row.iter().enumerate() {
            output[c * rows + r] = *value;
        }
    }
    output
}

/// Builds a linear layer in `dtype` from `[in, out]` weights.
pub(crate) fn linear(
    weight: Vec<f32>,
    shape: [usize; 2],
    bias: Option<Vec<f32>>,
    device: &Device,
    dtype: FloatDType,
) -> Linear {
    let bias = bias.map(|bias| parameter(bias, [shape[1]], device, dtype));
    Linear { weight: parameter(weight, shape, device, dtype), bias }
}

/// Builds a parameter in `dtype`. The values are rounded in host memory, so that they never exist
/// in another type on the device.
pub(crate) fn parameter<const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &Device,
    dtype: FloatDType,
) -> Param<Tensor<D>> {
    // `Param::from_data` would do the same, but supports only the device's default type.
    device.memory_persistent_allocations(TensorData::new(values, shape), |values| {
        Param::from_tensor(Tensor::from_data(values, (device, DType::from(dtype))))
    })
}
