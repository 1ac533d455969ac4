//! Rotary position embedding in the half-split layout of Hugging Face's Llama (Su et al. 2021):
//! channel `i` of the first half is rotated together with channel `i` of the second.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use crate::placed::PlacedRun;
use crate::rope::RopeTable;
use crate::shape::ModelShape;
use crate::spec::RopeConfig;

/// The cosines and sines of every position, in host memory: what a forward needs of them goes to
/// its device with it.
#[derive(Module, Debug)]
pub(crate) struct Rope {
    #[module(skip)]
    table: Arc<RopeTable>,
}

impl Rope {
    pub(crate) fn new(config: &RopeConfig, shape: &ModelShape) -> Self {
        Self { table: Arc::new(RopeTable::new(config, shape)) }
    }

    /// The tables of the rows of a forward, in `dtype` on `device`.
    pub(crate) fn window(
        &self,
        runs: &[PlacedRun],
        dtype: FloatDType,
        device: &Device,
    ) -> RopeWindow {
        let width = 2 * self.table.num_pairs();
        let (mut cos, mut signed_sin) = (Vec::new(), Vec::new());
        for run in runs {
            for position in run.start..run.start + run.num_rows {
                let (c, s) = self.table.at(position);
                cos.extend(c.iter().chain(c));
                signed_sin.extend(s.iter().map(|s| -s).chain(s.iter().copied()));
            }
        }
        let shape = [1, cos.len() / width, 1, width];
        let tensor = |values| Tensor::<4>::from_data(TensorData::new(values, shape), device);
        RopeWindow { cos: tensor(cos).cast(dtype), signed_sin: tensor(signed_sin).cast(dtype) }
    }
}

/// The cosines and sines of the positions of one forward, `[1, seq, 1, head_dim]` each, shared by
/// its layers: the two halves of the cosines alike, the first half of the sines negated, so that
/// `rotate(x) = x ∘ cos + swap_halves(x) ∘ signed_sin`.
#[derive(Debug, Clone)]
pub(crate) struct RopeWindow {
    cos: Tensor<4>,
    signed_sin: Tensor<4>,
}

impl RopeWindow {
    /// Rotates queries or keys, and multiplies them with `scale`.
    ///
    /// # Shapes
    /// - x: `[batch, seq, heads, head_dim]`
    /// - output: the same
    pub(crate) fn rotate(&self, x: Tensor<4>, scale: f32) -> Tensor<4> {
        let [batch, seq, heads, head_dim] = x.dims();
        let half = head_dim / 2;
        let first = x.clone().slice([0..batch, 0..seq, 0..heads, 0..half]);
        let second = x.clone().slice([0..batch, 0..seq, 0..heads, half..head_dim]);
        let swapped = Tensor::cat(vec![second, first], 3);
        let rotated = x * self.cos.clone() + swapped * self.signed_sin.clone();
        if scale == 1.0 { rotated } else { rotated * scale }
    }
}
