//! The lengths of cascades over look-ups that a recipe leaves to `tune`.

use anyhow::Result;
use draftsmith_model::WeightDtype;
use draftsmith_theory::{Counts, DrafterId, LookUps, Recordings, Spending, seconds_per_token};
use serde::Serialize;

use crate::costs::Costs;
use crate::recipe::EvaluateRecipe;
use crate::results::{CostSource, DecodingName};
use crate::statistics::shown_interval;
use crate::sweep::cascades::{JudgedCascade, closed_form, fastest, judge_cascades};
use crate::sweep::per_token;
use crate::tuning::TunedCascade;

/// Whether the recipe has a cascade over look-ups of this drafter whose lengths are to be found.
pub(super) fn is_asked_for(evaluate: &EvaluateRecipe, drafter: DrafterId) -> bool {
    let mut tuned = evaluate.cascades.iter().filter(|cascade| cascade.lengths.is_tuned());
    tuned.any(|cascade| cascade.drafters[0] == drafter)
}

/// A cascade that was tried.
#[derive(Debug, Serialize)]
pub(crate) struct TriedCascade {
    /// K.
    pub(crate) lengths: Vec<Vec<usize>>,
    /// Modelled speed over the best fixed length, minus 1.
    pub(crate) gain: f64,
}

/// What a cascade is judged by and against.
pub(super) struct Judged<'a> {
    pub(super) recordings: &'a Recordings,
    pub(super) costs: &'a Costs,
    pub(super) cost_source: CostSource,
    pub(super) dtype: WeightDtype,
    pub(super) seed: u64,
    /// The drafter's best fixed length, and what it takes.
    pub(super) fixed: (usize, Vec<Spending>),
}

impl Judged<'_> {
    /// The fastest cascade of the drafter over look-ups, and all that were tried.
    ///
    /// # Errors
    /// If too little is recorded for one.
    pub(super) fn best(
        &self,
        decoding: DecodingName,
        look_ups: LookUps<'_>,
    ) -> Result<(TunedCascade, Vec<TriedCascade>)> {
        let Self { recordings, costs, .. } = *self;
        let plain = seconds_per_token(&recordings.plain(&costs.rounds));
        let judged = judge_cascades(recordings, look_ups, costs)?;
        let best = fastest(&judged)?;
        let (best_fixed_length, fixed) = &self.fixed;
        let gain = |of: &JudgedCascade, some: &[usize]| {
            per_token(fixed, some) / per_token(&of.spent, some) - 1.0
        };
        let num_prompts = recordings.responses.len();
        let all: Vec<usize> = (0..num_prompts).collect();
        let tried = judged
            .iter()
            .map(|it| TriedCascade { lengths: it.cascade.lengths(), gain: gain(it, &all) });
        let expected_gain = shown_interval(num_prompts, self.seed, |some| gain(best, some));
        let counts: Counts = best.spent.iter().map(|spent| spent.counts).sum();
        let tuned = TunedCascade {
            drafters: vec![recordings.drafter, DrafterId::MaxGram],
            decoding,
            dtype: self.dtype,
            lengths: best.cascade.lengths(),
            num_tried: judged.len(),
            num_prompts,
            cost_source: self.cost_source,
            speedup: plain / best.seconds_per_token,
            verification_rate: counts.verification_rate(),
            discard_rate: counts.discard_rate(),
            best_fixed_length: *best_fixed_length,
            expected_gain: expected_gain.into(),
            closed_form: closed_form(recordings, look_ups, costs, &judged, plain)?,
        };
        Ok((tuned, tried.collect()))
    }
}
