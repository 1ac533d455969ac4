//! Turns packed weights back into tensors: for adapters that start from a frozen model's layer, for
//! losses that need the LM head as a matrix, and for writing files.

use std::convert::Infallible;
use std::ops::Range;

use burn::nn::Linear;
use burn::tensor::{Device, FloatDType};

use super::norm::Norm;
use super::source::{WeightSource, linear};
use crate::packed::{PackedLayer, PackedNorm, PackedWeights};
use crate::spec::ModelShape;
use crate::spec::{LayerSpec, LinearSpec, NormSpec};

/// The weights and biases of some outputs, as tensors on `device`.
pub(crate) fn unpacked_linear(
    packed: &PackedWeights,
    outputs: Range<usize>,
    device: &Device,
) -> Linear {
    let (num_inputs, num_outputs) = (packed.inputs, outputs.len());
    let mut weight = vec![0.0; num_inputs * num_outputs];
    let mut column = Vec::new();
    for (place, output) in outputs.clone().enumerate() {
        column.clear();
        packed.read_output(output, &mut column);
        for (input, value) in column.iter().enumerate() {
            weight[input * num_outputs + place] = *value;
        }
    }
    let bias = packed.bias.as_ref().map(|bias| bias[outputs].to_vec());
    linear(weight, [num_inputs, num_outputs], bias, device, FloatDType::F32)
}

/// A norm as tensors on `device`.
pub(crate) fn unpacked_norm(packed: &PackedNorm, spec: &NormSpec, device: &Device) -> Norm {
    Norm::new(spec, packed.gamma.clone(), packed.beta.clone(), device)
}

/// A packed layer as a [`WeightSource`].
pub(crate) struct UnpackedSource<'a> {
    /// The outputs of each matrix within the packed ones. Matrices stored in one tensor share a
    /// name.
    linears: Vec<(LinearSpec, &'a PackedWeights, Range<usize>)>,
    norms: Vec<(&'static str, &'a PackedNorm)>,
    device: &'a Device,
}

impl<'a> UnpackedSource<'a> {
    /// # Panics
    /// If the spec lacks a part, which no model's does.
    pub(crate) fn new(
        layer: &'a PackedLayer,
        spec: &LayerSpec,
        shape: &ModelShape,
        device: &'a Device,
    ) -> Self {
        let both = spec.attention.as_ref().zip(spec.mlp.as_ref());
        let (attention_spec, mlp_spec) = both.expect("a model's layers have both parts");
        let PackedLayer { attention, mlp, .. } = layer;
        let mut linears = Vec::new();
        let mut add = |weights: &'a PackedWeights, specs: &[LinearSpec]| {
            let mut start = 0;
            for spec in specs {
                linears.push((*spec, weights, start..start + spec.outputs));
                start += spec.outputs;
            }
        };
        let [query, key, value, output] = attention_spec.linears(shape);
        add(&attention.qkv, &[query, key, value]);
        add(&attention.output, &[output]);
        let (gate, [up, down]) = mlp_spec.linears(shape);
        add(&mlp.gate_up, &gate.into_iter().chain([up]).collect::<Vec<_>>());
        add(&mlp.down, &[down]);
        let (of_attention, of_mlp) = (&attention_spec.names, &mlp_spec.names);
        let mut norms = vec![(of_attention.norm, &attention.norm), (of_mlp.norm, &mlp.norm)];
        norms.extend(of_attention.post_norm.into_iter().zip(&attention.post_norm));
        norms.extend(of_mlp.post_norm.into_iter().zip(&mlp.post_norm));
        let of_heads = attention.head_norms.iter().flatten();
        norms.extend(of_attention.head_norms.into_iter().flatten().zip(of_heads));
        Self { linears, norms, device }
    }
}

impl WeightSource for UnpackedSource<'_> {
    type Error = Infallible;

    fn linear(&mut self, _: &str, spec: &LinearSpec) -> Result<Linear, Infallible> {
        let is_it = |own: &LinearSpec| (own.name, own.rows) == (spec.name, spec.rows);
        let found = self.linears.iter().find(|(own, ..)| is_it(own));
        let (_, weights, outputs) = found.expect("a layer has the matrices of its spec");
        let linear = unpacked_linear(weights, outputs.clone(), self.device);
        // Matrices packed side by side share a bias, with zeros for those without one.
        Ok(Linear { bias: linear.bias.filter(|_| spec.has_bias), ..linear })
    }

    fn norm(
        &mut self,
        _: &str,
        name: &'static str,
        _: usize,
        spec: &NormSpec,
    ) -> Result<Norm, Infallible> {
        let found = self.norms.iter().find(|(own, _)| *own == name);
        let (_, norm) = found.expect("a layer has the norms of its spec");
        Ok(unpacked_norm(norm, spec, self.device))
    }
}
