//! Evaluation of stop rules by replay. Settings that were chosen on some recordings are evaluated
//! on other recordings, and compared with the best fixed length and plain decoding.
//!
//! A fold is a pair of such sets of recordings. `replay` has one fold, of validation and test
//! prompts. `survey` has few prompts and cross-validates with two folds: each half is evaluated
//! with the settings chosen on the other half.
//!
//! Uncertain costs are a list: the measured ones, then some within their uncertainty
//! ([`MeasuredCosts::drawn`](crate::costs::MeasuredCosts::drawn)). Settings are chosen at the first.
//! Lists of spent time hold all responses at the first costs, then all at the second, and so on. Every
//! resample of an interval takes other costs, so that intervals cover both prompts and costs.

use std::borrow::Cow;
use std::cell::Cell;

use anyhow::{Context, Result};
use draftsmith_report::{OracleResult, ReplayRow, shown_interval};
use draftsmith_theory::{Counts, Estimate, Recordings, TimedCounts, seconds_per_token};

use crate::costs::Costs;
use crate::sweep::{RuleChoice, best_fixed, best_of, cheapest, per_token};

/// The settings that were chosen on some recordings, with other recordings to evaluate them on.
pub struct Fold<'a> {
    /// The best setting of each rule on the first recordings.
    pub choices: Vec<RuleChoice>,
    judged_on: Cow<'a, Recordings>,
    /// The same fold with a perfect acceptance head; `None` without a head, and for targets on
    /// servers, where not every candidate's acceptance probability is known.
    perfect: Option<Box<Fold<'a>>>,
}

impl<'a> Fold<'a> {
    /// Chooses the best setting of each rule on `chosen_on` by calling `choose`. The settings will
    /// be evaluated on `judged_on`.
    ///
    /// # Errors
    /// If nothing was recorded.
    pub fn new(
        chosen_on: &Recordings,
        judged_on: &'a Recordings,
        costs: &Costs,
        choose: fn(&Recordings, &Costs) -> Result<Vec<RuleChoice>>,
    ) -> Result<Self> {
        let has_all = chosen_on.is_judged() && judged_on.is_judged();
        let perfect = (chosen_on.head.is_some() && has_all).then(|| {
            let choices = best_of(&chosen_on.with_perfect_head(), costs, |it| it.acceptance_prob)?;
            let judged_on = Cow::Owned(judged_on.with_perfect_head());
            anyhow::Ok(Box::new(Fold { choices, judged_on, perfect: None }))
        });
        let (choices, judged_on) = (choose(chosen_on, costs)?, Cow::Borrowed(judged_on));
        Ok(Self { choices, judged_on, perfect: perfect.transpose()? })
    }

    /// Returns the same choices with other recordings to evaluate them on.
    pub fn on<'b>(&self, judged_on: &'b Recordings) -> Fold<'b> {
        let perfect = self.perfect.as_ref().map(|perfect| {
            let choices = perfect.choices.clone();
            let judged_on = Cow::Owned(judged_on.with_perfect_head());
            Box::new(Fold { choices, judged_on, perfect: None })
        });
        Fold { choices: self.choices.clone(), judged_on: Cow::Borrowed(judged_on), perfect }
    }

    /// Finds the cheapest choice without prompt lookup for which `belongs` is true.
    ///
    /// # Errors
    /// If `belongs` is false for every rule.
    pub fn best(&self, belongs: fn(&RuleChoice) -> bool) -> Result<&RuleChoice> {
        cheapest(self.choices.iter().filter(|choice| is_alone(choice) && belongs(choice)))
    }

    /// Replays a rule on the evaluation recordings, and returns its time for each response, at each of
    /// the costs.
    ///
    /// # Errors
    /// If the rule cannot be replayed.
    pub fn spent(&self, choice: &RuleChoice, costs: &[Costs]) -> Result<Vec<Vec<TimedCounts>>> {
        costs.iter().map(|costs| choice.replay(&self.judged_on, costs)).collect()
    }
}

/// Joins the times of several folds at each of the costs.
pub fn joined(folds: &[impl AsRef<[Vec<TimedCounts>]>]) -> Vec<TimedCounts> {
    let num_costs = folds.first().map_or(0, |fold| fold.as_ref().len());
    let at = |nth: usize| folds.iter().flat_map(move |fold| fold.as_ref()[nth].iter().cloned());
    (0..num_costs).flat_map(at).collect()
}

/// The joint evaluation of several folds. Its estimates are over the responses of all folds, in the
/// order of the folds.
pub struct Judging<'a> {
    /// The folds.
    pub folds: Vec<Fold<'a>>,
    costs: &'a [Costs],
    seed: u64,
    /// The time spent with each fold's best fixed length.
    pub fixed: Vec<TimedCounts>,
    /// The time spent by plain decoding.
    pub plain: Vec<TimedCounts>,
}

impl<'a> Judging<'a> {
    /// Prepares the evaluation: replays plain decoding and the best fixed lengths.
    ///
    /// # Errors
    /// If the cost of a draft forward is unknown.
    pub fn new(folds: Vec<Fold<'a>>, costs: &'a [Costs], seed: u64) -> Result<Self> {
        let at = |costs: &'a Costs| {
            folds.iter().flat_map(|fold| fold.judged_on.plain(&costs.rounds)).collect::<Vec<_>>()
        };
        let plain = costs.iter().flat_map(at).collect();
        let mut judging = Self { folds, costs, seed, fixed: Vec::new(), plain };
        judging.fixed = judging.spent(&judging.folds, |it| best_fixed(&it.choices))?;
        Ok(judging)
    }

    /// Computes the gains of each rule in `shown`. Each fold uses its own setting of the rule, and
    /// the rows name the settings in `shown`. Leaves out rules that could not be fitted in some
    /// fold.
    ///
    /// # Errors
    /// If a rule cannot be replayed.
    pub fn rows(&self, shown: &[RuleChoice]) -> Result<Vec<ReplayRow>> {
        let is_in_all = |choice: &&RuleChoice| {
            self.folds.iter().all(|fold| like(&fold.choices, choice).is_some())
        };
        shown.iter().filter(is_in_all).map(|choice| self.row(choice)).collect()
    }

    fn row(&self, shown: &RuleChoice) -> Result<ReplayRow> {
        fn same_rule<'c>(fold: &'c Fold<'_>, shown: &RuleChoice) -> Result<&'c RuleChoice> {
            let found = like(&fold.choices, shown);
            found.with_context(|| format!("the rule `{:?}` was tried", shown.name))
        }
        let own = self.spent(&self.folds, |fold| same_rule(fold, shown))?;
        let gain = |some: &[usize]| over(&self.fixed, &own, some);
        let ceiling = match is_alone(shown) && shown.config.needs().acceptance_prob {
            true => {
                let perfect: Option<Vec<&Fold<'_>>> =
                    self.folds.iter().map(|fold| fold.perfect.as_deref()).collect();
                perfect.map(|folds| self.spent(folds, |fold| same_rule(fold, shown))).transpose()?
            }
            false => None,
        };
        let most = ceiling.as_ref().map(|spent| |some: &[usize]| over(&self.fixed, spent, some));
        let num_responses = self.plain.len() / self.costs.len();
        let counts: Counts = own[..num_responses].iter().map(|spent| spent.counts).sum();
        let ceiling = most.map(|most| self.estimate(&most));
        // A share of a gain that may be zero is meaningless.
        let is_gain = ceiling.is_some_and(|ceiling| ceiling.low > 0.0);
        Ok(ReplayRow {
            lookup_first: shown.lookup_first,
            stop_rule: shown.name,
            config: shown.config.clone(),
            speedup: self.speedup(&own),
            gain: self.estimate(&gain),
            verification_rate: counts.verification_rate(),
            discard_rate: counts.discard_rate(),
            ceiling,
            share_of_ceiling: most
                .filter(|_| is_gain)
                .map(|most| self.estimate(&|some| gain(some) / most(some))),
        })
    }

    /// Replays the oracle (SpecDec++, Lemma 2.1). Where rounds of varying lengths cost so much that
    /// the best fixed length is faster, it uses that.
    ///
    /// # Errors
    /// If the cost of a draft forward is unknown.
    pub fn oracle(&self) -> Result<OracleResult> {
        let mut oracle = Vec::new();
        for (nth, costs) in self.costs.iter().enumerate() {
            let mut spent = Vec::new();
            for fold in &self.folds {
                spent.extend(fold.judged_on.replay_oracle(&costs.mixed_rounds)?);
            }
            let fixed = &self.fixed[nth * spent.len()..][..spent.len()];
            let is_faster = seconds_per_token(fixed) < seconds_per_token(&spent);
            oracle.extend_from_slice(if is_faster { fixed } else { &spent });
        }
        let verified = |some: &[usize]| {
            let counts: Counts = some.iter().map(|at| oracle[*at].counts).sum();
            counts.verification_rate()
        };
        Ok(OracleResult {
            speedup: self.speedup(&oracle),
            gain: self.estimate(&|some| over(&self.fixed, &oracle, some)),
            verification_rate: self.estimate(&verified),
        })
    }

    /// Returns the time spent with each fold's cheapest choice for which `belongs` is true.
    ///
    /// # Errors
    /// If `belongs` is false for every rule of a fold.
    pub fn best(&self, belongs: fn(&RuleChoice) -> bool) -> Result<Vec<TimedCounts>> {
        self.spent(&self.folds, |fold| fold.best(belongs))
    }

    /// Estimates the speed relative to plain decoding, with its 95 % interval.
    pub fn speedup(&self, own: &[TimedCounts]) -> Estimate {
        speedup(&self.plain, own, self.costs.len(), self.seed)
    }

    /// Computes a statistic over the time spent, with its 95 % interval. The statistic receives
    /// indices of lists such as `plain`. Indices that differ by a multiple of the number of responses
    /// are of one response.
    pub fn estimate(&self, statistic: &dyn Fn(&[usize]) -> f64) -> Estimate {
        estimate(self.plain.len(), self.costs.len(), self.seed, statistic)
    }

    /// Replays the rule that `pick` selects in each fold, and returns the time spent.
    fn spent<'f>(
        &self,
        folds: impl IntoIterator<Item = &'f Fold<'a>>,
        pick: impl for<'c> Fn(&'c Fold<'a>) -> Result<&'c RuleChoice>,
    ) -> Result<Vec<TimedCounts>>
    where
        'a: 'f,
    {
        let spent = folds.into_iter().map(|fold| fold.spent(pick(fold)?, self.costs));
        Ok(joined(&spent.collect::<Result<Vec<_>>>()?))
    }
}

/// Returns whether the rule has no prompt lookup in front of the drafter.
fn is_alone(choice: &RuleChoice) -> bool {
    choice.lookup_first.is_none()
}

/// Finds the choice that corresponds to `shown`: the same rule, or the best rule with prompt
/// lookup; `None` if the rule could not be fitted.
fn like<'c>(choices: &'c [RuleChoice], shown: &RuleChoice) -> Option<&'c RuleChoice> {
    choices.iter().find(|choice| match shown.lookup_first {
        None => is_alone(choice) && choice.name == shown.name,
        Some(_) => !is_alone(choice),
    })
}

/// Estimates the speed relative to plain decoding, with its 95 % interval. The lists hold all
/// responses at each of `num_costs` costs.
pub fn speedup(
    plain: &[TimedCounts],
    own: &[TimedCounts],
    num_costs: usize,
    seed: u64,
) -> Estimate {
    estimate(plain.len(), num_costs, seed, &|some| 1.0 + over(plain, own, some))
}

/// Estimates the speed of `fast` relative to `slow`, minus 1, with its 95 % interval. The lists hold all
/// responses at each of `num_costs` costs.
pub fn gain(slow: &[TimedCounts], fast: &[TimedCounts], num_costs: usize, seed: u64) -> Estimate {
    estimate(slow.len(), num_costs, seed, &|some| over(slow, fast, some))
}

/// Replays at each of the costs, and returns all times, those at the first costs first.
///
/// # Errors
/// If `replay` fails.
pub fn at_each(
    costs: &[Costs],
    replay: impl Fn(&Costs) -> Result<Vec<TimedCounts>>,
) -> Result<Vec<TimedCounts>> {
    Ok(costs.iter().map(replay).collect::<Result<Vec<_>>>()?.concat())
}

/// Computes a statistic over lists of `len` entries, all responses at each of `num_costs` costs, with
/// its 95 % interval.
fn estimate(
    len: usize,
    num_costs: usize,
    seed: u64,
    statistic: &dyn Fn(&[usize]) -> f64,
) -> Estimate {
    let num_responses = len / num_costs;
    // The value is computed first, at the first costs.
    let nth = Cell::new(0);
    shown_interval(num_responses, seed, |some| {
        let from = nth.replace((nth.get() + 1) % num_costs) * num_responses;
        statistic(&some.iter().map(|index| from + index).collect::<Vec<usize>>())
    })
}

/// Computes the speed of `fast` relative to `slow`, minus 1, over the responses with the indices
/// `some`.
pub fn over(slow: &[TimedCounts], fast: &[TimedCounts], some: &[usize]) -> f64 {
    per_token(slow, some) / per_token(fast, some) - 1.0
}

#[cfg(test)]
pub(crate) mod tests {
    use draftsmith_theory::{
        DrafterId, FixedLengthConfig, RecordedCandidate, RecordedPlace, Recording, SeededDraws,
        StopRuleConfig, StopRuleName,
    };

    use super::*;
    use crate::sweep::best_unread;

    /// Simulates recordings whose candidates are accepted with probability `accepted`.
    pub(crate) fn recordings(
        [num_responses, num_tokens]: [usize; 2],
        accepted: f64,
        stream: [&str; 2],
    ) -> Recordings {
        let mut draws = SeededDraws::new(1, &stream);
        let candidate = RecordedCandidate {
            token_id: 7,
            candidate_prob: 0.5,
            confidence: 0.5,
            confidence_of_ten: 0.5,
            entropy: 1.0,
            predicted_acceptance_prob: None,
            draft_log_prob: -1.0,
            target_log_prob: -1.0,
        };
        let mut place = || RecordedPlace {
            candidate: candidate.clone(),
            rollout: (draws.uniform() >= accepted)
                .then(|| vec![RecordedCandidate { token_id: 8, ..candidate.clone() }; 8]),
        };
        let response =
            |_| Recording::new(Vec::new(), (0..num_tokens).map(|_| place()).collect(), num_tokens);
        Recordings {
            drafter: DrafterId::DRAFT,
            max_length: 8,
            eos_token_ids: vec![0],
            head: None,
            responses: (0..num_responses).map(response).collect(),
            answers: None,
        }
    }

    #[test]
    fn each_half_is_judged_with_the_settings_of_the_other() {
        let of = |accepted, name| recordings([20, 40], accepted, ["judging", name]);
        let (often, seldom) = (of(0.95, "often"), of(0.3, "seldom"));
        let costs = Costs::paper(DrafterId::DRAFT);
        let fold = |chosen_on, judged_on| Fold::new(chosen_on, judged_on, &costs, best_unread);
        let folds = [fold(&often, &seldom).expect("rules"), fold(&seldom, &often).expect("rules")];
        let lengths = folds
            .each_ref()
            .map(|fold| best_fixed(&fold.choices).expect("tried").config.parameter());
        assert!(lengths[0] > lengths[1], "{lengths:?}");
        let all = std::slice::from_ref(&costs);
        let judging = Judging::new(folds.into(), all, 3).expect("a price");
        let config = |length: f64| {
            let candidate_length = length as usize;
            StopRuleConfig::FixedLength(FixedLengthConfig { candidate_length })
        };
        let expected: Vec<TimedCounts> = [(&seldom, lengths[0]), (&often, lengths[1])]
            .into_iter()
            .flat_map(|(half, length)| {
                half.replay(&config(length), &costs.rounds).expect("replays")
            })
            .collect();
        assert_eq!(judging.fixed, expected);
        // What was chosen for the other half is worse than what was chosen for itself.
        let own = vec![fold(&often, &often).expect("rules")];
        let own = Judging::new(own, all, 3).expect("a price");
        let crossed = judging.speedup(&judging.fixed);
        assert!(crossed.value < own.speedup(&own.fixed).value && crossed.low < crossed.value);
        assert_eq!(judging.plain.len(), 40);
        let rows = judging.rows(&judging.folds[0].choices).expect("replays");
        let fixed = rows.iter().find(|row| row.stop_rule == StopRuleName::FixedLength);
        let fixed = fixed.expect("a row");
        assert_eq!((fixed.speedup, fixed.gain.value), (crossed, 0.0));
    }
}
