//! Grouped-query attention with rotary positions: over a cache while decoding, causal over whole
//! sequences while training.
//!
//! Queries that share a key/value head are stacked as rows of one product, so keys and values are
//! never expanded to the number of query heads.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Tensor, TensorData, activation::softmax};

use crate::config::LlamaConfig;
use crate::kv_cache::LayerCache;
use crate::llama::rope::{Rope, RopeWindow};
use crate::llama::{LinearShape, project};

/// The four projections of one layer's attention.
#[derive(Module, Debug)]
pub(crate) struct Attention {
    pub(crate) q_proj: Linear,
    pub(crate) k_proj: Linear,
    pub(crate) v_proj: Linear,
    pub(crate) o_proj: Linear,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
}

/// What the layers of one forward share.
#[derive(Debug, Clone)]
pub(crate) struct Positions {
    pub(crate) rope: RopeWindow,
    /// Added to the scores, `[1, 1, seq, all]`: 0 where a query may look, a large negative number
    /// where it may not. `None` when every query may look everywhere.
    pub(crate) mask: Option<Tensor<4>>,
}

/// Added to scores that must not be seen: softmax turns it into exactly 0 in f32.
const MASKED: f32 = -1e30;

impl Positions {
    /// The rotary tables and mask of `seq` tokens that follow `start` others.
    pub(crate) fn new(rope: &Rope, start: usize, seq: usize) -> Self {
        let rope = rope.window(start, seq);
        let mask = (seq > 1).then(|| {
            let all = start + seq;
            let mut mask = vec![0.0; seq * all];
            for (query, row) in mask.chunks_exact_mut(all).enumerate() {
                row[start + query + 1..].fill(MASKED);
            }
            Tensor::from_data(TensorData::new(mask, [1, 1, seq, all]), &rope.device())
        });
        Self { rope, mask }
    }
}

impl Attention {
    pub(crate) fn new(
        config: &LlamaConfig,
        linear: &mut impl FnMut(LinearShape) -> Linear,
    ) -> Self {
        let hidden = config.hidden_size;
        let q = config.num_attention_heads * config.head_dim;
        let kv = config.num_key_value_heads * config.head_dim;
        let bias = config.attention_bias;
        let mut named = |name, input, output| linear(LinearShape { name, input, output, bias });
        Self {
            q_proj: named("self_attn.q_proj", hidden, q),
            k_proj: named("self_attn.k_proj", hidden, kv),
            v_proj: named("self_attn.v_proj", hidden, kv),
            o_proj: named("self_attn.o_proj", q, hidden),
            num_heads: config.num_attention_heads,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        }
    }

    /// The projections of queries, keys, values and the output.
    pub(crate) fn projections(&self) -> [&Linear; 4] {
        [&self.q_proj, &self.k_proj, &self.v_proj, &self.o_proj]
    }

    /// Attends from new tokens to all tokens read so far and themselves.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: `[batch, seq, hidden]`
    pub(crate) fn forward(
        &self,
        x: Tensor<3>,
        positions: &Positions,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<3> {
        let [batch, seq, hidden] = x.dims();
        // The scores' scale is the queries' as well, and fewer numbers.
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let q = self.heads(&self.q_proj, self.num_heads, x.clone());
        let q = positions.rope.rotate(q, scale).swap_dims(1, 2);
        let (k, v) = self.keys_and_values(x, positions);
        let (k, v) = match cache {
            Some(cache) => cache.append(k, v),
            None => (k, v),
        };
        let all = k.dims()[2];
        let groups = self.num_heads / self.num_kv_heads;
        let q = q.reshape([batch, self.num_kv_heads, groups * seq, self.head_dim]);
        let mut scores = q.matmul(k.swap_dims(2, 3));
        if let Some(mask) = &positions.mask {
            scores = (scores.reshape([batch, self.num_heads, seq, all]) + mask.clone()).reshape([
                batch,
                self.num_kv_heads,
                groups * seq,
                all,
            ]);
        }
        let mixed = softmax(scores, 3).matmul(v);
        let mixed = mixed
            .reshape([batch, self.num_heads, seq, self.head_dim])
            .swap_dims(1, 2)
            .reshape([batch, seq, self.num_heads * self.head_dim]);
        project(&self.o_proj, mixed).reshape([batch, seq, hidden])
    }

    /// Appends the keys and values of new tokens, whose attention nobody reads.
    ///
    /// # Shapes
    /// - x: `[1, seq, hidden]`
    pub(crate) fn fill(&self, x: Tensor<3>, positions: &Positions, cache: &mut LayerCache) {
        let (k, v) = self.keys_and_values(x, positions);
        cache.append(k, v);
    }

    /// `[batch, kv_heads, seq, head_dim]` each, the keys rotated.
    fn keys_and_values(&self, x: Tensor<3>, positions: &Positions) -> (Tensor<4>, Tensor<4>) {
        let k = self.heads(&self.k_proj, self.num_kv_heads, x.clone());
        let v = self.heads(&self.v_proj, self.num_kv_heads, x);
        (positions.rope.rotate(k, 1.0).swap_dims(1, 2), v.swap_dims(1, 2))
    }

    /// A projection cut into heads, `[batch, seq, heads, head_dim]`.
    fn heads(&self, linear: &Linear, num_heads: usize, x: Tensor<3>) -> Tensor<4> {
        let [batch, seq, _] = x.dims();
        project(linear, x).reshape([batch, seq, num_heads, self.head_dim])
    }
}
