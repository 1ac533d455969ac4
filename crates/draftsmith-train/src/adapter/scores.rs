//! How well an adapter predicts its target.

use serde::{Deserialize, Serialize};

use crate::adapter::distillation::DistillationLoss;

/// The scores of one adapter on one set of tokens, against the target's raw distribution (T = 1).
/// Means over no tokens are NaN.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdapterScores {
    /// The number of tokens predicted.
    pub num_tokens: usize,
    /// Mean −Σ p log q in nats, p the target's and q the adapter's distribution.
    pub cross_entropy: f64,
    /// Mean −Σ p log p in nats: the lowest possible `cross_entropy`.
    pub target_entropy: f64,
    /// The share of tokens where both have the same most probable token.
    pub agreement: f64,
    /// Mean Σ min(p, q): the expected acceptance probability of a token drawn from q.
    pub overlap: f64,
}

impl AdapterScores {
    /// Mean KL(p ‖ q) in nats: the part of the cross-entropy that training can remove.
    pub fn kl(&self) -> f64 {
        self.cross_entropy - self.target_entropy
    }

    /// The mean of a loss.
    pub fn loss(&self, loss: DistillationLoss) -> f64 {
        match loss {
            DistillationLoss::CrossEntropy => self.cross_entropy,
            DistillationLoss::TotalVariation => 1.0 - self.overlap,
        }
    }
}
