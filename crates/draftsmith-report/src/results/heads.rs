//! The schema of `heads.json`, which compares the acceptance heads of a sweep by the speed of
//! decoding with each.

use draftsmith_theory::{CostSource, DecodingName, DrafterName, Estimate, StopRuleConfig};
use serde::{Deserialize, Serialize};

use crate::text::{number, percent};

/// The content of `heads.json`. Times are modelled, as in `replay.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRace {
    /// The drafter.
    pub drafter: DrafterName,
    /// The source of the costs.
    pub cost_source: CostSource,
    /// The hash of the fastest head, which is in the folder `head/`.
    pub head_hash: String,
    /// The speed of the head with the lowest KL on the validation prompts, relative to the fastest
    /// head, minus 1. Null if it is the fastest itself.
    pub lost_by_kl: Option<Estimate>,
    /// All heads, in the order of the sweep.
    pub heads: Vec<JudgedHead>,
}

impl HeadRace {
    /// Names the fastest head and states how much slower the head with the lowest KL is, as in
    /// `d2-w6-r0.15 is the fastest of 20 heads. d3-w6-r0.15 has the lowest KL and is 0.8% slower
    /// (0.2 to 1.4).`
    pub fn verdict(&self) -> String {
        let named = |is: fn(&JudgedHead) -> bool| {
            self.heads.iter().find(|head| is(head)).map_or("", |head| head.name.as_str())
        };
        let (fastest, lowest) = (named(|head| head.is_chosen), named(|head| head.has_lowest_kl));
        let num = self.heads.len();
        match self.lost_by_kl {
            None => format!("{fastest} is the fastest of {num} heads, and has the lowest KL."),
            Some(Estimate { value, low, high }) => format!(
                "{fastest} is the fastest of {num} heads. {lowest} has the lowest KL and is {} slower ({} to {}).",
                percent(-value, 1),
                number(-100.0 * high, 1),
                number(-100.0 * low, 1)
            ),
        }
    }
}

/// A head of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JudgedHead {
    /// The head's settings, as in `d3-w6-r0.15`.
    pub name: String,
    /// The head's number of layers.
    pub num_layers: usize,
    /// The loss weight of rejected candidates.
    pub rejection_weight: f64,
    /// The share of the target's tokens in the head's training input.
    pub mixing_ratio: f64,
    /// The unshifted KL of the head's predictions on the validation rows of its training, in nats.
    pub kl: f64,
    /// Whether this head is the fastest on the validation prompts, which is in `head/`.
    pub is_chosen: bool,
    /// Whether this head has the lowest KL.
    pub has_lowest_kl: bool,
    /// The speed on validation prompts, over all ways of decoding, relative to plain decoding.
    pub speedup: f64,
    /// The speed on the same prompts relative to the best fixed lengths, minus 1.
    pub gain: Estimate,
    /// The lowest speed of the head on the test prompts of any source, relative to the fastest of
    /// all heads and thresholds there (SpecDec++, §4.3). The head's own threshold is the same for
    /// all sources, and all run Algorithm 2.
    pub least_share: f64,
    /// The threshold with the largest such share, chosen on the test prompts themselves as in the
    /// paper; null if Algorithm 2 was not replayed.
    pub shared_threshold: Option<SharedThreshold>,
    /// The head's results on the test prompts of each way of decoding and source.
    pub sets: Vec<HeadOnSet>,
}

/// The results of a head on the test prompts of one source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadOnSet {
    /// The way of decoding: greedy or sampled.
    pub decoding: DecodingName,
    /// The source of the prompts.
    pub dataset: String,
    /// The rule that reads the head, at the setting that was best on the validation prompts.
    pub config: StopRuleConfig,
    /// The speed relative to plain decoding.
    pub speedup: Estimate,
    /// The speed relative to the fixed length that is best on these prompts, minus 1.
    pub gain: Estimate,
    /// The result of SpecDec++'s own rule; null if it was not replayed.
    pub algorithm_2: Option<Algorithm2>,
    /// The work and speed at each threshold of Algorithm 2.
    pub curve: Vec<CurvePoint>,
}

/// The result of SpecDec++'s Algorithm 2, at the threshold h that was best on the validation
/// prompts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Algorithm2 {
    /// The threshold h.
    pub threshold: f64,
    /// The speed relative to plain decoding.
    pub speedup: Estimate,
    /// The speed relative to the fixed length that is best on these prompts, minus 1 (SpecDec++,
    /// Table 1).
    pub gain: Estimate,
}

/// A threshold h of Algorithm 2 for all sources of test prompts (SpecDec++, §4.3).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedThreshold {
    /// The threshold h.
    pub threshold: f64,
    /// The lowest speed at this threshold on the prompts of any source, relative to the fastest of
    /// all heads and thresholds there.
    pub least_share: f64,
}

/// The work per token and the speed at one threshold.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CurvePoint {
    /// The threshold.
    pub threshold: f64,
    /// The number of discarded candidates per token.
    pub discard_rate: f64,
    /// The number of target forwards per token.
    pub verification_rate: f64,
    /// The speed relative to plain decoding.
    pub speedup: f64,
}
