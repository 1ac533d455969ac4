//! The sizes of a model that every caller may ask for, whatever its architecture.

/// A causal language model's sizes and special tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    /// Number of token embeddings.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// The beginning-of-sequence token, if the model has one.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a response; may be empty.
    pub eos_token_ids: Vec<u32>,
}
