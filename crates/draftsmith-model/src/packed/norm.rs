//! Norms of rows in host memory.

use super::steps;
use crate::vectors::vectorized;

/// A norm's weights. If a checkpoint stores weights minus 1, the 1 has been added.
#[derive(Debug)]
pub(crate) struct PackedNorm {
    /// The scale.
    pub(crate) gamma: Vec<f32>,
    /// The shift of a LayerNorm; `None` for an RMS norm.
    pub(crate) beta: Option<Vec<f32>>,
    pub(crate) epsilon: f32,
}

impl PackedNorm {
    /// Returns the width of a row.
    pub(crate) fn width(&self) -> usize {
        self.gamma.len()
    }

    /// Applies the norm to rows in place.
    pub(crate) fn forward(&self, x: &mut [f32]) {
        vectorized(
            #[inline(always)]
            || self.apply(x),
        );
    }

    /// Applies the norm as [`Self::forward`] does. For calls inside `vectorized`.
    #[inline(always)]
    pub(super) fn apply(&self, x: &mut [f32]) {
        match &self.beta {
            None => steps::rms_norm(x, &self.gamma, self.epsilon),
            Some(beta) => steps::layer_norm(x, &self.gamma, beta, self.epsilon),
        }
    }

    /// Applies the norm to rows and writes the result to `output`, replacing its contents.
    pub(super) fn forward_into(&self, x: &[f32], output: &mut Vec<f32>) {
        output.clear();
        output.extend_from_slice(x);
        self.forward(output);
    }
}

/// Adds `y` to `x`. If `norm` is given, it is applied to `y` first.
pub(super) fn add_normed(x: &mut [f32], y: &mut [f32], norm: Option<&PackedNorm>) {
    vectorized(
        #[inline(always)]
        || {
            if let Some(norm) = norm {
                norm.apply(y);
            }
            steps::add(x, y);
        },
    );
}
