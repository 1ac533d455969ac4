//! Rotary position embedding in the half-split layout of Hugging Face's Llama (Su et al. 2021):
//! channel `i` of the first half is rotated together with channel `i` of the second.

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use crate::placed::PlacedRun;
use crate::shape::ModelShape;
use crate::spec::{RopeConfig, RopeScaling};

/// The cosines and sines of every position.
#[derive(Module, Debug)]
pub(crate) struct Rope {
    /// `[max_positions, head_dim]`, the two halves alike.
    cos: Tensor<2>,
    /// `[max_positions, head_dim]`, the first half negated, so that
    /// `rotate(x) = x ∘ cos + swap_halves(x) ∘ sin`.
    signed_sin: Tensor<2>,
}

impl Rope {
    /// Tabulates all positions of a model's context.
    pub(crate) fn new(config: &RopeConfig, shape: &ModelShape, device: &Device) -> Self {
        let half = shape.head_dim / 2;
        let (half_cos, half_sin) = tabulated(config, shape);
        let mut cos: Vec<f32> = Vec::with_capacity(2 * half_cos.len());
        let mut signed_sin: Vec<f32> = Vec::with_capacity(2 * half_sin.len());
        for (c, s) in half_cos.chunks_exact(half).zip(half_sin.chunks_exact(half)) {
            cos.extend(c.iter().chain(c));
            signed_sin.extend(s.iter().map(|s| -s).chain(s.iter().copied()));
        }
        let shape = [shape.context, shape.head_dim];
        Self {
            cos: Tensor::from_data(TensorData::new(cos, shape), device),
            signed_sin: Tensor::from_data(TensorData::new(signed_sin, shape), device),
        }
    }

    /// The tables of the rows of a forward, in `dtype`.
    pub(crate) fn of_runs(&self, runs: &[PlacedRun], dtype: FloatDType) -> RopeWindow {
        if let [only] = runs {
            return self.window(only.start, only.num_rows, dtype);
        }
        let windows = runs.iter().map(|run| self.window(run.start, run.num_rows, dtype));
        let (cos, signed_sin) = windows.map(|window| (window.cos, window.signed_sin)).unzip();
        RopeWindow { cos: Tensor::cat(cos, 1), signed_sin: Tensor::cat(signed_sin, 1) }
    }

    /// The tables of `len` positions from `start`, in `dtype`.
    pub(crate) fn window(&self, start: usize, len: usize, dtype: FloatDType) -> RopeWindow {
        let [_, head_dim] = self.cos.dims();
        let cut = |table: &Tensor<2>| {
            let rows = table.clone().slice([start..start + len, 0..head_dim]);
            rows.reshape([1, len, 1, head_dim]).cast(dtype)
        };
        RopeWindow { cos: cut(&self.cos), signed_sin: cut(&self.signed_sin) }
    }
}

/// The cosines and signed sines of the positions of one forward, `[1, seq, 1, head_dim]` each,
/// shared by its layers.
#[derive(Debug, Clone)]
pub(crate) struct RopeWindow {
    cos: Tensor<4>,
    signed_sin: Tensor<4>,
}

impl RopeWindow {
    /// Where the tables are.
    pub(crate) fn device(&self) -> Device {
        self.cos.device()
    }

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

/// The cosines and sines of every position, `[positions, head_dim / 2]` each.
pub(super) fn tabulated(config: &RopeConfig, shape: &ModelShape) -> (Vec<f32>, Vec<f32>) {
    let frequencies = inverse_frequencies(config, shape.head_dim);
    let len = shape.context * frequencies.len();
    let (mut cos, mut sin) = (Vec::with_capacity(len), Vec::with_capacity(len));
    for position in 0..shape.context {
        for frequency in &frequencies {
            // transformers multiplies in f32; the same product here keeps long contexts equal.
            let angle = f64::from(position as f32 * *frequency as f32);
            cos.push(angle.cos() as f32);
            sin.push(angle.sin() as f32);
        }
    }
    (cos, sin)
}

/// Radians a position, one for each pair of channels.
fn inverse_frequencies(config: &RopeConfig, head_dim: usize) -> Vec<f64> {
    let base = (0..head_dim / 2)
        .map(|i| config.theta.powf(-2.0 * i as f64 / head_dim as f64))
        .collect::<Vec<f64>>();
    match config.scaling {
        RopeScaling::None => base,
        RopeScaling::Linear { factor } => base.into_iter().map(|f| f / factor).collect(),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: original,
        } => base
            .into_iter()
            .map(|frequency| {
                let wavelength = 2.0 * std::f64::consts::PI / frequency;
                if wavelength > original / low_freq_factor {
                    return frequency / factor;
                }
                if wavelength < original / high_freq_factor {
                    return frequency;
                }
                let smooth = (original / wavelength - low_freq_factor)
                    / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            })
            .collect(),
    }
}
