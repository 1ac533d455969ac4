//! Cross-validation: each half of a survey's answers is scored with settings from the other half.

use anyhow::Result;
use draftsmith_report::{DecodingName, LookUps};
use draftsmith_theory::{Decoding, Estimate, Recordings, StopRuleConfig, TimedCounts};
use serde::Serialize;

use crate::settings::Recorded;
use draftsmith_tune::costs::Costs;
use draftsmith_tune::judging::{Fold, speedup};
use draftsmith_tune::sweep::{RuleChoice, best_look_ups_alone};

/// The recordings of the two halves of the answers.
pub(super) struct Halves(pub(super) [Recordings; 2]);

impl Halves {
    /// Joins the recordings of both halves.
    pub(super) fn together(&self) -> Recordings {
        let responses = self.0.iter().flat_map(|half| half.responses.clone()).collect();
        Recordings { responses, ..self.0[0].clone() }
    }

    /// Scores each half with the settings that `choose` finds on the other half.
    ///
    /// # Errors
    /// If nothing was recorded.
    pub(super) fn folds(
        &self,
        costs: &Costs,
        choose: fn(&Recordings, &Costs) -> Result<Vec<RuleChoice>>,
    ) -> Result<[Fold<'_>; 2]> {
        let [one, other] = &self.0;
        Ok([Fold::new(other, one, costs, choose)?, Fold::new(one, other, costs, choose)?])
    }

    /// Returns the recordings for server settings: chosen on the first half, evaluated on the
    /// second.
    pub(super) fn recorded(&self, decoding: Decoding, seed: u64) -> Recorded<'_> {
        let [chosen_on, judged_on] = &self.0;
        Recorded { chosen_on, judged_on, decoding: DecodingName::of(&decoding), seed }
    }

    /// Returns the time spent by the target without drafting on all responses, at each of the costs.
    pub(super) fn plain(&self, costs: &[Costs]) -> Vec<TimedCounts> {
        let at = |costs: &Costs| self.0.each_ref().map(|half| half.plain(&costs.rounds)).concat();
        costs.iter().flat_map(at).collect()
    }

    /// Estimates the speedup of prompt lookup alone by cross-validation at uncertain costs, with a
    /// setting from both halves.
    ///
    /// # Errors
    /// If nothing was recorded.
    pub(super) fn look_ups(&self, costs: &[Costs], seed: u64) -> Result<LookUps> {
        let [one, other] = &self.0;
        let firsts = [best_look_ups_alone(other, &costs[0])?, best_look_ups_alone(one, &costs[0])?];
        let halves = || self.0.iter().zip(firsts);
        let at = |costs: &Costs| {
            halves().flat_map(|(half, first)| half.replay_look_ups(first, &costs.rounds)).collect()
        };
        let spent = costs.iter().map(at).collect::<Vec<Vec<TimedCounts>>>().concat();
        let look_ups = best_look_ups_alone(&self.together(), &costs[0])?;
        Ok(LookUps { look_ups, speedup: speedup(&self.plain(costs), &spent, costs.len(), seed) })
    }
}

/// A stop rule and its expected speedup.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HalfPromise {
    /// The rule and its setting as text, such as `K = 4`.
    pub setting: String,
    /// The rule and its setting.
    pub config: StopRuleConfig,
    /// The speedup over plain decoding.
    pub speedup: Estimate,
}

impl HalfPromise {
    pub(super) fn new(choice: &RuleChoice, speedup: Estimate) -> Self {
        let setting = choice.name.label(Some(choice.config.parameter()));
        Self { setting, config: choice.config.clone(), speedup }
    }
}
