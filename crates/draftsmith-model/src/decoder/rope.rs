//! Rotary position embedding (Su et al. 2021) in the half-split layout of Hugging Face's Llama:
//! channel `i` of the first half is rotated together with channel `i` of the second.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use crate::placed::PlacedRows;
use crate::rope::RopeTable;

/// Cosines and sines for the positions of one forward, `[1, seq, 1, width]` each, shared by its
/// layers. Both halves of the cosines are equal; the first half of the sines is negated, so that
/// `rotate(x) = x ∘ cos + swap_halves(x) ∘ signed_sin`.
#[derive(Debug, Clone)]
pub(crate) struct RopeWindow {
    cos: Tensor<4>,
    signed_sin: Tensor<4>,
}

impl RopeWindow {
    /// Looks up the rows of `table` that a forward needs, in `dtype` on `device`.
    pub(crate) fn new(
        table: &RopeTable,
        rows: PlacedRows<'_>,
        dtype: FloatDType,
        device: &Device,
    ) -> Self {
        let (mut cos, mut signed_sin, mut num_rows) = (Vec::new(), Vec::new(), 0);
        for run in rows.runs() {
            num_rows += run.num_rows;
            for entry in run.start..run.start + run.num_rows {
                let (c, s) = table.at(rows.position(run.slot, entry));
                cos.extend(c.iter().chain(c));
                signed_sin.extend(s.iter().map(|s| -s).chain(s.iter().copied()));
            }
        }
        let shape = [1, num_rows, 1, cos.len() / num_rows.max(1)];
        let tensor = |values| Tensor::<4>::from_data(TensorData::new(values, shape), device);
        Self { cos: tensor(cos).cast(dtype), signed_sin: tensor(signed_sin).cast(dtype) }
    }

    /// Rotates queries or keys and multiplies them by `scale`.
    ///
    /// # Shapes
    /// - x: `[batch, seq, heads, head_dim]`
    /// - output: the same
    pub(crate) fn rotate(&self, x: Tensor<4>, scale: f32) -> Tensor<4> {
        let ([batch, seq, heads, head_dim], [_, _, _, width]) = (x.dims(), self.cos.dims());
        let half = width / 2;
        let cut = |channels| x.clone().slice([0..batch, 0..seq, 0..heads, channels]);
        let swapped = Tensor::cat(vec![cut(half..width), cut(0..half)], 3);
        let turning = if width == head_dim { x.clone() } else { cut(0..width) };
        let mut rotated = turning * self.cos.clone() + swapped * self.signed_sin.clone();
        if width < head_dim {
            rotated = Tensor::cat(vec![rotated, cut(width..head_dim)], 3);
        }
        if scale == 1.0 { rotated } else { rotated * scale }
    }
}
