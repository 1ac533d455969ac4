//! The key `rules` of a cascade: what ends its chains before their lengths.

use std::path::PathBuf;

use anyhow::{Result, bail};
use draftsmith_theory::{Bounds, DrafterId, RuleSettings, StopRuleConfig, StopRuleName};
use serde::{Deserialize, Serialize};

/// What ends the chain that one of a cascade reads before its length.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChainRuleRecipe {
    /// The drafter that reads the chain; the target if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reviewer: Option<DrafterId>,
    /// The rule, by its name in results.
    pub(crate) stop_rule: StopRuleName,
    /// Its number, as in results.
    pub(crate) setting: f64,
    /// The directory of the head that it reads, of the chain's drafter; the drafter's own if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) head: Option<PathBuf>,
}

impl ChainRuleRecipe {
    /// The rule, for chains of up to `max` tokens.
    ///
    /// # Errors
    /// If it has no number, or another.
    pub(super) fn config(&self, max: usize) -> Result<StopRuleConfig> {
        let entry = self.stop_rule.entry();
        let Some(RuleSettings::Grid(grid)) = entry.map(|entry| &entry.settings) else {
            bail!("has a cascade with a rule that is fitted to rollouts: name one with a threshold")
        };
        if let Some(problem) = grid.key.values.problem(self.setting) {
            bail!("has a cascade with a rule whose `setting` {problem}");
        }
        let config = grid.at(self.setting, Bounds { min: 1, max: max.max(1) });
        config.init()?;
        Ok(config)
    }
}
