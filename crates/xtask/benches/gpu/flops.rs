//! The shape of a frozen model, and the arithmetic that a training step over it needs.
//!
//! Only matrix products count: `[m, k]` times `[k, n]` is 2·m·k·n operations. Attention counts the half of
//! the scores that a causal mask keeps. A backward pass counts two products for each product of the
//! forward, except gradients that are not needed. Recomputed products count once. `../peers/gpu.py` counts
//! in the same way, and `../gpu.sh` compares.

use burn::tensor::Device;
use clap::Args;
use draftsmith_model::{CausalLm, ModelConfig, ModelShape, WeightDtype};

/// A Llama's widths; by default Vicuna-7B's and Llama-2-7B's.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Shape {
    /// Width of the hidden states.
    #[arg(long, default_value_t = 4096)]
    pub(crate) hidden: usize,
    /// Decoder layers.
    #[arg(long, default_value_t = 32)]
    pub(crate) layers: usize,
    /// Heads, of queries and of keys.
    #[arg(long, default_value_t = 32)]
    pub(crate) heads: usize,
    /// Width of the MLP.
    #[arg(long, default_value_t = 11008)]
    pub(crate) intermediate: usize,
    /// Tokens of the vocabulary.
    #[arg(long, default_value_t = 32000)]
    pub(crate) vocab: usize,
}

impl Shape {
    /// A model with random weights, made on the device: each matrix in f32, then cast and freed.
    pub(crate) fn model(&self, context: usize, dtype: WeightDtype, device: &Device) -> CausalLm {
        self.config(context).init(device).to_dtype(dtype)
    }

    pub(crate) fn config(&self, context: usize) -> ModelConfig {
        ModelConfig::llama(
            ModelShape {
                vocab_size: self.vocab,
                hidden_size: self.hidden,
                num_layers: self.layers,
                num_heads: self.heads,
                num_kv_heads: self.heads,
                head_dim: self.hidden / self.heads,
                context,
                bos_token_id: None,
                eos_token_ids: vec![],
            },
            self.intermediate,
        )
    }

    /// Queries, keys, values, scores, mixture and output of one layer, for `rows` of `seq` tokens.
    fn attention(&self, rows: usize, seq: usize) -> f64 {
        let [hidden, rows, seq] = [self.hidden, rows, seq].map(|n| n as f64);
        // A token attends to (seq + 1) / 2 tokens on average, once for scores and once for values.
        rows * seq * (8.0 * hidden * hidden + 2.0 * hidden * (seq + 1.0))
    }

    /// All layers forward, without the LM head.
    fn layers_forward(&self, rows: usize, seq: usize) -> f64 {
        let mlp = 6.0 * self.hidden as f64 * self.intermediate as f64 * (rows * seq) as f64;
        self.layers as f64 * (self.attention(rows, seq) + mlp)
    }

    /// A step of an adapter: the target forward; the adapter forward and back; the LM head over
    /// target's and adapter's states, and back over the adapter's.
    pub(crate) fn adapter_step(&self, rows: usize, seq: usize, supervised: usize) -> f64 {
        let lm_head = 2.0 * (self.hidden * self.vocab) as f64 * (rows * supervised) as f64;
        self.layers_forward(rows, seq) + 3.0 * self.attention(rows, seq) + 3.0 * lm_head
    }

    /// A step of an EAGLE-3 drafter: the target forward and its LM head; `fc`, the halves of the projections that read
    /// embeddings, and the first step's keys and values, over all tokens; queries, output, MLP and LM head of each step
    /// over the supervised ones, and keys and values from the second on. Scores count once, as the target's do.
    pub(crate) fn eagle3_step(
        &self,
        rows: usize,
        seq: usize,
        supervised: usize,
        steps: usize,
    ) -> f64 {
        let [hidden, tokens, all] = [self.hidden, rows * supervised, rows * seq].map(|n| n as f64);
        let [wide, vocab, steps] = [self.intermediate, self.vocab, steps].map(|n| n as f64);
        let square = 2.0 * hidden * hidden;
        let known = all * (3.0 * square + 5.0 * square);
        let step = tokens * (2.0 * square + 6.0 * hidden * wide + 2.0 * hidden * vocab);
        let later = tokens * 2.0 * square;
        let scores = steps * tokens * 2.0 * hidden * (seq as f64 + 1.0);
        let drafter = known + steps * step + (steps - 1.0) * later + scores;
        self.layers_forward(rows, seq) + tokens * 2.0 * hidden * vocab + 3.0 * drafter
    }

    /// A step of a head: the draft forward, and the head forward and back without the gradient of its input.
    pub(crate) fn head_step(
        &self,
        rows: usize,
        seq: usize,
        labels: usize,
        num_layers: usize,
    ) -> f64 {
        let hidden = self.hidden as f64;
        let block = 2.0 * hidden * hidden;
        let output = 4.0 * hidden;
        let first = if num_layers == 0 { output } else { block };
        let head = 3.0 * (num_layers as f64 * block + output) - first;
        self.layers_forward(rows, seq) + head * (rows * labels) as f64
    }
}
