//! What tuning promised: a rule, a cascade or a tree, and its gain over a fixed length.

use draftsmith_theory::{DrafterId, FixedLengthConfig, StopRuleConfig};

use crate::exports::tuned::TunedRule;
use crate::results::{DrafterName, Estimate};
use crate::tuning::TunedPromise;

/// A setting that was tuned, and its gain.
#[derive(Debug, Clone)]
pub(super) struct Promise {
    pub(super) drafter: DrafterName,
    pub(super) config: StopRuleConfig,
    /// Whose best fixed length the gain is over.
    pub(super) over: DrafterId,
    pub(super) best_fixed_length: usize,
    pub(super) expected_gain: Estimate,
    /// What costs of another machine promise cannot be measured here.
    pub(super) is_of_this_machine: bool,
}

impl Promise {
    /// What was promised of a cascade or a tree `over` a drafter's chains.
    pub(super) fn of_tuned(
        drafter: DrafterName,
        rule: FixedLengthConfig,
        over: DrafterId,
        promise: &TunedPromise,
    ) -> Self {
        Self {
            drafter,
            config: rule.into(),
            over,
            best_fixed_length: promise.best_fixed_length,
            expected_gain: promise.expected_gain,
            is_of_this_machine: promise.cost_source.is_machine(),
        }
    }

    /// What tuning promised of a rule; None of the target alone.
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
