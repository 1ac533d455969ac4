//! The section `[tune]`: on what, and how far, stop rules are replayed.

use std::path::PathBuf;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::checks::require;
use super::costs::GivenCosts;
use super::prompts::Split;

/// How rollouts are recorded and a stop rule is chosen. Decodings, limits, heads and adapters are
/// those of `[evaluate]`, whose prompts are recorded too, for the test.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TuneRecipe {
    /// Prompt files to choose on; the prompts of the built data that training held out if absent.
    #[serde(default)]
    pub(crate) prompts: Option<Vec<PathBuf>>,
    /// At most so many prompts of each file, or of the held-out ones, spread evenly; all if absent.
    #[serde(default)]
    pub(crate) num_prompts: Option<usize>,
    /// The split of the prompt files that is taken; all if absent.
    #[serde(default)]
    pub(crate) split: Option<Split>,
    /// The greatest number of candidates a round can be replayed with.
    #[serde(default = "default_max_length")]
    pub(crate) max_length: usize,
    /// Whether, and how, the head's predictions are made chances of acceptance before a rule reads
    /// them.
    #[serde(default)]
    pub(crate) calibration: CalibrationChoice,
    /// Whether prompt lookup before each drafter is tried too.
    #[serde(default = "yes")]
    pub(crate) lookup_first: bool,
    /// What forwards cost where the drafters are going to serve; measured here if absent.
    #[serde(default)]
    pub(crate) costs: Option<GivenCosts>,
}

/// Which calibration of a head's predictions is fitted to the rollouts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CalibrationChoice {
    /// That which convinces in cross-validation over the prompts, if one does.
    #[default]
    Auto,
    /// None: the head's own predictions are used.
    None,
    /// A scale and a bias of the logit.
    Platt,
    /// A monotone function through up to 32 knots.
    Isotonic,
}

fn yes() -> bool {
    true
}

fn default_max_length() -> usize {
    20
}

impl Default for TuneRecipe {
    fn default() -> Self {
        Self {
            prompts: None,
            num_prompts: None,
            split: None,
            max_length: default_max_length(),
            calibration: CalibrationChoice::default(),
            lookup_first: true,
            costs: None,
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
        require(
            self.split.is_none() || self.prompts.is_some(),
            "tune.split",
            "is there without `tune.prompts`: what training held out is no prompt file",
        )?;
        require((1..=256).contains(&self.max_length), "tune.max_length", "is outside 1 to 256")?;
        self.costs.iter().try_for_each(|costs| costs.check("tune.costs."))
    }
}
