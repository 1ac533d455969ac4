//! Turns packed weights back into tensors: for adapters that start from a frozen model's layer, for
//! losses that need the LM head as a matrix, and for writing files.

use std::ops::Range;

use burn::nn::Linear;
use burn::tensor::{Device, FloatDType};

use super::attention::Attention;
use super::layer::DecoderLayer;
use super::mlp::Mlp;
use super::norm::Norm;
use super::source::linear;
use crate::packed::{PackedLayer, PackedNorm, PackedWeights};
use crate::spec::{BOTH_PARTS, LayerSpec, LinearSpec, ModelShape, NormSpec};

/// Unpacks the weights and biases of some outputs into tensors on `device`.
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

/// Unpacks a norm into tensors on `device`.
pub(crate) fn unpacked_norm(packed: &PackedNorm, spec: &NormSpec, device: &Device) -> Norm {
    Norm::new(spec, packed.gamma.clone(), packed.beta.clone(), device)
}

/// Unpacks a layer into tensors on `device`.
///
/// # Panics
/// If the layer lacks a part. The layers of models have both parts.
pub(crate) fn unpacked_layer(
    layer: &PackedLayer,
    spec: &LayerSpec,
    shape: &ModelShape,
    device: &Device,
) -> DecoderLayer {
    let both = spec.attention.as_ref().zip(spec.mlp.as_ref());
    let (attention_spec, mlp_spec) = both.expect(BOTH_PARTS);
    let parts = layer.attention.as_ref().zip(layer.mlp.as_ref());
    let (attention, mlp) = parts.expect(BOTH_PARTS);
    let norm = |norm: &PackedNorm| unpacked_norm(norm, &spec.norm, device);
    let part = |weights: &PackedWeights, first: usize, spec: &LinearSpec| {
        let linear = unpacked_linear(weights, first..first + spec.outputs, device);
        // Matrices packed side by side share a bias vector, with zeros for a matrix without a bias.
        Linear { bias: linear.bias.filter(|_| spec.has_bias), ..linear }
    };
    let [query, key, value, output] = attention_spec.linears(shape);
    let attention = Attention {
        norm: norm(&attention.norm),
        query: part(&attention.qkv, 0, &query),
        key: part(&attention.qkv, query.outputs, &key),
        value: part(&attention.qkv, query.outputs + key.outputs, &value),
        output: part(&attention.output, 0, &output),
        head_norms: attention.head_norms.as_ref().map(|both| both.each_ref().map(norm)),
        post_norm: attention.post_norm.as_ref().map(norm),
        form: attention.form,
        joined: None,
    };
    let (gate, [up, down]) = mlp_spec.linears(shape);
    let mlp = Mlp {
        norm: norm(&mlp.norm),
        gate: gate.map(|gate| part(&mlp.gate_up, 0, &gate)),
        up: part(&mlp.gate_up, gate.map_or(0, |gate| gate.outputs), &up),
        down: part(&mlp.down, 0, &down),
        post_norm: mlp.post_norm.as_ref().map(norm),
        activation: mlp.activation,
        joined: None,
    };
    DecoderLayer { attention: Some(attention), mlp: Some(mlp), is_parallel: layer.is_parallel }
}
