//! What draft forwards, target forwards and rows cost: measured on this machine, or the paper's.

mod measure;

use draftsmith_theory::{CostModel, SignalNeeds, StopRuleConfig};
use serde::{Deserialize, Serialize};

pub(crate) use measure::{Measurement, measure};

/// Costs of one drafter under one way of decoding, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Costs {
    /// Of a draft forward whose signals nobody reads, and of target forwards and rows.
    pub(crate) model: CostModel,
    /// What a draft forward costs more with an acceptance head.
    pub(crate) head_seconds: f64,
    /// What a draft forward costs more with its confidence, or the candidate's own probability.
    pub(crate) confidence_seconds: f64,
    /// What a draft forward costs more with its entropy.
    pub(crate) entropy_seconds: f64,
}

impl Costs {
    /// SpecDec++'s, fitted on an A100 to a 7B draft and a 70B target: signals and rows for nothing.
    pub(crate) const PAPER: Self = Self {
        model: CostModel { draft_seconds: 0.0234, target_seconds: 0.112, row_seconds: 0.0 },
        head_seconds: 0.0,
        confidence_seconds: 0.0,
        entropy_seconds: 0.0,
    };

    /// The cost model of rounds under a rule.
    pub(crate) fn of_rule(&self, config: &StopRuleConfig) -> CostModel {
        self.of_needs(config.needs())
    }

    /// The cost model of rounds whose rule reads these signals.
    pub(crate) fn of_needs(&self, needs: SignalNeeds) -> CostModel {
        let extras = [
            (needs.acceptance_prob, self.head_seconds),
            (needs.confidence || needs.candidate_prob, self.confidence_seconds),
            (needs.entropy, self.entropy_seconds),
        ];
        let extra: f64 = extras.iter().filter(|(is_read, _)| *is_read).map(|(_, s)| s).sum();
        CostModel { draft_seconds: self.model.draft_seconds + extra, ..self.model }
    }
}
