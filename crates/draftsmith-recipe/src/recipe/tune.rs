//! The section `[tune]`: how stop rules are tuned by replaying recorded rollouts.

use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::costs::GivenCosts;
use super::keys::require;
use super::prompts::Split;

/// The settings for recording rollouts and choosing a stop rule. `[evaluate]` gives the decodings,
/// length limits, heads and adapters. Its prompts are recorded too and serve as test prompts.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TuneRecipe {
    /// The prompt files for choosing the rule; by default, prompts that training held out of the
    /// data.
    pub prompts: Option<Vec<PathBuf>>,
    /// The maximum number of prompts per file or of held-out prompts, spread evenly; all if absent.
    pub num_prompts: Option<usize>,
    /// The split of the prompt files to use; all prompts if absent.
    pub split: Option<Split>,
    /// The maximum number of candidates in a replayed round.
    #[serde(alias = "max_length")]
    pub max_candidate_length: usize,
    /// Whether to also try prompt lookup before each drafter.
    pub lookup_first: bool,
    /// The times of forwards on the machine that will serve the drafters; measured here if absent.
    pub costs: Option<GivenCosts>,
    /// The most seconds of all races together, in which the settings that may be the fastest answer the
    /// same prompts in turn, above 0. Default: the time of 1,000 answers, at most 600.
    pub race_seconds: Option<f64>,
}

impl Default for TuneRecipe {
    fn default() -> Self {
        Self {
            prompts: None,
            num_prompts: None,
            split: None,
            max_candidate_length: 20,
            lookup_first: true,
            costs: None,
            race_seconds: None,
        }
    }
}

impl TuneRecipe {
    pub(super) fn check(&self) -> Result<()> {
        require(
            self.prompts.as_ref().is_none_or(|prompts| !prompts.is_empty()),
            "tune.prompts",
            "is empty: leave it out for the prompts that training held out",
        )?;
        require(self.num_prompts != Some(0), "tune.num_prompts", "is 0: leave it out for all")?;
        let is_time = |seconds: f64| seconds > 0.0 && seconds.is_finite();
        require(
            self.race_seconds.is_none_or(is_time),
            "tune.race_seconds",
            "is not above 0: leave it out for the default",
        )?;
        require(
            self.split.is_none() || self.prompts.is_some(),
            "tune.split",
            "is set without `tune.prompts`: only prompt files are split, not held-out prompts",
        )?;
        require(
            (1..=256).contains(&self.max_candidate_length),
            "tune.max_candidate_length",
            "is outside 1 to 256",
        )?;
        self.costs.iter().try_for_each(|costs| costs.check("tune.costs."))
    }
}
