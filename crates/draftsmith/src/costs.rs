//! What draft forwards, target forwards and rows cost: measured on this machine, or the paper's.

mod measure;
mod mixed;

use draftsmith_theory::{CostModel, RoundCosts, SignalNeeds, StopRuleConfig, StopRuleName};
use serde::{Deserialize, Serialize};

pub(crate) use measure::{Measurement, measure};

/// The round lengths that are timed; the target reads one row more than a round has candidates.
const LENGTHS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 13];

/// Costs of one drafter under one way of decoding, in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Costs {
    /// Of a draft forward whose signals nobody reads, and of verifications, where rounds are all of
    /// one length.
    pub(crate) rounds: RoundCosts,
    /// The same where rounds are as long as a rule that looks at the draft would make them, one
    /// longer than another. Engines are faster when they do the same again, and when they did it a
    /// short while ago.
    pub(crate) mixed_rounds: RoundCosts,
    /// What a draft forward costs more with an acceptance head.
    pub(crate) head_seconds: f64,
    /// What a draft forward costs more with its confidence, or the candidate's own probability.
    pub(crate) confidence_seconds: f64,
    /// What a draft forward costs more with its entropy.
    pub(crate) entropy_seconds: f64,
}

impl Costs {
    /// Those of the SpecDec++ paper, fitted on an A100 to a 7B draft and a 70B target: signals and
    /// further rows cost nothing.
    pub(crate) fn paper() -> Self {
        let model = CostModel { draft_seconds: 0.0234, target_seconds: 0.112, row_seconds: 0.0 };
        Self {
            rounds: model.into(),
            mixed_rounds: model.into(),
            head_seconds: 0.0,
            confidence_seconds: 0.0,
            entropy_seconds: 0.0,
        }
    }

    /// The costs of rounds under a rule.
    pub(crate) fn of_rule(&self, config: &StopRuleConfig) -> RoundCosts {
        if config.name() == StopRuleName::FixedLength {
            self.rounds.clone()
        } else {
            self.of_needs(config.needs())
        }
    }

    /// The costs of rounds whose rule reads these signals.
    pub(crate) fn of_needs(&self, needs: SignalNeeds) -> RoundCosts {
        let extras = [
            (needs.acceptance_prob, self.head_seconds),
            (needs.confidence || needs.candidate_prob, self.confidence_seconds),
            (needs.entropy, self.entropy_seconds),
        ];
        let extra: f64 = extras.iter().filter(|(is_read, _)| *is_read).map(|(_, s)| s).sum();
        let draft_seconds = self.mixed_rounds.draft_seconds() + extra;
        self.mixed_rounds.clone().with_draft_seconds(draft_seconds)
    }
}
