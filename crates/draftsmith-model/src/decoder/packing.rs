//! Between a decoder's tensors and packed weights.
//!
//! Adapters are packed when they were read. What is packed becomes tensors again for the few who
//! need it so: what is trained and begins with a frozen model's layer, losses that take the LM head
//! as a matrix, and files.

use std::convert::Infallible;
use std::ops::Range;

use burn::module::Param;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Device, TensorData};

use super::attention::Attention;
use super::mlp::Mlp;
use super::source::{WeightSource, linear};
use crate::packed::{PackedAttention, PackedLayer, PackedMlp, PackedNorm, PackedWeights};
use crate::shape::ModelShape;
use crate::spec::{LayerSpec, LinearSpec};

impl Attention {
    pub(crate) fn packed(&self) -> PackedAttention {
        let (num_heads, num_kv_heads) = self.num_heads();
        PackedAttention::new(self.norm(), self.projections(), num_heads, num_kv_heads)
    }
}

impl Mlp {
    pub(crate) fn packed(&self) -> PackedMlp {
        let (gate, up_and_down) = self.projections();
        PackedMlp::new(self.norm(), gate, up_and_down)
    }
}

/// The weights of some outputs, and their biases, as tensors on `device`.
pub(crate) fn unpacked_linear(
    packed: &PackedWeights,
    outputs: Range<usize>,
    device: &Device,
) -> Linear {
    let (num_inputs, num_outputs) = (packed.num_inputs(), outputs.len());
    let mut weight = vec![0.0; num_inputs * num_outputs];
    let mut column = Vec::new();
    for (place, output) in outputs.clone().enumerate() {
        column.clear();
        packed.read_output(output, &mut column);
        for (input, value) in column.iter().enumerate() {
            weight[input * num_outputs + place] = *value;
        }
    }
    let bias = packed.bias().map(|bias| bias[outputs].to_vec());
    linear(weight, [num_inputs, num_outputs], bias, device)
}

/// A norm as a tensor on `device`.
pub(crate) fn unpacked_norm(packed: &PackedNorm, epsilon: f64, device: &Device) -> RmsNorm {
    let gamma = TensorData::new(packed.gamma.clone(), [packed.gamma.len()]);
    RmsNorm { gamma: Param::from_data(gamma, device), epsilon }
}

/// A packed layer, by the names of its spec.
pub(crate) struct Unpacked<'a> {
    layer: &'a PackedLayer,
    /// By name, where each matrix stands.
    linears: Vec<(&'static str, &'a PackedWeights, Range<usize>)>,
    /// What the attention's norm is called.
    attention_norm: &'static str,
    device: &'a Device,
}

impl<'a> Unpacked<'a> {
    /// # Panics
    /// If the spec leaves a part out, as no model's does.
    pub(crate) fn new(
        layer: &'a PackedLayer,
        spec: &LayerSpec,
        shape: &ModelShape,
        device: &'a Device,
    ) -> Self {
        let both = spec.attention.as_ref().zip(spec.mlp.as_ref());
        let (attention, mlp) = both.expect("a model's layers have both parts");
        let mut linears = Vec::new();
        let mut add = |weights: &'a PackedWeights, specs: &[LinearSpec]| {
            let mut start = 0;
            for spec in specs {
                linears.push((spec.name, weights, start..start + spec.outputs));
                start += spec.outputs;
            }
        };
        let [query, key, value, output] = attention.linears(shape);
        add(&layer.attention.qkv, &[query, key, value]);
        add(&layer.attention.output, &[output]);
        let (gate, [up, down]) = mlp.linears(shape);
        add(&layer.mlp.gate_up, &gate.into_iter().chain([up]).collect::<Vec<_>>());
        add(&layer.mlp.down, &[down]);
        Self { layer, linears, attention_norm: attention.names.norm, device }
    }
}

impl WeightSource for Unpacked<'_> {
    type Error = Infallible;

    fn linear(&mut self, _: &str, spec: &LinearSpec) -> Result<Linear, Infallible> {
        let found = self.linears.iter().find(|(name, ..)| *name == spec.name);
        let (_, weights, outputs) = found.expect("a layer has the matrices of its spec");
        let linear = unpacked_linear(weights, outputs.clone(), self.device);
        // Matrices side by side share a bias, of zeros for those that have none.
        Ok(Linear { bias: linear.bias.filter(|_| spec.has_bias), ..linear })
    }

    fn norm(&mut self, name: &str, _: usize, epsilon: f64) -> Result<RmsNorm, Infallible> {
        let PackedLayer { attention, mlp } = self.layer;
        let is_attention = name.ends_with(self.attention_norm);
        let norm = if is_attention { &attention.norm } else { &mlp.norm };
        Ok(unpacked_norm(norm, epsilon, self.device))
    }
}
