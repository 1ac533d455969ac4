//! The costs of draft forwards, target forwards and additional target rows. They are measured on
//! this machine, given by the user, or taken from the SpecDec++ paper.
//!
//! Costs that the user gives apply to another machine. `costs.json` does not store them, and no
//! evaluation on this machine verifies gains predicted with them. Reports name the source of the
//! costs.

mod measure;
mod mixed;

use anyhow::Result;
use draftsmith_theory::{
    CostModel, DrafterId, RoundCosts, SignalNeeds, StopRuleConfig, StopRuleName, TheoryError,
};
use serde::{Deserialize, Serialize};

use draftsmith_recipe::GivenCosts;

pub use measure::{COSTS_TIME_LIMIT, CostProbe, LengthsUnder, MeasuredCosts};

/// The round lengths to time, in candidates. A verification reads one row more than the round has
/// candidates.
const LENGTHS: [usize; 10] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 13];

/// The costs of one drafter under one way of decoding, in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// The drafter.
    pub drafter: DrafterId,
    /// The costs of verifications, and of draft forwards without signals, in rounds of one fixed
    /// length.
    pub rounds: RoundCosts,
    /// The same costs in rounds of varying lengths, as under a rule that reads signals. Such rounds
    /// are slower, because weights and kernels stay in the caches only if they were used recently.
    pub mixed_rounds: RoundCosts,
    /// The additional cost of a draft forward with an acceptance head.
    pub head_seconds: f64,
    /// The additional cost of a draft forward that computes the confidence or the candidate's
    /// probability.
    pub confidence_seconds: f64,
    /// The additional cost of a draft forward that computes the entropy.
    pub entropy_seconds: f64,
}

impl Costs {
    /// Returns the costs of the SpecDec++ paper (§4.2), fitted on A100s to a 7B draft model and a
    /// 70B target. Signals and additional rows cost nothing.
    pub fn paper(drafter: DrafterId) -> Self {
        let draft_seconds = CostModel::PAPER.draft_seconds;
        Self::of_all(drafter, RoundCosts::paper([(drafter, draft_seconds)].into()))
    }

    /// Returns the costs that the user gives for a drafter of a recipe with `num_drafters`
    /// drafters; `None` if the user gives none.
    ///
    /// # Errors
    /// If there are several drafters and the costs do not name the drafter that they are for, or a
    /// cost is not a positive number.
    pub fn given(
        given: &GivenCosts,
        drafter: DrafterId,
        num_drafters: usize,
    ) -> Result<Option<Self>> {
        let Some(draft_ms) = given.draft_ms(drafter, num_drafters)? else { return Ok(None) };
        let target = Self::given_target(given)?;
        let priced = |rounds: RoundCosts| rounds.with_draft_seconds(drafter, draft_ms * 1e-3);
        Ok(target.map(|target| Self::of_all(drafter, priced(target.rounds))))
    }

    /// Returns the costs that the user gives for the target's forwards, without the cost of a draft
    /// forward; `None` if the user gives none.
    ///
    /// # Errors
    /// If a cost is not a positive number.
    pub fn given_target(given: &GivenCosts) -> Result<Option<Self>> {
        let Some(rows_ms) = given.rows_ms() else { return Ok(None) };
        let rows = rows_ms.into_iter().map(|ms| ms * 1e-3).collect();
        let rounds = RoundCosts::new([].into(), rows)?;
        Ok(Some(Self::of_all(DrafterId::DRAFT, rounds)))
    }

    /// Creates the costs of the target's forwards from `points`, pairs of a number of rows and
    /// measured seconds. The cost of a draft forward is left out.
    ///
    /// # Errors
    /// If there are no points.
    pub fn of_target(points: Vec<(usize, f64)>) -> Result<Self, TheoryError> {
        Ok(Self::of_all(DrafterId::DRAFT, RoundCosts::from_points([].into(), points)?))
    }

    /// Creates costs that are the same for fixed and varying round lengths, with free signals.
    fn of_all(drafter: DrafterId, rounds: RoundCosts) -> Self {
        Self {
            drafter,
            mixed_rounds: rounds.clone(),
            rounds,
            head_seconds: 0.0,
            confidence_seconds: 0.0,
            entropy_seconds: 0.0,
        }
    }

    /// Returns the same costs for another drafter.
    ///
    /// # Errors
    /// If the cost of a draft forward is unknown.
    pub fn of_drafter(self, drafter: DrafterId) -> Result<Self, TheoryError> {
        let renamed = |rounds: RoundCosts| {
            let seconds = rounds.draft_seconds(self.drafter)?;
            Ok(rounds.with_draft_seconds(drafter, seconds))
        };
        let (rounds, mixed_rounds) = (renamed(self.rounds)?, renamed(self.mixed_rounds)?);
        Ok(Self { drafter, rounds, mixed_rounds, ..self })
    }

    /// Returns costs with the times of both kinds of rounds changed as by [`RoundCosts::map`].
    fn map(self, draft: impl Fn(f64) -> f64, verify: impl Fn(usize, f64) -> f64) -> Self {
        let rounds = self.rounds.map(&draft, &verify);
        Self { rounds, mixed_rounds: self.mixed_rounds.map(&draft, &verify), ..self }
    }

    /// Returns the costs of rounds under a rule, including the signals that it reads.
    pub fn of_rule(&self, config: &StopRuleConfig) -> RoundCosts {
        if config.name() == StopRuleName::FixedLength {
            self.rounds.clone()
        } else {
            self.of_needs(config.needs())
        }
    }

    /// Returns the costs of rounds of varying lengths under a rule that reads the signals in
    /// `needs`.
    pub fn of_needs(&self, needs: SignalNeeds) -> RoundCosts {
        let extras = [
            (needs.acceptance_prob, self.head_seconds),
            (
                needs.confidence || needs.confidence_of_ten || needs.candidate_prob,
                self.confidence_seconds,
            ),
            (needs.entropy, self.entropy_seconds),
        ];
        let extra: f64 = extras.iter().filter(|(is_read, _)| *is_read).map(|(_, s)| s).sum();
        let rounds = self.mixed_rounds.clone();
        // An unknown cost of a draft forward stays unknown, and is an error where it is used.
        match rounds.draft_seconds(self.drafter) {
            Ok(alone) => rounds.with_draft_seconds(self.drafter, alone + extra),
            Err(_) => rounds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_kept_by_the_names_of_drafters() {
        let exit = DrafterId::named("exit2");
        let costs = Costs::paper(exit);
        let mut json = serde_json::to_value(&costs).expect("serializes");
        assert_eq!(json["drafter"], "exit2");
        assert_eq!(json["rounds"]["draft_seconds"]["exit2"], 0.0234);
        assert_eq!(serde_json::from_value::<Costs>(json.clone()).expect("reads back"), costs);
        // A price of another drafter is refused when it is needed.
        json["drafter"] = "draft".into();
        let other: Costs = serde_json::from_value(json).expect("reads");
        let refused = other.rounds.line(other.drafter).expect_err("no price").to_string();
        assert!(refused.contains("`draft`"), "{refused}");
    }

    #[test]
    fn given_costs_are_in_milliseconds_for_the_drafters_that_they_name() {
        let exit = DrafterId::named("exit2");
        let given = |text: &str| toml::from_str::<GivenCosts>(text).expect("reads");
        let free_rows = given("draft_ms = 31.25\ntarget_ms = 125");
        let costs = Costs::given(&free_rows, exit, 1).expect("one").expect("given");
        assert_eq!(costs.rounds.draft_seconds(exit).expect("a price"), 0.03125);
        assert_eq!([1, 2, 14].map(|rows| costs.rounds.verify_seconds(rows)), [0.125; 3]);
        assert_eq!(
            costs.of_needs(SignalNeeds { entropy: true, ..SignalNeeds::default() }),
            costs.rounds
        );
        let rows = given("draft_ms = { exit2 = 1 }\nrows_ms = [8, 9, 12]");
        let costs = Costs::given(&rows, exit, 2).expect("named").expect("given");
        for (rows, ms) in [(1, 8.0), (2, 9.0), (3, 12.0), (4, 14.0)] {
            assert!((costs.rounds.verify_seconds(rows) * 1e3 - ms).abs() < 1e-12);
        }
        assert_eq!(Costs::given(&rows, DrafterId::DRAFT, 2).expect("not named"), None);
    }

    #[test]
    fn only_rules_that_read_a_signal_pay_for_it() {
        let drafter = DrafterId::DRAFT;
        let costs = Costs { entropy_seconds: 0.5, head_seconds: 0.25, ..Costs::paper(drafter) };
        let price = |needs| costs.of_needs(needs).draft_seconds(drafter).expect("a price");
        let none = SignalNeeds::default();
        assert_eq!(price(none), 0.0234);
        assert_eq!(price(SignalNeeds { entropy: true, ..none }), 0.0234 + 0.5);
        let both = SignalNeeds { entropy: true, acceptance_prob: true, ..none };
        assert_eq!(price(both), 0.0234 + 0.75);
    }
}
