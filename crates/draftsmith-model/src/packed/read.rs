//! Packs a checkpoint's tensors while reading them, some rows at a time, so that there is no other
//! copy of the weights.
//!
//! Hugging Face stores linear weights as `[out, in]`. Rows are thus outputs, and sixteen rows make
//! a panel.

use super::{
    AttentionForm, PackedAttention, PackedLayer, PackedMlp, PackedNorm, PackedWeights, Storage,
};
use crate::error::Result;
use crate::rope::Reach;
use crate::spec::{AttentionSpec, LayerSpec, LinearSpec, MlpSpec, NamedLayer, NamedNorm};
use crate::weights::WeightReader;

/// A checkpoint to be packed.
pub(crate) struct Packing<'a> {
    pub(crate) reader: &'a mut WeightReader,
}

impl Packing<'_> {
    /// Packs linear layers with the same input side by side, as one matrix. `layer` is the prefix
    /// of their names.
    pub(crate) fn linears(&mut self, layer: &str, specs: &[LinearSpec]) -> Result<PackedWeights> {
        let name = |spec: &LinearSpec, part: &str| format!("{}.{part}", spec.name_in(layer));
        let inputs = specs[0].inputs;
        // The shapes are checked before memory is allocated, because they come from a
        // `config.json`.
        for spec in specs {
            self.reader.check_shape(&name(spec, "weight"), &[spec.rows.num_all, inputs])?;
        }
        let storage = |spec: &LinearSpec| {
            self.reader.format_of(&name(spec, "weight")).map_or(Storage::F32, Storage::of)
        };
        let parts: Vec<(Storage, usize)> =
            specs.iter().map(|spec| (storage(spec), spec.outputs)).collect();
        let mut packed = PackedWeights::beside(&parts, inputs);
        let mut bias = Vec::new();
        for spec in specs {
            let first = bias.len();
            self.reader.take_stored_rows(
                &name(spec, "weight"),
                &[spec.rows.num_all, inputs],
                spec.rows.strips(spec.outputs),
                |row, rows| packed.set_rows(first + row, rows),
            )?;
            bias.resize(first + spec.outputs, 0.0);
            if spec.has_bias {
                let own = &mut bias[first..];
                self.reader.take_rows(
                    &name(spec, "bias"),
                    &[spec.rows.num_all],
                    spec.rows.strips(spec.outputs),
                    |row, rows| own[row..][..rows.len()].copy_from_slice(rows),
                )?;
            }
        }
        packed.bias = specs.iter().any(|spec| spec.has_bias).then_some(bias);
        Ok(packed)
    }

    /// Reads a norm.
    pub(crate) fn norm(&mut self, norm: NamedNorm<'_>) -> Result<PackedNorm> {
        let (gamma, beta) = self.reader.take_norm(norm)?;
        Ok(PackedNorm { gamma, beta, epsilon: norm.spec.epsilon as f32 })
    }

    /// Reads a layer. `reaches` lists the reaches of the model's layers.
    pub(crate) fn layer(
        &mut self,
        layer: NamedLayer<'_>,
        reaches: &[Reach],
    ) -> Result<PackedLayer> {
        let LayerSpec { attention, mlp, is_parallel, reach, .. } = layer.spec;
        let reach = &reaches[*reach];
        let attention =
            attention.as_ref().map(|it| self.attention(it, layer, reach)).transpose()?;
        let mlp = mlp.as_ref().map(|it| self.mlp(it, layer)).transpose()?;
        Ok(PackedLayer { attention, mlp, is_parallel: *is_parallel })
    }

    fn attention(
        &mut self,
        spec: &AttentionSpec,
        layer: NamedLayer<'_>,
        reach: &Reach,
    ) -> Result<PackedAttention> {
        let NamedLayer { shape, name, .. } = layer;
        let [query, key, value, output] = spec.linears(shape);
        let mut norm = |part, width| self.norm(layer.norm(part, width));
        let mut head_norms = None;
        if let Some([query, key]) = spec.names.head_norms {
            head_norms = Some([norm(query, shape.head_dim)?, norm(key, shape.head_dim)?]);
        }
        let post_norm =
            spec.names.post_norm.map(|part| norm(part, shape.hidden_size)).transpose()?;
        Ok(PackedAttention {
            norm: norm(spec.names.norm, shape.hidden_size)?,
            head_norms,
            post_norm,
            qkv: self.linears(name, &[query, key, value])?,
            output: self.linears(name, &[output])?,
            form: AttentionForm::new(spec, layer),
            reach: reach.clone(),
        })
    }

    fn mlp(&mut self, spec: &MlpSpec, layer: NamedLayer<'_>) -> Result<PackedMlp> {
        let NamedLayer { shape, name, .. } = layer;
        let (gate, [up, down]) = spec.linears(shape);
        let mut norm = |part| self.norm(layer.norm(part, shape.hidden_size));
        let gate_up: Vec<LinearSpec> = gate.into_iter().chain([up]).collect();
        Ok(PackedMlp {
            norm: norm(spec.names.norm)?,
            post_norm: spec.names.post_norm.map(norm).transpose()?,
            gate_up: self.linears(name, &gate_up)?,
            is_gated: gate.is_some(),
            activation: spec.activation,
            down: self.linears(name, &[down])?,
        })
    }
}
