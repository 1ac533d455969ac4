//! The data that our own kernels need about one block of a layer: its attention or its MLP.

use burn::tensor::Tensor;

use crate::packed::AttentionForm;

/// The parameters of an attention over a cache.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "kernels"), expect(dead_code, reason = "only kernels read it"))]
pub(crate) struct Attending {
    pub(super) form: AttentionForm,
    /// The epsilon of the norms of heads.
    pub(super) epsilon: f32,
    /// The number of pieces of the cache that are attended to separately.
    pub(super) num_splits: usize,
}

/// The weights of a block, attention or MLP.
#[derive(Debug)]
#[cfg_attr(not(feature = "kernels"), expect(dead_code, reason = "only kernels read it"))]
pub(crate) struct BlockTensors {
    /// The scale and the shift of the norm before the block; `None` if the block reads rows after a
    /// norm.
    pub(super) norm: Option<(Tensor<1>, Option<Tensor<1>>)>,
    /// The weights of the first product, a matrix `[in, out]` with contiguous columns, and its
    /// bias. `last` has the same form.
    pub(super) first: (Tensor<2>, Option<Tensor<1>>),
    pub(super) last: (Tensor<2>, Option<Tensor<1>>),
    pub(super) post_norm: Option<(Tensor<1>, Option<Tensor<1>>)>,
    /// The epsilon of both norms.
    pub(super) epsilon: f64,
}
