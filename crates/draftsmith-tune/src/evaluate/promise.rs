//! The gains over the best fixed length that `tune` promised for rules.

use draftsmith_report::DrafterName;
use draftsmith_theory::{DrafterId, Estimate, StopRuleConfig};

use draftsmith_recipe::exports::tuned::TunedRule;

/// A tuned setting and its expected gain.
#[derive(Debug, Clone)]
pub(super) struct Promise {
    pub(super) drafter: DrafterName,
    pub(super) config: StopRuleConfig,
    /// The drafter whose best fixed length the gain is over.
    pub(super) over: DrafterId,
    pub(super) best_fixed_length: usize,
    pub(super) expected_gain: Estimate,
    /// Whether the costs are those of this machine: gains at other costs cannot be measured here.
    pub(super) is_of_this_machine: bool,
}

impl Promise {
    /// Returns what `tune` promised of a rule. `None` without a drafter.
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
