//! `replay`: what every rule would have done on the test prompts, from their rollouts alone, and
//! how much of what a perfect head could gain the trained one gains.
//!
//! Each rule's setting is chosen on the validation prompts' rollouts, for the costs that the recipe
//! gives or else this machine's (as `tune` measured them), and for the paper's. A head's predictions are calibrated as its export says,
//! and are judged themselves too: before and after, on the test prompts.

use anyhow::{Context, Result};
use draftsmith_theory::{Counts, Decoding, HeadMetrics, Recordings, Spending};

use crate::console::Console;
use crate::costs::Costs;
use crate::exports::calibration::{FittedCalibration, HeadCalibration};
use crate::recipe::Recipe;
use crate::results::{
    ClosedForm, CostSource, DecodingName, DrafterName, Estimate, HeadPredictions, JudgedHead,
    Replay, ReplayGroup, ReplayRow, StopRuleName,
};
use crate::rollouts::{PromptSet, RecordedSet, RolloutFiles, RolloutKey};
use crate::statistics::shown_interval;
use crate::sweep::{Choice, best_of_each, best_with_head, per_token};
use crate::table::{render_predictions, render_replay_table};
use crate::tuning::{given_costs, read_costs, write_replay};
use crate::workspace::Workspace;

/// Runs the stage.
pub(crate) fn run(recipe: &Recipe, workspace: &Workspace, console: &Console) -> Result<Replay> {
    let (tune, evaluate) = recipe.need_tuning("replay")?;
    let files = RolloutFiles::of(recipe, workspace)?;
    let given = given_costs(tune, &files.drafters())?;
    let measured = read_costs(recipe, workspace.dtype())?;
    if measured.is_empty() && given.is_empty() {
        console.note(
            "replay: this machine's costs are not known, so only the paper's are used; \
             hint: run `draftsmith tune` with this recipe first",
        );
    }
    let mut replay = Replay { dtype: workspace.dtype(), ..Replay::default() };
    for drafter in files.drafters() {
        let calibration = match files.head_dir(drafter) {
            Some(dir) => HeadCalibration::read(dir)?,
            None => HeadCalibration::default(),
        };
        for decoding in &evaluate.decodings {
            let read = |set| files.read(RolloutKey { drafter, set, decoding: *decoding });
            let (validation, test) = (read(PromptSet::Validation)?, read(PromptSet::Test)?);
            let fitted = calibration.of(*decoding).filter(|_| test.recordings.head.is_some());
            let served = evaluate.decoding(*decoding);
            replay.predictions.extend(predictions(drafter, served, &test, fitted));
            let calibrated = |set: RecordedSet| match fitted {
                Some(fitted) => set.recordings.calibrated(&fitted.map),
                None => set.recordings,
            };
            let share_accepted = test.summary().share_accepted;
            let (validation, test) = (calibrated(validation), calibrated(test));
            let given = given.iter().find(|costs| costs.drafter == test.drafter);
            let machine = measured
                .iter()
                .map(|entry| (entry.decoding, &entry.measured.costs))
                .find(|(name, costs)| (costs.drafter, *name) == (test.drafter, *decoding))
                .map(|(_, costs)| (CostSource::Machine, costs.clone()));
            let own = given.map(|costs| (CostSource::Given, costs.clone())).or(machine);
            let paper = (CostSource::Paper, Costs::paper(test.drafter));
            for (source, costs) in own.into_iter().chain([paper]) {
                let sets = Sets {
                    validation: &validation,
                    test: &test,
                    share_accepted,
                    costs,
                    seed: recipe.seed,
                };
                replay.groups.push(sets.group(drafter, *decoding, source)?);
            }
        }
    }
    write_replay(recipe, &replay)?;
    console.text(render_predictions(&replay.predictions))?;
    console.text(render_replay_table(&replay.groups, console.width(), console.colour()))?;
    console.document(&replay)?;
    Ok(replay)
}

/// How good the head's predictions are on recorded prompts; None where there are none.
fn predictions(
    drafter: DrafterName,
    decoding: Decoding,
    set: &RecordedSet,
    fitted: Option<&FittedCalibration>,
) -> Option<HeadPredictions> {
    let judged = set.judged_prompts(decoding).concat();
    let judge = |map: &dyn Fn(f64) -> f64| {
        let mut metrics = HeadMetrics::default();
        for judged in &judged {
            metrics.update_weighted(map(judged.predicted_prob), judged.label, judged.weight);
        }
        JudgedHead { bins: metrics.reliability(), scores: metrics.finish() }
    };
    (!judged.is_empty()).then(|| HeadPredictions {
        drafter,
        decoding: DecodingName::of(&decoding),
        calibration: fitted.cloned(),
        num_test_prompts: set.recordings.responses.len(),
        before: judge(&|prob| prob),
        after: fitted.map(|fitted| judge(&|prob| fitted.map.apply(prob))),
    })
}

/// What rules are chosen on, and judged on.
struct Sets<'a> {
    validation: &'a Recordings,
    test: &'a Recordings,
    /// The share of the test prompts' tokens that are drafted and accepted.
    share_accepted: Option<f64>,
    costs: Costs,
    seed: u64,
}

impl Sets<'_> {
    fn group(
        &self,
        drafter: DrafterName,
        decoding: DecodingName,
        cost_source: CostSource,
    ) -> Result<ReplayGroup> {
        let choices = best_of_each(self.validation, &self.costs)?;
        let fixed = choices.iter().find(|choice| choice.name == StopRuleName::FixedLength);
        let fixed = fixed.context("fixed lengths are among the rules")?;
        let costs = self.costs.rounds.line(self.costs.drafter)?;
        let closed_form = self.share_accepted.map(|acceptance_prob| {
            let (length, max_length) = (fixed.config.parameter() as usize, self.test.max_length);
            ClosedForm::new(acceptance_prob, length, max_length, &costs)
        });
        let fixed = self.spent(self.test, fixed)?;
        let plain = self.test.plain(&self.costs.rounds);
        let perfect = self.validation.head.is_some().then(|| {
            let validation = self.validation.with_perfect_head();
            let choices = best_with_head(&validation, &self.costs)?;
            anyhow::Ok((self.test.with_perfect_head(), choices))
        });
        let perfect = perfect.transpose()?;
        let rows = choices
            .iter()
            .map(|choice| {
                let own = self.spent(self.test, choice)?;
                let gain = |some: &[usize]| over(&fixed, &own, some);
                let ceiling = match &perfect {
                    Some((test, choices)) if choice.config.needs().acceptance_prob => {
                        let best = choices.iter().find(|perfect| perfect.name == choice.name);
                        Some(self.spent(test, best.context("every rule is tried")?)?)
                    }
                    _ => None,
                };
                let most = ceiling.as_ref().map(|spent| |some: &[usize]| over(&fixed, spent, some));
                let counts: Counts = own.iter().map(|spent| spent.counts).sum();
                let ceiling = most.map(|most| self.estimate(&most));
                // A share of nothing, or of what may be nothing, says nothing.
                let is_gain = ceiling.is_some_and(|ceiling| ceiling.low > 0.0);
                Ok(ReplayRow {
                    stop_rule: choice.name,
                    config: choice.config.clone(),
                    speedup: self.estimate(&|some| 1.0 + over(&plain, &own, some)),
                    gain: self.estimate(&gain),
                    verification_rate: counts.verification_rate(),
                    discard_rate: counts.discard_rate(),
                    ceiling,
                    share_of_ceiling: most
                        .filter(|_| is_gain)
                        .map(|most| self.estimate(&|some| gain(some) / most(some))),
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let oracle = (decoding == DecodingName::Greedy).then(|| {
            let oracle = self.test.replay_oracle(&self.costs.mixed_rounds)?;
            anyhow::Ok(self.estimate(&|some| over(&fixed, &oracle, some)))
        });
        let oracle = oracle.transpose()?;
        Ok(ReplayGroup {
            drafter,
            decoding,
            cost_source,
            costs,
            num_validation_prompts: self.validation.responses.len(),
            num_test_prompts: self.test.responses.len(),
            num_test_tokens: self.test.num_tokens(),
            closed_form,
            rows,
            oracle,
        })
    }

    fn spent(&self, recordings: &Recordings, choice: &Choice) -> Result<Vec<Spending>> {
        Ok(recordings.replay(&choice.config, &self.costs.of_rule(&choice.config))?)
    }

    fn estimate(&self, statistic: &dyn Fn(&[usize]) -> f64) -> Estimate {
        shown_interval(self.test.responses.len(), self.seed, statistic).into()
    }
}

/// How much faster one is than the other over some responses, minus 1.
fn over(slow: &[Spending], fast: &[Spending], some: &[usize]) -> f64 {
    per_token(slow, some) / per_token(fast, some) - 1.0
}
