//! Norms of rows in host memory.

use super::steps;
use crate::vectors::vectorized;

/// A norm as it is computed: the 1 that some checkpoints leave out is added.
#[derive(Debug)]
pub(crate) struct PackedNorm {
    /// What rows are multiplied with.
    pub(crate) gamma: Vec<f32>,
    /// What is added to them: of a LayerNorm.
    pub(crate) beta: Option<Vec<f32>>,
    pub(crate) epsilon: f32,
}

impl PackedNorm {
    /// Numbers of a row.
    pub(crate) fn width(&self) -> usize {
        self.gamma.len()
    }

    /// Norms rows in place.
    pub(crate) fn forward(&self, x: &mut [f32]) {
        vectorized(
            #[inline(always)]
            || self.apply(x),
        );
    }

    /// The same, within what is vectorized.
    #[inline(always)]
    pub(super) fn apply(&self, x: &mut [f32]) {
        match &self.beta {
            None => steps::rms_norm(x, &self.gamma, self.epsilon),
            Some(beta) => steps::layer_norm(x, &self.gamma, beta, self.epsilon),
        }
    }

    /// Writes normed rows to `output`, in place of what it holds.
    pub(super) fn forward_into(&self, x: &[f32], output: &mut Vec<f32>) {
        output.clear();
        output.extend_from_slice(x);
        self.forward(output);
    }
}

/// Adds to rows what a part of a layer gives for them, by its norm if there is one.
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
