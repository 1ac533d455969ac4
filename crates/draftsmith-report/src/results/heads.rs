//! The schema of `heads.json`: the heads of a sweep, compared by the speed of decoding under them.

use draftsmith_theory::{Estimate, StopRuleConfig};
use serde::{Deserialize, Serialize};

use crate::names::{CostSource, DecodingName, DrafterName};
use crate::text::{number, percent};

/// The content of `heads.json`. Times are modelled, as in `replay.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRace {
    /// The drafter.
    pub drafter: DrafterName,
    /// The source of the costs.
    pub cost_source: CostSource,
    /// The hash of the head in `head/`, the fastest.
    pub head_hash: String,
    /// The head with the lowest KL relative to the fastest: its speed on the validation prompts, minus 1; null if
    /// it is the fastest.
    pub lost_by_kl: Option<Estimate>,
    /// All heads, in the order of the sweep.
    pub heads: Vec<JudgedHead>,
}

impl HeadRace {
    /// Names the fastest head and states what the head with the lowest KL loses to it: `d2-w6-r0.15 is the fastest of
    /// 20 heads. d3-w6-r0.15 has the lowest KL and is 0.8% slower (0.2 to 1.4).`
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
    /// Its settings, as in `d3-w6-r0.15`.
    pub name: String,
    /// Its number of layers.
    pub num_layers: usize,
    /// The loss weight of rejected candidates.
    pub rejection_weight: f64,
    /// The share of the target's tokens in its training input.
    pub mixing_ratio: f64,
    /// The unshifted KL of its predictions on the validation rows of its training, in nats.
    pub kl: f64,
    /// Whether it is the fastest on the validation prompts, which is in `head/`.
    pub is_chosen: bool,
    /// Whether it has the lowest KL.
    pub has_lowest_kl: bool,
    /// Speed on the validation prompts of all ways of decoding together, relative to plain decoding.
    pub speedup: f64,
    /// Speed on the validation prompts relative to the best fixed lengths, minus 1, likewise.
    pub gain: Estimate,
    /// The least of its speeds on the test prompts of a source, relative to the fastest head there (SpecDec++, §4.3).
    pub least_share: f64,
    /// Its results on the test prompts of each way of decoding and source.
    pub sets: Vec<HeadOnSet>,
}

/// A head on test prompts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadOnSet {
    /// Greedy or sampled decoding.
    pub decoding: DecodingName,
    /// The source of the prompts.
    pub dataset: String,
    /// The rule that reads the head, at the setting that was best on the validation prompts.
    pub config: StopRuleConfig,
    /// Speed relative to plain decoding.
    pub speedup: Estimate,
    /// Speed relative to the best fixed length, minus 1.
    pub gain: Estimate,
    /// Work at each threshold of the rule.
    pub curve: Vec<CurvePoint>,
}

/// Work per token at a threshold.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CurvePoint {
    /// The threshold.
    pub threshold: f64,
    /// Discarded candidates per token.
    pub discard_rate: f64,
    /// Target forwards per token.
    pub verification_rate: f64,
}
