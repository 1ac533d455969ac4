//! The gains that `tune` predicted ("promised") for its rules over the best fixed length.

use draftsmith_report::DrafterName;
use draftsmith_theory::{DrafterId, Estimate, StopRuleConfig};

use draftsmith_recipe::exports::tuned::TunedRule;

/// A tuned rule with its predicted gain.
#[derive(Debug, Clone)]
pub(super) struct Promise {
    pub(super) drafter: DrafterName,
    pub(super) config: StopRuleConfig,
    /// The drafter whose best fixed length is the baseline of the gain.
    pub(super) over: DrafterId,
    pub(super) best_fixed_length: usize,
    pub(super) expected_gain: Estimate,
    /// Whether the gain was computed with costs of this machine. Otherwise it cannot be verified
    /// here.
    pub(super) is_of_this_machine: bool,
}

impl Promise {
    /// Returns the promise of a tuned rule; `None` if the rule has no drafter.
    pub(super) fn of_rule(tuned: &TunedRule) -> Option<Self> {
        Some(Self {
            drafter: tuned.drafter,
            config: tuned.config.clone(),
            over: tuned.drafter.id()?,
            best_fixed_length: tuned.best_fixed_length,
            expected_gain: tuned.expected_gain,
            is_of_this_machine: tuned.cost_source.is_machine(),
        })
    }
}
