//! What kernels of our own need to know of one block of a layer, attention or MLP.

use burn::tensor::Tensor;

use crate::packed::AttentionForm;

/// The numbers of an attention over a cache.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "kernels"), expect(dead_code, reason = "only kernels read it"))]
pub(crate) struct Attending {
    pub(super) form: AttentionForm,
    /// Of the norms of heads.
    pub(super) epsilon: f32,
    /// Pieces of the cache that are attended to apart.
    pub(super) num_splits: usize,
}

/// The weights of a block, attention or MLP.
#[derive(Debug)]
#[cfg_attr(not(feature = "kernels"), expect(dead_code, reason = "only kernels read it"))]
pub(crate) struct BlockTensors {
    /// Scale and shift; `None` if the block reads normed rows.
    pub(super) norm: Option<(Tensor<1>, Option<Tensor<1>>)>,
    /// Matrices `[in, out]` with contiguous columns, and biases.
    pub(super) first: (Tensor<2>, Option<Tensor<1>>),
    pub(super) last: (Tensor<2>, Option<Tensor<1>>),
    pub(super) post_norm: Option<(Tensor<1>, Option<Tensor<1>>)>,
    /// Of both norms.
    pub(super) epsilon: f64,
}
