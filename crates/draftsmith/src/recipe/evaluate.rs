//! The section `[evaluate]`: what is measured, on which prompts.

use std::path::PathBuf;

use anyhow::{Context, Result};
use draftsmith_theory::{Bounds, Decoding, EntropyThreshold, Sampling};
use serde::{Deserialize, Serialize};

use super::checks::require;
use super::data::{default_max_new_tokens, one};
use crate::results::DecodingName;

/// What is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EvaluateRecipe {
    /// Prompt files, one dataset each, in any of the forms that `data.prompts` may have.
    pub(crate) prompts: Vec<PathBuf>,
    /// At most so many prompts of each file, spread evenly over it; all if absent.
    #[serde(default)]
    pub(crate) num_prompts: Option<usize>,
    /// The most new tokens a turn.
    #[serde(default = "default_max_new_tokens")]
    pub(crate) max_new_tokens: usize,
    /// Leave out prompts that do not fit the models' context; an error if false.
    #[serde(default)]
    pub(crate) skip_long_prompts: bool,
    /// Which decodings are measured.
    #[serde(default = "default_decodings")]
    pub(crate) decodings: Vec<DecodingName>,
    /// Temperature of the sampled decoding.
    #[serde(default = "one")]
    pub(crate) temperature: f64,
    /// Nucleus mass of the sampled decoding.
    #[serde(default = "one")]
    pub(crate) top_p: f64,
    /// The fixed candidate lengths K.
    #[serde(default = "default_candidate_lengths")]
    pub(crate) candidate_lengths: Vec<usize>,
    /// The stop thresholds h of heads, the draft's and adapters', of calibrated predictions where a
    /// head has a calibration; none where there is no head.
    #[serde(default = "default_stop_thresholds")]
    pub(crate) stop_thresholds: Vec<f64>,
    /// The same of the rule without the paper's lag of one candidate.
    #[serde(default)]
    pub(crate) stop_thresholds_without_lag: Vec<f64>,
    /// The first candidate lengths of transformers' heuristic, with every drafter.
    #[serde(default)]
    pub(crate) initial_lengths: Vec<usize>,
    /// The confidence thresholds η of the separate draft.
    #[serde(default)]
    pub(crate) draft_confidence_thresholds: Vec<f64>,
    /// Thresholds of the candidate's own probability (transformers), with every drafter.
    #[serde(default)]
    pub(crate) candidate_prob_thresholds: Vec<f64>,
    /// Thresholds of the product of confidences, with every drafter.
    #[serde(default)]
    pub(crate) joint_confidence_thresholds: Vec<f64>,
    /// SVIP's entropy thresholds h, with every drafter.
    #[serde(default)]
    pub(crate) entropy_thresholds: Vec<f64>,
    /// SVIP's c, in front of the entropy.
    #[serde(default = "default_entropy_scale")]
    pub(crate) entropy_scale: f64,
    /// SVIP looks at every so many-th candidate.
    #[serde(default = "one_candidate")]
    pub(crate) entropy_check_interval: usize,
    /// The most candidates a round of the separate draft under any rule but a fixed length.
    #[serde(default = "default_max_candidate_length")]
    pub(crate) max_candidate_length: usize,
    /// The head's directory; the one that this recipe trains if absent.
    #[serde(default)]
    pub(crate) head: Option<PathBuf>,
    /// Directories of self-draft adapters; those that this recipe trains if absent.
    #[serde(default)]
    pub(crate) adapters: Option<Vec<PathBuf>>,
    /// The fixed candidate lengths γ of self-drafts; none where there is no adapter.
    #[serde(default = "default_self_draft_lengths")]
    pub(crate) self_draft_lengths: Vec<usize>,
    /// The confidence thresholds η of self-drafts.
    #[serde(default = "default_confidence_thresholds")]
    pub(crate) confidence_thresholds: Vec<f64>,
    /// The most candidates a round of a self-draft under any rule but a fixed length.
    #[serde(default = "default_max_self_draft_length")]
    pub(crate) max_self_draft_length: usize,
}

impl EvaluateRecipe {
    /// The decoding that a name stands for here.
    pub(crate) fn decoding(&self, name: DecodingName) -> Decoding {
        match name {
            DecodingName::Greedy => Decoding::Greedy,
            DecodingName::Sampled => Decoding::Sampled(Sampling {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: None,
            }),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        require(!self.prompts.is_empty(), "evaluate.prompts", "is empty: name a prompt file")?;
        require(self.num_prompts != Some(0), "evaluate.num_prompts", "is 0: leave it out for all")?;
        require(self.max_new_tokens > 0, "evaluate.max_new_tokens", "is 0, expected 1 or more")?;
        require(!self.decodings.is_empty(), "evaluate.decodings", "is empty: name one")?;
        let lengths = [
            ("candidate_lengths", &self.candidate_lengths),
            ("initial_lengths", &self.initial_lengths),
            ("self_draft_lengths", &self.self_draft_lengths),
        ];
        for (key, lengths) in lengths {
            require(
                lengths.iter().all(|length| (1..=256).contains(length)),
                &format!("evaluate.{key}"),
                "has a length outside 1 to 256",
            )?;
        }
        let probabilities = [
            ("stop_thresholds", &self.stop_thresholds),
            ("stop_thresholds_without_lag", &self.stop_thresholds_without_lag),
            ("confidence_thresholds", &self.confidence_thresholds),
            ("draft_confidence_thresholds", &self.draft_confidence_thresholds),
            ("candidate_prob_thresholds", &self.candidate_prob_thresholds),
            ("joint_confidence_thresholds", &self.joint_confidence_thresholds),
        ];
        for (key, thresholds) in probabilities {
            require(
                thresholds.iter().all(|threshold| (0.0..=1.0).contains(threshold)),
                &format!("evaluate.{key}"),
                "has a threshold outside 0 to 1",
            )?;
        }
        require(
            self.entropy_thresholds.iter().all(|h| *h >= 0.0 && h.is_finite()),
            "evaluate.entropy_thresholds",
            "has a threshold below 0",
        )?;
        require(
            self.entropy_scale > 0.0 && self.entropy_scale.is_finite(),
            "evaluate.entropy_scale",
            "is not a positive number",
        )?;
        require(
            self.entropy_check_interval > 0,
            "evaluate.entropy_check_interval",
            "is 0, expected 1 or more",
        )?;
        Bounds::new(1, self.max_self_draft_length)
            .context("key `evaluate.max_self_draft_length`")?;
        for name in &self.decodings {
            self.decoding(*name).validate().context("section `evaluate`")?;
        }
        Bounds::new(1, self.max_candidate_length).context("key `evaluate.max_candidate_length`")?;
        Ok(())
    }
}

fn default_decodings() -> Vec<DecodingName> {
    vec![DecodingName::Greedy, DecodingName::Sampled]
}

fn default_candidate_lengths() -> Vec<usize> {
    (1..=10).collect()
}

fn default_stop_thresholds() -> Vec<f64> {
    vec![0.1, 0.3, 0.5, 0.7, 0.9]
}

fn default_max_candidate_length() -> usize {
    20
}

fn default_self_draft_lengths() -> Vec<usize> {
    (1..=6).collect()
}

fn default_confidence_thresholds() -> Vec<f64> {
    vec![0.2, 0.4, 0.6, 0.8]
}

/// Kangaroo's γ.
fn default_max_self_draft_length() -> usize {
    6
}

/// c of SVIP's code.
fn default_entropy_scale() -> f64 {
    EntropyThreshold::ENTROPY_SCALE
}

fn one_candidate() -> usize {
    1
}
